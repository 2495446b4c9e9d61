"""Parse sampled replies: reasoning, text and tool calls, complete or broken.

A broken call is not dropped or repaired. It becomes a `ToolCall` with the raw text as arguments; the
environment answers it with an error, and the model can repair it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from trialogue.messages import ToolCall, to_arguments
from trialogue.talk.render.vocabulary import Piece, Pieces, Vocabulary
from trialogue.trajectory import Reply

Arguments = dict[str, Any] | str
Found = tuple[str, Arguments]
"""A parsed call: name and arguments."""

_CALL = re.compile(
    r"""\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*?)\s*\}?\s*""",
    re.DOTALL,
)
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks around calls and reasoning: control tokens if the vocabulary has them, otherwise text."""

    call: Piece
    end_call: Piece
    think: Piece
    end_think: Piece

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Marks:
        texts = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        return cls(*(found if (found := vocabulary.find(text)) is not None else text for text in texts))


def read_hermes(pieces: Pieces, marks: Marks, vocabulary: Vocabulary) -> Reply:
    """`<think>…</think>` text `<tool_call>{"name": …, "arguments": …}</tool_call>` …"""
    reasoning: str | None = None
    before, after = cut(pieces, marks.end_think)
    lead, opened = cut(before, marks.think)
    if opened is not None and vocabulary.to_text(lead).strip():
        opened = None  # in the middle of a text it starts no reasoning
    if after is not None or opened is not None:
        inside = vocabulary.to_text(before if opened is None else opened).strip("\n")
        reasoning = inside or None
        pieces = after or []
    before, rest = cut(pieces, marks.call)
    content = vocabulary.to_text(before)
    if reasoning is not None or after is not None:
        content = content.lstrip("\n")
    if rest is not None:
        content = content.removesuffix("\n")
    found: list[Found] = []
    while rest is not None:
        body, behind = cut(rest, marks.end_call)
        if behind is None:  # not closed: it ends at the next call or at the end
            body, rest = cut(rest, marks.call)
            found += read_json_calls(vocabulary.to_text(body))
            continue
        found += read_json_calls(vocabulary.to_text(body))
        between, rest = cut(behind, marks.call)
        said = vocabulary.to_text(between).strip()
        content = f"{content}\n{said}" if content and said else content or said
    return Reply(content, to_calls(found), reasoning)


def read_llama(pieces: Pieces, python_tag: int | None, vocabulary: Vocabulary) -> Reply:
    """`{"name": …, "parameters": …}` as the whole message or after `<|python_tag|>`; several are separated by
    `;`."""
    before, after = cut(pieces, python_tag) if python_tag is not None else (pieces, None)
    text = vocabulary.to_text(before)
    if after is not None:
        return Reply(text.strip(), to_calls(read_json_calls(vocabulary.to_text(after))))
    if text.lstrip().startswith("{") and _NAME.search(text):
        return Reply("", to_calls(read_json_calls(text)))
    return Reply(text)


def read_json_calls(text: str) -> list[Found]:
    """Calls written as consecutive JSON objects. An incomplete rest is kept as raw text."""
    found: list[Found] = []
    decoder = json.JSONDecoder()
    text = text.strip()
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        calls = [
            _to_found(item) for item in (cast("list[Any]", value) if isinstance(value, list) else [value])
        ]
        if None in calls:
            return [_salvage(text)]
        found += [call for call in calls if call is not None]
        while position < len(text) and (text[position].isspace() or text[position] in ";,"):
            position += 1
    if position < len(text) or not found:
        found.append(_salvage(text[position:]))
    return found


def read_compact(text: str) -> Found:
    """`name{"key":"value"}`"""
    name = re.split(r"[\s{]", text.lstrip(), maxsplit=1)[0]
    rest = text.lstrip()[len(name) :]
    if rest and not rest.lstrip().startswith("{"):
        return name, rest[1:]
    return name, read_arguments(rest)


def read_arguments(text: str) -> Arguments:
    """The arguments of a call: a JSON object, or else the raw text."""
    arguments = to_arguments(text)
    return arguments if is_writable(arguments) else text


def is_writable(value: Any) -> bool:
    """Whether a value can be encoded as UTF-8 JSON. Lone surrogates and extremely nested lists cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def to_calls(found: Sequence[Found]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=f"call_{number}", name=name, arguments=arguments)
        for number, (name, arguments) in enumerate(found)
    )


def cut(pieces: Pieces, mark: Piece) -> tuple[Pieces, Pieces | None]:
    """The pieces before and after the first mark; None after it if there is no mark."""
    for position, piece in enumerate(pieces):
        if isinstance(mark, int) or isinstance(piece, int):
            if piece == mark:
                return pieces[:position], pieces[position + 1 :]
        elif mark in piece:
            left, right = piece.split(mark, 1)
            return [*pieces[:position], left], [right, *pieces[position + 1 :]]
    return pieces, None


def _to_found(value: Any) -> Found | None:
    if not isinstance(value, dict):
        return None
    call = cast("dict[str, Any]", value)
    name = call.get("name")
    arguments: Any = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not is_writable(call):
        return None
    if isinstance(arguments, str):
        return name, read_arguments(arguments)
    return name, (cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else json.dumps(arguments))


def _salvage(text: str) -> Found:
    """The name and raw arguments of a broken call, as far as they can be found."""
    whole = _CALL.fullmatch(text)
    if whole is not None:
        try:
            name = json.loads(whole[1])
        except ValueError:
            name = whole[1]
        if is_writable(name):
            return name, whole[2]
    named = _NAME.search(text)
    return (named[1] if named else ""), text
