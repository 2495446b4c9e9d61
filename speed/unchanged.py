"""Compare what two versions of the package compute, byte by byte: python speed/unchanged.py BEFORE AFTER

BEFORE and AFTER are checkouts. Each evaluates the oracle, takes a short cold start and three steps of
reinforcement learning, with equal seeds, on one thread, with the Python that runs this script. Trajectories,
metrics and weights are compared; the exit status is 1 if a file differs. The times in metrics and the digest
that ends each line are left out. Name a metric that has a new name since BEFORE as `--renamed OLD=NEW`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

PROGRAM = """
import asyncio, sys
from trialogue.config import EvalConfig, SftConfig, TrainConfig, load_config
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.score.evaluate import evaluate

place = f"run.directory={sys.argv[1]}"
levels = "tasks.levels=[1]"
tasks = ["run.name=eval", "tasks.count=40", "tasks.trials=2"]
asyncio.run(evaluate(load_config(EvalConfig, None, [place, *tasks])))
examples = ["run.name=sft", "sft.count=600", "sft.faults=0.22", "sft.only_successes=false"]
cold = asyncio.run(sft(load_config(SftConfig, None, [place, levels, *examples])))
steps = ["training.steps=3", "training.tasks_per_step=4", "training.eval_every=3", "training.eval_tasks=8"]
model = f"learner.model={cold}"
asyncio.run(train(load_config(TrainConfig, None, [place, levels, "run.name=train", model, *steps])))
"""
COMPARED = ("trajectories/*.jsonl", "metrics.jsonl", "model/*.safetensors")


TIMES = ("wall_seconds", "seconds")
"""Metrics that depend on the time taken."""
DIGEST = re.compile(rb',"digest":"[^"]*"(?=\}$)', re.MULTILINE)
"""The digest that ends a line: it was added after the first versions, and covers the times of a metric."""


def to_bytes(file: Path, renamed: dict[str, str]) -> bytes:
    """A file as it is compared: lines without digests, metrics without times and under their new names."""
    data = DIGEST.sub(b"", file.read_bytes()) if file.suffix == ".jsonl" else file.read_bytes()
    if file.name != "metrics.jsonl":
        return data
    lines = [_without_times(json.loads(line), renamed) for line in data.splitlines()]
    return json.dumps(lines, sort_keys=True).encode()


def _without_times(value: Any, renamed: dict[str, str]) -> Any:
    """Metrics at any depth."""
    if not isinstance(value, dict):
        return value
    metrics = cast("dict[str, Any]", value)
    return {
        renamed.get(key, key): _without_times(inner, renamed)
        for key, inner in metrics.items()
        if key not in TIMES
    }


def run(tree: Path, out: Path, renamed: dict[str, str]) -> dict[str, str]:
    """The digest of every compared file of the three runs of one checkout."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM, "runs"], check=True, cwd=out, env=environment)
    files = sorted(file for pattern in COMPARED for file in out.glob(f"runs/*/{pattern}"))
    return {str(file.relative_to(out)): hashlib.sha256(to_bytes(file, renamed)).hexdigest() for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    given = parser.parse_args()
    renamed = dict(item.split("=") for item in given.renamed)
    found: list[dict[str, str]] = []
    for tree in (given.before, given.after):
        with tempfile.TemporaryDirectory() as place:
            found.append(run(tree.resolve(), Path(place), renamed))
    before, after = found
    names = sorted(before.keys() | after.keys())
    for name in names:
        print("same    " if before.get(name) == after.get(name) else "DIFFERS ", name)
    differing = sum(before.get(name) != after.get(name) for name in names)
    print(f"{len(names)} files compared, {differing} differ")
    sys.exit(1 if differing or not names else 0)


if __name__ == "__main__":
    main()
