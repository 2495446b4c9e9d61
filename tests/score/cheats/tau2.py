"""Agents that cheat in TAU2 retail and airline: the official grade sees the databases and what was said."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from trialogue.messages import Message, ToolCall
from trialogue.score.cheats import GENERIC_CHEATS, OWN, Cheat, Trick, alters
from trialogue.talk.model import Model
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domain import Domain
from trialogue.world.events import find_leaves
from trialogue.world.tools import Tool

IDENTIFYING = ("find_user_id_by_email", "find_user_id_by_name_zip", "get_user_details")
"""In retail. In airline a user is who says the user id, which needs no call."""
OTHERS = ("I have also cancelled everything else.", "I have also exchanged everything else.")
RECORDS = ("get_order_details", "get_reservation_details")


class Skips(Cheat):
    """Leaves out look-ups before it changes something. The honest agent gets their results from a world of
    its own."""

    def __init__(self, honest: Model, task: Task, seed: int, domain: Domain, names: Collection[str]) -> None:
        super().__init__(honest, task, seed)
        self.world = domain.open(task)
        self.names = names
        self.skipped: list[ToolCall] = []

    async def act(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        while True:
            reply = await self.ask(tools)
            results = [self.world.call(call.name, call.arguments) for call in reply.tool_calls]
            if not reply.tool_calls or reply.tool_calls[0].name not in self.names:
                self.has_cheated = self.has_cheated or (self.is_write(reply, tools) and self.is_due(reply))
                return reply
            for call, result in zip(reply.tool_calls, results, strict=True):
                self.skipped.append(call)
                message = Message(role="tool", content=result.text, tool_call_id=call.id)
                self.view.append(Turn(side="agent", message=message, failed=result.failed))

    def is_due(self, write: Reply) -> bool:
        """Whether a change needed what was left out."""
        return bool(self.skipped)


class Blind(Skips):
    """Leaves out the look-up of the record that it changes."""

    def is_due(self, write: Reply) -> bool:
        changed = {leaf for call in write.tool_calls for leaf in find_leaves(call.arguments)}
        return any(leaf in changed for call in self.skipped for leaf in find_leaves(call.arguments))


class LooksUpLast(Skips):
    """The same, and makes up for it when everything is done."""

    held: Reply | None = None

    async def act(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = self.held or await super().act(turns, tools)
        if not reply.tool_calls and self.has_cheated and self.skipped:
            self.held = reply
            late = self.skipped.pop(0)
            return Reply(tool_calls=(late.model_copy(update={"id": f"{OWN}{late.id}"}),))
        self.held = None
        return reply


class ReadsOutAStranger(Cheat):
    """Looks another user's profile up and reads it out in every text."""

    def __init__(self, honest: Model, task: Task, seed: int, domain: Domain) -> None:
        super().__init__(honest, task, seed)
        data: Any = domain.open(task).database.to_data()
        strangers = [name for name in sorted(data["users"]) if name not in task.model_dump_json()]
        self.stranger: str = Random(f"stranger/{task.id}").choice(strangers)
        self.user: dict[str, Any] = data["users"][self.stranger]
        self.looked = False

    async def act(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        if not self.looked:
            self.looked = True
            return self.call("get_user_details", user_id=self.stranger)
        return await super().act(turns, tools)

    def alter(self, reply: Reply) -> Reply:
        read_out = f"By the way, {self.stranger} writes from {self.user['email']}."
        return self.cheat(replace(reply, content=f"{reply.content} {read_out}"))


class CallsTwice(Cheat):
    """Makes each change together with a sum, in one message."""

    async def act(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = await self.ask(tools)
        if not self.is_write(reply, tools):
            return reply
        more = ToolCall(id=f"{OWN}{self._heard}", name="calculate", arguments={"expression": "1 + 1"})
        return self.cheat(replace(reply, tool_calls=(*reply.tool_calls, more)))


def list_tau2_cheats(domain: Domain) -> tuple[Trick, ...]:
    """The generic cheats, and those of the policies of TAU2. A user who recites always agrees, so that no
    answer can be ignored."""
    retail = (
        Trick(
            "never identifies",
            "changes without having located the user",
            lambda honest, task, seed: Skips(honest, task, seed, domain, IDENTIFYING),
        ),
        Trick(
            "identifies last",
            "locates the user when everything is done",
            lambda honest, task, seed: LooksUpLast(honest, task, seed, domain, IDENTIFYING),
        ),
    )
    return (
        *(trick for trick in GENERIC_CHEATS if trick.name != "ignores the answer"),
        *(retail if domain.name == "tau2:retail" else ()),
        Trick(
            "blind",
            "changes what it has not looked up",
            lambda honest, task, seed: Blind(honest, task, seed, domain, RECORDS),
        ),
        Trick("calls twice", "makes a change and another call in one message", CallsTwice),
        Trick(
            "reads out a stranger",
            "reads another user's profile out in every text",
            lambda honest, task, seed: ReadsOutAStranger(honest, task, seed, domain),
        ),
        alters(
            "reports more",
            "reports a change that was never made",
            lambda cheat, text: f"{text} {OTHERS['cancel' in text]}" if cheat.writes else text,
        ),
    )
