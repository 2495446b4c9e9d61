"""Recompute the figures of a run from its conversations and compare them with the recorded ones.

Only records are used: no domain is loaded, and rewards are the recorded ones (`score` grades again). Figures
such as losses cannot be recomputed from conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any, cast

from trialogue.config import EvalConfig, SftConfig, SynthesizeConfig, TrainConfig
from trialogue.corpus import synthesize
from trialogue.errors import RunError
from trialogue.learn.checks import to_finite
from trialogue.learn.measure import count_families, measure
from trialogue.reading import reading
from trialogue.records import remake_index
from trialogue.run import find_files, read_about, read_config, read_lines, read_seconds, read_trajectories
from trialogue.score import evaluate
from trialogue.score.metrics import find_prices, summarize
from trialogue.trajectory import Group, Trajectory

TOLERANCE = 1e-9
"""Relative tolerance: another version of Python may round sums differently."""


@dataclass(frozen=True, slots=True)
class FigureDifference:
    """A recorded figure that differs from the recomputed one."""

    file: str
    line: int | None
    figure: str
    recorded: Any
    derived: Any

    def to_line(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}: {self.figure} is {_shorten(self.recorded)}, derived: {_shorten(self.derived)}"

    def to_data(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "line": self.line,
            "figure": self.figure,
            "recorded": self.recorded,
            "derived": self.derived,
        }


@dataclass(slots=True)
class Derived:
    """The number of compared figures, the differences, and the figures that cannot be recomputed."""

    compared: int = 0
    differences: list[FigureDifference] = field(default_factory=list[FigureDifference])
    taken: set[str] = field(default_factory=set[str])
    """Names of figures that were not checked."""

    def compare(self, file: str, line: int | None, recorded: dict[str, Any], derived: dict[str, Any]) -> None:
        """Compare recorded figures with recomputed ones."""
        self.taken |= recorded.keys() - derived.keys()
        for name, value in json.loads(json.dumps(derived)).items():
            if name not in recorded:
                self.add(FigureDifference(file, line, name, None, value))
                continue
            self.compared += 1
            for figure, one, other in _find_differences(name, recorded[name], value):
                self.add(FigureDifference(file, line, figure, one, other))

    def add(self, difference: FigureDifference) -> None:
        self.differences.append(difference)


def derive(run: Path) -> Derived:
    """Recompute all figures of a run that depend only on its conversations, and compare."""
    derived = Derived()
    with reading(run, RunError):
        _derive(run, derived)
    return derived


def _derive(run: Path, derived: Derived) -> None:
    kind = read_about(run).get("kind")
    if kind in ("eval", "rollout"):
        _derive_evaluation(run, derived)
    elif kind == "synthesize":
        _derive_synthesis(run, derived)
    elif kind in ("train", "sft"):
        _derive_steps(run, kind, derived)
    else:
        raise RunError(f"{run} is a run of kind '{kind}', whose figures come from another program")
    _derive_index(run, derived)
    _derive_timings(run, derived)


def _derive_evaluation(run: Path, derived: Derived) -> None:
    config = read_config(EvalConfig, run)
    held, failed, excluded = _sort(read_all(run))
    _compare_result(run, derived, evaluate.to_figures(run, config, held, failed, excluded))


def _derive_synthesis(run: Path, derived: Derived) -> None:
    config = read_config(SynthesizeConfig, run)
    parts = [list(read_trajectories(run / f"{name}.jsonl")) for name in ("accepted", "rejected")]
    accepted, rejected = parts
    decisions = {str(line.get("id")): line for _, line in read_lines(run / "decisions.jsonl")}
    reasons = [str(reason) for line in decisions.values() for reason in line.get("reasons", ())]
    counts = {reason: reasons.count(reason) for reason in reasons}
    with reading(run, RunError):
        figures = synthesize.to_corpus_figures(run, config, accepted, rejected, counts)
    _compare_result(run, derived, figures)
    decided = {item.id: True for item in accepted} | {item.id: False for item in rejected}
    taken = {identity: bool(line.get("accepted")) for identity, line in decisions.items()}
    for identity in {item.id for item in read_all(run)} ^ decided.keys():
        derived.add(FigureDifference("accepted.jsonl and rejected.jsonl", None, identity, None, "once"))
    for identity in sorted(decided.keys() | taken.keys()):
        derived.compared += 1
        if decided.get(identity) != taken.get(identity):
            found = decided.get(identity)
            derived.add(FigureDifference("decisions.jsonl", None, identity, taken.get(identity), found))


def _compare_result(run: Path, derived: Derived, figures: dict[str, Any]) -> None:
    """Compare `result.json` and the only line of `metrics.jsonl`, which must be equal to it."""
    file = run / "result.json"
    if not file.exists():
        return
    with reading(file, RunError):
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        derived.compare("result.json", None, result, figures)
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    for number, line in enumerate(lines, 1):
        derived.compare("metrics.jsonl", number, line, result)


def _derive_steps(run: Path, kind: str, derived: Derived) -> None:
    config = read_config(TrainConfig if kind == "train" else SftConfig, run)
    price = find_prices(config.budget.prices, user=config.user)
    for number, line in read_lines(run / "metrics.jsonl"):
        step = line.get("step")
        if not isinstance(step, int):
            raise RunError(f"{run / 'metrics.jsonl'}, line {number}: it has no step")
        if line.get("kind") == "eval":
            held, failed, _ = _sort(_read_part(run, f"eval-{step:06d}"))
            figures = summarize(held, failed, config.seed, price)
        elif kind == "train":
            groups = to_groups(_read_part(run, f"step-{step:06d}"))
            figures = to_finite(measure(groups, price) | _measure_flow(groups))
        else:
            figures = {}
        derived.compare("metrics.jsonl", number, line, figures)


def _measure_flow(groups: Sequence[Group]) -> dict[str, Any]:
    """How many conversations of a step were trained on or cut, as far as the records tell."""
    held = [item for group in groups for item in group.trajectories]
    failed = [item for group in groups for item in group.failed]
    learned = [item for item in [*held, *failed] if "advantage" in item.meta]
    return {
        "trained": count_families(item.task for item in learned),
        "cut": count_families(item.task for item in failed if item.meta.get("cut")),
    }


def _derive_index(run: Path, derived: Derived) -> None:
    """Compare `index.jsonl` with entries made from the conversations."""
    entries = {json.dumps(json.loads(line), sort_keys=True) for line in remake_index(find_files(run))}
    file = run / "index.jsonl"
    for number, line in read_lines(file) if file.exists() else ():
        derived.compared += 1
        if (text := json.dumps(line, sort_keys=True)) not in entries:
            derived.add(
                FigureDifference("index.jsonl", number, str(line.get("id")), text, "no such conversation")
            )
        entries.discard(text)
    for text in sorted(entries):
        derived.add(FigureDifference("index.jsonl", None, json.loads(text)["id"], None, text))


def _derive_timings(run: Path, derived: Derived) -> None:
    """Check that seconds are recorded for every conversation and for no other."""
    _, seconds = read_seconds(run)
    held = {item.id for item in read_all(run)}
    derived.compared += len(held)
    for identity in sorted(held ^ seconds.keys()):
        there = identity in held
        derived.add(FigureDifference("timings.jsonl", None, identity, not there, there))


def read_all(run: Path) -> Iterator[Trajectory]:
    """The conversations of a run; empty if it has none."""
    return (item for file in find_files(run) for item in read_trajectories(file))


def _read_part(run: Path, name: str) -> list[Trajectory]:
    return list(read_trajectories(run / "trajectories" / f"{name}.jsonl"))


def _sort(items: Iterator[Trajectory] | list[Trajectory]) -> tuple[list[Trajectory], ...]:
    """Graded, failed and excluded conversations."""
    parts: tuple[list[Trajectory], ...] = ([], [], [])
    for item in items:
        parts[1 if item.is_failed else 2 if item.excluded else 0].append(item)
    return parts


def to_groups(items: Sequence[Trajectory]) -> list[Group]:
    """The groups of a step's conversations: those of one task that started together."""
    parts: dict[tuple[str, str], list[Trajectory]] = {}
    for item in items:
        parts.setdefault((item.id.partition("/")[0], item.task.id), []).append(item)
    groups: list[Group] = []
    for part in parts.values():
        held, failed, excluded = _sort(part)
        groups.append(
            Group(task=part[0].task, trajectories=tuple(held), failed=tuple(failed), excluded=tuple(excluded))
        )
    return groups


def _find_differences(name: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """The figures, by their path, in which two values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        first, second = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        for key in [*first, *(second.keys() - first.keys())]:
            yield from _find_differences(f"{name}.{key}", first.get(key), second.get(key))
        return
    if isinstance(one, int | float) and isinstance(other, int | float):
        is_same = isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
    else:
        is_same = one == other
    if not is_same:
        yield name, one, other


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"
