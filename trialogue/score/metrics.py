"""Figures over conversations: pass^k with intervals, ends, blame, turns, tools, by family and level."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, fsum
from statistics import fmean
from typing import Any, NamedTuple

from trialogue.config import Price, Speaker
from trialogue.score.compliance import to_compliance_figures
from trialogue.talk.budget import find_price, to_cost
from trialogue.task import Side
from trialogue.trajectory import (
    Reward,
    Trajectory,
    Usage,
    count_near_calls,
    count_stuck,
    find_no_success,
)

SIDES: tuple[Side, Side] = ("agent", "user")


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_hat(successes: int, trials: int, k: int) -> float:
    """The chance that k trials drawn without replacement all succeed: C(c, k) / C(n, k)."""
    return comb(successes, k) / comb(trials, k)


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 2000) -> Interval:
    """Mean with the 95 % percentile interval of a bootstrap over the values (one per task), whatever their
    order. Where all succeeded or all failed there is nothing to draw from: the interval then is the
    binomial's exact one."""
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"))
    generator = random.Random(seed)
    size = len(values)
    if len(set(values)) == 1:
        rest = 1 - 0.025 ** (1 / size)  # failures so rare might never have been met in so many
        low = values[0] - rest if values[0] == 1 else values[0]
        return Interval(values[0], low, rest if values[0] == 0 else values[0])
    values = sorted(values)
    means = sorted(sum(generator.choices(values, k=size)) / size for _ in range(draws))
    return Interval(fmean(values), means[int(0.025 * draws)], means[int(0.975 * draws) - 1])


def by_task(trajectories: Iterable[Trajectory]) -> dict[str, list[bool]]:
    """Which of each task's graded conversations are a success; failed conversations are not graded."""
    successes: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            successes[trajectory.task.id].append(trajectory.is_success)
    return successes


def pass_hats(successes: Mapping[str, Sequence[bool]], seed: int = 0) -> dict[int, Interval]:
    """pass^1 to pass^k, each over the tasks that have so many trials."""
    if not successes:
        return {}
    counts = [(sum(trials), len(trials)) for trials in successes.values()]
    most = max(trials for _, trials in counts)
    return {
        k: bootstrap([pass_hat(good, n, k) for good, n in counts if n >= k], seed) for k in range(1, most + 1)
    }


PriceOf = Callable[[str, str | None], Price | None]
"""The price of what a side's model of that name uses."""


def find_prices(table: Mapping[str, Price], **speakers: Speaker) -> PriceOf:
    """The prices of a run's speakers: their own, else those of the table."""

    def price(side: str, model: str | None) -> Price | None:
        speaker = speakers.get(side)
        if model is None or speaker is None:
            return None
        own = {item.model.removeprefix("guided:").removeprefix("openai:"): item.price for item in speaker.mix}
        return find_price(model, own.get(model) or speaker.price, table)

    return price


@dataclass(frozen=True, slots=True)
class SummaryInputs:
    """What a summary needs besides the conversations."""

    seed: int = 0
    price: PriceOf | None = None
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: {})
    """Seconds of each conversation by who spent them: agent, user, tools."""


def summarize(
    trajectories: Sequence[Trajectory],
    failed: Sequence[Trajectory] = (),
    seed: int = 0,
    price: PriceOf | None = None,
    seconds: Mapping[str, Mapping[str, float]] | None = None,
    excluded: Sequence[Trajectory] = (),
) -> dict[str, Any]:
    """Every figure of a set of conversations as plain data: overall, by family and by level. Those `excluded`
    because of the user count in what was used, and beside the figures as if nothing had been left out."""
    inputs = SummaryInputs(seed, price, seconds or {})
    summary = _figures(trajectories, failed, inputs)
    summary["sides"] = {side: spend(side, [*trajectories, *failed, *excluded], inputs) for side in SIDES}
    if excluded:  # they were paid for all the same
        sides = summary["sides"].values()
        summary["tokens"] = {kind: sum(side[kind] for side in sides) for kind in summary["tokens"]}
        costs = [side["cost"] for side in sides if side["cost"] is not None]
        summary["cost"] = fsum(costs) if costs else None
    if near := count_near_calls([*trajectories, *failed, *excluded]):
        summary["near_calls"] = near
    if found := find_no_success(trajectories):
        summary["no_success"] = list(found)
    if stuck := count_stuck([*trajectories, *failed, *excluded]):
        summary["stuck"] = stuck
    if guided := measure_wordings([*trajectories, *failed, *excluded]):
        summary["guided"] = guided
    summary["audit"] = audit_figures(trajectories, excluded, seed, failed)
    summary["families"] = _split(trajectories, failed, lambda item: item.task.family, inputs)
    rates = [figures["pass^1"] for figures in summary["families"].values() if "pass^1" in figures]
    summary["family_mean"] = fmean(rates) if len(rates) > 1 else None
    summary["levels"] = _split(trajectories, failed, lambda item: str(item.task.level or ""), inputs)
    kinds = {True: "with gold calls", False: "without"}
    summary["writes"] = _split(
        trajectories, failed, lambda item: kinds[bool(item.task.expected.calls)], inputs
    )
    return summary


