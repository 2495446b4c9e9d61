"""Agents that do without understanding, to compare with: they show what the reward does not pay for."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trialogue.messages import ToolCall
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domains.shop.oracle import EMAIL, NAME, POSTCODE
from trialogue.world.tools import Tool


class SaysDone:
    """Answers "Done." whatever the customer says."""

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        return Reply("Done.")


class TransfersAll:
    """Finds out who it is talking with and hands everybody over to a human."""

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        last = turns[-1].message
        text = last.content
        if last.role == "tool" and not text.startswith("Error"):
            return self._call(
                turns, "transfer_to_human", customer_id=json.loads(text)["customer_id"], topic="complaint"
            )
        email, name, postcode = EMAIL.search(text), NAME.search(text), POSTCODE.search(text)
        if last.role == "user" and email:
            return self._call(turns, "find_customer_by_email", email=email[0])
        if last.role == "user" and name and postcode:
            return self._call(turns, "find_customer_by_name", name=name[0], postcode=postcode[0])
        return Reply("Could I have your name and postcode?")

    def _call(self, turns: Sequence[Turn], name: str, /, **arguments: str) -> Reply:
        return Reply(tool_calls=(ToolCall(id=f"call_{len(turns)}", name=name, arguments=arguments),))


def make_says_done(task: Task, seed: int) -> SaysDone:
    return SaysDone()


def make_transfers_all(task: Task, seed: int) -> TransfersAll:
    return TransfersAll()
