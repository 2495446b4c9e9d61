"""Every regular expression of the package meets text made to slow it down, and takes about linear time."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trialogue
from trialogue import find_domain
from trialogue.messages import Message
from trialogue.reading import find_fenced, find_object
from trialogue.score.audit import Case, find_wrong_facts
from trialogue.talk.agenda import make_agenda_user
from trialogue.trajectory import Trajectory, Turn
from trialogue.world.domains.shop.oracle import understand
from trialogue.world.speech import LONGEST_SENTENCE, split_sentences

PIECES = (
    *(
        "i need ",
        "i ",
        "only ",
        "not ",
        "n't ",
        "is ",
        "is now ",
        "is it ",
        "it is ",
        "ok ",
        "so and ",
        "or ",
    ),
    *("have been ", "we have ", "can ", "may i ", "could i please ", "please ", "what ", "to be ", "pay "),
    *(
        "new address ",
        "change ",
        "cancel ",
        "my name is ",
        "My name is ",
        "Abc ",
        "order ",
        "W1",
        "visa ",
        "0 ",
    ),
    *("a", "A", "1", "_", "-", ".", "@", "#", "(", "[", "{", "\\", '\\"', " ", "\n", "\n ", " ;", ": ", "! "),
    *("1 ", "1.", "1,", "1-", "#1", "a@", "a.", "a-", "x=", "t: ", ": a ", "(:", '"name": "', "```json "),
    *('{ "name":"a","arguments":', "<tool_call>", "[1]", "import a;\n", "\\ud800", "Args:\n", "a (b):"),
)
SECONDS = 1.5
"""Processor time of one thread for 8,000 characters, generous for a busy machine. Linear patterns take
milliseconds; a quadratic one with two nested repetitions takes many seconds."""


def find_patterns() -> dict[str, re.Pattern[Any]]:
    """Every compiled pattern that a module keeps, by where it stands."""
    found: dict[str, re.Pattern[Any]] = {}
    for module in pkgutil.walk_packages(trialogue.__path__, "trialogue."):
        if module.name.endswith(("__main__", "hosts.verl", "hosts.verl_trainer", "hosts.trl")):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            items = [*value.values()] if isinstance(value, dict) else [value]
            items = [*value] if isinstance(value, list | tuple) else items
            for item in items:
                if isinstance(item, re.Pattern) and item not in found.values():
                    found[f"{module.name}.{name}"] = item
    return found


def make_texts(size: int) -> Iterator[str]:
    for piece in PIECES:
        text = (piece * (size // len(piece) + 1))[:size]
        yield from (text + "\x00", text + "a")


@pytest.mark.speed
def test_every_pattern_matches_in_about_linear_time() -> None:
    patterns = find_patterns()
    assert len(patterns) > 40
    slow = [
        line for name, pattern in patterns.items() for line in time_uses(name, pattern, "finditer", 8_000)
    ]
    assert slow == []


def time_uses(name: str, pattern: re.Pattern[Any], method: str, size: int) -> Iterator[str]:
    """The texts that take a pattern long, used by this method of it."""
    is_bytes = isinstance(pattern.pattern, bytes)
    for text in make_texts(size):
        said: Any = text.encode() if is_bytes else text
        began = time.thread_time()
        if method in ("sub", "subn"):
            pattern.sub(b"" if is_bytes else "", said)
        else:
            found: Any = getattr(pattern, method)(said)
            deque(found if method in ("finditer", "split") else (), maxlen=0)
        if (took := time.thread_time() - began) > SECONDS:
            yield f"{name}: {took:.1f} s for {text[:20]!r}"


def find_uses() -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """Every pattern that is written where it is used, such as `re.search(r"...", text)`, with the method."""
    for file in sorted(Path(trialogue.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                method, first = ast.unparse(node.func)[3:], node.args[0]
                if method in USED and isinstance(first, ast.Constant):
                    flags = re.DOTALL if "DOTALL" in ast.unparse(node) else 0
                    flags |= re.MULTILINE if "MULTILINE" in ast.unparse(node) else 0
                    yield f"{file.name}, line {node.lineno}", re.compile(first.value, flags), method


USED = ("search", "match", "fullmatch", "finditer", "findall", "sub", "subn", "split")


@pytest.mark.speed
def test_every_pattern_that_is_written_where_it_is_used_is_about_linear() -> None:
    """Such a pattern may meet a whole answer."""
    uses = list(find_uses())
    assert len(uses) > 10
    assert [line for use in uses for line in time_uses(*use, 40_000)] == []


def test_an_answer_of_one_letter_is_read_in_no_time() -> None:
    """Of judges and simulated tools; the object and the fence are found as before."""
    for text in ("{" * 1_000_000, "[" * 1_000_000, "```" + " " * 1_000_000, "```json" * 100_000):
        began = time.thread_time()
        find_object(text)
        find_fenced(text)
        assert time.thread_time() - began < SECONDS
    assert find_object('Sure: {"a": {}} (done)') == '{"a": {}}'
    assert find_object("} {") == find_object("none") == ""
    assert find_fenced('So:\n```json\n{"a": 1}\n```\nDone.') == '{"a": 1}'
    assert find_fenced("```\n[]```") == "[]"
    assert find_fenced("```json {}") == "```json {}"


def test_sentences_are_bounded_and_whole() -> None:
    for text in make_texts(4000):
        pieces = split_sentences(text)
        assert all(len(piece) <= LONGEST_SENTENCE for piece in pieces)
        assert "".join("".join(pieces).split()) == "".join(text.split())
    assert split_sentences("One.  Two!\nThree?") == ["One.", "Two!", "Three?"]


def test_a_rule_based_user_reads_long_words_in_little_time() -> None:
    domain = find_domain("shop")
    tasks = {tuple(sorted(task.meta["agenda"]["facts"])): task for task in domain.tasks("test", 40, 0)}
    slow: list[str] = []
    for task in tasks.values():
        for text in make_texts(8_000):
            for said in (text, f"Shall I do that? {text}?"):
                user = make_agenda_user(task, 0)
                began = time.thread_time()
                user.respond(said)
                if (took := time.thread_time() - began) > 2 * SECONDS:
                    slow.append(f"{task.id}: {took:.1f} s for {said[:40]!r}")
    assert slow == []


@pytest.mark.parametrize("piece", ["i need ", "x=", "1.", "pay ", "0 "])
def test_an_audit_and_an_oracle_read_long_words_in_little_time(piece: str) -> None:
    domain = find_domain("shop")
    [task] = domain.tasks("test", 1, 0)
    text = (piece * 16_000)[:16_000]
    turns = tuple(
        Turn(side=side, message=Message(role=role, content=text))
        for side, role in (("user", "user"), ("agent", "assistant"), ("user", "user"))
    )
    began = time.thread_time()
    list(find_wrong_facts(Case(domain, Trajectory(id="t", task=task, turns=turns, end="max_turns"))))
    understand(text)
    assert time.thread_time() - began < 5 * SECONDS
