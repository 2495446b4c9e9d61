"""docs/reference.md names exactly the methods and fields of the code, with parameters and defaults."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import pytest

import trialogue
from trialogue.engine.api import Completion, OptimParams, SamplingParams, TokenBatch
from trialogue.learn.advantages import Advantage
from trialogue.messages import Frozen
from trialogue.talk.model import Model
from trialogue.trajectory import Group, Reward, Trajectory

PAGE = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
PROTOCOLS = [trialogue.Engine, trialogue.Renderer]
CLASSES = [TokenBatch, Group, Trajectory, Reward, OptimParams, SamplingParams, Completion]


def read_section(name: str) -> str:
    [section] = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return section


def read_table(name: str) -> list[list[str]]:
    """The cells of each row below the headings."""
    rows = [line for line in read_section(name).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def list_parameters(function: Any) -> str:
    """The parameters without `self` and annotations, as the page writes them."""
    signature = inspect.signature(function)
    bare = [
        item.replace(annotation=inspect.Parameter.empty)
        for item in signature.parameters.values()
        if item.name != "self"
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def list_members(protocol: type) -> set[str]:
    """The properties and methods of a protocol, as the page writes them."""
    found: set[str] = set()
    for name, member in vars(protocol).items():
        if isinstance(member, property):
            found.add(name)
        elif inspect.isfunction(member) and not name.startswith("_"):
            before = "async " if inspect.iscoroutinefunction(member) else ""
            found.add(f"{before}{name}{list_parameters(member)}")
    return found


def list_fields(kind: type) -> dict[str, str]:
    """The fields and properties of a class, with their defaults."""
    if issubclass(kind, Frozen):
        own = dict.fromkeys(kind.model_fields, "")
    else:
        own = {item.name: "" if item.default is MISSING else str(item.default) for item in fields(kind)}
    return own | {name: "" for name, member in vars(kind).items() if isinstance(member, property)}


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_the_page_names_the_methods_of(protocol: type) -> None:
    named = [row[0].strip("` ") for row in read_table(protocol.__name__)]
    assert sorted(named) == sorted(list_members(protocol))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_page_names_the_fields_of(kind: type) -> None:
    rows = read_table(kind.__name__)
    assert [row[0].strip("` ") for row in rows] == list(list_fields(kind))
    if len(rows[0]) == 4:
        assert {row[0].strip("` "): row[2] for row in rows} == list_fields(kind)
    elif not issubclass(kind, Frozen):
        assert not any(list_fields(kind).values()), "a class with defaults needs a column for them"


def test_the_page_has_the_signatures_of_functions() -> None:
    assert str(inspect.signature(Model.reply)).replace("'", "") in read_section("Agent and user")
    loss = str(inspect.signature(trialogue.LossFunction.__call__)).replace("'", "").replace("self, ", "")
    assert loss in read_section("LossFunction")
    assert get_args(Advantage)[0] == [Group]
    assert "`(group: Group) -> Sequence[float]`" in read_section("Advantage function")


def test_the_names_of_the_page_are_public() -> None:
    """What the page calls public is; `str`, `Tensor` and what has its module beside it are not ours."""
    words = {word for code in re.findall(r"`([^`]+)`", PAGE) for word in re.findall(r"\b[A-Z][a-z]\w+", code)}
    foreign = {"Sequence", "Tensor", "None", "Vocabulary"}
    assert words - foreign <= set(trialogue.__all__)
    assert len(words) > 15
