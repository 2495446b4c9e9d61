"""A party: one side of a conversation, what it is told, what tools it has, and what it can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trialogue.messages import Message
from trialogue.talk.model import Model
from trialogue.task import Side
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool


@dataclass(frozen=True, slots=True)
class Party:
    """Agent and user are the same thing here: a model with a system prompt and perhaps tools."""

    side: Side
    model: Model
    system: str
    tools: Mapping[str, Tool]

    def sees(self, turns: Sequence[Turn]) -> list[Turn]:
        """The conversation from this side: itself as assistant, the other as user, and of the other's
        tool calls and results nothing at all."""
        seen = [Turn.model_construct(side=self.side, message=Message(role="system", content=self.system))]
        for turn in turns:
            message = turn.message
            if turn.side == self.side:
                if message.role == "user":
                    message = message.model_copy(update={"role": "assistant"})
                    turn = turn.model_copy(update={"message": message})
                seen.append(turn)
            elif message.role != "tool" and not message.tool_calls:
                heard = Message.model_construct(role="user", content=message.content)
                seen.append(Turn.model_construct(side=turn.side, message=heard))
        return seen

    async def speak(self, turns: Sequence[Turn]) -> Reply:
        return await self.model.reply(self.sees(turns), list(self.tools.values()))
