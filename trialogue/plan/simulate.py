"""A discrete-event simulation of the loop: conversations, a user's endpoint with limits, samplers, updates.

It keeps the rules of `learn/collect.py`: `wait`, `cut` and `async`, `rollout.concurrency`, the endpoint's
`concurrency` and `requests_per_minute`. Every sampler divides its decode steps among the conversations that
it answers. Each second of a conversation is filed under what it waited for.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil, inf
from random import Random
from statistics import fmean, median
from typing import Any

from trialogue.plan.lengths import Lengths, Part
from trialogue.plan.sampler import Sampler
from trialogue.plan.timing import Sampling

PARTS = ("queue", "user", "limit", "tools", "python", "sampling", "cache")
"""What a conversation waits for: its turn to begin, its user, the limits of the user's endpoint, tools, the
processors that hold conversations, sampling, room in the sampler's cache."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What is simulated."""

    conversations: int
    """In one step."""
    at_once: int
    replicas: int
    sampling: Sampling
    update_seconds: Callable[[float, float, float], float]
    """Seconds between two collections, for so many conversations with so many tokens of their own, of which
    so many were sampled."""
    user_at_once: float = inf
    user_per_second: float = inf
    workers: int = 1
    """Processes that hold conversations."""
    turn_seconds: float = 0.0
    """What such a process computes in a turn."""
    policy: str = "wait"
    quorum: float = 0.75
    patience: float = 1.25
    staleness: int = 2
    group_size: int = 1
    scenario_tokens: int = 0
    steps: int = 1
    most: int = 1000
    """Simulated conversations; where there are more, each stands for several."""

    @property
    def weight(self) -> float:
        return max(1.0, self.conversations / self.most)


@dataclass(slots=True)
class Step:
    """What a simulated step came to. Numbers are those of all conversations, not of those simulated."""

    collect: float = 0.0
    update: float = 0.0
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of the collection by what the last conversations waited for."""
    finished: float = 0.0
    cut: float = 0.0
    calls: float = 0.0
    """Requests to the user's endpoint, and tokens of them."""
    prompt: float = 0.0
    completion: float = 0.0
    sampled: float = 0.0
    tokens: float = 0.0
    """Of the conversations that are learned from, without what all begin with."""
    busiest: float = 0.0
    """Requests to the user's endpoint in the busiest second."""
    typical: float = 0.0
    """Seconds of the median conversation."""


@dataclass(slots=True, eq=False)
class Talk:
    """One conversation under way."""

    turns: Sequence[Part]
    step: int
    group: int
    sampler: int
    worker: int
    since: float
    begun: float = 0.0
    place: int = 0
    context: int = 0
    unread: int = 0
    """Tokens that the sampler has not read yet."""
    visible: int = 0
    """Tokens that the user has said or been told."""
    held: int = 0
    """Tokens that its present reply occupies in the cache."""
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    over: bool = False
    taken: bool = False
    ended: float = 0.0


