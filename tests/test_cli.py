"""The verbs as a user runs them, with real files; in a process of their own where that matters."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run_verb
from endpoint import Endpoint, completion

from trialogue.errors import ConfigError
from trialogue.records import unstamp
from trialogue.world.scaffold import write_domain

SLOW = '''
"""The starter with an agent that takes its time, and that breaks on its first try at some tasks."""
import asyncio
from dataclasses import replace
from pathlib import Path

from trialogue import find_domain
from trialogue.talk.scripted import GoldParty

broken = set()


class Slow(GoldParty):
    def __init__(self, task, seed):
        super().__init__(task)
        self.fails = seed % 5 == 0

    async def reply(self, turns, tools):
        await asyncio.sleep(0.02)
        if self.fails:
            raise RuntimeError("broken")
        return await super().reply(turns, tools)


bakery = find_domain(str(Path(__file__).parent / "bakery"))
domain = replace(bakery, name="slow", oracle=Slow, reference=__file__)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_domain(tmp_path / "bakery")
    return tmp_path


def run_process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trialogue", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def ask(folder: Path, *words: str) -> Any:
    done = run_verb(folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def read_lines(path: Path) -> list[str]:
    """The conversations of a run in any order, without their places in the file."""
    files = (path / "trajectories").glob("*.jsonl")
    return sorted(unstamp(line).decode() for file in files for line in file.read_bytes().splitlines())


def test_init_check_eval_work_at_once(tmp_path: Path) -> None:
    written = ask(tmp_path, "init", "bakery")
    assert [Path(file).name for file in written["files"]] == [
        "README.md",
        "database.json",
        "domain.py",
        "policy.md",
        "tasks.jsonl",
    ]
    source = (tmp_path / "bakery" / "domain.py").read_text()
    assert len(source.splitlines()) <= 100
    assert "NAME" not in source
    assert "trialogue check bakery" in (tmp_path / "bakery" / "README.md").read_text()
    checked = ask(tmp_path, "check", "bakery")
    assert checked.pop("policy")["never_exercised"] == []
    assert checked == {"domain": "bakery", "tasks": 9, "ok": True, "problems": []}
    speakers = ("--agent", "oracle", "--user", "agenda")
    result = ask(tmp_path, "eval", "bakery", *speakers, "--trials", "2", "--tasks", "9")
    assert result["reward"] == result["pass^1"] == result["pass^2"] == 1
    wanted = "domain split tasks trials pass^1 pass^1_low pass^1_high reward ends blame families run"
    assert set(wanted.split()) <= set(result)
    assert result["tasks"] == 4
    assert result["notes"] == {"tasks": "9 were asked for, there are 4"}
    assert result["sides"]["user"]["seconds"] >= 0
    assert result["wall_seconds"] > 0
    assert result["families"]["cancel"]["tools"] == {"find_orders": 2, "cancel_order": 2}


@pytest.mark.parametrize("name", ["Bakery", "my-bakery", "7up", "a b", "shop", "..", "bäckerei"])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        write_domain(tmp_path / "inside" / name)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bakery").mkdir()
    done = run_verb(tmp_path, "init", "bakery")
    assert done.returncode == 2
    assert "bakery exists already" in done.stderr
    assert not list((tmp_path / "bakery").iterdir())


def test_check_tells_problems_and_fails(folder: Path) -> None:
    (folder / "bakery" / "policy.md").write_text("\n")
    done = run_verb(folder, "check", "bakery")
    assert done.returncode == 1
    assert "✗ the policy is empty" in done.stdout
    assert "1 problem" in done.stdout
    done = run_verb(folder, "check", "bakery", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"] == [{"task": "", "problem": "the policy is empty"}]


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("tasks.jsonl", '{"id": "a"}\n', "tasks.jsonl, line 1, task a: instructions: Field required"),
        ("tasks.jsonl", "{\n", "tasks.jsonl, line 1: not JSON"),
        ("database.json", '{"orders": {"A1": {}}}', "orders.A1.order_id: Field required"),
        ("domain.py", "1 / 0\n", "ZeroDivisionError: division by zero (domain.py, line 1)"),
        ("domain.py", "\n", "defines no domain; write `domain = Domain.load"),
    ],
)
def test_a_broken_file_is_named(folder: Path, file: str, text: str, expected: str) -> None:
    (folder / "bakery" / file).write_text(text)
    done = run_verb(folder, "check", "bakery")
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(folder: Path) -> None:
    (folder / "bakery" / "domain.py").write_text("1 / 0\n")
    assert "Traceback" in run_process(folder, "--debug", "check", "bakery").stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["init", "My-Bakery"], "'My-Bakery' is not a valid name for a domain: use small letters"),
        (["check", "bakry"], "file.py:name; did you mean bakery?"),
        (["train", "configs/x.toml"], "configs/x.toml is a file of settings: write --config configs/x.toml"),
        (["eval", "bakery", "x.toml"], "x.toml is a file of settings: write --config x.toml"),
        (["export", "verl", "x.toml", "--out", "o"], "trialogue export verl: x.toml is a file of settings"),
        (["draft", "x.toml"], "trialogue draft: x.toml is a file of settings: write --config x.toml"),
        (["train", "bakery", "--config", "x.toml"], "there is no config file x.toml"),
        (["train", "learner.model=tiny"], "trialogue train: name a DOMAIN, such as shop"),
        (["eval", "--config", "empty.toml"], "trialogue eval: name a DOMAIN, such as shop"),
        (["sft", "bakery", "shop"], "'shop' is no setting; write key=value"),
        (["users", "compare", "bakery"], "trialogue users compare: Missing option '--user'"),
        (["eval", "bakery", "--agent", "nobody"], "there is no model 'nobody'; allowed are oracle"),
        (["eval", "bakery", "limits.turns=3"], "limits.turns: no such key; allowed here: observations"),
        (["eval", "bakery", "seed=x"], "seed: input should be a valid integer"),
        (["eval", "bakery", "--tasks", "0"], "0 is not in the range"),
        (["eval", "bakery", "tasks.levels=[9]"], "no tasks in split 'test' of levels [9]"),
        (["play", "bakery", "--task", "none"], "bakery has no task 'none'; it has cancel-3"),
        (["play", "bakery", "--as", "tool"], "'tool' is not one of 'agent', 'user'"),
        (["score", "nowhere"], "there is no run or file nowhere"),
        (["report", "nowhere"], "there is no run nowhere"),
        (["view", "nowhere"], "there is no folder nowhere"),
        (["view"], "there is no folder runs"),
        (["report", 300 * "a"], "the name is too long: aaa"),
        (["check", 300 * "a"], "the name is too long"),
        (["eval", "bakery", "--agent", "orakle"], "did you mean oracle?"),
        (["eval", "bakery", "--agent", "agenda"], "agenda plays the user"),
        (
            ["eval", "bakery", "--agent", "oracle", "run.name=../out"],
            "run.name: '../out' is no name of one folder",
        ),
        (["view", "bakery", "--id", "cancel-3/0"], "--id goes with --export FILE.html"),
    ],
)
def test_wrong_usage_ends_with_2(folder: Path, words: list[str], expected: str) -> None:
    (folder / "empty.toml").touch()
    done = run_verb(folder, *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_score_reproduces_every_reward(folder: Path) -> None:
    for agent in ("oracle", "naive"):
        result = ask(folder, "eval", "bakery", "--agent", agent, "--split", "all", f"run.name={agent}")
        rows = ask(folder, "score", result["run"], "bakery")
        recorded = [json.loads(line) for line in read_lines(folder / result["run"])]
        assert {row["id"]: row["reward"] for row in rows} == {
            line["id"]: line["reward"]["value"] for line in recorded
        }
        assert all(row["same"] for row in rows)
    file = folder / "runs" / "naive" / "trajectories" / "eval.jsonl"
    line = json.loads(file.read_text().splitlines()[0])
    line["reward"]["value"] = 1.0
    file.write_text(json.dumps(line) + "\n")
    done = run_verb(folder, "score", str(file), "--trust")
    assert done.returncode == 1
    assert "DIFFERS from the record" in done.stdout


def test_the_same_seed_gives_the_same_bytes(folder: Path) -> None:
    words = ["eval", "bakery", "--split", "all", "--trials", "3", "--seed", "7"]
    first, second = (ask(folder, *words, f"run.name={name}")["run"] for name in "ab")
    files = [folder / path / "trajectories" / "eval.jsonl" for path in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()
    other = ask(folder, *words[:-1], "8", "run.name=c")["run"]
    assert (folder / other / "trajectories" / "eval.jsonl").read_bytes() != files[0].read_bytes()


def test_rollout_and_report(folder: Path) -> None:
    result = ask(folder, "rollout", "bakery", "--split", "train")
    path = folder / result["run"]
    assert (path / "trajectories" / "rollout.jsonl").exists()
    (path / "report.md").unlink()
    report = ask(folder, "report", result["run"])
    assert report["state"] == "finished"
    assert report["result"]["run"] == result["run"]
    assert (path / "report.md").read_text() == report["markdown"]
    assert run_verb(folder, "report", result["run"]).stdout.startswith("# rollout of bakery")


def test_a_run_that_learned_nothing_says_so(folder: Path) -> None:
    few = ["training.steps=2", "training.tasks_per_step=1", "training.group_size=2", "training.eval_every=0"]
    done = run_verb(
        folder, "train", "shop", *few, "limits.observations=4", "tasks.levels=[1]", "run.name=base"
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was learned: most replies were cut off" in done.stderr
    assert 'evaluate it: trialogue eval shop --agent runs/base "tasks.levels=[1]"' in done.stdout
    again = run_verb(folder, "train", "--resume", "runs/base")
    assert "runs/base had nothing left to do" in again.stderr
    assert "nothing was learned" not in again.stderr
    for verb in ("eval", "sft"):
        other = run_verb(folder, verb, "--resume", "runs/base")
        assert other.stderr.endswith("is a run of `trialogue train`, and only that goes on with it\n"), verb


def test_a_domain_without_an_oracle_is_taught_by_the_teacher(folder: Path) -> None:
    done = run_verb(folder, "sft", "bakery", "sft.count=12", "run.name=taught")
    assert done.returncode == 0, done.stderr
    told = run_verb(folder, "sft", "bakery", "sft.faults=0.2")
    assert told.returncode == 2
    assert "the teacher, which makes no mistakes on purpose" in told.stderr
    corpus = ask(folder, "synthesize", "bakery", "--count", "3", "run.name=corpus")
    assert corpus["agent"] == "teacher"
    assert corpus["accepted"] == 3


def test_config_lists_every_key(folder: Path) -> None:
    keys = ask(folder, "config")
    seed = {"verb": "eval", "key": "seed", "default": 0, "meaning": "Seed of every random choice."}
    assert seed in keys
    assert all(key["meaning"] for key in keys)
    shown = run_verb(folder, "config", "eval").stdout
    assert 'user.model = "agenda"' in shown
    assert len([line for line in shown.splitlines() if " = " in line and line[0] != " "]) == len(
        [key for key in keys if key["verb"] == "eval"]
    )


def test_a_file_of_settings_and_overrides(folder: Path) -> None:
    (folder / "my.toml").write_text('domain = "bakery"\n[tasks]\nsplit = "train"\ncount = 2\n')
    result = ask(folder, "eval", "--config", "my.toml", "--tasks", "1", "tasks.trials=3")
    assert (result["split"], result["tasks"], result["trials"]) == ("train", 1, 3)


def test_an_interrupted_run_goes_on_to_the_same_result(folder: Path, crash: Callable[[Path], None]) -> None:
    (folder / "slow.py").write_text(SLOW)
    words = ["eval", "slow.py", "--split", "all", "--trials", "4", "rollout.concurrency=4", "--seed", "3"]
    whole = ask(folder, *words, "run.name=whole")
    assert whole["failed"] > 0  # some conversations were held anew

    command = [sys.executable, "-m", "trialogue", *words, "run.name=cut"]
    child = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    file = folder / "runs" / "cut" / "trajectories" / "eval.jsonl"
    for _ in range(3000):
        if file.exists() and file.stat().st_size:
            break
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130, errors
    assert "trialogue eval --resume runs/cut domain=slow.py\n" in errors
    assert "Traceback" not in errors
    about = json.loads((folder / "runs" / "cut" / "run.json").read_text())
    assert about["state"] == "stopped"
    some = read_lines(folder / "runs" / "cut")
    assert 0 < len(some) < len(read_lines(folder / "runs" / "whole"))
    done = run_verb(folder, "report", "runs/cut")
    assert done.returncode == 1
    assert "not finished (its state is 'stopped')" in done.stderr
    crash(folder / "runs" / "cut")
    with file.open("a") as half:  # a line cut off by a crash is dropped
        half.write('{"id": "cut off')

    resumed = ask(folder, "eval", "slow.py", "--resume", "runs/cut")
    assert read_lines(folder / "runs" / "cut") == read_lines(folder / "runs" / "whole")
    assert without_time(resumed) == without_time(whole)


def without_time(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = {"seconds", "wall_seconds", "run"}
        return {key: without_time(inner) for key, inner in value.items() if key not in left_out}
    return value


def test_resuming_a_finished_run_holds_nothing_again(folder: Path) -> None:
    words = ["eval", "bakery", "--split", "all", "run.name=one"]
    first = ask(folder, *words)
    lines = read_lines(folder / "runs" / "one")
    again = ask(folder, *words, "--resume", "runs/one")  # the same settings may be given once more
    assert read_lines(folder / "runs" / "one") == lines
    assert without_time(first) == without_time(again)


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["eval", "--resume", "runs/one", "--seed", "1"], 2, "a resumed run keeps its own"),
        (["rollout", "bakery", "--resume", "runs/one"], 1, "is a run of kind 'eval', not 'rollout'"),
        (["eval", "--resume", "bakery"], 1, "is no run directory"),
        (
            ["eval", "--resume", "runs"],
            1,
            "has no run.json: name one of the runs in it (one), such as runs/one",
        ),
        (["chat", "runs"], 1, "runs has no weights: name one of the runs in it (one), such as runs/one"),
        (["eval", "--resume", "runs/onee"], 2, "there is no run runs/onee; did you mean runs/one?"),
        (["chat", "one"], 2, "there is no run one; did you mean runs/one?"),
        (["eval", "bakery", "run.name=one"], 1, "resume it with --resume"),
    ],
)
def test_what_cannot_be_resumed_says_why(folder: Path, words: list[str], status: int, expected: str) -> None:
    ask(folder, "eval", "bakery", "run.name=one")
    done = run_verb(folder, *words)
    assert done.returncode == status
    assert expected in done.stderr


def test_nothing_graded_is_a_failure(folder: Path) -> None:
    (folder / "empty.jsonl").write_text("")
    done = run_verb(folder, "eval", "bakery", "--agent", "replay:empty.jsonl", "rollout.redraws=0", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["blame"] == {"infrastructure": 4}


def test_a_script_and_a_person_that_is_not_there(folder: Path) -> None:
    script = folder / "script.jsonl"
    call = {"tool_calls": [{"name": "cancel_order", "arguments": {"order_id": "A108"}}]}
    script.write_text(json.dumps(call) + '\n"Your order has been cancelled."\n')
    words = ["eval", "bakery", "--agent", "scripted:script.jsonl", "--tasks", "1"]
    assert ask(folder, *words, "reward.rules=off")["reward"] == 1
    asked = ask(folder, *words)
    assert (asked["reward"], asked["outcome"], asked["compliant"]) == (0, 1, 0), "nobody was asked for a yes"
    assert set(asked["breaches"]) == {"identity first", "confirm"}
    done = run_verb(folder, "eval", "bakery", "--agent", "human", "run.name=left")
    assert done.returncode == 130
    assert "trialogue eval --resume runs/left domain=bakery" in done.stderr


def test_an_endpoint_is_billed_recorded_and_played_back_without_it(folder: Path) -> None:
    words = ["eval", "bakery", "--seed", "5"]
    with Endpoint(lambda request, asked: completion("It is done.", usage=(100, 10))) as server:
        live = [
            "--agent",
            "openai:toy",
            f"agent.base_url={server.url}",
            "agent.price=[2.0, 8.0]",
            "run.name=live",
        ]
        result = ask(folder, *words, *live)
    used = result["sides"]["agent"]
    assert used["calls"] > 4
    assert used["prompt"] == 100 * used["calls"]
    assert result["cost"] == used["cost"] == pytest.approx(used["calls"] * (100 * 2 + 10 * 8) / 1e6)
    assert sum(figures["cost"] for figures in result["families"].values()) == pytest.approx(result["cost"])
    assert result["sides"]["user"]["cost"] is None
    assert 0 < used["seconds"] <= result["seconds"]
    assert "| agent |" in (folder / "runs" / "live" / "report.md").read_text()

    recording = "runs/live/recordings/agent.jsonl"
    again = ask(folder, *words, "--agent", f"replay:{recording}", "run.name=again")
    assert again["failed"] == 0
    assert read_lines(folder / "runs" / "again") == read_lines(folder / "runs" / "live")


def test_the_installed_command_answers() -> None:
    command = shutil.which("trialogue", path=str(Path(sys.executable).parent)) or ""
    words = [command] if command else [sys.executable, "-m", "trialogue"]
    done = subprocess.run(
        [*words, "--help"], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    for verb in ("init", "check", "play", "rollout", "eval", "score", "config", "report"):
        assert f"  {verb} " in done.stdout
