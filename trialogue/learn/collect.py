"""The conversations of a step, graded: `Collector.next_groups`.

`stragglers.policy` says what a step does about conversations that take much longer than the others. With
`wait` it waits for all of them. With `cut` and `async` it goes on with every complete group when most
conversations are over. `cut` ends the others, which fail. `async` lets them continue into the next steps with
newer weights: each reply records the version that sampled it, and they are cut when they get too old.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from trialogue.config import TrainConfig
from trialogue.engine.api import Completion, SamplingParams
from trialogue.errors import ConfigError
from trialogue.learn.advantages import has_signal
from trialogue.score.parties import Parties
from trialogue.score.varied import vary_tasks
from trialogue.talk.local import Sampler
from trialogue.talk.model import ModelSource
from trialogue.talk.rewording import reword
from trialogue.talk.rollout import Deadline, derive_seed, hold_groups
from trialogue.task import Task
from trialogue.trajectory import Group, Trajectory, in_order
from trialogue.world.domain import Domain

Watch = Callable[[int, dict[str, Any]], None]
"""Called with the number and the metrics of each step. During conversations `kind` is `talk`, with how many
are over; after Ctrl-C it is `stopping`."""


class Gate:
    """A sampler that can be closed while weights change: conversations then wait instead of failing."""

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
        """Wait until the replies being sampled are complete, and hold new ones back."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()


@dataclass(eq=False)
class RolloutBatch:
    """The conversations begun in one step."""

    step: int
    levels: list[int]
    tasks: list[Task]
    size: int
    began: float
    deadline: Deadline = field(default_factory=Deadline)
    finished: list[Group] = field(default_factory=lambda: [])
    """Complete groups that no step has learned from yet."""
    taken: set[str] = field(default_factory=set[str])
    """Ids of the tasks whose groups a step has learned from."""
    over: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Task and trial of the conversations that are over."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    job: asyncio.Task[None] | None = None

    @property
    def total(self) -> int:
        return len(self.tasks) * self.size

    @property
    def is_over(self) -> bool:
        return self.job is not None and self.job.done()

    def add_trajectory(self, trajectory: Trajectory) -> None:
        if not trajectory.is_failed:
            self.over.add((trajectory.task.id, trajectory.trial))
            self.changed.set()

    async def collect(self, groups: AsyncGenerator[Group]) -> None:
        try:
            async for group in groups:
                self.finished.append(group)
                self.over |= {(group.task.id, trial) for trial in range(self.size)}
                self.changed.set()
        finally:
            self.changed.set()
            await groups.aclose()

    async def wait_for_change(self) -> None:
        self.changed.clear()
        await self.changed.wait()


