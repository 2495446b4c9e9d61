"""The gold agent for domains with a policy to keep: it asks who is calling, asks for a yes, and reports."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from trialogue.errors import ModelError
from trialogue.messages import ToolCall
from trialogue.talk.agenda import read_agenda
from trialogue.task import Call, Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.events import find_leaves
from trialogue.world.speech import is_yes
from trialogue.world.tools import Tool

Steps = Generator[Reply, str, None]
ATTEMPTS = 3
"""How often it asks for a yes to the same change."""


class PoliteGold:
    """Makes a task's gold calls with the manners that most policies ask for. It looks the answer up in the
    task and in the agenda of its user, so it shows that a task can be solved by the rules, not that a model
    can find out how."""

    def __init__(self, task: Task) -> None:
        agenda = read_agenda(task)
        self._known = [name for name, fact in agenda.facts.items() if fact.value is not None]
        self._values: dict[str, Any] = {name: agenda.facts[name].value for name in self._known}
        self._wishes = agenda.wishes
        self._calls = [call for call in task.expected.calls if call.side == "agent"]
        self._say = [item if isinstance(item, str) else item[0] for item in task.expected.say]
        self._steps: Steps | None = None
        self._made = 0

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        if turns[-1].message.role == "tool" and turns[-1].failed:
            raise ModelError(f"a gold call was refused: {turns[-1].message.content}", blame="tool")
        if self._steps is None:
            self._steps = self._serve(tools)
            return next(self._steps)
        return self._steps.send(turns[-1].message.content)

    def _serve(self, tools: Sequence[Tool]) -> Steps:
        for name in self._known:
            yield Reply(f"Could you tell me your {name.replace('_', ' ')}?")
        for tool in tools:
            required = tool.parameters.get("required", ())
            if not tool.writes and required and all(name in self._values for name in required):
                yield self._call(
                    Call(name=tool.name, arguments={name: self._values[name] for name in required})
                )
        ending = {tool.name for tool in tools if tool.ends}
        for wish in self._wishes:
            if (wish.answer is not None or not self._calls) and self._say:
                yield Reply(f"{self._say.pop(0)}. Anything else?")
            elif self._calls and self._calls[0].name in ending:
                yield self._call(self._calls.pop(0))
            elif self._calls:
                yield from self._change(self._calls.pop(0))
        while True:
            if self._calls:
                yield from self._change(self._calls.pop(0))
            yield Reply(". ".join([*self._say, "Anything else?"]))

    def _change(self, call: Call) -> Steps:
        values = [
            f"{field.replace('_', ' ')} {leaf}"
            for field, value in call.arguments.items()
            for leaf in find_leaves(value)
        ]
        what = ", ".join([call.name.replace("_", " "), *values])
        for _ in range(ATTEMPTS):
            answer = yield Reply(f"Shall I do this: {what}?")
            if is_yes(answer):
                break
        yield self._call(call)
        yield Reply(f"I have completed this: {what}. Anything else?")

    def _call(self, call: Call) -> Reply:
        self._made += 1
        return Reply(
            tool_calls=(ToolCall(id=f"call_{self._made}", name=call.name, arguments=call.arguments),)
        )
