"""Evaluations on disk: told again byte by byte, graded again, gone on with, kept to one writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trialogue import ModelError, Reply, RunError, Task, Trajectory
from trialogue.config import EvalConfig, RunSettings, TrainConfig
from trialogue.durable import mend
from trialogue.run import Run, read_about, read_config, read_lines, read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.score.rescore import rescore
from trialogue.score.resume import settle_config
from trialogue.talk.model import Model
from trialogue.talk.scripted import ScriptedModel, call

DOMAIN = '''
from trialogue import Assertion, Call, Database, Domain, Expected, Record, Table, Task, tool
from trialogue.world.domain import from_list

class Order(Record):
    status: str = "pending"

class Store(Database):
    orders: Table[Order]

    @tool(writes=True)
    def cancel(self, order_id: str) -> Order:
        """Cancel an order."""
        self.orders[order_id].status = "cancelled"
        return self.orders[order_id]

tasks = [
    Task(
        id=f"t{number}",
        domain="store",
        instructions="Cancel.",
        meta={"family": "odd" if number % 2 else "even"},
        expected=Expected(calls=(Call(name="cancel", arguments={"order_id": f"W{number}"}),)),
    )
    for number in range(4)
]
database = Store.load({"orders": {f"W{number}": {} for number in range(4)}})
domain = Domain("store", "Help.", database, from_list("store", tasks))
'''


@pytest.fixture
def config(tmp_path: Path) -> EvalConfig:
    (tmp_path / "store.py").write_text(DOMAIN)
    (tmp_path / "user.jsonl").write_text('"Cancel it."\n"###STOP###"\n')
    return EvalConfig.model_validate(
        {
            "domain": str(tmp_path / "store.py"),
            "agent": {"model": "oracle"},
            "user": {"model": f"scripted:{tmp_path / 'user.jsonl'}"},
            "tasks": {"trials": 2},
            "run": {"directory": str(tmp_path / "runs"), "name": "first"},
        }
    )


def named(config: EvalConfig, name: str) -> EvalConfig:
    return config.model_copy(update={"run": RunSettings(directory=config.run.directory, name=name)})


def read(path: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(path)]


def half_right(task: Task, seed: int) -> Model:
    """Cancels the right order for even tasks, fails by the service for t3, runs out of turns for t1."""
    if task.id == "t3":
        return Fails()
    script: list[str | Reply] = [call("cancel", order_id=f"W{task.id[1:]}"), "Done."]
    return ScriptedModel([call("cancel", order_id="none")] if task.id == "t1" else script)


def make_right(task: Task, seed: int) -> Model:
    return ScriptedModel([call("cancel", order_id=f"W{task.id[1:]}"), "Done."])


def spoken(
    config: EvalConfig, agent: Callable[[Task, int], Model], monkeypatch: pytest.MonkeyPatch
) -> EvalConfig:
    """The configuration with an agent of one's own, by name."""
    monkeypatch.setattr(sys.modules[__name__], "own_agent", agent, raising=False)
    speaker = config.agent.model_copy(update={"model": f"{__name__}:own_agent"})
    return config.model_copy(update={"agent": speaker})


class Fails:
    async def reply(self, turns: Any, tools: Any) -> Reply:
        raise ModelError("down", "infrastructure")


async def test_the_same_seed_gives_the_same_bytes_and_the_same_figures(config: EvalConfig) -> None:
    results = [await evaluate(named(config, name)) for name in ("one", "two")]
    files = [Path(result["run"]) / "trajectories" / "eval.jsonl" for result in results]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(read(files[0])) == 8
    for result in results:
        assert (result["tasks"], result["trials"], result["conversations"]) == (4, 2, 8)
        assert (result["pass^1"], result["pass^2"], result["reward"]) == (1.0, 1.0, 1.0)
        assert set(result["families"]) == {"odd", "even"}
        assert read_about(Path(result["run"]))["state"] == "finished"
    one, two = (without_seconds({**result, "run": ""}) for result in results)
    assert one == two


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_seconds(inner) for key, inner in value.items() if "seconds" not in key}
    return value


