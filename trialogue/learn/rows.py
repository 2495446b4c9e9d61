"""From conversations to training rows: the sampled ids as they are, a mask, and an advantage per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trialogue.engine.api import Row, find_conversations
from trialogue.learn.advantages import ADVANTAGES, Advantage, grpo
from trialogue.learn.checks import Checks
from trialogue.learn.losses import LOG_BOUND
from trialogue.task import Side
from trialogue.trajectory import Group, Trajectory


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


def add_elsewhere(rows: Sequence[Row], known: Sequence[Sequence[float]]) -> list[Row]:
    """Add to each row the log-ratios of the other rows of its conversation. `known` are the log-probabilities
    of all tokens under the present weights."""
    sums = [
        sum(
            max(-LOG_BOUND, min(LOG_BOUND, new - old))
            for new, old, mask in zip(logprobs, row.logprobs, row.mask, strict=True)
            if mask
        )
        for row, logprobs in zip(rows, known, strict=True)
    ]
    done = list(rows)
    for members in find_conversations(rows):
        for index in members:
            others = sum(sums[member] for member in members if member != index)
            done[index] = replace(rows[index], elsewhere=others)
    return done
