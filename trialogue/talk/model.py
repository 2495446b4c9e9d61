"""The seam that everything which speaks goes through: a language model, a script, a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool


class Model(Protocol):
    """Something that speaks for one side of one conversation."""

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        """Answer. The turns are in this side's perspective: first the system prompt, then what it said
        (role `assistant`), its tools' results (`tool`) and what the other side said to it (`user`)."""
        ...


ModelSource = Callable[[Task, int], Model]
"""Makes the model for one conversation from its task and seed. A model without state may be shared."""
