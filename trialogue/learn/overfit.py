"""Detect overfitting from `metrics.jsonl`, so that a resumed run finds the same.

The steps between two evaluations are compared with the mean of both, on the
levels that these steps admitted and with families weighed as among the dev tasks. What always differs (the
agent samples in training and is greedy on dev, a split may be harder) cancels: only the change counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from typing import Any

Strata = dict[str, tuple[float, float]]
"""Mean reward, as a fraction of its range, and number of tasks, by family or under one name."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with half of its 95 % interval."""

    value: float
    half: float

    @classmethod
    def of(cls, value: float, tasks: float) -> Estimate:
        """Of values from 0 to 1, which vary at most as successes do (the interval of Agresti and Coull)."""
        middle = (value * tasks + 2) / (tasks + 4)
        return cls(value, 1.96 * sqrt(max(0.0, middle * (1 - middle)) / (tasks + 4)))


@dataclass(frozen=True, slots=True)
class Standing:
    """Training and dev tasks side by side after a step."""

    step: int
    like: tuple[object, ...]
    """Levels and families: only equal ones are compared."""
    train: Estimate
    dev: Estimate


def find_overfit(
    lines: Sequence[Mapping[str, Any]], group_size: int, evaluations: int, rewards: tuple[float, float]
) -> str | None:
    """What to say where training and dev tasks have parted within the last `evaluations`, or within more."""
    standings = find_standings(lines, group_size, rewards)
    if len(standings) < evaluations:
        return None
    now = standings[-1]
    for then in standings[: 1 - evaluations]:
        # One evaluation may be off by chance; the one before it has to say the same.
        if all(have_parted(then, later) for later in standings[-2:]):
            low, high = rewards
            first, last = (
                [low + (high - low) * estimate.value for estimate in (item.train, item.dev)]
                for item in (then, now)
            )
            return (
                f"overfit: on training tasks the reward rose from {first[0]:.2f} to {last[0]:.2f} since step "
                f"{then.step}, on dev tasks it went from {first[1]:.2f} to {last[1]:.2f}: stop or go back to "
                "an earlier checkpoint; train on more tasks, lower optimizer.learning_rate, or set loss.kl"
            )
    return None


def have_parted(then: Standing, now: Standing) -> bool:
    """Whether train grew away from dev by more than the intervals, while dev did not rise and lies below."""
    if then.like != now.like:
        return False
    grown = (now.train.value - then.train.value) - (now.dev.value - then.dev.value)
    parted = grown > hypot(then.train.half, now.train.half, then.dev.half, now.dev.half)
    stands = now.dev.value - now.dev.half <= then.dev.value
    above = now.train.value - now.train.half > now.dev.value + now.dev.half
    return parted and stands and above


def find_standings(
    lines: Sequence[Mapping[str, Any]], group_size: int, rewards: tuple[float, float]
) -> list[Standing]:
    """Each evaluation that has steps before it, beside them."""
    found: list[Standing] = []
    steps: list[Mapping[str, Any]] = []
    before: Mapping[str, Any] | None = None
    for line in lines:
        if "kind" not in line and line.get("reward") is not None:
            steps.append(line)
        if line.get("kind") != "eval":
            continue
        if steps and line.get("reward") is not None:
            levels = steps[-1].get("levels", [])
            alike = [item for item in steps if item.get("levels", []) == levels]
            train, dev = _to_strata(alike, line, levels, rewards)
            if before is not None and before.get("levels", {}).keys() == line.get("levels", {}).keys():
                start = _to_strata(alike, before, levels, rewards)[1]
                # Training rewards are a mean over the interval, so dev rewards are too.
                dev = {
                    name: ((value + start.get(name, (value, 0))[0]) / 2, tasks)
                    for name, (value, tasks) in dev.items()
                }
            like = (tuple(levels), tuple(sorted(dev)))
            found.append(Standing(line["step"], like, *_weigh(train, dev, group_size)))
        steps, before = [], line if line.get("reward") is not None else None
    return found


def _to_strata(
    steps: Sequence[Mapping[str, Any]],
    line: Mapping[str, Any],
    levels: Sequence[int],
    rewards: tuple[float, float],
) -> tuple[Strata, Strata]:
    """What is alike in steps and in an evaluation: its tasks of the admitted levels where a curriculum admits
    only some (families are not told by level), else the families that both have, else everything."""
    low, high = rewards

    def join(parts: Iterable[tuple[float | None, float]]) -> tuple[float, float]:
        known = [(value, number) for value, number in parts if value is not None and number]
        total = sum(number for _, number in known)
        mean = sum(value * number for value, number in known) / total if total else low
        return min(1.0, max(0.0, (mean - low) / (high - low))), total

    def join_dev(parts: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
        return join((part.get("reward"), part.get("tasks", 0)) for part in parts)

    whole = {"": join((item["reward"], item["conversations"]) for item in steps)}
    by_level = line.get("levels", {})
    admitted = [part for name, part in by_level.items() if int(name) in levels]
    if 0 < len(admitted) < len(by_level):
        return whole, {"": join_dev(admitted)}
    train = {
        name: join((item["families"].get(name), item["graded"].get(name, 0)) for item in steps)
        for name in line.get("families", {})
        if all("graded" in item for item in steps)
    }
    dev = {name: join_dev([line["families"][name]]) for name, (_, number) in train.items() if number}
    return (train, dev) if dev else (whole, {"": join_dev([line])})


def _weigh(train: Strata, dev: Strata, group_size: int) -> tuple[Estimate, Estimate]:
    """Both means with the weights of dev. A task counts once, for its conversations are not independent."""
    total = sum(tasks for _, tasks in dev.values())
    weights = {name: tasks / total for name, (_, tasks) in dev.items()}
    groups = 1 / sum(weight**2 / (train[name][1] / group_size) for name, weight in weights.items())
    return (
        Estimate.of(sum(weight * train[name][0] for name, weight in weights.items()), groups),
        Estimate.of(sum(weight * dev[name][0] for name, weight in weights.items()), total),
    )
