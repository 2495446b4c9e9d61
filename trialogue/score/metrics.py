"""Figures over conversations: pass^k with intervals, ends, blame, turns, tools, by family and level."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any, NamedTuple

from trialogue.trajectory import Trajectory

SUCCESS = 1.0 - 1e-6
"""A reward from here on counts as success."""


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_hat(successes: int, trials: int, k: int) -> float:
    """The chance that k trials drawn without replacement all succeed: C(c, k) / C(n, k)."""
    return comb(successes, k) / comb(trials, k)


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 2000) -> Interval:
    """Mean with the 95 % percentile interval of a bootstrap over the values (one per task)."""
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"))
    generator = random.Random(seed)
    size = len(values)
    if len(set(values)) == 1:
        return Interval(values[0], values[0], values[0])
    means = sorted(sum(generator.choices(values, k=size)) / size for _ in range(draws))
    return Interval(fmean(values), means[int(0.025 * draws)], means[int(0.975 * draws) - 1])


def by_task(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """The rewards of each task's conversations; failed conversations have none."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards[trajectory.task.id].append(trajectory.reward.value)
    return rewards


def pass_hats(rewards: Mapping[str, Sequence[float]], seed: int = 0) -> dict[int, Interval]:
    """pass^1 to pass^k, k being the trials every task has."""
    if not rewards:
        return {}
    counts = [(sum(value >= SUCCESS for value in values), len(values)) for values in rewards.values()]
    most = min(trials for _, trials in counts)
    return {k: bootstrap([pass_hat(good, n, k) for good, n in counts], seed) for k in range(1, most + 1)}


def summarize(
    trajectories: Sequence[Trajectory], failed: Sequence[Trajectory] = (), seed: int = 0
) -> dict[str, Any]:
    """Every figure of a set of conversations as plain data."""
    summary = _figures(trajectories, seed)
    everything = [*trajectories, *failed]
    summary["failed"] = len(failed)
    summary["blame"] = dict(sorted(Counter(item.blame for item in failed if item.blame).items()))
    summary["ends"] = dict(sorted(Counter(item.end for item in everything).items()))
    summary["tools"] = dict(Counter(name for item in trajectories for name in called(item)).most_common())
    summary["families"] = _split(trajectories, lambda item: item.task.family, seed)
    summary["levels"] = _split(trajectories, lambda item: str(item.task.level or ""), seed)
    writes = [item for item in trajectories if item.task.expected.calls]
    others = [item for item in trajectories if not item.task.expected.calls]
    kinds = {"with gold calls": writes, "without": others}
    summary["writes"] = {kind: _figures(items, seed) for kind, items in kinds.items() if items}
    usage = [turn.usage for item in everything for turn in item.turns if turn.usage is not None]
    summary["tokens"] = {
        "prompt": sum(item.prompt for item in usage),
        "completion": sum(item.completion for item in usage),
        "cached": sum(item.cached for item in usage),
    }
    return summary


def called(trajectory: Trajectory) -> list[str]:
    """Names of the tools the agent called."""
    return [
        call.name for turn in trajectory.turns if turn.side == "agent" for call in turn.message.tool_calls
    ]


def _figures(trajectories: Sequence[Trajectory], seed: int) -> dict[str, Any]:
    rewards = by_task(trajectories)
    hats = pass_hats(rewards, seed)
    figures: dict[str, Any] = {
        "tasks": len(rewards),
        "conversations": len(trajectories),
        "reward": fmean(value for values in rewards.values() for value in values) if rewards else None,
    }
    for k, interval in hats.items():
        figures[f"pass^{k}"] = interval.value
        figures[f"pass^{k}_low"], figures[f"pass^{k}_high"] = interval.low, interval.high
    if trajectories:
        figures["turns"] = fmean(len(item.turns) for item in trajectories)
        figures["tool_calls"] = fmean(len(called(item)) for item in trajectories)
    return figures


def _split(
    trajectories: Sequence[Trajectory], key: Callable[[Trajectory], str], seed: int
) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        parts[key(trajectory)].append(trajectory)
    return {name: _figures(parts[name], seed) for name in sorted(parts) if name}