def measure_wordings(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """What became of a guided user's wordings: how many sentences were said, asked for again and replaced by
    the rule's, for which faults, and how many openings are different. Empty without a guided user."""
    said = [
        [turn for turn in item.turns if turn.side == "user" and turn.rejected is not None]
        for item in trajectories
    ]
    faults = [turn.rejected or () for turns in said for turn in turns]
    openings = [turns[0].message.content for turns in said if turns]
    if not faults:
        return {}
    return {
        "sentences": len(faults),
        "again": sum(len(found) == 1 for found in faults),
        "replaced": sum(len(found) == 2 for found in faults),
        "faults": dict(Counter(fault for found in faults for fault in found).most_common()),
        "openings": len(set(openings)) / len(openings),
    }


def audit_figures(
    trajectories: Sequence[Trajectory],
    excluded: Sequence[Trajectory] = (),
    seed: int = 0,
    failed: Sequence[Trajectory] = (),
) -> dict[str, Any]:
    """What the audit of the user found, and the agent's success with and without the user's faults: `all`
    takes the first conversation of each trial, as if nothing had been left out, and counts one that got stuck
    as lost; `clean` takes those without findings."""
    first: dict[tuple[str, int], Trajectory] = {}
    lost_by_user = [
        item.model_copy(update={"reward": Reward(value=0.0)}) for item in failed if item.end == "stuck"
    ]
    for item in [*lost_by_user, *excluded, *trajectories]:
        known = first.get((item.task.id, item.trial))
        if known is None or _draw(item) < _draw(known):
            first[item.task.id, item.trial] = item
    everything = [*trajectories, *excluded]
    lost = [item for item in first.values() if item.reward is not None and not item.is_success]
    clean = [item for item in trajectories if not item.findings]
    return {
        "findings": dict(sorted(Counter(f.kind for item in everything for f in item.findings).items())),
        "conversations": sum(bool(item.findings) for item in everything),
        "excluded": len(excluded),
        "lost": len(lost),
        "lost_with_findings": sum(bool(item.findings) for item in lost),
        "success": {
            "all": _success(list(first.values()), seed),
            "clean": _success(clean, seed),
        },
    }


def _draw(trajectory: Trajectory) -> int:
    """Which draw of its trial a conversation was: `TASK/TRIAL.DRAW`, or none for the first."""
    number = trajectory.id.rpartition("/")[2].partition(".")[2]
    return int(number) if number.isdigit() else 0


def _success(trajectories: Sequence[Trajectory], seed: int) -> dict[str, Any]:
    successes = by_task(trajectories)
    figures: dict[str, Any] = {"conversations": sum(map(len, successes.values()))}
    for interval in [item for k, item in pass_hats(successes, seed).items() if k == 1]:
        figures |= {"pass^1": interval.value, "pass^1_low": interval.low, "pass^1_high": interval.high}
    return figures


def called(trajectory: Trajectory) -> list[str]:
    """Names of the tools the agent called."""
    return [
        call.name for turn in trajectory.turns if turn.side == "agent" for call in turn.message.tool_calls
    ]


def _figures(
    trajectories: Sequence[Trajectory], failed: Sequence[Trajectory], inputs: SummaryInputs
) -> dict[str, Any]:
    successes = by_task(trajectories)
    everything = [*trajectories, *failed]
    rewards = [item.value for item in trajectories if item.reward is not None]
    figures: dict[str, Any] = {
        "tasks": len(successes),
        "conversations": len(trajectories),
        "failed": len(failed),
        "reward": fmean(rewards) if rewards else None,
    }
    figures |= to_compliance_figures(trajectories)
    for k, interval in pass_hats(successes, inputs.seed).items():
        figures[f"pass^{k}"] = interval.value
        figures[f"pass^{k}_low"], figures[f"pass^{k}_high"] = interval.low, interval.high
    if trajectories:
        figures["turns"] = fmean(len(item.turns) for item in trajectories)
        figures["tool_calls"] = fmean(len(called(item)) for item in trajectories)
    figures["tools"] = dict(Counter(name for item in trajectories for name in called(item)).most_common())
    figures["ends"] = dict(sorted(Counter(item.end for item in everything).items()))
    figures["blame"] = dict(sorted(Counter(item.blame for item in failed if item.blame).items()))
    figures["errors"] = _find_frequent(item.error for item in failed if item.error)
    sides = [spend(side, everything, inputs) for side in SIDES]
    figures["tokens"] = {
        kind: sum(side[kind] for side in sides) for kind in ("prompt", "completion", "cached")
    }
    costs = [side["cost"] for side in sides if side["cost"] is not None]
    figures["cost"] = sum(costs) if costs else None
    spent = [inputs.seconds[item.id] for item in everything if item.id in inputs.seconds]
    figures["seconds"] = (
        round(fsum(value for parts in spent for value in parts.values()), 3) if spent else None
    )
    return figures


def _find_frequent(texts: Iterable[str]) -> dict[str, int]:
    """The three most frequent texts; those that are equally frequent in the order of the alphabet."""
    return dict(sorted(Counter(texts).items(), key=lambda item: (-item[1], item[0]))[:3])


def add_judge(figures: dict[str, Any], usage: Sequence[Usage], price: Price | None) -> None:
    """Enter what a judge has used beside the two sides, and into the totals."""
    used = figures["sides"]["judge"] = _to_spending([(item, price) for item in usage])
    used["seconds"] = None  # not told apart
    figures["tokens"] = {kind: total + used[kind] for kind, total in figures["tokens"].items()}
    if used["cost"] is not None:
        figures["cost"] = (figures["cost"] or 0.0) + used["cost"]


def _to_spending(used: Sequence[tuple[Usage, Price | None]]) -> dict[str, Any]:
    usage = [item for item, _ in used]
    costs = [to_cost(item, price) for item, price in used if price is not None]
    return {
        "calls": sum(item.calls for item in usage),
        "prompt": sum(item.prompt for item in usage),
        "completion": sum(item.completion for item in usage),
        "cached": sum(item.cached for item in usage),
        "cost": fsum(costs) if costs else None,
    }


def spend(side: Side, trajectories: Sequence[Trajectory], inputs: SummaryInputs) -> dict[str, Any]:
    """What one side used: model calls, tokens, money where its price is known, and seconds."""
    used = [
        (turn.usage, inputs.price(side, turn.model) if inputs.price is not None else None)
        for item in trajectories
        for turn in item.turns
        if turn.side == side and turn.usage and turn.message.role != "tool"
    ]
    return {
        **_to_spending(used),
        "seconds": round(fsum(inputs.seconds.get(item.id, {}).get(side, 0.0) for item in trajectories), 3),
    }


def _split(
    trajectories: Sequence[Trajectory],
    failed: Sequence[Trajectory],
    key: Callable[[Trajectory], str],
    inputs: SummaryInputs,
) -> dict[str, dict[str, Any]]:
    parts: dict[str, tuple[list[Trajectory], list[Trajectory]]] = defaultdict(lambda: ([], []))
    for place, items in enumerate((trajectories, failed)):
        for trajectory in items:
            parts[key(trajectory)][place].append(trajectory)
    return {name: _figures(*parts[name], inputs) for name in sorted(parts) if name}
