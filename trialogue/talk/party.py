"""A party: one side of a conversation, what it is told, what tools it has, and what it can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trialogue.messages import Message
from trialogue.talk.model import Model, ask
from trialogue.task import Side
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool


@dataclass(slots=True)
class Party:
    """Agent and user are the same thing here: a model with a system prompt and perhaps tools."""

    side: Side
    model: Model
    system: str
    tools: Mapping[str, Tool]
    cue: str | None = None
    """Words of the other side that only this one hears, before anything is said."""
    _seen: list[Turn] = field(default_factory=lambda: [], init=False, repr=False)
    _source: Sequence[Turn] = field(default=(), init=False, repr=False)
    _read: int = field(default=0, init=False, repr=False)
    """How much of the source is in what was seen: a conversation only grows, so it is turned round once."""

    def sees(self, turns: Sequence[Turn]) -> list[Turn]:
        """The conversation from this side: itself as assistant, the other as user, and of the other's
        tool calls and results nothing at all."""
        if turns is not self._source or self._read > len(turns) or not self._seen:
            system = Message(role="system", content=self.system)
            self._seen = [Turn(side=self.side, message=system)]
            if self.cue is not None:
                other: Side = "user" if self.side == "agent" else "agent"
                self._seen.append(Turn(side=other, message=Message(role="user", content=self.cue)))
            self._source, self._read = turns, 0
        for turn in turns[self._read :]:
            seen = self._see(turn)
            if seen is not None:
                self._seen.append(seen)
        self._read = len(turns)
        return self._seen.copy()

    def _see(self, turn: Turn) -> Turn | None:
        message = turn.message
        if turn.side != self.side:
            if message.role == "tool" or message.tool_calls:
                return None
            return Turn(side=turn.side, message=Message(role="user", content=message.content))
        if message.role != "user":
            return turn
        own = Message(
            role="assistant",
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=message.tool_calls,
        )
        return turn.model_copy(update={"message": own})

    async def speak(self, turns: Sequence[Turn]) -> Reply:
        return await ask(self.model, self.sees(turns), list(self.tools.values()), self.side)
