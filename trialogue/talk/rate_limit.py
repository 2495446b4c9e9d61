"""How fast an endpoint is asked: never faster than its limits, and not at all while it is down.

Waiting here is nobody's fault, so the clock of the conversation that waits stands still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
LOG = logging.getLogger("trialogue")
CLOCK: ContextVar[asyncio.Timeout | None] = ContextVar("clock", default=None)
"""The time limit of the conversation this task holds."""


@contextmanager
def off_the_clock() -> Generator[None]:
    """Time in here does not count against the conversation; one that is cut stays cut."""
    clock = CLOCK.get()
    when = clock.when() if clock is not None and not clock.expired() else None
    loop = asyncio.get_running_loop()
    began = loop.time()
    if clock is None or when is None or when <= began:  # about to end: let it
        yield
        return
    clock.reschedule(None)
    try:
        yield
    finally:
        if clock.when() is None and not clock.expired():  # else it was cut meanwhile
            clock.reschedule(when + loop.time() - began)


LONGEST_PAUSE = 30.0
"""Seconds between two tries of an endpoint that is down, at most."""
FIRST_PATIENCE = 60.0
"""Seconds an endpoint that has never answered is waited for: more likely its address is wrong."""
BURST = 1.0
"""How many seconds' worth of requests or tokens may come at once."""


@dataclass(slots=True)
class Pace:
    """Requests and tokens a minute, kept by spacing them out."""

    requests: float | None = None
    tokens: float | None = None
    clock: Callable[[], float] = monotonic
    pause: Callable[[float], Awaitable[Any]] = asyncio.sleep
    _free_requests: float = field(default=0.0, init=False)
    _free_tokens: float = field(default=0.0, init=False)
    """When the allowance would be whole again, had nothing more been asked for."""
    _typical: float | None = field(default=None, init=False)

    async def wait(self, estimate: int) -> int:
        """Wait for one's turn. Returns how many tokens were reckoned with, to be settled afterwards."""
        now, wait = self.clock(), 0.0
        estimate = round(self._typical) if self._typical is not None else estimate
        if self.requests is not None:
            wait = max(wait, max(self._free_requests, now) - BURST - now)
            self._free_requests = max(self._free_requests, now) + 60 / self.requests
        if self.tokens is not None:
            wait = max(wait, max(self._free_tokens, now) - BURST - now)
            self._free_tokens = max(self._free_tokens, now) + estimate * 60 / self.tokens
        if wait > 0:
            with off_the_clock():
                await self.pause(wait)
        return estimate

    def settle(self, reckoned: int, used: int) -> None:
        """Put right what was reckoned, now that it is known."""
        if self.tokens is not None:
            self._free_tokens += (used - reckoned) * 60 / self.tokens
            self._typical = used if self._typical is None else 0.9 * self._typical + 0.1 * used


class Down(Exception):
    """The endpoint did not answer as an endpoint should."""

    answered: bool = False
    """Whether somebody answered, with an error."""


@dataclass(slots=True)
class Breaker:
    """Stops asking an endpoint that is down. One request at a time tries it now and then; when it answers,
    the others, who have waited, go on."""

    who: str
    after: int
    """Faults in a row, of all conversations together, that make it count as down."""
    patience: float
    """Seconds an outage may last; then those who wait fail; whoever comes later waits for one more try.
    With 0 nobody ever waits: each request fails by its own fault."""
    pause: Callable[[float], Awaitable[Any]] = asyncio.sleep
    clock: Callable[[], float] = monotonic
    outages: int = 0
    setting: str = ""
    """What to change for more patience."""
    _answered: bool = False
    _refusal: str = ""
    """The last error it answered with."""
    _faults: int = 0
    _since: float | None = None
    _probe: asyncio.Lock | None = None
    _given_up: int = 0
    """How many times those who waited were told that it is of no use."""

    @property
    def is_open(self) -> bool:
        return self._since is not None

    async def through(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request, when there is somebody to answer it. A fault raises `Down`."""
        if self._since is None:
            return await self._try(send)
        if self._probe is None:
            self._probe = asyncio.Lock()
        given_up = self._given_up
        with off_the_clock():
            async with self._probe:
                wait = LONGEST_PAUSE if self._is_late() else 1.0
                while self.is_open:
                    if given_up < self._given_up:  # while this one stood in line
                        raise self._give_up()
                    await self.pause(wait)
                    wait = min(2 * wait, LONGEST_PAUSE)
                    try:
                        return await self._try(send)
                    except Down:
                        if self._is_late():
                            self._given_up += 1
        return await self._try(send)

    def _is_late(self) -> bool:
        return self._since is not None and self.clock() - self._since > self._patience()

    def _patience(self) -> float:
        return self.patience if self._answered else min(self.patience, FIRST_PATIENCE)

    def _give_up(self) -> Down:
        if not self._answered:
            if self._refusal:
                return Down(f"{self.who} has answered with nothing but errors, at last {self._refusal}")
            return Down(f"{self.who} has never answered; is its address right?")
        return Down(f"{self.who} has been down for more than {self.patience:g} s")

    async def _try(self, send: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await send()
        except Down as fault:
            self._faults += 1
            self._refusal = str(fault) if fault.answered else self._refusal
            if self._faults >= self.after and self._since is None and self.patience > 0:
                self._since = self.clock()
                self.outages += 1
                LOG.warning(
                    "%s is down (%s); conversations with it pause until it is back, for %g s at most%s",
                    self.who,
                    fault,
                    self._patience(),
                    f" ({self.setting})" if self.setting and self._answered else "",
                )
            raise
        except Exception:  # whatever it was, somebody answered
            self._answer()
            raise
        self._answer()
        return answer

    def _answer(self) -> None:
        self._faults = 0
        self._answered = True
        if self._since is not None:
            LOG.warning("%s is back after %.0f s", self.who, self.clock() - self._since)
            self._since = None
