"""Waiting times: help, the first conversation, the page of a large run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from speed import view
from speed.measure import Figure, Options, alone


def time_command(*arguments: str) -> float:
    started = perf_counter()
    command = [sys.executable, "-m", "trialogue", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - started


def measure(options: Options) -> list[Figure]:
    repeated = range(options.repetitions)
    time_command("--help")  # compiles to bytecode once
    python: list[float] = []
    for _ in repeated:
        started = perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        python.append(perf_counter() - started)
    bound, by = min(python), "starting Python and doing nothing"
    with tempfile.TemporaryDirectory() as place:
        settings = ("--tasks", "1", f"run.directory={place}")
        talk = ("eval", "shop", "--agent", "oracle", "--user", "agenda", *settings)
        figures = [
            alone(
                "start: --help",
                "s",
                [time_command("--help") for _ in repeated],
                target=0.3,
                bound=bound,
                bounded_by=by,
            ),
            alone(
                "start: first conversation, held and graded",
                "s",
                [time_command(*talk) for _ in repeated],
                target=2.0,
                bound=bound,
                bounded_by=by,
            ),
        ]
    conversations = 2_000 if options.quick else 10_000
    with tempfile.TemporaryDirectory() as place:
        index = view.make_run(Path(place), conversations) / "index.jsonl"
        opened = [view.measure(Path(place))["open"] for _ in repeated]
        read = min(time_reading(index) for _ in repeated)
    figures.append(
        alone(
            f"start: page of {conversations:,} conversations",
            "s",
            opened,
            target=1.0,
            bound=read,
            bounded_by="reading the index of its conversations",
        )
    )
    return figures


def time_reading(file: Path) -> float:
    started = perf_counter()
    with file.open("rb") as lines:
        for line in lines:
            json.loads(line)
    return perf_counter() - started