class Collector:
    """Holds the conversations of a run. `batches` are those under way, oldest first."""

    def __init__(
        self,
        config: TrainConfig,
        domain: Domain,
        agent: ModelSource,
        parties: Parties,
        watch: Watch | None = None,
    ) -> None:
        if config.stragglers.policy != "wait" and config.training.redraw_no_signal:
            raise ConfigError("training.redraw_no_signal needs whole steps: set stragglers.policy=wait")
        self.config, self.domain, self.agent, self.user = config, domain, agent, parties.user
        self.settings = replace(parties.to_settings(config), group_size=config.training.group_size)
        self.watch = watch
        self.levels, self.level = sorted(config.tasks.levels), 0
        self.started: list[Task] = []
        """The tasks begun in the newest step."""
        self.replaced: list[Group] = []
        """The groups without signal that the newest step replaced by others."""
        self.batches: list[RolloutBatch] = []

    @property
    def admitted(self) -> list[int]:
        """The levels of difficulty that tasks are drawn from now."""
        return self.levels[: self.level + 1] if self.config.training.curriculum else self.levels

    def adjust_level(self, reward: float) -> None:
        """Admit the next level when the mean reward of a step is high enough."""
        if self.config.training.curriculum and reward >= self.config.training.curriculum:
            self.level = min(self.level + 1, len(self.levels) - 1) if self.levels else 0

    async def next_groups(self, step: int) -> list[Group]:
        """The groups that this step learns from, in the order of their tasks."""
        self.started = choose_tasks(self.domain, self.config, step, 0, self.admitted)
        self.replaced = []
        if self.config.stragglers.policy == "wait":
            return await self._hold_all(step)
        self.begin(step, self.started, self.admitted)
        return await self._take(step, is_last=step + 1 == self.config.training.steps)

    async def _hold_all(self, step: int) -> list[Group]:
        """Wait for all groups. With dynamic sampling, new tasks replace groups without signal."""
        training = self.config.training
        kept: list[Group] = []
        over, wanted = -1, training.tasks_per_step * training.group_size

        def count(_: Trajectory | None = None) -> None:
            nonlocal over
            over += 1
            if self.watch is not None:
                self.watch(step, {"kind": "talk", "done": over, "of": max(wanted, over)})

        count()
        for draw in range(training.redraw_no_signal + 1):
            missing = training.tasks_per_step - len(kept)
            drawn = choose_tasks(self.domain, self.config, step, draw, self.admitted)
            tasks = choose_some(drawn, missing, derive_seed(self.config.seed, "redraw", step, draw))
            settings = replace(
                self.settings,
                seed=derive_seed(self.config.seed, "step", step),
                name=f"{step + 1}.{draw}/" if draw else f"{step + 1}/",
                each=count,
            )
            groups = [item async for item in hold_groups(self.domain, tasks, self.agent, self.user, settings)]
            is_last = draw == training.redraw_no_signal
            for group in in_order(groups, tasks):
                (kept if is_last or has_signal(group) else self.replaced).append(group)
            if len(kept) >= training.tasks_per_step:
                break
        return kept

    # -- steps that do not wait for the slowest conversation --

    def hold(self, batch: RolloutBatch) -> AsyncGenerator[Group]:
        """Hold the conversations of a batch."""
        settings = replace(
            self.settings,
            seed=derive_seed(self.config.seed, "step", batch.step),
            name=f"{batch.step + 1}/",
            each=batch.add_trajectory,
            deadline=batch.deadline,
        )
        return hold_groups(self.domain, batch.tasks, self.agent, self.user, settings)

    def begin(self, step: int, tasks: Sequence[Task], levels: Sequence[int]) -> None:
        now = asyncio.get_running_loop().time()
        batch = RolloutBatch(step, list(levels), list(tasks), self.settings.group_size, now)
        batch.job = asyncio.create_task(batch.collect(self.hold(batch)))
        self.batches.append(batch)

    async def _take(self, step: int, *, is_last: bool) -> list[Group]:
        """All complete groups. Nothing is left for later in the last step."""
        newest = self.batches[-1]
        await self._wait_for_most(newest)
        stragglers = self.config.stragglers
        bound = stragglers.staleness if stragglers.policy == "async" and not is_last else 0
        for batch in self.batches:
            if step - batch.step >= bound and not batch.is_over:
                batch.deadline.cut()
                await asyncio.wait([job for job in (batch.job,) if job is not None])
        while not any(batch.finished for batch in self.batches) and not newest.is_over:
            await newest.wait_for_change()
        for batch in self.batches:
            if batch.job is not None and batch.job.done():
                batch.job.result()  # raises what went wrong, before any group is taken
        groups: list[Group] = []
        for batch in self.batches:
            groups += in_order(batch.finished, batch.tasks)
            batch.taken |= {group.task.id for group in batch.finished}
            batch.finished = []
        self.batches = [batch for batch in self.batches if not batch.is_over]
        return groups

    async def _wait_for_most(self, batch: RolloutBatch) -> None:
        """Wait until most conversations of a batch are over, and a little longer for the others."""
        stragglers, loop = self.config.stragglers, asyncio.get_running_loop()
        enough = ceil(stragglers.quorum * batch.total)
        while len(batch.over) < enough and not batch.is_over:
            await batch.wait_for_change()
        end = batch.began + stragglers.patience * (loop.time() - batch.began)
        if batch.job is not None and end > loop.time():
            await asyncio.wait([batch.job], timeout=end - loop.time())

    # -- resuming --

    def to_data(self, step: int) -> dict[str, Any]:
        """What a checkpoint before a step keeps: the level, and the tasks of earlier steps that nothing was
        learned from yet. Their conversations are held again after resuming."""
        batches = [
            {
                "step": batch.step,
                "levels": batch.levels,
                "tasks": [task.id for task in batch.tasks if task.id not in batch.taken],
            }
            for batch in self.batches
            if batch.step < step
        ]
        return {"level": self.level, "batches": batches}

    def restore(self, known: dict[str, Any]) -> None:
        """Go on from what `to_data` gave."""
        self.level = int(known.get("level", 0))
        for old in known.get("batches", ()):
            tasks = choose_tasks(self.domain, self.config, old["step"], 0, old["levels"])
            self.begin(old["step"], [task for task in tasks if task.id in old["tasks"]], old["levels"])

    async def close(self) -> None:
        jobs = [batch.job for batch in self.batches if batch.job is not None]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


# -- which tasks --


def choose_tasks(
    domain: Domain, config: TrainConfig, step: int, draw: int, levels: Sequence[int]
) -> list[Task]:
    """The tasks of a step, in other words if that is set."""
    chosen = draw_tasks(domain, config, step, draw, levels)
    seed = derive_seed(config.seed, "reword", step, draw)
    return [reword(task, seed) for task in chosen] if config.tasks.reword else chosen


def draw_tasks(
    domain: Domain, config: TrainConfig, step: int, draw: int, levels: Sequence[int]
) -> list[Task]:
    """The tasks of a step. An endless domain makes new ones; a finite one is gone through in epochs."""
    wanted = config.tasks
    count = config.training.tasks_per_step
    if domain.endless:
        seed = derive_seed(config.seed, "tasks", step, draw)
        made = domain.tasks(wanted.split, count, seed, levels=levels, families=wanted.families)
        return vary_tasks(domain, made, seed).tasks if is_varied(domain, wanted.vary) else made
    known = find_known(domain, config, levels)
    first = (step + draw * config.training.steps) * count
    chosen: list[Task] = []
    for place in range(first, first + count):
        epoch, position = divmod(place, len(known))
        order = list(range(len(known)))
        random.Random(derive_seed(config.seed, "epoch", epoch)).shuffle(order)
        chosen.append(known[order[position]])
    chosen = list({task.id: task for task in chosen}.values())
    if is_varied(domain, wanted.vary):
        return vary_tasks(domain, chosen, derive_seed(config.seed, "vary", step, draw)).tasks
    return chosen


def is_varied(domain: Domain, wanted: bool | None) -> bool:
    """Whether tasks that are learned from get fresh values: as is set, else where they are a list."""
    return not domain.endless if wanted is None else wanted


def choose_some(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """A uniform sample of tasks, in their order. The first ones alone would be biased: a domain may list its
    tasks by level."""
    places = random.Random(seed).sample(range(len(tasks)), min(count, len(tasks)))
    return [tasks[place] for place in sorted(places)]


def find_known(domain: Domain, config: TrainConfig, levels: Sequence[int]) -> list[Task]:
    """All tasks of a finite domain that training may use."""
    wanted = config.tasks
    known = domain.tasks(wanted.split, wanted.count, config.seed, levels=levels, families=wanted.families)
    if not known:
        raise ConfigError(
            f"{domain.name} has no tasks in split '{wanted.split}' of these levels and families"
        )
    return known
