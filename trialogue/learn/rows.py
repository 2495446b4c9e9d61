"""From conversations to training rows: the sampled ids as they are, a mask, and an advantage per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trialogue.engine.api import Row, find_conversations
from trialogue.learn.grpo import LOG_BOUND
from trialogue.task import Side
from trialogue.trajectory import Trajectory


@dataclass(slots=True)
class _Growing:
    """A row while its turns are laid end to end."""

    tokens: list[int] = field(default_factory=lambda: [])
    mask: list[int] = field(default_factory=lambda: [])
    logprobs: list[float] = field(default_factory=lambda: [])
    advantages: list[float] = field(default_factory=lambda: [])
    turns: list[int] = field(default_factory=lambda: [])


def to_rows(
    trajectory: Trajectory,
    advantage: float | Sequence[float],
    *,
    side: Side = "agent",
    train_on_everything: bool = False,
) -> list[Row]:
    """The rows of one conversation. mask is 1 exactly on the ids the side's model sampled.

    `advantage` is one number for the conversation, or one per reply of the side. A turn whose template
    rewrote the history begins a new row. `train_on_everything` drops the mask: an ablation, never a method.
    """
    rows: list[_Growing] = []
    replies = [turn for turn in trajectory.turns if turn.side == side and turn.tokens is not None]
    shares = [advantage] * len(replies) if isinstance(advantage, int | float) else list(advantage)
    if len(shares) != len(replies):
        raise ValueError(f"{trajectory.id}: {len(shares)} advantages for {len(replies)} replies")
    for number, (turn, share) in enumerate(zip(replies, shares, strict=True)):
        tokens = turn.tokens
        assert tokens is not None
        if tokens.start or not rows:
            rows.append(_Growing())
        row = rows[-1]
        seen, said = len(tokens.prompt), len(tokens.reply)
        trained = int(train_on_everything)
        row.tokens += [*tokens.prompt, *tokens.reply]
        row.mask += [trained if row.mask or place else 0 for place in range(seen)] + [1] * said
        row.logprobs += [0.0] * seen + list(tokens.logprobs)
        row.advantages += [share * trained] * seen + [share] * said
        row.turns += [number] * (seen + said)
    return [
        Row(row.tokens, row.mask, row.logprobs, row.advantages, id=trajectory.id, turns=row.turns)
        for row in rows
    ]


def add_elsewhere(rows: Sequence[Row], known: Sequence[Sequence[float]]) -> list[Row]:
    """Rows with the log-ratios of their conversation's other rows, by the log-probabilities `known` of all
    their tokens under the present weights."""
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
