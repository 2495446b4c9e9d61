"""Advantages, how much better each conversation of a group was than the others, and the rows to learn from.

An advantage function takes a group and returns one number per conversation, or one list per conversation with
one number per reply of the agent. It is named by `advantage.name`: a name from `ADVANTAGES`, or a function of
your own as `module:name` or `path/to/file.py:name`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean, stdev
from typing import Any, cast

from trialogue.engine.api import Row
from trialogue.errors import ConfigError
from trialogue.learn.checks import Checks
from trialogue.seams import check_signature, describe_value, load_seam, loading
from trialogue.task import Side
from trialogue.trajectory import Group, Trajectory

EPSILON = 1e-6
"""Smaller differences of rewards are no signal."""

Values = Sequence[float] | Sequence[Sequence[float]]
"""One advantage per conversation of a group, or one list per conversation with one per reply."""
Advantage = Callable[[Group], Values]


def center(rewards: Sequence[float]) -> list[float]:
    """r - mean, and all 0 where the rewards do not differ.

    >>> center([1.0, 0.0, 0.0, 1.0])
    [0.5, -0.5, -0.5, 0.5]
    """
    if not _differ(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def normalize(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (standard deviation + 1e-6), with the unbiased standard deviation.

    >>> round(normalize([1.0, 0.0, 0.0, 1.0])[0], 4)
    0.866
    """
    spread = stdev(rewards) + EPSILON if _differ(rewards) else 1.0
    return [value / spread for value in center(rewards)]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r - mean of the others.

    >>> leave_one_out([1.0, 0.0])
    [1.0, -1.0]
    """
    size = len(rewards)
    return [value * size / max(1, size - 1) for value in center(rewards)]


def grpo(group: Group) -> list[float]:
    """Group relative policy optimization: divided by the standard deviation of the group."""
    return normalize(to_rewards(group))


def dr_grpo(group: Group) -> list[float]:
    """GRPO done right: not divided by the standard deviation."""
    return center(to_rewards(group))


def rloo(group: Group) -> list[float]:
    """REINFORCE leave-one-out: each conversation against the mean of the others."""
    return leave_one_out(to_rewards(group))


def has_signal(group: Group) -> bool:
    """Whether the rewards of a group differ."""
    return _differ(to_rewards(group))


def to_rewards(group: Group) -> list[float]:
    return [item.value for item in group.trajectories]


def _differ(rewards: Sequence[float]) -> bool:
    return len(rewards) > 1 and max(rewards) - min(rewards) >= EPSILON


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def find_advantage(name: str, loss: str = "grpo") -> Advantage:
    """The function that `advantage.name` names. Where it is empty, the one that belongs to the loss."""
    if not name:
        return ADVANTAGES.get(loss, grpo)
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    function: Any = load_seam(name, "advantage")
    check_signature(function, ("group",), "advantage")

    def checked(group: Group) -> Values:
        what = f"advantage {describe_value(function)}"
        with loading(what):
            found = function(group)
        problem = find_problem(found, group)
        if problem:
            raise ConfigError(f"{what} on task {group.task.id}: {problem}")
        return found

    return checked


def find_problem(result: Any, group: Group) -> str:
    """What is wrong with the result of an advantage function; empty where it can be used."""
    wanted = "one number per conversation, or one list per conversation with one number per reply"
    if not isinstance(result, Sequence):
        return f"it returned {type(result).__name__}, not {wanted}"
    found = cast("Sequence[Any]", result)
    if len(found) != len(group.trajectories):
        return f"it returned {len(found)} values for {len(group.trajectories)} conversations"
    for value, item in zip(found, group.trajectories, strict=True):
        replies = sum(turn.side == "agent" and turn.tokens is not None for turn in item.turns)
        numbers = cast("Sequence[Any]", value if isinstance(value, Sequence) else [value] * replies)
        if not all(isinstance(number, int | float) and isfinite(number) for number in numbers):
            return f"{value!r} of conversation {item.id} is no finite number; return {wanted}"
        if len(numbers) != replies:
            return f"{len(numbers)} numbers for the {replies} replies of conversation {item.id}"
    return ""


# -- rows: the sampled ids as they are, a mask, and an advantage per token ---------------------------------


@dataclass(slots=True)
class _Growing:
    """A row while its turns are appended."""

    tokens: list[int] = field(default_factory=lambda: [])
    mask: list[int] = field(default_factory=lambda: [])
    logprobs: list[float] = field(default_factory=lambda: [])
    advantages: list[float] = field(default_factory=lambda: [])
    turns: list[int] = field(default_factory=lambda: [])


def build_rows(
    groups: Sequence[Group], advantage: Advantage = grpo, checks: Checks | None = None
) -> list[Row]:
    """The rows of a step: the conversations of all groups that have a signal. Failed ones enter no group's
    mean, and conversations whose mask or log-probabilities are wrong are left out."""
    checks = checks or Checks()
    rows: list[Row] = []
    for group in groups:
        advantages = advantage(group)
        checks.see_group(group, advantages, sum_to_zero=advantage in ADVANTAGES.values())
        if not any(any(value) if isinstance(value, Sequence) else value for value in advantages):
            continue
        for trajectory, value in zip(group.trajectories, advantages, strict=True):
            found = to_rows(trajectory, value)
            rows += found if checks.is_masked_right(trajectory, found) else []
    return rows


def to_rows(trajectory: Trajectory, advantage: float | Sequence[float], *, side: Side = "agent") -> list[Row]:
    """The rows of one conversation. mask is 1 exactly on the ids that the side's model sampled.

    `advantage` is one number for the conversation, or one per reply of the side. A turn whose template
    rewrote the history begins a new row.
    """
    rows: list[_Growing] = []
    replies = [turn.tokens for turn in trajectory.turns if turn.side == side and turn.tokens is not None]
    values = [advantage] * len(replies) if isinstance(advantage, int | float) else list(advantage)
    if len(values) != len(replies):
        raise ValueError(f"{trajectory.id}: {len(values)} advantages for {len(replies)} replies")
    for number, (tokens, value) in enumerate(zip(replies, values, strict=True)):
        if tokens.start or not rows:
            rows.append(_Growing())
        row = rows[-1]
        seen, said = len(tokens.prompt), len(tokens.reply)
        row.tokens += [*tokens.prompt, *tokens.reply]
        row.mask += [0] * seen + [1] * said
        row.logprobs += [0.0] * seen + list(tokens.logprobs)
        row.advantages += [0.0] * seen + [value] * said
        row.turns += [number] * (seen + said)
    return [
        Row(row.tokens, row.mask, row.logprobs, row.advantages, id=trajectory.id, turns=row.turns)
        for row in rows
    ]
