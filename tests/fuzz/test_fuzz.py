"""A bounded share of what `make fuzz` does, and every finding it ever had."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trialogue.benchmarks.bfcl.execute import parse_call
from trialogue.config import EvalConfig, RunSettings, TrainConfig, load_config
from trialogue.corpus.review import read_judgement
from trialogue.errors import ConfigError, DomainError, GradeError, RunError, ToolError
from trialogue.messages import ToolCall
from trialogue.run import Run, is_listed, read_about, read_marks, read_seconds, read_trajectories, read_usage
from trialogue.score.verdict import read_verdict
from trialogue.talk.model import clean_arguments, to_clean
from trialogue.talk.render.parse import read_json_calls, to_calls
from trialogue.talk.replay import Replay
from trialogue.task import Task
from trialogue.trajectory import Reply, Trajectory
from trialogue.world.find import find_domain


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return importlib.import_module("fuzz")
    finally:
        sys.path.pop(0)


TARGETS = ["replies", "calls", "config", "runs", "answers", "tools", "servers"]
FILE_TARGETS = ["tau1", "tau2", "bfcl", "ace", "written", "own", "judges", "corpora", "records"]


@pytest.mark.fuzz
@pytest.mark.parametrize("target", [*TARGETS, *FILE_TARGETS])
def test_nothing_breaks_what_reads(fuzz: ModuleType, target: str) -> None:
    if target == "servers":
        pytest.importorskip("mcp")
    if target == "corpora":
        pytest.importorskip("pyarrow")
    fuzz.find_renderers()
    fuzz.find_shop()
    findings = [fuzz.try_one(target, f"suite-{number}") for number in range(150)]
    assert not [found for found in findings if found is not None]


def test_every_target_has_its_share(fuzz: ModuleType) -> None:
    assert [*TARGETS, *FILE_TARGETS] == list(fuzz.TARGETS)


def test_good_files_are_read(fuzz: ModuleType) -> None:
    """Else everything would be refused, whatever was spoilt."""
    files = sys.modules["files"]
    count = 0
    for name, read in files.READERS.items():
        for place in files.SETS[name]:
            read(files.find_folder(name), place)  # raises where it is refused
            count += 1
    assert count >= len(files.READERS) > 0


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


# -- what was found in files -------------------------------------------------------------------------------

MOCK = "domains/mock"
BFCL = "bfcl_eval/data/BFCL_v4_multi_turn_miss_func.json"
ACE = "data_all/data_en/data_agent_multi_step.json"
CODE = "envs/retail/tasks_test.py"
JSON = "retail/tasks_test.json"
Content = str | bytes | tuple[str, str]
"""All of a file, or what takes the place of some words of the good one."""
SPOILT: dict[str, tuple[str, str, Content, str]] = {
    "no id": ("tau2", f"{MOCK}/tasks.json", '[{"ticket": ""}]', "tasks.json, task 1: there is no 'id'"),
    "no list": ("tau2", f"{MOCK}/tasks.json", "3", "tasks.json: TypeError: 'int' object is not iterable"),
    "no splits": ("tau2", f"{MOCK}/split_tasks.json", '{"test": 3}', "split_tasks.json: TypeError"),
    "a wrong record": ("tau2", f"{MOCK}/db.json", '{"tasks": {"t": {}}, "users": {}}', "db.json: MockTools"),
    "not UTF-8": ("tau2", f"{MOCK}/policy.md", b"\xff", "policy.md: not UTF-8"),
    "no task": ("tau2", "results.json", ('"task_id": "2"', '"task_id": "9"'), "has no task '9'"),
    "a tower": ("tau1-json", JSON, "[" * 9000, "tasks_test.json: nested too deeply"),
    "half a letter": ("tau1-json", JSON, r'["\ud800"]', "tasks_test.json: half of a surrogate pair"),
    "tools that are none": ("tau1-json", "retail/tools_info.json", "[3]", "tools: TypeError"),
    "not Python": ("tau1-code", CODE, "TASKS_TEST = [", "tasks_test.py: not Python"),
    "code": ("tau1-code", CODE, "TASKS_TEST = [open(x)[0]]", "tasks_test: ValueError: malformed node"),
    "turns that are none": ("bfcl", BFCL, ('"question": [', '"question": [3, '), "miss_func.json: TypeError"),
    "no answer": ("bfcl", BFCL, ("miss_func_0", "other"), "miss_func.json: there is no 'multi_turn_other'"),
    "no entry": ("bfcl", BFCL, "", "multi_turn_miss_func.json holds no task"),
    "no line": ("ace", ACE, "", "data_agent_multi_step.json holds no task"),
    "half a letter in a program": (
        "tau1-code",
        CODE,
        (r"TASKS_TEST = [", "HELLO = '\\ud83d'\nTASKS_TEST = ["),
        "tasks_test.py: half of a surrogate pair",
    ),
    "no such class": ("ace", ACE, ('["BaseApi"', '["X"'), "answers, agent_multi_step_0: there is no 'X'"),
    "no tools": ("ace", ACE, ('"function": [', '"function": [3, '), "answers, agent_multi_step_0: TypeError"),
    "no episode": (
        "ace",
        "episodes.jsonl",
        '{"id": "x", "steps": []}',
        "episodes.jsonl: ace:multi_step@en has",
    ),
    "no level": (
        "own",
        "tasks.jsonl",
        ('"level": 1', '"level": Infinity'),
        "line 1, task t1: meta: Value error, level",
    ),
    "no scenario": ("own", "scenario.json", '{"summary": "x"}', "scenario.json: tables: Field required"),
    "a field too long": ("own", "scenario.json", '{"' + "s" * 5000 + '": 1}', "...: Extra inputs"),
    "a tower of TOML": ("own", "server.toml", "a = " + "[" * 5000, "server.toml: nested too deeply"),
    "no traits": ("own", "personas.toml", "[tone]\n[chance.mild]\n", "personas.toml: ValueError: a group"),
    "nobody": ("own", "personas.jsonl", "", "personas.jsonl: ValueError: a group"),
    "a deep script": ("own", "script.jsonl", "[" * 5000, "script.jsonl, line 1, is neither"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_wrong_with_a_file_is_told(fuzz: ModuleType, case: str) -> None:
    files = sys.modules["files"]
    name, place, content, told = SPOILT[case]
    folder, good = files.find_folder(name), files.SETS[name][place]
    if isinstance(content, tuple):
        assert content[0] in good
        content = good.replace(*content)
    try:
        (folder / place).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises((ConfigError, DomainError)) as caught:
            files.READERS[name](folder, place)
    finally:
        (folder / place).write_text(good, encoding="utf-8")
    assert str(folder) in str(caught.value)
    assert told in str(caught.value)
    assert len(str(caught.value)) < files.LONGEST


def test_half_a_letter_in_a_run_is_told(tmp_path: Path) -> None:
    """Python's decoder takes it from bytes as from an escape, and nothing can write it down again."""
    file = tmp_path / "eval.jsonl"
    for line in (b'{"id": "t\xed\xa0\x80"}\n', b'{"id": "t\\ud800"}\n'):
        file.write_bytes(line)
        with pytest.raises(RunError, match=r"eval.jsonl, line 1: (not UTF-8|half of a surrogate pair)"):
            list(read_trajectories(file))


