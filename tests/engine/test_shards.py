"""Two processes under torchrun against one: the same numbers, and checkpoints that go either way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent / "shards_run.py"


def run(*arguments: object, processes: int = 1) -> None:
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(many if processes > 1 else []), str(SCRIPT), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def differ(one: Path, other: Path) -> float:
    """The largest difference between two checkpoints, optimizer included."""
    most = 0.0
    for file in ("model.safetensors", "optimizer.safetensors"):
        first, second = load_file(one / file), load_file(other / file)
        assert first.keys() == second.keys()
        most = max(most, *(float((first[name] - second[name]).abs().max()) for name in first))
    return most


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_two_processes_compute_what_one_does(kind: str, make_model, tmp_path: Path) -> None:
    make_model(kind).save_pretrained(tmp_path / "model")
    run(tmp_path, "one", 0, 3)
    run(tmp_path, "two", 0, 3, processes=2)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for step, ours in one.items():
        theirs = two[step]
        assert theirs["reply"] == ours["reply"]
        assert theirs["reply_logprobs"] == pytest.approx(ours["reply_logprobs"], abs=1e-5)
        assert theirs["metrics"] == pytest.approx(ours["metrics"], rel=1e-5, abs=1e-6)
        assert theirs["norm"] == pytest.approx(ours["norm"], rel=1e-5)
        for key in ("forward", "logprobs"):
            for left, right in zip(theirs[key], ours[key], strict=True):
                assert left == pytest.approx(right, abs=1e-5)
    for step in (1, 2, 3):
        assert differ(tmp_path / f"one-{step}", tmp_path / f"two-{step}") < 1e-6
    moved = load_file(tmp_path / "one-3" / "model.safetensors")
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert max(float((moved[name] - start[name]).abs().max()) for name in start) > 1e-3

    run(tmp_path, "taken-up", 2, 3, "two-2")
    assert differ(tmp_path / "taken-up-3", tmp_path / "one-3") < 1e-6
    run(tmp_path, "handed-on", 2, 3, "one-2", processes=2)
    assert differ(tmp_path / "handed-on-3", tmp_path / "one-3") < 1e-6
    assert torch.isfinite(next(iter(moved.values()))).all()
