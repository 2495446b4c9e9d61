"""The figures of a training step: rewards, groups, turns, tools, variety, age of the weights. Only the
agent's own tokens are counted, never those of users or tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import Any

from trialogue.engine.api import Row
from trialogue.learn.advantages import has_signal
from trialogue.score.compliance import to_compliance_figures
from trialogue.score.metrics import PriceOf, SummaryInputs, called, measure_wordings, spend
from trialogue.task import Task
from trialogue.trajectory import Group, Trajectory, count_near_calls, count_stuck


def measure(groups: Sequence[Group], price: PriceOf | None = None) -> dict[str, Any]:
    """The figures of one step's conversations, as plain data for `metrics.jsonl`. `price` gives the price of
    the user's models."""
    held = [item for group in groups for item in group.trajectories]
    failed = [item for group in groups for item in group.failed]
    spoilt = [item for group in groups for item in group.excluded]
    graded = [group for group in groups if group.trajectories]
    metrics: dict[str, Any] = {
        "conversations": len(held),
        "failed": len(failed),
        "excluded": sum(len(group.excluded) for group in groups),
        "findings": dict(Counter(finding.kind for item in [*held, *spoilt] for finding in item.findings)),
        "blame": dict(Counter(item.blame for item in failed if item.blame)),
        "ends": dict(sorted(Counter(item.end for item in held).items())),
        "tools": dict(Counter(name for item in held for name in called(item)).most_common()),
    }
    if near := count_near_calls([*held, *failed, *spoilt]):
        metrics["near_calls"] = near
    if stuck := count_stuck([*held, *failed, *spoilt]):
        metrics["stuck"] = stuck
    if guided := measure_wordings([*held, *failed, *spoilt]):
        metrics["guided"] = guided
    if price is not None:
        metrics["cost"] = spend("user", [*held, *failed, *spoilt], SummaryInputs(price=price))["cost"]
    if not held:
        return metrics
    metrics |= to_compliance_figures(held)
    rewards = [[item.value for item in group.trajectories] for group in graded]
    turns = [len(item.turns) for item in held]
    replies = [len(ids) for item in held for ids in sampled(item)]
    metrics |= {
        "reward": fmean(value for values in rewards for value in values),
        "reward_spread": fmean(pstdev(values) for values in rewards),
        "success": fmean(item.is_success for item in held),
        "all_right": fmean(all(item.is_success for item in group.trajectories) for group in graded),
        "all_wrong": fmean(not any(item.is_success for item in group.trajectories) for group in graded),
        "no_signal": fmean(not has_signal(group) for group in graded),
        "turns": fmean(turns),
        "turns_max": max(turns),
        "tool_calls": fmean(len(called(item)) for item in held),
        "tool_errors": fmean(sum(turn.failed for turn in item.turns) for item in held),
        "reply_tokens": fmean(replies) if replies else 0.0,
        "response_tokens": fmean(sum(len(ids) for ids in sampled(item)) for item in held),
        "cut_off": fmean(item.end == "too_long" for item in held),
        "unique_4grams": fmean(
            unique_ngrams([tokens_of(item) for item in group.trajectories]) for group in graded
        ),
        "unique_replies": fmean(
            len({tuple(tokens_of(item)) for item in group.trajectories}) / len(group.trajectories)
            for group in graded
        ),
        "families": by_family(held),
    }
    return metrics


def sampled(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """The ids of each reply the agent sampled."""
    return [
        turn.tokens.reply for turn in trajectory.turns if turn.side == "agent" and turn.tokens is not None
    ]


def tokens_of(trajectory: Trajectory) -> list[int]:
    """All ids the agent sampled in a conversation."""
    return [token for reply in sampled(trajectory) for token in reply]


def unique_ngrams(sequences: Sequence[Sequence[int]], size: int = 4) -> float:
    """Different n-grams as a fraction of all n-grams of a group: 1 where no two are equal."""
    grams = [
        tuple(sequence[place : place + size])
        for sequence in sequences
        for place in range(len(sequence) - size + 1)
    ]
    return len(set(grams)) / len(grams) if grams else 0.0


def by_family(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward of each family of tasks."""
    families = sorted({item.task.family for item in trajectories if item.task.family})
    return {
        family: fmean(item.value for item in trajectories if item.task.family == family)
        for family in families
    }


def count_families(tasks: Iterable[Task], times: int = 1) -> dict[str, int]:
    """The number of conversations by family of tasks."""
    found = Counter(task.family or "all" for task in tasks)
    return {family: times * number for family, number in sorted(found.items())}


def measure_flow(
    started: Sequence[Task], groups: Sequence[Group], rows: Iterable[Row], size: int, version: int
) -> dict[str, Any]:
    """What became of the conversations of a step, by family, and the age of the weights that sampled them.
    A graded conversation need not be trained on: its group may have no signal, or it was left out."""
    ids = {row.id for row in rows}
    learned = [item for group in groups for item in (*group.trajectories, *group.failed) if item.id in ids]
    held = [item for group in groups for item in group.trajectories]
    cut = [item for group in groups for item in group.failed if item.meta.get("cut")]
    ages = [
        version - turn.tokens.version
        for item in held
        for turn in item.turns
        if turn.side == "agent" and turn.tokens is not None
        for _ in turn.tokens.reply
    ]
    return {
        "started": count_families(started, size),
        "graded": count_families(item.task for item in held),
        "trained": count_families(item.task for item in learned),
        "cut": count_families(item.task for item in cut),
        "staleness": fmean(ages) if ages else 0.0,
        "staleness_max": max(ages, default=0),
    }
