# pyright: reportPrivateUsage=false
"""The common parts of all measurements: figures, alternating repetitions, work in separate processes, bounds.

Nothing here imports torch or trialogue, so that the environment of a peer can run its part.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parents[1]
BODY, EMBEDDING = 106.2e6, 28.3e6  # weights of SmolLM2-135M, whose embedding is also the output matrix
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line."""

    quick: bool = False
    repetitions: int = 5
    model: str | None = None  # folder of SmolLM2
    trl: str | None = None  # Pythons of the peers' environments
    vllm: str | None = None
    llama: str | None = None  # llama.cpp's server
    gguf: str | None = None  # and the weights in its format
    data: str | None = None  # folder with TAU2's data
    tau2: str | None = None  # checkout of tau2-bench, and the Python to run it
    tau2_python: str | None = None
    demo: str | None = None  # folder of finished demonstrations
    only: str = ""  # text in the names of the cases to run
    against: str = ""  # and in the names of peers
    precision: str = ""  # float32 or bfloat16 only

    def wants(self, case: str) -> bool:
        return self.only in case


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `ratio` is how many times better ours is, with the range over repetitions.
    `bound` is the limit of the machine in the same unit, `bounded_by` its cause, and `away` how many times
    worse ours is. `note` is additional information: names stay the same from run to run. `measured` is the
    day."""

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
    away: float | None = None
    note: str = ""
    measured: str = field(default_factory=lambda: date.today().isoformat())


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
    note: str = "",
) -> Figure:
    """A figure of alternating repetitions (ours, theirs): medians and the range of ratios."""
    ratios = [ours / theirs if more_is_better else theirs / ours for ours, theirs in pairs]
    middle = median(ours for ours, _ in pairs)
    return Figure(
        name,
        middle,
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
        (bound / middle if more_is_better else middle / bound) if bound else None,
        note,
    )


def compare_peaks(
    name: str, rows: Sequence[tuple[dict[str, Any], dict[str, Any]]], against: str, versions: dict[str, str]
) -> Figure:
    """Peak memory of processes in which SmolLM2 learned."""
    return compare(
        f"peak memory of the {name}",
        "GB",
        [(ours["peak"], theirs["peak"]) for ours, theirs in rows],
        against,
        bound=(BODY + EMBEDDING) * 16 / 1e9,
        bounded_by="weights, gradients and Adam's two moments in float32",
        versions=versions,
    )


def alone(
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    target: float | None = None,
    bound: float | None = None,
    bounded_by: str = "",
    note: str = "",
) -> Figure:
    """A figure without a peer. The ratio, if there is a target, is how far below it ours is."""
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
        median(values) / bound if bound else None,
        note,
    )


PACKAGES = ("torch", "transformers", "trl", "vllm")


def find_versions() -> dict[str, str]:
    """Versions of Python, trialogue and the packages loaded in this process."""
    found = {"python": platform.python_version()}
    with suppress(metadata.PackageNotFoundError):
        found["trialogue"] = f"{metadata.version('trialogue')} {find_commit()}".strip()
    return found | {name: str(sys.modules[name].__version__) for name in PACKAGES if name in sys.modules}


@cache
def find_commit() -> str:
    """The measured commit, and whether the code has changed since."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    try:
        commit = ask("rev-parse", "--short=7", "HEAD").strip()
        return f"{commit} and changes" if ask("status", "--porcelain", "trialogue", "speed/*.py") else commit
    except (OSError, subprocess.CalledProcessError):  # no clone, or no git
        return ""


def join_versions(ours: dict[str, Any], theirs: dict[str, Any], peer: str) -> dict[str, str]:
    """The versions of both sides; where they differ, the peer's has its name."""
    joined: dict[str, str] = dict(ours["versions"])
    for package, version in theirs["versions"].items():
        same = joined.get(package, version) == version
        joined[package if same else f"{package} of {peer}"] = version
    return joined