class Simulation:
    """Runs a loop for some steps."""

    def __init__(self, loop: Loop, lengths: Lengths, seed: int = 0) -> None:
        self.loop, self.lengths, self.random = loop, lengths, Random(seed)
        self.weight = loop.weight
        self._events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._number, self._placed = count(), count()
        shared = lengths.shared_tokens
        self.samplers = [Sampler(loop.sampling, self.weight, shared) for _ in range(loop.replicas)]
        self._free = [0.0] * max(1, loop.workers)
        slots = loop.user_at_once / self.weight
        self._slots = inf if slots == inf else max(1, round(slots))
        # Several conversations that one stands for share a slot, which then takes as much longer.
        self._slower = 1.0 if slots == inf else self._slots / slots
        self._asking = 0
        self._line: deque[Talk] = deque()
        self._next_request = 0.0
        self._requests: Counter[int] = Counter()
        self._queue: dict[int, deque[Talk]] = {}
        self._batches: dict[int, list[Talk]] = {}
        self._left: dict[int, int] = {}
        self._told = Step()

    def run(self) -> list[Step]:
        """The steps, in order."""
        loop, now, steps = self.loop, 0.0, list[Step]()
        for step in range(loop.steps):
            self._told, self._requests = Step(), Counter()
            self._drain(now)
            self._begin_batch(step, now)
            end = self._collect(step, now)
            taken = self._take(step, end, is_last=step + 1 == loop.steps)
            self._tell(now, end, taken)
            steps.append(self._told)
            now = end + self._told.update
            for sampler in self.samplers:  # weights change: nobody samples meanwhile
                sampler.stall(end, self._told.update)
                self._watch(sampler)
        return steps

    def _at(self, when: float, action: Callable[[Any, float], None], about: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), action, about))

    def _drain(self, now: float) -> None:
        """What happens while weights are updated."""
        while self._events and self._events[0][0] <= now:
            when, _, action, about = heapq.heappop(self._events)
            action(about, when)

    # -- one step --

    def _begin_batch(self, step: int, now: float) -> None:
        loop = self.loop
        size = max(1, round(loop.conversations / self.weight))
        batch: list[Talk] = []
        for place in range(size):
            turns, number = self.lengths.draw(self.random), next(self._placed)
            spot = number % loop.replicas, number % len(self._free)
            batch.append(Talk(turns, step, place // loop.group_size, *spot, since=now))
        self._batches[step], self._left[step] = batch, size
        self._queue[step] = deque(batch)
        for sampler in self.samplers:  # new weights: what all begin with is read again
            sampler.stall(now, loop.sampling.prefill(self.lengths.shared_tokens))
            self._watch(sampler)
        for _ in range(min(size, max(1, round(loop.at_once / self.weight)))):
            self._begin_next(step, now)

    def _collect(self, step: int, began: float) -> float:
        """Run until the step stops waiting."""
        loop, size, now, end = self.loop, len(self._batches[step]), began, inf
        enough = ceil(loop.quorum * size)
        while self._left[step] and self._events:
            if end == inf and loop.policy != "wait" and size - self._left[step] >= enough:
                end = began + loop.patience * (now - began)
            if self._events[0][0] > end:
                return end
            now, _, action, about = heapq.heappop(self._events)
            action(about, now)
        return now

    def _take(self, step: int, now: float, *, is_last: bool) -> list[Talk]:
        """The conversations that the step learns from; those that are too old are cut."""
        loop = self.loop
        bound = loop.staleness if loop.policy == "async" and not is_last else 0
        taken: list[Talk] = []
        for begun, batch in list(self._batches.items()):
            if step - begun >= bound:
                for talk in batch:
                    if not talk.over:
                        self._cut(talk, now)
            waiting = {talk.group for talk in batch if not talk.over}
            fresh = [talk for talk in batch if talk.group not in waiting and not talk.taken]
            for talk in fresh:
                talk.taken = True
            taken += [talk for talk in fresh if talk.place == len(talk.turns)]
            if not waiting:
                del self._batches[begun]
        return taken

    def _cut(self, talk: Talk, now: float) -> None:
        talk.over = True
        self._left[talk.step] -= 1
        self._told.cut += self.weight
        sampler = self.samplers[talk.sampler]
        if sampler.drop(talk, now):
            self._watch(sampler)

    def _tell(self, began: float, end: float, taken: Sequence[Talk]) -> None:
        told, weight = self._told, self.weight
        told.collect = end - began
        told.finished = len(taken) * weight
        told.tokens = sum(talk.context for talk in taken) * weight
        sampled = sum(part.tokens for talk in taken for part in talk.turns if part.who == "agent") * weight
        told.update = self.loop.update_seconds(told.finished, told.tokens, sampled)
        told.busiest = max(self._requests.values(), default=0) * weight
        told.typical = median(talk.ended - talk.begun for talk in taken) if taken else 0.0
        last = sorted(taken, key=lambda talk: talk.ended)[-max(1, len(taken) // 20) :]
        waits = {part: fmean(talk.waits[part] for talk in last) if last else 0.0 for part in PARTS}
        whole = sum(waits.values()) or 1.0
        told.parts = {part: told.collect * value / whole for part, value in waits.items()}

    # -- one conversation --

    def _begin_next(self, step: int, now: float) -> None:
        if queue := self._queue[step]:
            talk = queue.popleft()
            talk.waits["queue"] += now - talk.since
            talk.begun = now
            self._go_on(talk, now)

    def _go_on(self, talk: Talk, now: float) -> None:
        if talk.over:
            return
        talk.since = now
        if talk.place == len(talk.turns):
            talk.over, talk.ended = True, now
            self._left[talk.step] -= 1
            self.samplers[talk.sampler].forget(talk)
            self._begin_next(talk.step, now)
            return
        part = talk.turns[talk.place]
        if part.who == "agent":
            sampler = self.samplers[talk.sampler]
            sampler.ask(talk, now)
            self._watch(sampler)
        elif part.who == "tool":
            self._at(now + part.seconds, self._end_tool, talk)
        elif part.seconds <= 0:
            self._end_turn(talk, now)
        elif self._asking < self._slots:
            self._ask_user(talk, now)
        else:
            self._line.append(talk)

    def _ask_user(self, talk: Talk, now: float) -> None:
        """Send a request: it has a slot of the endpoint, and may have to wait for the allowed rate."""
        self._asking += 1
        start = max(now, self._next_request)
        self._next_request = start + self.weight / self.loop.user_per_second
        seconds = talk.turns[talk.place].seconds
        whole = seconds * self._slower
        talk.waits["limit"] += start - talk.since + whole - seconds
        talk.waits["user"] += seconds
        self._requests[int(start)] += 1
        told, weight = self._told, self.weight
        told.calls += weight
        told.prompt += (talk.visible + self.loop.scenario_tokens) * weight
        told.completion += talk.turns[talk.place].tokens * weight
        self._at(start + whole, self._end_user, talk)

    def _end_user(self, talk: Talk, now: float) -> None:
        self._asking -= 1
        while self._line:
            following = self._line.popleft()
            if not following.over:
                self._ask_user(following, now)
                break
        self._end_turn(talk, now)

    def _end_tool(self, talk: Talk, now: float) -> None:
        talk.waits["tools"] += now - talk.since
        self._end_turn(talk, now)

    def _end_turn(self, talk: Talk, now: float) -> None:
        """A message is there: a process of ours has work with it."""
        if talk.over:
            return
        part = talk.turns[talk.place]
        talk.place += 1
        talk.context += part.tokens
        if part.who != "agent":
            talk.unread += part.tokens
        following = talk.turns[talk.place].who if talk.place < len(talk.turns) else "user"
        if part.who == "user" or (part.who == "agent" and following == "user"):
            talk.visible += part.tokens
        if not self.loop.turn_seconds:
            self._go_on(talk, now)
            return
        ready = max(self._free[talk.worker], now) + self.loop.turn_seconds * self.weight
        self._free[talk.worker] = ready
        talk.waits["python"] += ready - now
        self._at(ready, self._go_on, talk)

    # -- sampling --

    def _watch(self, sampler: Sampler) -> None:
        """Wake up when the sampler's next reply is complete; what was planned before is void."""
        sampler.version += 1
        when = sampler.next_end()
        if when < inf:
            self._at(when, self._end_replies, (sampler, sampler.version))

    def _end_replies(self, about: tuple[Sampler, int], now: float) -> None:
        sampler, version = about
        if version != sampler.version:
            return
        ended = sampler.end_replies(now)
        self._watch(sampler)
        for talk in ended:
            self._told.sampled += talk.turns[talk.place].tokens * self.weight
            self._end_turn(talk, now)
