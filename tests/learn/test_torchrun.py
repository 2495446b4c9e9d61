"""`trialogue train` under torchrun goes as in one process, and either takes up the other's run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trialogue.run import list_checkpoints, read_lines, read_trajectories

ROOT = Path(__file__).parents[2]


def run(*words: str, processes: int) -> None:
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(many if processes > 1 else []), "-m", "trialogue", "train", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_alike(one: Path, other: Path) -> None:
    """The same words were spoken, and the numbers agree as far as two ways of adding up do."""
    first, second = ([line for _, line in read_lines(path / "metrics.jsonl")] for path in (one, other))
    assert len(first) == len(second)
    updates = 0
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() & {"step", "reward", "loss", "kl", "grad_norm", "response_tokens"}:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
        updates += "loss" in ours
    assert updates >= 2
    for file in sorted((one / "trajectories").iterdir()):
        held, again = (
            {item.id: [turn.message for turn in item.turns] for item in read_trajectories(path)}
            for path in (file, other / "trajectories" / file.name)
        )
        assert held == again


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_processes_train_as_one(wall: str, trained: Path, tmp_path: Path) -> None:
    settings = [
        f"domain={wall}",
        f"learner.model={trained}",
        "learner.device=cpu",
        "learner.cache_gigabytes=0.1",
        "limits.reply_tokens=12",
        "limits.context_tokens=128",
        "training.steps=3",
        "training.temperature=1",
        "training.tasks_per_step=3",
        "training.group_size=4",
        "training.eval_every=0",
        "training.checkpoint_every=1",
        "optimizer.warmup=0",
        "optimizer.learning_rate=5e-3",
        "loss.kl=0.05",
        f"run.directory={tmp_path}",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    run(*settings, "run.name=one", processes=1)
    run(*settings, "run.name=two", processes=2)
    assert_alike(one, two)
    for path, processes in ((one, 2), (two, 1)):
        taken_up = path.with_name(f"{path.name}-taken-up")
        shutil.copytree(path, taken_up)
        last = list_checkpoints(taken_up)[-1]
        assert last.name == "step-000003"
        shutil.rmtree(last)
        run("--resume", str(taken_up), processes=processes)
        assert_alike(path, taken_up)
