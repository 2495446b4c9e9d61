"""The agent of ACEBench that writes its calls as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trialogue.benchmarks.ace.execute import UnreadableCalls, read_calls
from trialogue.benchmarks.ace.world import EXECUTE, AceDomain
from trialogue.messages import Message, ToolCall
from trialogue.talk.model import Model
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool

STOP = "finish conversation"
FRAME = "The functions you can use:\n{functions}\n\nThe conversation so far:\n{history}"
RULES = """\
You help by calling functions. To call some, write nothing but [name(key='value'), name(key='value')].
Anything else you write goes to the user. When everything is done, write 'finish conversation'.
"""


class TextCaller:
    """The benchmark's own kind of agent: its model gets functions and history in one message, and its calls
    are parsed from its text."""

    def __init__(self, domain: AceDomain, task: Task, model: Model) -> None:
        self._domain = domain
        self._task = task
        self._model = model

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        wording = self._domain.wording
        alone = "alone_" if self._domain.alone else ""
        told = wording.get(f"{alone}system", RULES)
        if not alone:
            told += turns[0].message.content
        frame = wording.get(f"{alone}frame", FRAME)
        functions = str(self._task.meta["function"])
        said = frame.replace("{functions}", functions).replace("{history}", self._tell(turns[1:]))
        asked = [
            Turn(side="agent", message=Message(role="system", content=told)),
            Turn(side="user", message=Message(role="user", content=said)),
        ]
        reply = await self._model.reply(asked, [])
        if not self._is_call(reply.content):
            return reply
        call = ToolCall(id="call_0", name=EXECUTE, arguments={"text": reply.content})
        return replace(reply, content="", tool_calls=(call,))

    def _is_call(self, text: str) -> bool:
        """Whether a text is for the functions and not for the user."""
        if not self._domain.alone and not _has_brackets(text):
            return False
        try:
            read_calls(text, self._domain.alone)
        except UnreadableCalls:
            return False
        return True

    def _tell(self, turns: Sequence[Turn]) -> str:
        """The conversation as lines of user, agent and execution."""
        results = "execution result" if self._domain.alone else "execution"
        lines: list[str] = []
        for turn in turns:
            message = turn.message
            if message.role == "tool":
                lines.append(f"{results}:{message.content}")
            elif message.role == "user":
                lines.append(f"user:{message.content}")
            else:
                texts = [
                    str(call.arguments.get("text"))
                    for call in message.tool_calls
                    if isinstance(call.arguments, dict)
                ]
                lines.append(f"agent:{texts[0] if texts else message.content}")
        return "".join(f"{line}\n" for line in lines)


def _has_brackets(text: str) -> bool:
    """Whether a line has an opening and a closing bracket, in this order."""
    return any(0 <= line.find("[") < line.rfind("]") for line in text.split("\n"))
