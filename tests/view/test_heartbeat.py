"""Every command that takes a while shows something all the time, also where its output goes to a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep

import pytest
from endpoint import Endpoint

from trialogue.activity import Activity, Phase

SHORT = 0.4
"""Seconds of silence that a test allows itself, in place of the six of a terminal."""
SLACK = 3.0
"""What a machine that is busy with other tests may add to it."""


def follow(
    *arguments: str, folder: Path, seconds: float = SHORT, said: str = ""
) -> tuple[list[tuple[float, str]], int]:
    """Run a command with both outputs in a pipe and `said` as its input; the lines of both with their times,
    and the exit status."""
    environment = os.environ | {
        "TRIALOGUE_PROGRESS_SECONDS": str(seconds),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OPENAI_API_KEY": "none",
    }
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        [sys.executable, "-m", "trialogue", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(said)
        process.stdin.close()
        lines += [(monotonic(), line.rstrip("\n")) for line in process.stdout]
    return lines, process.returncode


def find_gap(lines: list[tuple[float, str]]) -> float:
    """The longest silence between two lines."""
    times = [at for at, _ in lines]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def find_bars(lines: list[tuple[float, str]]) -> list[str]:
    return [line for _, line in lines if re.search(r"\d+%\|", line) or "\r" in line]


@pytest.fixture
def slow_endpoint() -> Generator[str]:
    """An endpoint that takes its time for each reply of an agent."""

    def answer(request: object, asked: int) -> str:
        sleep(1.5)
        return "One moment, I am looking."

    with Endpoint(answer) as server:
        yield server.url


def test_an_evaluation_with_a_slow_agent_is_never_silent(slow_endpoint: str, tmp_path: Path) -> None:
    settings = [f"agent.base_url={slow_endpoint}", "limits.observations=4", "tasks.levels=[1]"]
    lines, status = follow(
        "eval", "shop", "--agent", "openai:slow", "--tasks", "1", *settings, folder=tmp_path
    )
    text = [line for _, line in lines]
    assert status == 0, text
    assert find_gap(lines) < SHORT + SLACK
    beats = [line for line in text if line.startswith("eval")]
    beats = [line for line in beats if " · conversations 0/1, " in line]
    turns = [int(found[1]) for line in beats if (found := re.search(r"(\d+) turns", line))]
    assert turns == sorted(turns)
    assert len(set(turns)) > 1, "turns are told while the only conversation goes on"
    assert re.search(r"\d+ tokens, \d+ s so far", beats[-1])


@pytest.mark.training
def test_learning_is_never_silent_and_its_log_holds_no_bars(tmp_path: Path) -> None:
    few = ["training.steps=2", "training.tasks_per_step=2", "training.group_size=2", "training.eval_every=0"]
    settings = ["limits.reply_tokens=64", "run.name=agent"]
    lines, status = follow("train", "shop", *few, *settings, folder=tmp_path, seconds=0.1)
    text = [line for _, line in lines]
    assert status == 0, text
    assert find_gap(lines) < 10, text
    assert not find_bars(lines), text
    steps = [line for line in text if line.startswith("step=")]
    assert re.match(r"step=1/2 .* s=[\d.]+ left=\d+(s|min)$", steps[0]), steps
    assert any(re.search(r" · learning [01]/2 steps", line) for line in text), text
    assert any(line.startswith("computing with 1 thread ") for line in text), text
    lines, status = follow("eval", "shop", "--agent", "runs/agent", "--tasks", "2", folder=tmp_path)
    assert not find_bars(lines)
    lines, _ = follow("chat", "runs/agent", folder=tmp_path)
    assert any(re.match(r"chat( · loading the model)?, \d+ s so far", line) for _, line in lines), lines


def test_whoever_waits_for_a_slow_agent_is_told_so(slow_endpoint: str, tmp_path: Path) -> None:
    agent = ["--agent", "openai:slow", f"agent.base_url={slow_endpoint}"]
    lines, _ = follow("play", "shop", "--as", "user", *agent, folder=tmp_path, said="Hello.\n")
    text = [line for _, line in lines]
    assert any("play · waiting for the other side, " in line for line in text), text
    assert "AGENT One moment, I am looking." in "\n".join(text)
    assert find_gap(lines) < SHORT + SLACK


def test_with_json_progress_goes_to_stderr(slow_endpoint: str, tmp_path: Path) -> None:
    settings = [f"agent.base_url={slow_endpoint}", "limits.observations=1", "tasks.levels=[1]", "--json"]
    command = [
        sys.executable,
        "-m",
        "trialogue",
        "eval",
        "shop",
        "--agent",
        "openai:slow",
        "--tasks",
        "1",
        *settings,
    ]
    environment = {**os.environ, "TRIALOGUE_PROGRESS_SECONDS": "0.2"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["asked"] == 1
    assert "eval" in done.stderr


def test_phases_within_each_other_tell_what_is_done_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("trialogue.activity.monotonic", lambda: clock)
    activity = Activity()
    assert activity.describe() is None
    outer, inner = Phase("train", began=100.0), Phase("learning", 36, "steps", 12, "rows", 100.0, first=10)
    activity.phases += [outer, inner]
    clock = 110.0
    activity.turns, activity.tokens = 1300, 5
    told = "train · learning 12/36 steps (rows), 1,200 turns, 10 s so far, about 2 min left"
    assert activity.describe(turns=100, tokens=5) == told
