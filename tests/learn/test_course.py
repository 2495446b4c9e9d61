"""`trialogue learn`: a short real course from a folder to a report, which is never silent and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from time import monotonic

import pytest
from click.testing import CliRunner

from trialogue.cli.main import main
from trialogue.config import EvalConfig, SftConfig, TrainConfig
from trialogue.learn.course import (
    REWORD,
    Course,
    Sizes,
    cold_config,
    find_gap,
    find_kept_step,
    warm_config,
)
from trialogue.learn.pace import find_longest
from trialogue.learn.sizes import ColdStart, Reinforcement
from trialogue.world.scaffold import write_domain

SIZES = Sizes(ColdStart(100, 3.0, 40, 24), warm=Reinforcement(8, 2), is_small=False)


def test_settings_go_to_the_parts_that_know_them(tmp_path: Path) -> None:
    words = ("sft.epochs=7", "training.group_size=4", "limits.reply_tokens=99", "tasks.levels=[2]")
    course = Course("shop", tmp_path, seed=3, words=words)
    cold = cold_config(course, SIZES)
    warm = warm_config(course, SIZES, tmp_path / "sft")
    test = course.to_config(EvalConfig, "test")
    assert isinstance(cold, SftConfig)
    assert isinstance(warm, TrainConfig)
    assert (cold.sft.epochs, cold.sft.count, cold.sft.examples) == (7, 100, "teacher")
    assert (warm.training.group_size, warm.training.steps) == (4, 8)
    assert (cold.sft.patience, warm.training.patience) == (3, 3)
    assert (cold.optimizer.learning_rate, warm.optimizer.learning_rate) == (1e-4, 1e-5)
    assert {each.seed for each in (cold, warm, test)} == {3}
    assert {each.limits.reply_tokens for each in (warm, test)} == {99}
    assert {each.tasks.levels for each in (cold, warm, test)} == {(2,)}
    assert cold.tasks.reword
    assert REWORD == "tasks.reword=true"


def test_the_longest_reply_is_found() -> None:
    assert find_longest([0, 1, 1, 0, 1, 1, 1, 0]) == 3
    assert find_longest([1, 1]) == 2
    assert find_longest([0]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a DOMAIN"),
        (["shop", "run.name=x"], "learn chooses run.name=x itself"),
        (["shop", "tasks.split=dev"], "itself; leave it out"),
        (["shop", "--resume", "runs/none"], "there is no run runs/none"),
        (["shop", "--minutes", "0"], "--minutes"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["learn", *words])
    assert done.exit_code == 2
    assert message in done.output


def run(folder: Path, *words: str) -> list[str]:
    """The lines of a course. No two are more than ten seconds apart."""
    environment = os.environ | {
        "TRIALOGUE_PROGRESS_SECONDS": "2",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    times, lines = [monotonic()], [""]
    with subprocess.Popen(
        [sys.executable, "-m", "trialogue", "learn", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            times.append(monotonic())
            lines.append(line.rstrip("\n"))
    assert process.returncode == 0, lines
    print(*lines, sep="\n")
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 10, lines[gaps.index(max(gaps))]
    return lines


@pytest.mark.training
@pytest.mark.timeout(900)
def test_a_short_course_is_real_and_goes_on(tmp_path: Path) -> None:
    write_domain(tmp_path / "bakery", generated=True)
    lines = run(tmp_path, "bakery", "--minutes", "0.5", "training.steps=2", "training.tasks_per_step=2")
    directory = tmp_path / "runs" / "learn-bakery"
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    sizes = json.loads((directory / "course.json").read_text(encoding="utf-8"))["sizes"]
    held = (directory / "test-after-sft" / "trajectories" / "eval.jsonl").read_text(encoding="utf-8")
    assert len(held.splitlines()) >= summary["test_tasks"] == sizes["cold"]["test_tasks"] == 40
    assert sizes["pace"]["learned"] > 0
    lost = sum(mistake["conversations"] for mistake in summary["mistakes"])
    assert lost == round(40 * (1 - summary["after_rl"]["pass^1"]))
    report = (directory / "report.md").read_text(encoding="utf-8")
    assert "## What is still wrong" in report
    assert "what would help" in report
    for number in range(1, 7):
        assert any(line.startswith(f"{number}/6 ") for line in lines)
    assert any("left" in line for line in lines)

    before = {file: file.stat().st_mtime for file in directory.glob("*/result.json")}
    again = run(tmp_path, "bakery", "--resume", str(directory))
    assert before == {file: file.stat().st_mtime for file in directory.glob("*/result.json")}
    assert any("talk to it" in line for line in again)


@pytest.mark.parametrize(("success", "is_said"), [(0.99, True), (0.7, False)])
def test_solved_training_tasks_and_unsolved_dev_tasks_are_told(
    tmp_path: Path, success: float, is_said: bool
) -> None:
    (tmp_path / "run.json").write_text('{"kind": "train"}', encoding="utf-8")
    lines = [{"step": 0, "kind": "eval", "pass^1": 0.6}, {"step": 1, "success": success}]
    lines.append({"step": 1, "kind": "eval", "pass^1": 0.65})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    assert bool(find_gap(tmp_path)) is is_said
    assert find_kept_step(tmp_path) == 1
