"""The seam that everything which speaks goes through: a language model, a script, a person."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import isawaitable
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, cast

from trialogue.errors import ConfigError
from trialogue.messages import ToolCall
from trialogue.seams import describe_type, describe_value
from trialogue.task import Side, Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool
from trialogue.world.values import clean_text


class Model(Protocol):
    """Something that speaks for one side of one conversation."""

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        """Answer. The turns are in this side's perspective: first the system prompt, then what it said
        (role `assistant`), its tools' results (`tool`) and what the other side said to it (`user`)."""
        ...


ModelSource = Callable[[Task, int], Model]
"""Makes the model for one conversation from its task and seed. A model without state may be shared."""


async def ask(model: Model, turns: Sequence[Turn], tools: Sequence[Tool], side: Side) -> Reply:
    """The reply of a model. One that is no `Reply` is a mistake of whoever wrote the model."""
    asked: Any = model.reply(turns, tools)
    reply = await asked if isawaitable(asked) else asked
    if isinstance(reply, Reply):
        return reply
    raise ConfigError(
        f"the {side} {describe_value(model.reply)} returned {describe_type(reply)}; it must return a Reply"
    )


async def close_source(source: object) -> None:
    """Let go of what a source of models holds open, such as connections."""
    close = getattr(source, "close", None)
    closing = close() if callable(close) else None
    if isawaitable(closing):
        await closing


def save_tokenizer(source: object, folder: Path) -> None:
    """Put `tokenizer.json` into a folder, where the source's model has one: it tells what ids stand for."""
    save = getattr(source, "save_tokenizer", None)
    if callable(save):
        save(folder / "tokenizer.json")


MOST_CALLS = 1000
"""What `limits.calls` may be at most; more are not even read of a message."""
_DEPTH = 64
"""How deep the arguments of a call may be nested."""


def clean_arguments(arguments: dict[str, Any] | str) -> dict[str, Any] | str:
    """Arguments that come back from a file as they went in. Where they hold what JSON has no form for
    (not-a-number, nesting without end) they become text, which the world turns down as malformed."""
    if isinstance(arguments, str):
        return clean_text(arguments)
    if is_sound(arguments, _DEPTH):
        return arguments
    try:
        text = json.dumps(arguments)
        cleaned: Any = json.loads(clean_text(json.dumps(arguments, ensure_ascii=False)))
    except RecursionError:
        return "(nested too deeply)"
    except (TypeError, ValueError):
        return clean_text(repr(arguments)[:1000])
    return cast("dict[str, Any]", cleaned) if is_sound(cleaned, _DEPTH) else text


def is_sound(value: Any, depth: int) -> bool:
    """Whether a JSON value can be written down and read back."""
    if value is None or isinstance(value, bool | int):
        return True
    if isinstance(value, str):
        return value.isascii() or clean_text(value) is value
    if isinstance(value, float):
        return isfinite(value)
    if not depth:
        return False
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return all(
            isinstance(key, str) and is_sound(key, 1) and is_sound(inner, depth - 1) for key, inner in items
        )
    return isinstance(value, list) and all(is_sound(inner, depth - 1) for inner in cast("list[Any]", value))


def to_clean(reply: Reply) -> Reply:
    """A reply whose every text can be written to a file and whose calls can be told apart."""
    content = clean_text(reply.content)
    reasoning = None if reply.reasoning is None else clean_text(reply.reasoning)
    calls = reply.tool_calls and _clean_calls(reply.tool_calls)
    if content is reply.content and reasoning is reply.reasoning and calls is reply.tool_calls:
        return reply
    return replace(reply, content=content, reasoning=reasoning, tool_calls=calls)


def _clean_calls(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    cleaned: list[ToolCall] = []
    known: set[str] = set()
    for number, call in enumerate(calls):
        arguments = clean_arguments(call.arguments)
        name, identity = clean_text(call.name), clean_text(call.id)
        while identity in known:
            identity = f"{identity}_{number}"
        known.add(identity)
        if arguments is not call.arguments or name is not call.name or identity is not call.id:
            call = ToolCall(id=identity, name=name, arguments=arguments)
        cleaned.append(call)
    return calls if all(new is old for new, old in zip(cleaned, calls, strict=True)) else tuple(cleaned)
