"""Steps that do not wait for the slowest conversation.

The conversations begun in one step are a wave. When most of a wave are over the step goes on with every group
that is complete. What is still under way is cut, or carried into the next steps: it goes on speaking with the
newer weights, each reply marked with the version that sampled it, and is cut when it is too old.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Any

from trialogue.config import StragglerSettings
from trialogue.engine.api import Completion, Row, SamplingParams
from trialogue.talk.local import Sampler
from trialogue.talk.rollout import Deadline
from trialogue.task import Task
from trialogue.trajectory import Group, Trajectory


class Gate:
    """Stands before a sampler: closed while weights change, so that conversations wait instead of failing."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._busy = 0

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        while not self._open.is_set():
            await self._open.wait()
        self._busy += 1
        self._idle.clear()
        try:
            return await self._sampler.sample(prompts, params, session=session)
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def end_session(self, session: str) -> None:
        await self._sampler.end_session(session)

    @asynccontextmanager
    async def closed(self) -> AsyncGenerator[None]:
        """Let the replies being sampled come to their end, and hold the others back."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()


@dataclass(eq=False)
class Wave:
    """The conversations begun in one step."""

    step: int
    levels: list[int]
    tasks: list[Task]
    size: int
    began: float
    deadline: Deadline = field(default_factory=Deadline)
    finished: list[Group] = field(default_factory=lambda: [])
    taken: set[str] = field(default_factory=set[str])
    over: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    job: asyncio.Task[None] | None = None

    @property
    def total(self) -> int:
        return len(self.tasks) * self.size

    @property
    def is_over(self) -> bool:
        return self.job is not None and self.job.done()

    def hear(self, trajectory: Trajectory) -> None:
        if trajectory.end != "error":
            self.over.add((trajectory.task.id, trajectory.trial))
            self.moved.set()

    async def pump(self, groups: AsyncGenerator[Group]) -> None:
        try:
            async for group in groups:
                self.finished.append(group)
                self.over |= {(group.task.id, trial) for trial in range(self.size)}
                self.moved.set()
        finally:
            self.moved.set()
            await groups.aclose()


Begin = Callable[[Wave], AsyncGenerator[Group]]
"""Starts the conversations of a wave; its deadline and `hear` are to be told to the rollout."""


class Waves:
    """The waves of a run, oldest first."""

    def __init__(self, settings: StragglerSettings, begin: Begin, group_size: int) -> None:
        self.settings, self._begin, self._size = settings, begin, group_size
        self.waves: list[Wave] = []

    def begin(self, step: int, tasks: Sequence[Task], levels: Sequence[int]) -> Wave:
        wave = Wave(step, list(levels), list(tasks), self._size, asyncio.get_running_loop().time())
        wave.job = asyncio.create_task(wave.pump(self._begin(wave)))
        self.waves.append(wave)
        return wave

    async def take(self, step: int, last: bool = False) -> list[Group]:
        """The groups to learn from now. In the last step nothing is carried."""
        wave = self.waves[-1]
        await self._wait(wave)
        bound = self.settings.staleness if self.settings.policy == "carry" and not last else 0
        for old in self.waves:
            if step - old.step >= bound and not old.is_over:
                old.deadline.cut()
                await asyncio.wait([job for job in (old.job,) if job is not None])
        while not any(item.finished for item in self.waves) and not wave.is_over:
            await self._move(wave)
        for item in self.waves:
            if item.job is not None and item.job.done():
                item.job.result()  # what went wrong there is raised here, before anything is taken
        groups: list[Group] = []
        for item in self.waves:
            place = {task.id: number for number, task in enumerate(item.tasks)}
            groups += sorted(item.finished, key=lambda group: place[group.task.id])
            item.taken |= {group.task.id for group in item.finished}
            item.finished = []
        self.waves = [item for item in self.waves if not item.is_over]
        return groups

    async def _wait(self, wave: Wave) -> None:
        """Until most of the wave are over, and a little longer for the rest."""
        loop = asyncio.get_running_loop()
        enough = ceil(self.settings.quorum * wave.total)
        while len(wave.over) < enough and not wave.is_over:
            await self._move(wave)
        end = wave.began + self.settings.patience * (loop.time() - wave.began)
        if wave.job is not None and end > loop.time():
            await asyncio.wait([wave.job], timeout=end - loop.time())

    async def _move(self, wave: Wave) -> None:
        wave.moved.clear()
        await wave.moved.wait()

    def to_data(self, step: int) -> list[dict[str, Any]]:
        """What a checkpoint keeps before a step: tasks that were begun earlier and not yet learned from. They
        are held anew; the step begins its own itself."""
        return [
            {
                "step": item.step,
                "levels": item.levels,
                "tasks": [task.id for task in item.tasks if task.id not in item.taken],
            }
            for item in self.waves
            if item.step < step
        ]

    async def close(self) -> None:
        jobs = [item.job for item in self.waves if item.job is not None]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


def count_families(tasks: Iterable[Task], times: int = 1) -> dict[str, int]:
    """Conversations by family of tasks, so that nobody has to guess whether some are missing."""
    found = Counter(task.family or "all" for task in tasks)
    return {family: times * number for family, number in sorted(found.items())}


def measure_flow(
    started: Sequence[Task], groups: Sequence[Group], rows: Iterable[Row], size: int, version: int
) -> dict[str, Any]:
    """What became of the conversations of a step, by family, and how old the weights were that spoke. What
    was graded need not be learned from: a group may be flat, a conversation left out."""
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