def find_peak() -> float:
    """Peak resident memory of this process in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


# -- parts: work in separate processes ---------------------------------------------------------------------


class Part:
    """`speed.MODULE.PARTS[NAME]` in a separate process, prepared once and run on request."""

    def __init__(self, module: str, name: str, python: str | None = None, **settings: Any) -> None:
        self.name = f"{module}:{name}"
        command = [python or sys.executable, "-m", "speed.measure", module, name, json.dumps(settings)]
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._read()

    def run(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # a process that has ended is reported below
            self.process.stdin.write("run\n")
            self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        """A part marks its lines of output; other lines come from libraries."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        self.__exit__()
        sys.exit(f"{self.name} failed with status {self.process.returncode}; its error stands above")

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve(module: str, name: str, settings: dict[str, Any]) -> None:
    """The process side of `Part`."""
    run: Callable[[], dict[str, Any]] = import_module(f"speed.{module}").PARTS[name](**settings)
    say = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115 - whatever becomes of sys.stdout
    say.write("> {}\n")
    for _ in sys.stdin:
        result = run()
        say.write(f"> {json.dumps({'peak': find_peak(), 'versions': find_versions(), **result})}\n")


def alternate(
    parts: Sequence[Callable[[], Part]], repetitions: int, *, anew: bool = False
) -> Iterator[list[list[dict[str, Any]]]]:
    """The results of each part so far, after every round, so that an interrupted run keeps them. A round runs
    each part once in turn, so that a change of the machine's speed affects all. With `anew` every run has a
    process of its own, for its peak memory."""
    results: list[list[dict[str, Any]]] = [[] for _ in parts]
    with ExitStack() as stack:
        made = [] if anew else [stack.enter_context(make()) for make in parts]
        for _ in range(repetitions):
            for place, make in enumerate(parts):
                results[place].append(run_once(make) if anew else made[place].run())
            yield results


def run_once(make: Callable[[], Part]) -> dict[str, Any]:
    with make() as part:
        return part.run()


# -- what the machine allows -------------------------------------------------------------------------------


def find_precisions(options: Options) -> tuple[str, ...]:
    """The dtypes to measure: float32, and bfloat16 if the processor multiplies it."""
    import torch

    wanted = (options.precision,) if options.precision else ("float32", "bfloat16")
    if "bfloat16" in wanted and not torch.cpu._is_avx512_bf16_supported():
        print("bfloat16 left out: this processor does not multiply such numbers (AVX512_BF16)")
        return tuple(name for name in wanted if name != "bfloat16")
    return wanted


def find_rates(precision: str = "float32", seconds: float = 0.5) -> dict[str, float]:
    """Floating-point operations per second of a large matrix product, bytes per second read from memory, and
    bytes of a number."""
    import torch

    kind: torch.dtype = getattr(torch, precision)
    left, right = torch.randn(1024, 576).to(kind), torch.randn(576, 1536).to(kind)
    large = torch.randn(1 << 13, 1 << 13)  # 256 MB, more than any cache holds
    narrow = torch.randn(1 << 13)

    def best(action: Callable[[], object]) -> float:
        found, started = float("inf"), perf_counter()
        while perf_counter() - started < seconds:
            begun = perf_counter()
            action()
            found = min(found, perf_counter() - begun)
        return found

    turned = right.t().contiguous()
    ways = [lambda: left @ right, lambda: torch.nn.functional.linear(left, turned)]
    if torch.backends.mkldnn.is_available():
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(left, turned, None, "none", [], ""))
    return {
        "flops": 2 * 1024 * 576 * 1536 / min(map(best, ways)),
        "bytes": large.numel() * 4 / min(best(large.sum), best(lambda: large @ narrow)),
        "width": float(kind.itemsize),
    }


def to_json(figures: Sequence[Figure]) -> str:
    return json.dumps([asdict(figure) for figure in figures], indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