async def test_what_both_sides_are_told_is_kept_and_hashed(config: EvalConfig, tmp_path: Path) -> None:
    result = await evaluate(config)
    told = json.loads((tmp_path / "runs" / "first" / "prompts.json").read_text())
    assert told["policies"] == ["Help."]
    assert [tool["function"]["name"] for tool in told["tools"]] == ["cancel"]
    assert told["user_tools"] == []
    [user] = told["users"]
    assert user.endswith("# Your scenario\n\n{instructions}\n")
    assert (result["prompts"], result["tasks_hash"]) == (told["hash"], told["tasks_hash"])
    fewer = config.model_copy(update={"tasks": config.tasks.model_copy(update={"count": 2})})
    other = await evaluate(named(fewer, "second"))
    assert other["prompts"] == result["prompts"]
    assert other["tasks_hash"] != result["tasks_hash"]
    source = DOMAIN.replace('"Help."', '"Help them."')
    (tmp_path / "kind.py").write_text(source)
    kind = named(config, "third").model_copy(update={"domain": str(tmp_path / "kind.py")})
    assert (await evaluate(kind))["prompts"] != result["prompts"]


async def test_every_reward_is_reproduced_from_the_file_alone(
    config: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = await evaluate(spoken(config, half_right, monkeypatch))
    assert result["agent"] == f"{__name__}:own_agent"
    assert result["ends"] == {"error": 6, "max_turns": 2, "user_stop": 4}
    assert (result["pass^1"], result["tasks"], result["failed"]) == (pytest.approx(2 / 3), 3, 6)
    rows = rescore(Path(result["run"]), trust=True)
    assert len(rows) == 12
    assert all(row.same for row in rows)
    assert [row.to_data()["reward"] for row in rows] == [
        None if item.reward is None else item.reward.value for item in read_trajectories(Path(result["run"]))
    ]


def tamper(line: dict[str, Any], kind: str) -> dict[str, Any]:
    turns = line["turns"]
    if kind == "reward":
        line["reward"]["value"] = 0.5
    elif kind == "result":
        turns[2]["message"]["content"] = '{"status":"pending"}'
    elif kind == "call":
        turns[1]["message"]["tool_calls"][0]["arguments"] = {"order_id": "W9"}
    elif kind == "lost call":
        turns[1]["message"].pop("tool_calls")
    elif kind == "end":
        line["end"] = "max_turns"
    elif kind == "set-up":
        line["task"]["setup"] = {"data": {"nothing": {}}}
    return line


@pytest.mark.parametrize("kind", ["reward", "result", "call", "lost call", "end", "set-up"])
async def test_a_changed_record_is_noticed(config: EvalConfig, kind: str) -> None:
    result = await evaluate(config)
    file = Path(result["run"]) / "trajectories" / "eval.jsonl"
    first, *others = read(file)
    file.write_text("".join(json.dumps(line) + "\n" for line in [tamper(first, kind), *others]))
    rows = rescore(file, trust=True)
    assert [row.same for row in rows] == [False] + [True] * 7
    assert "DIFFERS" in rows[0].to_line()


async def test_a_run_that_was_cut_off_is_gone_on_with(
    config: EvalConfig, crash: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def agent(task: Task, seed: int) -> Model:
        asked.append(task.id)
        return ScriptedModel([call("cancel", order_id=f"W{task.id[1:]}"), "Done."])

    config = spoken(config, agent, monkeypatch)
    whole = await evaluate(named(config, "whole"))
    result = await evaluate(config)
    path = Path(result["run"])
    file = path / "trajectories" / "eval.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:100])
    crash(path)
    asked.clear()
    again = await evaluate(config, resume=path)
    assert sorted(asked) == ["t1", "t2", "t2", "t3", "t3"]
    assert sorted(item.id for item in read_trajectories(path)) == sorted(
        f"t{task}/{trial}" for task in range(4) for trial in range(2)
    )
    assert (again["pass^1"], again["conversations"]) == (whole["pass^1"], whole["conversations"])
    assert all(row.same for row in rescore(path, trust=True))
    asked.clear()
    done = await evaluate(config, resume=path)
    assert asked == []
    assert done["conversations"] == 8


async def test_a_run_is_gone_on_with_from_another_folder(
    config: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: Callable[[Path], None]
) -> None:
    """What it names by a path is found from where it was begun."""
    monkeypatch.chdir(tmp_path)
    user = config.user.model_copy(update={"model": "scripted:user.jsonl"})
    relative = config.model_copy(update={"domain": "store.py", "user": user})
    whole = await evaluate(relative)
    lines = (tmp_path / "runs" / "first" / "trajectories" / "eval.jsonl").read_text().splitlines(True)
    (tmp_path / "runs" / "first" / "trajectories" / "eval.jsonl").write_text("".join(lines[:3]))
    crash(tmp_path / "runs" / "first")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = tmp_path / "runs" / "first"
    resumed = await evaluate(read_config(EvalConfig, run), resume=run)
    assert resumed["pass^1"] == whole["pass^1"] == 1.0
    assert resumed["conversations"] == 8


async def test_failed_conversations_are_tried_again_when_a_run_goes_on(
    config: EvalConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = spoken(config, half_right, monkeypatch)
    result = await evaluate(config)
    monkeypatch.setattr(sys.modules[__name__], "own_agent", make_right)
    again = await evaluate(config, resume=Path(result["run"]))
    assert again["conversations"] == 8
    assert again["tasks"] == 4


def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes('{"a": 1}\n{"b": "\u2028"}\n{"c"'.encode())
    assert [line for _, line in read_lines(file)] == [{"a": 1}, {"b": "\u2028"}]
    mend(file)
    assert file.read_bytes().endswith(b"}\n")
    file.write_text('{"a"\n{"b": 2}\n')
    with pytest.raises(RunError, match="line 1: not JSON"):
        list(read_lines(file))
    file.write_text("[1]\n")
    with pytest.raises(RunError, match="line 1: not a JSON object"):
        list(read_lines(file))


def test_a_second_process_is_refused(config: EvalConfig, tmp_path: Path) -> None:
    settings = RunSettings(directory=str(tmp_path / "runs"), name="held")
    run = Run.create(settings, "eval", "store", config, 0)
    script = (
        "import sys; from pathlib import Path\n"
        "from trialogue.run import Run; from trialogue.errors import RunError\n"
        "try:\n    Run.resume(Path(sys.argv[1]))\n"
        "except RunError as error:\n    sys.exit(str(error))\n"
    )

    def second() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(run.path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    refused = second()
    assert refused.returncode == 1
    assert f"another process (process {os.getpid()}) is writing to {run.path}" in refused.stderr
    run.close("stopped")
    assert second().returncode == 0


def test_runs_are_never_overwritten_and_wrong_ones_are_told(config: EvalConfig, tmp_path: Path) -> None:
    settings = RunSettings(directory=str(tmp_path), name="mine")
    Run.create(settings, "eval", "store", config, 0).close("finished")
    with pytest.raises(RunError, match="exists; resume it with --resume"):
        Run.create(settings, "eval", "store", config, 0)
    for other, kind in ((config, "rollout"), (TrainConfig(), "train")):  # told before settings are compared
        with pytest.raises(RunError, match=f"is a run of kind 'eval', not '{kind}'"):
            settle_config(other, kind, tmp_path / "mine")
    with pytest.raises(RunError, match=r"is no run directory: it has no run.json"):
        Run.resume(tmp_path)
    unnamed = RunSettings(directory=str(tmp_path))
    runs = [Run.create(unnamed, "eval", "a/b c.py", config, 0) for _ in range(2)]
    assert len({run.path for run in runs}) == 2
    for run in runs:
        run.close("stopped")
    for text, message in (("{", "is not JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "mine" / "run.json").write_text(text)
        with pytest.raises(RunError, match=message):
            read_about(tmp_path / "mine")


def test_a_file_that_holds_no_trajectory_is_told(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"id": "x"}\n')
    with pytest.raises(RunError, match=r"line 1: no trajectory: task: Field required"):
        list(read_trajectories(file))
    with pytest.raises(RunError, match="cannot read"):
        list(read_trajectories(tmp_path / "none.jsonl"))


def test_a_trajectory_comes_back_from_its_line() -> None:
    task = Task(id="t", domain="d", instructions="\u2028\n")
    trajectory = Trajectory(id="t/0", task=task, turns=(), end="user_stop", meta={"a": [1, None]})
    assert "\n" not in trajectory.to_json()
    assert Trajectory.model_validate_json(trajectory.to_json()) == trajectory


async def test_a_full_disk_hides_no_other_fault(config: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Run, lines: Any, step: int | None = None) -> None:
        raise RunError("no room left")

    def stumble(*_: Any) -> None:
        raise ArithmeticError("the fault")

    monkeypatch.setattr(Run, "add_ledger", full)
    with pytest.raises(ArithmeticError, match="the fault"):
        await evaluate(config, progress=stumble)
