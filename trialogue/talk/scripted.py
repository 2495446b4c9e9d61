"""Models that follow a script, and the gold agent that a domain without an oracle of its own gets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trialogue.errors import ConfigError, ModelError
from trialogue.messages import ToolCall, from_openai
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool


def call(name: str, /, **arguments: Any) -> Reply:
    """A reply that calls one tool: `call("get_order", order_id="W1")`."""
    return Reply(tool_calls=(ToolCall(id="call_0", name=name, arguments=arguments),))


class ScriptedModel:
    """Says the lines it was given, one after the other, then repeats the last."""

    def __init__(self, lines: Iterable[str | Reply]) -> None:
        self._lines = [Reply(line) if isinstance(line, str) else line for line in lines]
        self._next = 0
        if not self._lines:
            raise ConfigError("a script needs at least one line")

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        line = self._lines[min(self._next, len(self._lines) - 1)]
        self._next += 1
        return line


def read_script(path: Path) -> list[Reply]:
    """A script from JSON lines: each a text, or a message of the OpenAI shape."""
    lines: list[Reply] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the script {path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
            if isinstance(value, str):
                lines.append(Reply(value))
            else:
                message = from_openai({"role": "assistant", **value})
                lines.append(Reply(message.content, message.tool_calls, message.reasoning))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: neither a JSON text nor a message ({error})") from None
    if not lines:
        raise ConfigError(f"the script {path} is empty")
    return lines


class GoldAgent:
    """Does what the task expects, call by call, and says what is to be said. It looks the answer up in
    the task, so it shows that a task can be solved, not that a model can find out how."""

    def __init__(self, task: Task) -> None:
        calls = [item for item in task.expected.calls if item.side == "agent"]
        self._calls = [call(item.name, **item.arguments) for item in calls]
        said = [item if isinstance(item, str) else item[0] for item in task.expected.say]
        self._say = [". ".join(said)] if said else ["It is done."]

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        if turns[-1].message.role == "tool" and turns[-1].failed:
            raise ModelError(f"a gold call was refused: {turns[-1].message.content}", blame="tool")
        if self._calls:
            return self._calls.pop(0)
        return Reply(self._say.pop(0)) if self._say else Reply("It is done. Anything else?")
