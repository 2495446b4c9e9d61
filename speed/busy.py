"""Time the demonstration beside a busy process on one of two cores, and on quiet cores, in turn.

Each run is `trialogue demo --minutes 1` in a process of its own on two cores. Three rounds take nine minutes.
Other work on the machine makes the ratio meaningless.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from speed.measure import ROOT, Figure, Options, alone

TARGET = 1.8
CHOSEN = ("OMP_", "GOMP_", "KMP_", "MKL_")
"""Variables that would fix the number of threads or their way of waiting."""


def measure(options: Options) -> list[Figure]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("busy: this needs two cores, and the process may use one")
    minutes = 0.5 if options.quick else 1.0
    quiet: list[float] = []
    ratios: list[float] = []
    for _ in range(options.repetitions):
        quiet.append(time_demo(cores, minutes))
        with keep_busy(cores[-1]):
            beside = time_demo(cores, minutes)
        ratios.append(beside / quiet[-1])
        print(f"quiet {quiet[-1]:.1f} s, beside a busy process {beside:.1f} s", flush=True)
    note = f"quiet: {min(quiet):.0f} s"
    return [alone("demonstration beside a busy process", "times", ratios, target=TARGET, note=note)]


def time_demo(cores: list[int], minutes: float) -> float:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(CHOSEN)}
    started = perf_counter()
    with tempfile.TemporaryDirectory() as place:
        command = ["demo", "--minutes", str(minutes), "--out", str(Path(place) / "demo")]
        subprocess.run(
            [sys.executable, "-m", "trialogue", *command],
            check=True,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    return perf_counter() - started


@contextmanager
def keep_busy(core: int) -> Generator[None]:
    """A process that computes on one core without pause."""
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as process:
        try:
            yield
        finally:
            process.kill()
