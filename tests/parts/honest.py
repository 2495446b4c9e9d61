"""Conversations of an honest agent with a rule-based user, for tests of the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trialogue.config import Limits, Speaker
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.talk.model import ModelSource
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.task import Task
from trialogue.trajectory import Trajectory
from trialogue.world.domain import Domain


def hold_honest(
    domain: Domain,
    tasks: Sequence[Task],
    agent: str = "oracle",
    seed: int = 0,
    user: ModelSource | None = None,
) -> list[Trajectory]:
    """One graded conversation per task."""

    async def hold() -> list[Trajectory]:
        limits = Limits(seconds=60)
        speaks = find_model(Speaker(model=agent), "agent", domain, limits, seed)
        hears = user or find_model(Speaker(model="agenda"), "user", domain, limits, seed)
        settings = RolloutSettings(limits=limits, seed=seed, redraws=0, grade=grade)
        return [
            item
            async for group in rollout(domain, tasks, speaks, hears, settings)
            for item in group.everything
        ]

    return asyncio.run(hold())
