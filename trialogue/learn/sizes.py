"""How much to learn in the minutes that are given, at the pace that was measured on this machine.

Pure functions. The cold start is sized when a few conversations were held and learned from, reinforcement
when the cold start has been tested: by then it is known how long a conversation of the agent takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any

COLD_SHARE = 0.6
"""Share of the time for the cold start: the teacher's conversations and learning from them."""
EPOCHS = 3.0
"""Passes over the teacher's conversations. Making one takes a third as long as learning from it once."""
BATCH = 12
CONCURRENCY = 128
TASKS, SIBLINGS = 16, 8
"""Groups and conversations of a group in a step of reinforcement."""
FEWEST_STEPS = 4
"""Steps of reinforcement below which there is nothing to gain."""
FEWEST_EXAMPLES = 24
EVALUATIONS = 6
"""Evaluations on dev tasks during reinforcement."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a conversation costs here, in seconds, and how long it is, in tokens."""

    held: float
    """The teacher holds one, and it is written as tokens."""
    learned: float
    """A model learns from it, once."""
    longest: int = 0
    """Tokens of the longest conversation, the prompt included."""
    reply: int = 0
    """Tokens of the longest reply."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The size of the cold start."""

    examples: int
    epochs: float
    test_tasks: int
    dev_tasks: int

    @property
    def steps(self) -> int:
        return max(1, round(self.epochs * self.examples * 0.95 / BATCH))


@dataclass(frozen=True, slots=True)
class Reinforcement:
    """The size of reinforcement learning. No steps: there is no time for it."""

    steps: int
    eval_every: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all parts. Those of reinforcement are known when the cold start has been tested."""

    cold: ColdStart
    pace: Pace | None = None
    reply_tokens: int = 64
    context_tokens: int = 1024
    is_small: bool = True
    warm: Reinforcement | None = None

    @classmethod
    def read(cls, data: dict[str, Any]) -> Sizes:
        """The sizes that a course was begun with."""
        cold, pace, warm = ColdStart(**data.pop("cold")), data.pop("pace"), data.pop("warm")
        return cls(cold, Pace(**pace) if pace else None, warm=Reinforcement(**warm) if warm else None, **data)


def plan_cold_start(minutes: float, pace: Pace, recorded: int | None = None) -> ColdStart:
    """The cold start that takes its share of the minutes; `recorded` conversations need not be held."""
    seconds = 60 * minutes * COLD_SHARE
    test_tasks, dev_tasks = _bound(20 * minutes, 40, 200), _bound(10 * minutes, 24, 100)
    if recorded is not None:
        epochs = min(2 * EPOCHS, seconds / max(1e-9, recorded * pace.learned))
        return ColdStart(recorded, max(0.1, round(epochs, 2)), test_tasks, dev_tasks)
    examples = floor(seconds / (pace.held + EPOCHS * pace.learned))
    if examples >= FEWEST_EXAMPLES:
        return ColdStart(examples, EPOCHS, test_tasks, dev_tasks)
    few = min(FEWEST_EXAMPLES, max(2 * BATCH, floor(seconds / (pace.held + pace.learned))))
    return ColdStart(few, 1.0, test_tasks, dev_tasks)


def plan_reinforcement(seconds: float, pace: Pace, tested: float, cold: ColdStart) -> Reinforcement:
    """The steps that fit into the seconds left, the last test included. `tested` are the seconds that a
    conversation of the agent took in the test after the cold start."""
    left = seconds - cold.test_tasks * tested - EVALUATIONS * cold.dev_tasks * tested
    step = TASKS * SIBLINGS * (tested + pace.learned)
    steps = floor(left / max(1e-9, step))
    if steps < FEWEST_STEPS:
        return Reinforcement(0, 0)
    return Reinforcement(steps, max(1, -(-steps // EVALUATIONS)))


def plan_lengths(pace: Pace) -> tuple[int, int]:
    """Tokens of a reply and of a conversation at which one of the agent's is ended: what the teacher needs,
    and half as much again."""
    return _round_up(1.5 * pace.reply, 64), _round_up(1.5 * pace.longest + 256, 1024)


def _bound(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))


def _round_up(value: float, least: int) -> int:
    size = least
    while size < value:
        size *= 2
    return size
