"""A bounded share of what `make fuzz` does, and every finding it ever had."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trialogue.errors import ConfigError, RunError
from trialogue.messages import ToolCall
from trialogue.run import read_about
from trialogue.talk.model import clean_arguments, to_clean
from trialogue.talk.parse import read_json_calls, to_calls
from trialogue.talk.replay import Replay
from trialogue.trajectory import Reply
from trialogue.world.find import find_domain


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).with_name("fuzz.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["replies", "calls", "config", "runs", "answers", "tools", "servers"])
def test_nothing_breaks_what_reads(fuzz: ModuleType, target: str) -> None:
    if target == "servers":
        pytest.importorskip("mcp")
    fuzz.find_renderers()
    fuzz.find_shop()
    findings = [fuzz.try_one(target, f"suite-{number}") for number in range(150)]
    assert not [found for found in findings if found is not None]


HOSTILE = {
    "ten megabytes": '{"name": "cancel_order", "arguments": {"order_id": "' + "x" * 10_000_000 + '"}}',
    "deep nesting": '{"name": "a", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}",
    "deep lists": '{"name": "a", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}",
    "no number": '{"name": "a", "arguments": {"x": NaN, "y": [Infinity, -Infinity]}}',
    "half a letter": '{"name": "a\\ud800", "arguments": {"\\udc00": "\\ud83d"}}',
    "a huge number": '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
    "dunder": '{"name": "__class__", "arguments": {"__init__": "__globals__"}}',
    "many calls": '{"name": "a", "arguments": {}}' * 2000,
    "quotes": '{"name": "' + '\\"' * 50_000,
    "no end": '{"name": "a", "arguments": {"b": "' + "\\" * 100_001,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_calls_are_read_kept_and_refused(case: str) -> None:
    shop = find_domain("shop")
    environment = shop.open(shop.tasks("test", 1, 0)[0])
    before = environment.digest()
    started = time.process_time()
    reply = to_clean(Reply("", to_calls(read_json_calls(HOSTILE[case]))))
    assert reply.tool_calls
    for call in reply.tool_calls[:3]:
        line = call.model_dump_json()
        assert ToolCall.model_validate_json(line) == call
        result = environment.call(call.name, call.arguments)
        assert result.failed
        assert len(result.text) < 100_000
        result.text.encode()
    assert environment.digest() == before
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "name", ["__class__", "__init__", "__dict__", "open", "tools", "digest", "orders", ""]
)
def test_only_tools_can_be_called(name: str) -> None:
    shop = find_domain("shop")
    environment = shop.open(shop.tasks("test", 1, 0)[0])
    assert environment.call(name, {}).failed


def test_arguments_without_a_form_in_json_become_text() -> None:
    nested: Any = {}
    inner = nested
    for _ in range(500):
        inner["a"] = {}
        inner = inner["a"]
    for arguments in ({"x": float("nan")}, {"x": float("inf")}, nested):
        cleaned = clean_arguments(arguments)
        assert isinstance(cleaned, str)
        json.dumps(cleaned, allow_nan=False)


@pytest.mark.parametrize("text", ["[" * 5000, '{"a":' * 5000])
def test_towers_of_brackets_in_files_are_told(text: str, tmp_path: Path) -> None:
    """Found in a recording, where the fault of the decoder got through."""
    file = tmp_path / "run.json"
    file.write_text(text + "\n{}\n", encoding="utf-8")
    for reader, error in ((Replay, ConfigError), (lambda path: read_about(path.parent), RunError)):
        with pytest.raises(error):
            reader(file)
