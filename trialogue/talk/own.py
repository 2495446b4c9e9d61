"""Agents and users from outside the package, named by reference or given by a Python caller.

Each of these forms becomes a source of models:

- `async def agent(messages, tools)` in the shapes of OpenAI's chat completions, which returns a text or a
  message with tool calls;
- a function `(task, seed)` that returns a `Model`, or such an async function, for one conversation;
- a class of models, called with `(task, seed)` or without arguments for each conversation;
- a `Model`, which all conversations share.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from reprlib import repr as shorten
from typing import Any, cast

from trialogue.errors import ConfigError
from trialogue.messages import from_openai
from trialogue.reading import explain
from trialogue.seams import describe_type, describe_value, find_caller, load_seam
from trialogue.talk.model import Model, ModelSource, ask, close_source
from trialogue.task import Side, Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool

Shapes = list[dict[str, Any]]
Chat = Callable[[Shapes, Shapes], Awaitable[Any]]
"""An async function of messages and tools, each in OpenAI's shape."""
FORMS = "async def {side}(messages, tools), or a function (task, seed) that returns a Model"
SPEAKERS = "an object with async def reply(self, turns, tools), or an async function (messages, tools)"
MESSAGE = 'a text or a message {"content": …, "tool_calls": […]}'
CALL = '{"id": "1", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'


def find_own(reference: str, side: Side, known: Iterable[str] = ()) -> ModelSource:
    """The agent or user that `module:name` or `path/to/file.py:name` names; `known` are built-in names."""
    return Checked(to_source(load_seam(reference, side, known=known), side), side)


def to_source(found: Any, side: Side) -> ModelSource:
    """The source of models that an object in one of the accepted forms stands for."""
    make = cast("Callable[..., Any]", found)
    if inspect.isclass(found):
        if _takes(make) and not _is_first(make, "task"):
            return lambda task, seed: _to_model(make(), side)
    elif _is_async(found) or _is_first(found, "messages"):
        return Shared(_to_chat(found, side))
    elif not callable(found) and callable(getattr(found, "reply", None)):
        return Shared(found)
    if not callable(found):
        told = f"{describe_value(found)}{find_caller()}"
        raise ConfigError(f"the {side} is {told}; it must be {FORMS.format(side=side)}")
    if not _takes(found, "task", "seed"):
        raise ConfigError(f"the {side} is {_describe(found)}; it must be {FORMS.format(side=side)}")
    return Opened(make, side)


@dataclass(frozen=True, slots=True)
class Shared:
    """One model for all conversations."""

    model: Any

    def __call__(self, task: Task, seed: int) -> Model:
        return self.model

    async def close(self) -> None:
        await close_source(self.model)


@dataclass(frozen=True, slots=True)
class Opened:
    """Makes the model of each conversation from what a function returns."""

    source: Callable[[Task, int], Any]
    side: Side

    def __call__(self, task: Task, seed: int) -> Model:
        made = self.source(task, seed)
        if hasattr(made, "reply"):
            return made
        return _to_model(made, self.side, f"{_describe(self.source)} returned ")

    async def close(self) -> None:
        await close_source(self.source)


@dataclass(frozen=True, slots=True)
class Checked:
    """A source whose models are checked where they speak, whatever stands around them."""

    source: ModelSource
    side: Side

    def __call__(self, task: Task, seed: int) -> Model:
        return _CheckedModel(self.source(task, seed), self.side)

    async def close(self) -> None:
        await close_source(self.source)


@dataclass(frozen=True, slots=True)
class _CheckedModel:
    model: Model
    side: Side

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        return await ask(self.model, turns, tools, self.side)


def _to_model(found: Any, side: Side, returned: str = "") -> Model:
    if callable(getattr(found, "reply", None)):
        return found
    if _is_async(found):
        return _to_chat(found, side)
    if inspect.iscoroutine(found):
        found.close()
    raise ConfigError(f"the {side} {returned or 'is '}{describe_type(found)}; it must be {SPEAKERS}")


def _to_chat(function: Any, side: Side) -> ChatFunction:
    is_fit = _is_async(function) and _takes(function, "messages", "tools")
    if not is_fit or _is_first(function, "task"):
        raise ConfigError(f"the {side} is {_describe(function)}; it must be {FORMS.format(side=side)}")
    return ChatFunction(function, side)


@dataclass(frozen=True, slots=True)
class ChatFunction:
    """Speaks by an async function of messages and tools in OpenAI's shapes."""

    function: Chat
    side: Side

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        messages = [turn.message.to_openai() for turn in turns]
        found = await self.function(messages, deepcopy([tool.schema for tool in tools]))
        return to_reply(found, f"the {self.side} {describe_value(self.function)}")


def to_reply(found: Any, what: str) -> Reply:
    """The reply in what an async function returned."""
    if isinstance(found, str):
        return Reply(found)
    if isinstance(found, Reply):
        return found
    dump = getattr(found, "model_dump", None)
    shape: Any = dump() if callable(dump) else found  # a message of OpenAI's own package
    wanted = f"it must return {MESSAGE}"
    if not isinstance(shape, Mapping) or not any(key in shape for key in ("content", "tool_calls")):
        raise ConfigError(f"{what} returned {describe_type(found)}; {wanted}")
    calls = _get(shape, "tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ConfigError(f"{what} returned tool_calls that are {describe_type(calls)}; {wanted}")
    for call in cast("Sequence[Any]", calls):
        if not _is_call(call):
            raise ConfigError(f"{what} returned the tool call {shorten(call)}; a call must be {CALL}")
    try:
        message = from_openai({**shape, "role": "assistant"})
    except Exception as error:
        raise ConfigError(
            f"{what} returned a message that cannot be read: {explain(error)}; {wanted}"
        ) from error
    return Reply(message.content, message.tool_calls, message.reasoning)


def _is_call(call: Any) -> bool:
    """Whether a tool call has OpenAI's shape. Another one would lose its arguments."""
    function = _get(call, "function")
    return isinstance(_get(function, "name"), str) and isinstance(_get(function, "arguments"), str | dict)


def _get(shape: Any, key: str) -> Any:
    return cast("Mapping[str, Any]", shape).get(key) if isinstance(shape, Mapping) else None


def _is_async(found: Any) -> bool:
    """Whether calling this gives something to await."""
    inner: Any = inspect.unwrap(found) if inspect.isroutine(found) else found
    return callable(inner) and (
        inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    )


def _find_signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # built into Python
        return None


def _takes(function: Any, *arguments: str) -> bool:
    signature = _find_signature(function)
    try:
        _ = signature is None or signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _is_first(function: Any, name: str) -> bool:
    """Whether the first parameter has this name."""
    signature = _find_signature(function)
    return signature is not None and next(iter(signature.parameters), "") == name


def _describe(function: Any) -> str:
    """A function as it is declared, with its file and line."""
    name, place = describe_value(function).partition(" (")[::2]
    declared = f"{'async ' if _is_async(function) else ''}def {name}{_find_signature(function) or ''}"
    return f"{declared} ({place}" if place else declared
