"""One copy of the sampling weights in the simulation: continuous batching with a cache of limited room."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from trialogue.plan.timing import Sampling

if TYPE_CHECKING:
    from trialogue.plan.simulate import Talk


class Sampler:
    """Its clock counts decode steps. It stands still while prompts are read and while weights change."""

    def __init__(self, sampling: Sampling, weight: float, shared: int) -> None:
        self.sampling, self.weight, self.shared = sampling, weight, shared
        self.version = 0
        self._clock = self._now = self._stalled = 0.0
        self._active: list[tuple[float, int, Talk]] = []
        """By the value of the clock at which their reply is complete."""
        self._waiting: deque[Talk] = deque()
        self._cached = 0
        """Tokens of the conversations that are being answered."""
        self._idle = 0
        """Tokens of those that wait for something else; they go first where room is needed."""
        self._number = count()

    def stall(self, now: float, seconds: float) -> None:
        """Let nobody sample for a while."""
        self._advance(now)
        self._stalled = max(self._stalled, now) + seconds

    def ask(self, talk: Talk, now: float) -> None:
        """Begin a reply, or wait for room."""
        self._advance(now)
        if self._waiting or not self._has_room(talk):
            self._waiting.append(talk)
        else:
            self._admit(talk, now)

    def next_end(self) -> float:
        """When the next reply is complete."""
        if not self._active:
            return inf
        return max(self._now, self._stalled) + max(0.0, self._active[0][0] - self._clock) * self._pace()

    def end_replies(self, now: float) -> list[Talk]:
        """Take out the replies that are complete now, and let those who wait begin."""
        self._advance(now)
        ended: list[Talk] = []
        while self._active and (not ended or self._active[0][0] <= self._clock + 1e-6):
            _, _, talk = heapq.heappop(self._active)
            talk.waits["sampling"] += now - talk.since
            self._release(talk)
            self._idle += talk.held
            ended.append(talk)
        self._admit_waiting(now)
        return ended

    def drop(self, talk: Talk, now: float) -> bool:
        """Forget a conversation that was cut. Says whether it was being answered."""
        self._advance(now)
        before = len(self._active)
        self._active = [item for item in self._active if item[2] is not talk]
        if len(self._active) == before:
            if talk in self._waiting:
                self._waiting.remove(talk)
            else:
                self.forget(talk)
            return False
        heapq.heapify(self._active)
        self._release(talk)
        talk.held = 0
        self._admit_waiting(now)
        return True

    def forget(self, talk: Talk) -> None:
        """Free what an idle conversation has in the cache."""
        self._idle -= talk.held
        talk.held = 0

    def _advance(self, now: float) -> None:
        begin = max(self._now, self._stalled)
        if self._active and now > begin:
            self._clock += (now - begin) / self._pace()
        self._now = max(self._now, now)

    def _pace(self) -> float:
        number = len(self._active) * self.weight
        return self.sampling.decode(number, self._cached * self.weight + self.shared * number)

    def _has_room(self, talk: Talk) -> bool:
        tokens = talk.context + talk.turns[talk.place].tokens
        return not self._active or (self._cached + tokens) * self.weight + self.shared <= self.sampling.room

    def _admit(self, talk: Talk, now: float) -> None:
        tokens = talk.turns[talk.place].tokens
        talk.waits["cache"] += now - talk.since
        talk.since = now
        lost = self._lost()
        self._idle -= talk.held
        again = lost * max(0, talk.context - talk.unread)
        self._stalled = max(self._stalled, now) + self.sampling.prefill((talk.unread + again) * self.weight)
        talk.unread = 0
        talk.held = talk.context + tokens
        self._cached += talk.held
        heapq.heappush(self._active, (self._clock + tokens, next(self._number), talk))

    def _lost(self) -> float:
        """The share of an idle conversation's cache that had to make room."""
        if self._idle <= 0:
            return 0.0
        free = self.sampling.room - self.shared - self._cached * self.weight
        return min(1.0, max(0.0, 1.0 - free / (self._idle * self.weight)))

    def _admit_waiting(self, now: float) -> None:
        while self._waiting and (self._waiting[0].over or self._has_room(self._waiting[0])):
            talk = self._waiting.popleft()
            if not talk.over:
                self._admit(talk, now)

    def _release(self, talk: Talk) -> None:
        self._cached -= talk.held
