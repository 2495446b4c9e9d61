"""Models that follow a script, and the gold agent that a domain without an oracle gets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from trialogue.errors import ConfigError, ModelError
from trialogue.messages import ToolCall, from_openai
from trialogue.reading import from_json, reading
from trialogue.task import Call, Side, Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domain import STOP
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
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the script {path}: {why}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        with reading(f"{path}, line {number}, is neither a JSON text nor a message", ConfigError):
            value: Any = from_json(line)
            if isinstance(value, str):
                lines.append(Reply(value))
            else:
                message = from_openai({"role": "assistant", **value})
                lines.append(Reply(message.content, message.tool_calls, message.reasoning))
    if not lines:
        raise ConfigError(f"the script {path} is empty")
    return lines


GO_ON = "Go on, please."


class GoldParty:
    """Does what the task expects of its side, call by call, and, as the agent, says what is to be said. It
    looks the answer up in the task, so it shows that a task can be solved, not that a model can find out how.

    Where both sides have calls to make they take turns, each up to where the other's next call stands; what
    ends the conversation comes after everything that must be said.
    """

    def __init__(
        self,
        task: Task,
        side: Side = "agent",
        ending: Collection[str] = (),
        stop: str = STOP,
        strict: bool = True,
    ) -> None:
        said = [item if isinstance(item, str) else item[0] for item in task.expected.say]
        runs = to_runs(task.expected.calls, ending, bool(said))
        own = [calls for whose, calls in runs if whose == side]
        if side == "user" and (not runs or runs[0][0] == "agent"):
            own.insert(0, [])  # the user opens, but the agent has the first call
        self._runs = [[call(item.name, **item.arguments) for item in calls] for calls in own] or [[]]
        self._strict = strict
        self._last_words = stop if side == "user" else "It is done. Anything else?"
        if side == "user":
            heard = max(1, sum(whose == "agent" for whose, _ in runs))
            self._words = [GO_ON] * max(heard, len(self._runs) - 1)
        else:
            has_end = bool(said) and any(item.name in ending for calls in own for item in calls)
            self._words = [GO_ON] * (len(self._runs) - 1 - has_end) + [". ".join(said) or "It is done."]

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        last = turns[-1]
        if self._strict and last.message.role == "tool" and last.failed:
            raise ModelError(f"a gold call was refused: {last.message.content}", blame="tool")
        if self._runs and self._runs[0]:
            return self._runs[0].pop(0)
        self._runs = self._runs[1:]
        return Reply(self._words.pop(0) if self._words else self._last_words)


def to_runs(calls: Sequence[Call], ending: Collection[str], has_words: bool) -> list[tuple[Side, list[Call]]]:
    """Gold calls in runs of one side each; those of the agent that end the conversation are a run of their
    own at the end, with at least one turn of the agent before it where something has to be said."""
    last = [item for item in calls if item.side == "agent" and item.name in ending]
    runs: list[tuple[Side, list[Call]]] = []
    for item in calls:
        if item in last:
            continue
        if not runs or runs[-1][0] != item.side:
            runs.append((item.side, []))
        runs[-1][1].append(item)
    if last and has_words and not any(side == "agent" for side, _ in runs):
        runs.append(("agent", []))
    return [*runs, ("agent", last)] if last else runs
