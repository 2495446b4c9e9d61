"""Count the code that one training step executes: python speed/walk.py [--list]

After a short cold start it trains the tiny base for three steps and counts the files and functions of the
package that run during the second one. Threads that were started before are not followed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import trialogue
from trialogue.config import SftConfig, TrainConfig, load_config
from trialogue.learn.sft import sft
from trialogue.learn.train import train

PACKAGE = Path(trialogue.__file__).resolve().parent
COLD_START = ("sft.count=2000", "sft.faults=0.22", "sft.only_successes=false", "tasks.levels=[1]")
SETTINGS = (
    "training.steps=3",
    "training.tasks_per_step=4",
    "training.group_size=8",
    "training.eval_every=0",
    "training.checkpoint_every=100",
    "tasks.levels=[1]",
)


class Walk:
    """Counts the calls of each function of the package between two steps."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def watch(self, step: int, metrics: dict[str, Any]) -> None:
        """Profile the second step: from the metrics of the first one to those of the second."""
        if metrics.get("kind") is None:
            threading.setprofile(self._see if step == 1 else None)
            sys.setprofile(self._see if step == 1 else None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)):
            self.calls[Path(file).relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the files")
    given = parser.parse_args()
    walk = Walk()
    with tempfile.TemporaryDirectory() as place:
        runs = f"run.directory={place}"
        model = asyncio.run(sft(load_config(SftConfig, None, (*COLD_START, runs))))
        config = load_config(TrainConfig, None, (*SETTINGS, runs, f"learner.model={model}"))
        asyncio.run(train(config, watch=walk.watch))
    files: Counter[str] = Counter(file for file, _ in walk.calls)
    outside = {file: number for file, number in files.items() if not file.startswith("engine/")}
    print(f"one step: {len(files)} files, {len(walk.calls)} functions")
    print(f"outside engine/: {len(outside)} files, {sum(outside.values())} functions")
    if given.list:
        for file, number in sorted(outside.items()):
            print(f"  {number:3} functions  {file}")


if __name__ == "__main__":
    main()
