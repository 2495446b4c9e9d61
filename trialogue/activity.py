"""Progress of the process: nested phases, each with a count that only grows.

Code that runs long opens a phase: `with phase("check", 100) as seen: seen.done += 1`. `view/heartbeat.py`
shows it at least every ten seconds. Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Phase:
    """Something that takes a while: how much of it is done, of how much where that is known."""

    what: str
    total: int | None = None
    unit: str = ""
    done: int = 0
    note: str = ""
    began: float = field(default_factory=monotonic)
    first: int = 0
    """How much was done before, by the run that this one resumes."""
    until: float | None = None
    """When it is planned to be over (monotonic), where somebody has planned that."""

    def describe(self) -> str:
        if self.total is None:
            words = f"{self.what} {self.done:,}" if self.done else self.what
        else:
            words = f"{self.what} {self.done:,}/{self.total:,}" + (f" {self.unit}" if self.unit else "")
        return f"{words} ({self.note})" if self.note else words

    def estimate(self) -> float | None:
        """Seconds left at the pace so far; None where that cannot be told."""
        if self.until is not None:
            return max(0.0, self.until - monotonic()) or None
        fresh = self.done - self.first
        if self.total is None or fresh <= 0 or self.done >= self.total:
            return None
        return (monotonic() - self.began) / fresh * (self.total - self.done)


class Activity:
    """The work in progress of this process. Other threads may read it."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.turns = self.tokens = 0
        self.said = monotonic()
        """When somebody last showed anything."""
        self.silent = 0
        """More than 0: a live block or a person has the terminal."""
        self.notices: list[str] = []
        """Lines to show once, such as the number of threads."""

    def describe(self, turns: int = 0, tokens: int = 0) -> str | None:
        """One line, or None where nothing takes long; counts are given from a number on."""
        phases = [*self.phases]
        if not phases:
            return None
        words = [" · ".join(phase.describe() for phase in phases)]
        if self.turns > turns:
            words.append(f"{self.turns - turns:,} turns")
        if self.tokens > tokens:
            words.append(f"{self.tokens - tokens:,} tokens")
        words.append(f"{to_duration(monotonic() - phases[0].began)} so far")
        planned = (phase for phase in phases if phase.total is not None or phase.until is not None)
        counted = next(planned, phases[0])
        if (left := counted.estimate()) is not None:
            words.append(f"about {to_duration(left)} left")
        return ", ".join(words)


ACTIVITY = Activity()


@contextmanager
def phase(
    what: str, total: int | None = None, unit: str = "", done: int = 0, until: float | None = None
) -> Generator[Phase]:
    """Say that something takes a while; whoever does it counts `done` up."""
    made = Phase(what, total, unit, done, first=done, until=until)
    ACTIVITY.phases.append(made)
    try:
        yield made
    finally:
        ACTIVITY.phases.remove(made)


def counting(what: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items one by one, in a phase that counts them."""
    with phase(what) as seen:
        for item in items:
            yield item
            seen.done += 1


@contextmanager
def silence() -> Generator[None]:
    """Show nothing meanwhile: a live block or a person has the terminal."""
    ACTIVITY.silent += 1
    try:
        yield
    finally:
        ACTIVITY.silent -= 1
        ACTIVITY.said = monotonic()


def notify(line: str) -> None:
    """Have a line shown once."""
    if line not in ACTIVITY.notices:
        ACTIVITY.notices.append(line)


def to_duration(seconds: float) -> str:
    """Seconds in words.

    >>> to_duration(8040)
    '2 h 14 min'
    """
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min" if rest >= 120 else f"{rest} s"
