"""Record every reply of a model to a file, and play a recording back without one call.

Replies are filed under the conversation (task and seed) and what had been said when they were given, so a
replay notices when the conversation has taken another course.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trialogue.config import Speaker
from trialogue.errors import ConfigError, ModelError
from trialogue.messages import ToolCall
from trialogue.records import append_records, check_line
from trialogue.seams import split_reference
from trialogue.talk.model import Model, ModelSource, close_source
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
    data["has_patience"] = reply.has_patience
    said = {"rejected": list(reply.rejected)} if reply.rejected is not None else {}
    return {key: value for key, value in data.items() if value} | said


def from_data(data: dict[str, Any]) -> Reply:
    return Reply(
        content=data.get("content", ""),
        tool_calls=tuple(ToolCall(**call) for call in data.get("tool_calls", ())),
        reasoning=data.get("reasoning"),
        tokens=Tokens(**data["tokens"]) if data.get("tokens") else None,
        finish=data.get("finish", "stop"),
        usage=Usage(**data["usage"]) if data.get("usage") else None,
        model=data.get("model"),
        has_patience=data.get("has_patience", False),
        rejected=None if data.get("rejected") is None else tuple(data["rejected"]),
    )


def is_asked(speaker: Speaker) -> bool:
    """Whether a speaker's words cannot be made again by rule, and have to be written down."""
    if speaker.mix:
        return any(map(is_asked, speaker.mix))
    kind = speaker.model.partition(":")[0]
    return kind not in ("", "oracle", "teacher", "naive", "gold", "agenda", "scripted") and (
        kind != "replay" or speaker.otherwise is not None
    )


def is_language_model(speaker: Speaker) -> bool:
    """Whether a language model speaks, or its recording; in a mix, any of several."""
    if speaker.mix:
        return any(map(is_language_model, speaker.mix))
    kind = speaker.model.partition(":")[0]
    if kind in ("guided", "local", "openai", "replay"):
        return True
    is_own = split_reference(speaker.model) is not None or speaker.model.endswith(".py")
    return is_asked(speaker) and kind != "human" and not is_own


def read_recording(path: Path) -> dict[str, Reply | ModelError]:
    """What was said, or went wrong, at each recorded point."""
    known: dict[str, Reply | ModelError] = {}
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
            stamped, agrees = check_line(line.encode())
            if stamped is not None and not agrees:
                raise ValueError("it was changed: its digest does not agree")
            failed = data.get("error")
            known[data["key"]] = from_data(data) if failed is None else ModelError(failed, data.get("blame"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if number == len(lines):
                break  # the last line was cut off while it was written
            raise ConfigError(f"{path}, line {number}: not a recorded reply ({error})") from None
    return known


class Recorder:
    """Writes down the replies of the models it makes. What is on record is not asked for again, so that a
    resumed run pays for nothing twice."""

    def __init__(self, source: ModelSource, path: Path) -> None:
        self.source, self._path = source, path
        path.parent.mkdir(parents=True, exist_ok=True)
        known = read_recording(path) if path.exists() else {}
        self.known = {key: item for key, item in known.items() if isinstance(item, Reply)}

    def __call__(self, task: Task, seed: int) -> Model:
        return _Recorded(self, self.source(task, seed), task, seed)

    def write(self, key: str, task: Task, data: dict[str, Any]) -> None:
        append_records(self._path, [json.dumps({"key": key, "task": task.id, **data})])


@dataclass(frozen=True, slots=True)
class _Recorded:
    recorder: Recorder
    model: Model
    task: Task
    seed: int

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        key = to_key(self.task, self.seed, turns)
        known = self.recorder.known.get(key)
        if known is not None:
            return known
        try:
            reply = await self.model.reply(turns, tools)
        except ModelError as error:
            self.recorder.write(key, self.task, {"error": str(error), "blame": error.blame})
            raise
        self.recorder.write(key, self.task, to_data(reply))
        return reply


class Replay:
    """Plays a recording back. Where it holds nothing, `otherwise` speaks; without it the reply fails."""

    def __init__(self, path: Path, otherwise: ModelSource | None = None) -> None:
        self._otherwise = otherwise
        self._known = read_recording(path)

    def __call__(self, task: Task, seed: int) -> Model:
        live = self._otherwise(task, seed) if self._otherwise else None
        return _Replayed(self._known, task, seed, live)

    async def close(self) -> None:
        await close_source(self._otherwise)


@dataclass(frozen=True, slots=True)
class _Replayed:
    known: dict[str, Reply | ModelError]
    task: Task
    seed: int
    live: Model | None

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        known = self.known.get(to_key(self.task, self.seed, turns))
        if isinstance(known, Reply):
            return known
        if self.live is not None:
            return await self.live.reply(turns, tools)
        if known is not None:  # it failed then, so it fails now, with the same words
            raise ModelError(str(known), known.blame)
        raise ModelError(
            f"the recording has no reply for task {self.task.id} (seed {self.seed}) after "
            f"{len(turns)} turns: the conversation took another course",
            blame="infrastructure",
        )
