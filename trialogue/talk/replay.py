"""Record every reply of a model to a file, and play a recording back without one call.

Replies are filed under the conversation (task and seed) and what had been said when they were given, so a
replay notices when the conversation has taken another course.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trialogue.durable import append
from trialogue.errors import ConfigError, ModelError
from trialogue.messages import ToolCall
from trialogue.talk.model import Model, ModelSource
from trialogue.task import Task
from trialogue.trajectory import Reply, Tokens, Turn, Usage
from trialogue.world.tools import Tool


def to_key(task: Task, seed: int, turns: Sequence[Turn]) -> str:
    """Names a point in a conversation."""
    said = [
        [turn.message.role, turn.message.content, [repr(call) for call in turn.message.tool_calls]]
        for turn in turns
    ]
    text = json.dumps([task.id, seed, said], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def to_data(reply: Reply) -> dict[str, Any]:
    data: dict[str, Any] = {"content": reply.content, "finish": reply.finish}
    data["tool_calls"] = [call.model_dump() for call in reply.tool_calls]
    data["reasoning"], data["model"] = reply.reasoning, reply.model
    data["tokens"] = reply.tokens.model_dump() if reply.tokens else None
    data["usage"] = reply.usage.model_dump() if reply.usage else None
    return {key: value for key, value in data.items() if value}


def from_data(data: dict[str, Any]) -> Reply:
    return Reply(
        content=data.get("content", ""),
        tool_calls=tuple(ToolCall(**call) for call in data.get("tool_calls", ())),
        reasoning=data.get("reasoning"),
        tokens=Tokens(**data["tokens"]) if data.get("tokens") else None,
        finish=data.get("finish", "stop"),
        usage=Usage(**data["usage"]) if data.get("usage") else None,
        model=data.get("model"),
    )


class Recorder:
    """Writes the replies of the models it makes."""

    def __init__(self, source: ModelSource, path: Path) -> None:
        self._source, self._path = source, path
        path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, task: Task, seed: int) -> Model:
        return _Recorded(self._source(task, seed), task, seed, self._path)


class _Recorded:
    def __init__(self, model: Model, task: Task, seed: int, path: Path) -> None:
        self._model, self._task, self._seed, self._path = model, task, seed, path

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = await self._model.reply(turns, tools)
        line = {"key": to_key(self._task, self._seed, turns), "task": self._task.id, **to_data(reply)}
        append(self._path, json.dumps(line) + "\n")
        return reply


class Replay:
    """Plays a recording back. Where it holds nothing, `otherwise` speaks; without it the reply fails."""

    def __init__(self, path: Path, otherwise: ModelSource | None = None) -> None:
        self._otherwise = otherwise
        self._replies: dict[str, Reply] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"cannot read the recording {path}: {why}") from None
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                self._replies[data["key"]] = from_data(data)
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    break  # the last line was cut off while it was written
                raise ConfigError(f"{path}, line {number}: not a recorded reply ({error})") from None

    def __call__(self, task: Task, seed: int) -> Model:
        live = self._otherwise(task, seed) if self._otherwise else None
        return _Replayed(self._replies, task, seed, live)


class _Replayed:
    def __init__(self, replies: dict[str, Reply], task: Task, seed: int, live: Model | None) -> None:
        self._replies, self._task, self._seed, self._live = replies, task, seed, live

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        known = self._replies.get(to_key(self._task, self._seed, turns))
        if known is not None:
            return known
        if self._live is None:
            raise ModelError(
                f"the recording has no reply for task {self._task.id} (seed {self._seed}) after "
                f"{len(turns)} turns: the conversation took another course",
                blame="infrastructure",
            )
        return await self._live.reply(turns, tools)
