"""`trialogue train` says before it begins that the tiny base has had no cold start, and how to make one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from trialogue.cli.main import main

WARNING = "warning: the tiny base has had no cold start"
FEW = (
    *("training.steps=1", "training.tasks_per_step=1", "training.group_size=2", "training.eval_every=0"),
    *("limits.observations=4", "limits.reply_tokens=8", "learner.device=cpu"),
)


def call(*words: str) -> str:
    """Everything that is printed, in the order in which it is."""
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_training_without_a_cold_start_warns_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = call("train", "shop", *FEW, "tasks.levels=[1]", "run.name=raw")
    assert 0 <= told.index(WARNING) < told.index("step=1/1")
    cold, warm = (shlex.split(command) for command in re.findall("`trialogue (.*?)`", told)[:2])
    assert cold == ["sft", "shop", "tasks.levels=[1]", "run.name=cold"]
    assert WARNING in call("train", "shop", *FEW, "learner.model=runs/raw", "run.name=further")
    assert WARNING not in call("train", "--resume", "runs/raw")
    call(*cold, "sft.count=4", "limits.context_tokens=512", "limits.reply_tokens=64")
    assert WARNING not in call(*warm, *FEW, "run.name=warm")
