"""Several models for one side of a run: each conversation, or each task, draws one by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from trialogue.talk.model import Model, ModelSource, close_source
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool


@dataclass(frozen=True, slots=True)
class Mix:
    """Draws a source by the conversation's seed, or by its task, so that a whole group has the same."""

    sources: Sequence[tuple[str, float, ModelSource]]
    by: Literal["conversation", "task"] = "conversation"
    seed: int = 0

    def __call__(self, task: Task, seed: int) -> Model:
        random = Random(f"mix/{self.seed}/{task.id}" if self.by == "task" else f"mix/{seed}")
        [(name, _, source)] = random.choices(self.sources, [weight for _, weight, _ in self.sources])
        return _Named(name, source(task, seed))

    async def close(self) -> None:
        for _, _, source in self.sources:
            await close_source(source)


@dataclass(frozen=True, slots=True)
class _Named:
    """Says who speaks, where the model itself does not."""

    name: str
    model: Model

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = await self.model.reply(turns, tools)
        return reply if reply.model is not None else replace(reply, model=self.name)
