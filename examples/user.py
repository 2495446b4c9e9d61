"""A user of your own: the rule-based one, who types in a hurry.

    trialogue eval shop --agent oracle --user examples/user.py:HastyUser

A user, like an agent, is a class or function of `(task, seed)` that gives a `Model` for one conversation, or
an async function `(messages, tools)`.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from trialogue import Reply, Task, Tool, Turn, make_agenda_user


class HastyUser:
    """Swaps two letters in one of ten words. Names and numbers stay right."""

    def __init__(self, task: Task, seed: int) -> None:
        self.model, self.draw = make_agenda_user(task, seed), random.Random(seed)

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = await self.model.reply(turns, tools)
        return replace(reply, content=re.sub(r"\b[a-z]{4,}\b", self.misspell, reply.content))

    def misspell(self, word: re.Match[str]) -> str:
        if self.draw.random() > 0.1:
            return word[0]
        place = self.draw.randrange(len(word[0]) - 1)
        return word[0][:place] + word[0][place + 1] + word[0][place] + word[0][place + 2 :]
