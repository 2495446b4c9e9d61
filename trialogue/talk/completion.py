"""A chat completion, read from plain data into the fields that are used, each of the type it must have.

Usage is a report of the endpoint about itself: it is bounded by what was sent and received, and decides
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

from trialogue.endpoint import Unreadable
from trialogue.messages import ToolCall, to_arguments
from trialogue.talk.model import MOST_CALLS, clean_arguments
from trialogue.trajectory import Usage
from trialogue.world.values import clean_text

Shape = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The first choice of a completion."""

    content: str
    refusal: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    finish: str


def read_chat(answer: Any) -> ChatAnswer:
    """The reply in an answer. One of another shape raises `Unreadable`, which says where."""
    choices = _read_list(_to_object(answer, "the answer"), "choices")
    if not choices:
        raise Unreadable("an answer without choices")
    choice = _to_object(choices[0], "choices[0]")
    if choice.get("message") is None:
        raise Unreadable("a choice without a message")
    message = _to_object(choice["message"], "message")
    calls = [
        _read_call(_to_object(call, f"tool_calls[{number}]"), number)
        for number, call in enumerate(_read_list(message, "tool_calls")[: MOST_CALLS + 1])
    ]
    return ChatAnswer(
        content=_read_text(message, "content"),
        refusal=_read_text(message, "refusal"),
        reasoning=_read_text(message, "reasoning") or _read_text(message, "reasoning_content") or None,
        calls=tuple(call for call in calls if call is not None),
        finish=_read_text(choice, "finish_reason"),
    )


def _read_call(call: Shape, number: int) -> ToolCall | None:
    if call.get("function") is None:
        return None
    function = _to_object(call["function"], f"tool_calls[{number}].function")
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):  # some endpoints send an object, most send its text
        arguments = to_arguments(_read_text(function, "arguments"))
    return ToolCall(
        id=clean_text(_read_text(call, "id") or f"call_{number}"),
        name=clean_text(_read_text(function, "name")),
        arguments=clean_arguments(cast("Shape | str", arguments)),
    )


def _to_object(value: Any, name: str) -> Shape:
    if not isinstance(value, dict):
        raise Unreadable(f"{name} is of the type {type(value).__name__}, not an object")
    return cast("Shape", value)


def _read_list(shape: Shape, name: str) -> list[Any]:
    value = shape.get(name)
    if value is not None and not isinstance(value, list):
        raise Unreadable(f"{name} is of the type {type(value).__name__}, not a list")
    return cast("list[Any]", value or [])


def _read_text(shape: Shape, name: str) -> str:
    value = shape.get(name)
    if value is not None and not isinstance(value, str):
        raise Unreadable(f"{name} is of the type {type(value).__name__}, not text")
    return value or ""


def read_usage(answer: Any, most: Usage) -> tuple[Usage, str]:
    """The tokens an answer reports, from 0 to `most`, and what it said out of these bounds."""
    doubts: list[str] = []

    def find(shape: Any, name: str) -> Any:
        if shape is not None and not isinstance(shape, dict):
            doubts.append(f"{name} is within no object")
            return None
        return cast("Shape", shape or {}).get(name)

    def count(shape: Any, name: str, limit: int) -> int:
        value = find(shape, name)
        number = _to_count(value)
        bounded = min(max(number or 0, 0), limit)
        if value is not None and number != bounded:
            text = str(cast(object, value)) if isinstance(value, int | float) else type(value).__name__
            doubts.append(f"{name} {text if len(text) <= 30 else text[:29] + '…'}, counted as {bounded}")
        return bounded

    told = find(answer, "usage")
    prompt = count(told, "prompt_tokens", most.prompt)
    completion = count(told, "completion_tokens", most.completion)
    details = find(told, "prompt_tokens_details")
    cached = count(details, "cached_tokens", prompt)
    return Usage(prompt=prompt, completion=completion, cached=cached), "; ".join(dict.fromkeys(doubts))


def _to_count(value: Any) -> int | None:
    """A number of tokens; None where it is none. Some servers write whole numbers as 12.0."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, float) and isfinite(value) else None