def test_a_judge_who_names_no_message_is_told() -> None:
    fault = {"kind": "dump", "message": float("inf"), "evidence": ""}
    task = Task(id="t", domain="d", instructions="")
    with pytest.raises(GradeError, match="cannot be read"):
        read_verdict(
            json.dumps({"faults": [fault]}), Trajectory(id="x", task=task, turns=(), end="user_stop")
        )
    scores = dict.fromkeys(("faithful", "policy", "complete", "user", "natural"), 5)
    with pytest.raises(GradeError, match="is not a judgement"):
        read_judgement("x", json.dumps({"scores": scores, "reasons": ["\ud800"]}), "judge")


def test_an_index_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    run = Run.create(RunSettings(directory=str(tmp_path), name="r"), "eval", "shop", EvalConfig(), 0)
    run.close("stopped")
    for line in ('{"file": "eval", "at": {}, "bytes": 1}\n', "[]\n", '{"file": "eval"}\n'):
        (run.path / "index.jsonl").write_text(line, encoding="utf-8")
        assert not is_listed(run.path)
        Run.resume(run.path).close("stopped")
        assert is_listed(run.path)


def test_a_number_too_large_in_a_call_is_told() -> None:
    with pytest.raises(ToolError, match="not plain values"):
        parse_call(f"f(x={'9' * 400}+1j)")


def test_towers_of_brackets_in_settings_are_told(tmp_path: Path) -> None:
    tower = "[" * 5000
    with pytest.raises(ConfigError, match=r"training\.steps"):
        load_config(TrainConfig, None, [f"training.steps={tower}"])
    (tmp_path / "deep.toml").write_text(f"seed = {tower}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"deep\.toml is not TOML"):
        load_config(TrainConfig, tmp_path / "deep.toml", [])


def test_marks_that_are_no_list_are_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"marks": 0.5}', encoding="utf-8")
    with pytest.raises(RunError, match="its marks are no list"):
        read_marks(tmp_path)


def test_seconds_and_bills_that_are_none_are_told(tmp_path: Path) -> None:
    (tmp_path / "timings.jsonl").write_text('{"id": {}, "seconds": 3}\n', encoding="utf-8")
    with pytest.raises(RunError, match=r"timings.jsonl, line 1: "):
        read_seconds(tmp_path)
    (tmp_path / "user.jsonl").write_text('{"usage": {"id": 1}}\n', encoding="utf-8")
    with pytest.raises(RunError, match=r"user.jsonl: "):
        read_usage(tmp_path / "user.jsonl")
