"""Measure every speed claim: python -m speed [MEASUREMENT …] [--quick]

Each measurement is a module of this package. Results are written to speed/results.json and to the table of
docs/speed.md. Measurements that were not run keep their previous lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from fcntl import LOCK_EX, flock
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from speed.measure import ROOT, Figure, Options, find_rates, to_json
from trialogue import durable

MEASUREMENTS = {
    "episodes": "TAU2 tasks: open, play, grade",
    "step": "A training step",
    "sample": "Sampling",
    "update": "An update",
    "latency": "Slow users",
    "growth": "Growth",
    "start": "Start-up",
    "reach": "Time to a goal",
    "busy": "A busy machine",
}
NEEDS_MODEL = {"step", "sample", "update"}
RESULTS = ROOT / "speed" / "results.json"
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
GROWTH = "![CPU seconds over conversations, turns, records, concurrency; dotted: ideal.](images/growth.png)"


def show(value: float | None) -> str:
    """A number with three significant digits, without powers of ten."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def to_table(figures: list[Figure]) -> str:
    lines = ["| what | ours | theirs | times better (range) | against | bound (times away) | n | on |"]
    lines.append("| --- | ---: | ---: | ---: | --- | ---: | ---: | --- |")
    for one in figures:
        ratio = show(one.ratio)
        if one.ratio is not None and one.repetitions > 1:
            ratio += f" ({show(one.low)}–{show(one.high)})"
        away = "" if one.away is None else f" ({show(one.away)})"
        cells = (
            f"{one.name} ({one.note})" if one.note else one.name,
            f"{show(one.ours)} {one.unit}",
            show(one.theirs),
            ratio,
            one.against or "–",
            f"{show(one.bound)}{away}",
            str(one.repetitions),
            one.measured,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def in_order(figures: list[Figure]) -> list[Figure]:
    """Group the cases of a model: float32 first, then by their numbers."""

    def to_key(figure: Figure) -> tuple[bool, str]:
        case = figure.name.partition(", ")[2].replace(",", "")
        return "bfloat16" in case, re.sub(r"\d+", lambda number: number[0].zfill(6), case)

    return sorted(figures, key=to_key)


def write_page(known: dict[str, list[Figure]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    parts = [BEGIN]
    for name, title in MEASUREMENTS.items():
        if figures := known.get(name):
            parts += [f"### {title}", to_table(in_order(figures) if name in ("step", "sample") else figures)]
        if name == "growth" and (PAGE.parent / "images" / "growth.png").exists():
            parts.append(GROWTH)
    durable.write(PAGE, before + "\n\n".join([*parts, END]) + after)


def read_results(path: Path) -> dict[str, list[Figure]]:
    known: dict[str, list[Figure]] = {}
    names = {field.name for field in fields(Figure)}
    lines: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for line in lines:
        figure = {key: value for key, value in line.items() if key in names}
        known.setdefault(line["measurement"], []).append(Figure(**figure))
    return known


def put(figure: Figure, figures: list[Figure], *, finished: bool = True) -> list[Figure]:
    """Replace the previous figure of that name, or append it. A figure that is waiting for more repetitions
    does not replace a complete one."""
    names = [(one.name, one.against) for one in figures]
    place = names.index(name) if (name := (figure.name, figure.against)) in names else len(figures)
    if not finished and figures[place:] and figures[place].repetitions > figure.repetitions:
        return figures
    return [*figures[:place], figure, *figures[place + 1 :]]


def add(name: str, change: Callable[[list[Figure]], list[Figure]]) -> None:
    """Change the figures of one measurement. Other measurements may run at the same time."""
    with (ROOT / "speed" / "__main__.py").open() as lock:
        flock(lock, LOCK_EX)
        known = read_results(RESULTS)
        write({**known, name: change(known.get(name, []))})


def write(known: dict[str, list[Figure]]) -> None:
    lines = [
        {"measurement": name, **line}
        for name in MEASUREMENTS
        for line in json.loads(to_json(known.get(name, [])))
    ]
    durable.write(RESULTS, json.dumps(lines, indent=1, ensure_ascii=False) + "\n")
    write_page(known)


def refuse_impossible(figure: Figure) -> None:
    """Refuse a figure that is faster than the machine allows: the work was not done. A slope has no such
    bound, and the speed of a machine varies by some percent."""
    if figure.unit != "slope" and figure.away is not None and figure.away < 0.9:
        sys.exit(
            f"{figure.name}: ours is {1 / figure.away:.2f} times better than its bound "
            f"({figure.bounded_by}), so something was left out; nothing of it is written down"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=", ".join(MEASUREMENTS))
    parser.add_argument("--quick", action="store_true", help="Tiny sizes, as a test; writes nothing")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=5,
        help="Alternating repetitions. Default: 5",
    )
    parser.add_argument("--model", help="Folder of the model. Default: SmolLM2 from its package")
    parser.add_argument("--trl-python", dest="trl", help="Python of an environment with TRL")
    parser.add_argument("--vllm-python", dest="vllm", help="Python of an environment with vLLM")
    parser.add_argument("--llama-server", dest="llama", metavar="FILE", help="llama.cpp's server")
    parser.add_argument("--gguf", metavar="FILE", help="the model's weights for llama.cpp")
    parser.add_argument("--data", metavar="DIR", help="Folder with TAU2's data. Default: TRIALOGUE_DATA")
    parser.add_argument("--tau2-checkout", dest="tau2", metavar="DIR", help="checkout of tau2-bench")
    parser.add_argument("--tau2-python", help="Python of an environment with the requirements of tau2-bench")
    parser.add_argument(
        "--demo", metavar="DIR", help="folder with finished demonstrations: DIR/*/summary.json"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="Only cases of step, sample and update whose name contains this",
    )
    parser.add_argument(
        "--against", metavar="TEXT", default="", help="Only peers of sample whose name contains this"
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="",
        help="Measure step and sample only in this dtype",
    )
    given = parser.parse_args()
    chosen = given.measurements or list(MEASUREMENTS)
    if unknown := set(chosen) - set(MEASUREMENTS):
        parser.error(
            f"there is no measurement {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}"
        )
    for flag, file in (
        ("--trl-python", given.trl),
        ("--vllm-python", given.vllm),
        ("--llama-server", given.llama),
    ):
        if file is not None and not Path(file).exists():
            parser.error(f"{flag}: there is no {file}; `make speed` makes the peers' places")
    model = given.model
    needs = {*NEEDS_MODEL, "latency"} if given.trl else NEEDS_MODEL
    if model is None and needs & set(chosen):
        from trialogue.engine.models import find_model_folder

        model = find_model_folder("smollm2")
    named = {
        field.name: getattr(given, field.name) for field in fields(Options) if hasattr(given, field.name)
    }
    named |= {"model": model, "repetitions": 1 if given.quick else given.repetitions}
    options = Options(**named)
    rates = find_rates()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rates['flops'] / 1e9:.0f} GFLOP/s, "
        f"{rates['bytes'] / 1e9:.0f} GB/s"
    )
    for name in chosen:
        print(f"== {name}", flush=True)
        figures: Iterable[Figure] = import_module(f"speed.{name}").measure(options)
        found = 0
        for figure in figures:
            found += 1
            print(to_table([figure]).splitlines()[-1], flush=True)
            refuse_impossible(figure)
            if not given.quick:
                finished = figure.repetitions >= options.repetitions
                add(name, partial(put, figure, finished=finished))
        if not found and (given.only or given.against or given.precision):
            print(f"{name}: nothing of it is what --only, --against and --precision ask for", end="")
            print("; with --quick cases have other sizes and names" if given.quick else "")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
