"""What all measurements share: figures, repetitions that alternate, work in processes of its own, bounds.

Nothing here imports torch or trialogue, so that a peer's environment can run its part.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parents[1]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    quick: bool = False
    repetitions: int = 5
    model: str | None = None  # folder of SmolLM2
    trl: str | None = None  # Pythons of the peers' environments
    vllm: str | None = None
    data: str | None = None  # folder with TAU2's data


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `ratio` is how many times better ours is, with the range over repetitions;
    `bound` is what the machine would allow at most, in the same unit, and `bounded_by` says by what."""

    name: str
    ours: float
    theirs: float | None
    unit: str
    ratio: float | None
    low: float | None
    high: float | None
    against: str
    versions: dict[str, str] = field(default_factory=dict[str, str])
    repetitions: int = 1
    bound: float | None = None
    bounded_by: str = ""


def compare(
    name: str,
    unit: str,
    pairs: Sequence[tuple[float, float]],
    against: str,
    *,
    more_is_better: bool = False,
    bound: float | None = None,
    bounded_by: str = "",
    versions: dict[str, str] | None = None,
) -> Figure:
    """A figure of alternating repetitions (ours, theirs): medians, and the range of the ratios."""
    ratios = [ours / theirs if more_is_better else theirs / ours for ours, theirs in pairs]
    return Figure(
        name,
        median(ours for ours, _ in pairs),
        median(theirs for _, theirs in pairs),
        unit,
        median(ratios),
        min(ratios),
        max(ratios),
        against,
        versions or find_versions(),
        len(pairs),
        bound,
        bounded_by,
    )


def alone(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    target: float | None = None,
    bound: float | None = None,
    bounded_by: str = "",
) -> Figure:
    """A figure that has no peer; the ratio, where there is a target, tells how far below it we are."""
    ratios = [target / value for value in values] if target is not None else None
    return Figure(
        name,
        median(values),
        target,
        unit,
        median(ratios) if ratios else None,
        min(ratios) if ratios else None,
        max(ratios) if ratios else None,
        "target" if ratios else "",
        find_versions(),
        len(values),
        bound,
        bounded_by,
    )


def find_versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("trialogue", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def find_peak() -> float:
    """Peak resident memory of this process in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


# -- parts: work in a process of its own -------------------------------------------------------------------


class Part:
    """`speed.MODULE.PARTS[NAME]` in a process of its own, made ready once and run whenever it is asked."""

    def __init__(self, module: str, name: str, python: str | None = None, **settings: Any) -> None:
        self.name = f"{module}:{name}"
        command = [python or sys.executable, "-m", "speed.measure", module, name, json.dumps(settings)]
        environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._read()

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        """What a part says is marked; whatever else libraries print is theirs."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        sys.exit(f"{self.name} failed with status {self.process.wait()}; its error stands above")

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(module: str, name: str, settings: dict[str, Any]) -> None:
    """The other end of `Part`."""
    run: Callable[[], dict[str, Any]] = import_module(f"speed.{module}").PARTS[name](**settings)
    say = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115 - whatever becomes of sys.stdout
    say.write("> {}\n")
    say.writelines(f"> {json.dumps({**run(), 'peak': find_peak()})}\n" for _ in sys.stdin)


def alternate(parts: Sequence[Callable[[], Part]], repetitions: int) -> list[list[dict[str, Any]]]:
    """Results of each part, one run of each in turn, so that a change of the machine's pace meets all."""
    with ExitStack() as stack:
        made = [stack.enter_context(make()) for make in parts]
        rounds = [[part.run() for part in made] for _ in range(repetitions)]
    return [list(results) for results in zip(*rounds, strict=True)]


# -- what the machine allows -------------------------------------------------------------------------------


def find_rates(seconds: float = 0.5) -> dict[str, float]:
    """Floating-point operations a second of a large matrix product, and bytes a second read from memory."""
    import torch

    left, right = torch.randn(1024, 576), torch.randn(576, 1536)
    large = torch.randn(1 << 26)  # 256 MB, more than any cache holds

    def best(action: Callable[[], object]) -> float:
        found, started = float("inf"), perf_counter()
        while perf_counter() - started < seconds:
            begun = perf_counter()
            action()
            found = min(found, perf_counter() - begun)
        return found

    return {
        "flops": 2 * 1024 * 576 * 1536 / best(lambda: left @ right),
        "bytes": large.numel() * 4 / best(large.sum),
        "threads": float(torch.get_num_threads()),
    }


def to_json(figures: Sequence[Figure]) -> str:
    return json.dumps([asdict(figure) for figure in figures], indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
