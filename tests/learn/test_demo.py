"""The demonstration: how it is shortened, and that a short one is real and never silent."""

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
from trialogue.learn.demo import MINUTES, Size


def test_the_whole_is_the_default_and_no_number_of_minutes_makes_it_longer() -> None:
    assert Size() == Size.fit(MINUTES) == Size.fit(60)
    assert Size.fit(1) == Size(examples=1000, steps=6, eval_every=6, dev_tasks=17, test_tasks=43)


def test_it_says_what_to_expect() -> None:
    assert "6 minutes" in Size().describe()
    short = Size.fit(1).describe()
    assert "1,000 examples in place of 6,000" in short
    assert "stays weak" in short


@pytest.mark.parametrize("minutes", ["0", "-1", "soon"])
def test_minutes_that_are_none_are_refused(minutes: str) -> None:
    done = CliRunner().invoke(main, ["demo", "--minutes", minutes])
    assert done.exit_code == 2
    assert "--minutes" in done.output


@pytest.mark.training
@pytest.mark.timeout(900)
def test_a_short_demonstration_is_real_and_never_silent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trialogue", "demo", "--minutes", "0.5", "--out", "demo"]
    environment = os.environ | {
        "TRIALOGUE_PROGRESS_SECONDS": "2",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    times, lines = [monotonic()], [""]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            times.append(monotonic())
            lines.append(line.rstrip("\n"))
    assert process.returncode == 0, lines
    print(*lines, f"{times[-1] - times[0]:.1f} s in all", sep="\n")
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 10, lines[gaps.index(max(gaps))]
    assert any(line.startswith("step=3/3 ") for line in lines)
    assert not [line for line in lines if "%|" in line]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text(encoding="utf-8"))
    assert summary["test_tasks"] == Size.fit(0.5).test_tasks
    config = json.loads((tmp_path / "demo" / "rl" / "config.json").read_text(encoding="utf-8"))
    assert config["reward"]["rules"] == "required"
    for name in ("after_sft", "after_rl"):
        figures = summary[name]
        assert 0 <= figures["low"] <= figures["pass^1"] <= min(figures["outcome"], figures["compliant"])
    assert any(" compliant=" in line for line in lines)
    assert [line for line in lines if "solved, policy kept" in line]
    for name, count in (("test-after-sft", 32), ("test-after-rl", 32)):
        held = (tmp_path / "demo" / name / "trajectories" / "eval.jsonl").read_text(encoding="utf-8")
        assert len(held.splitlines()) >= count
