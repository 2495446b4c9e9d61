"""Which of their own tools a rule-based user is asked to use, with what arguments, and what they tell of it.

"Please switch airplane mode off." asks for `set_airplane_mode(on=False)`: a sentence that tells the user to
do something names a tool by the words of its name or its description, or by a pattern of the agenda.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from trialogue.world.speech import PROPOSES, REPORTS, split_sentences
from trialogue.world.tools import Tool

_DIRECTS = re.compile(
    r"\bplease\b|\b(?:could|can|would|will) you\b|\b(?:need|want|like|ask) you to\b"
    r"|\byou (?:should|must|have to|need to)\b",
    re.IGNORECASE,
)
_FIRST = re.compile(r"^\W*(?:(?:now|then|first|next|so|and|ok|okay)\W+)*([a-z]+)", re.IGNORECASE)
_VERBS = frozenset(
    (
        *("turn", "switch", "set", "put", "open", "read", "check", "look"),
        *("restart", "start", "stop", "run", "take", "use", "press", "enter"),
    )
)
"""Words that a sentence which tells the user to do something may begin with."""
_WONDERS = re.compile(r"\b(?:whether|if|why|when)\b|\b(?:on or off|off or on)\b", re.IGNORECASE)
_GENERAL = {
    *("set", "get", "read", "check", "run", "toggle", "switch", "turn", "open", "show", "see", "use", "make"),
    *(
        "a",
        "an",
        "the",
        "of",
        "to",
        "in",
        "on",
        "off",
        "or",
        "and",
        "it",
        "what",
        "whether",
        "is",
        "your",
        "its",
    ),
}
"""Words that tell no tool from another."""
_ON, _OFF = (
    re.compile(r"\b(?:on|enabled?|activated?)\b", re.IGNORECASE),
    re.compile(r"\b(?:off|disabled?|deactivated?)\b", re.IGNORECASE),
)
_LONGEST = 400
"""Characters of a result that are told."""


def find_requests(
    text: str, tools: Sequence[Tool], patterns: Mapping[str, str], facts: Mapping[str, str | None]
) -> list[tuple[str, dict[str, Any]]]:
    """The calls that a text asks the user to make, in its order. One whose arguments the text leaves open is
    left out."""
    found: list[tuple[str, dict[str, Any]]] = []
    if not tools:
        return found
    verbs = _VERBS | {tool.name.split("_")[0].lower() for tool in tools}
    for sentence in split_sentences(text):
        first = _FIRST.search(sentence)
        if not _DIRECTS.search(sentence) and not (first and first[1].lower() in verbs):
            continue
        if PROPOSES.search(sentence) or REPORTS.search(sentence):
            continue
        if _WONDERS.search(sentence):
            continue
        fits = {
            tool.name: words
            for tool in tools
            if (words := _find_words(sentence, tool, patterns.get(tool.name)))
        }
        for tool in tools:
            words = fits.get(tool.name)
            if words is None or any(words < other for other in fits.values()):
                continue  # "mobile data roaming" is not about mobile data
            arguments = _find_arguments(sentence, tool, facts)
            if arguments is not None and (tool.name, arguments) not in found:
                found.append((tool.name, arguments))
    return found


def tell_result(text: str) -> str:
    """A tool's result as it stands in a sentence of the user."""
    return " ".join(text.split())[:_LONGEST].removeprefix("Error: ").rstrip(".")


def _find_words(sentence: str, tool: Tool, pattern: str | None) -> frozenset[str]:
    """The words by which a sentence names a tool; none where it does not."""
    if pattern is not None:
        match = re.search(pattern, sentence, re.IGNORECASE)
        return frozenset(_split(match[0])) if match else frozenset()
    said = set(_split(sentence))
    for words in (_split(tool.name), _split(re.split(r"(?<=[.!])\s", tool.description.strip())[0])):
        telling = frozenset(words) - _GENERAL
        if telling and telling <= said:
            return telling
    return frozenset()


@lru_cache(maxsize=4096)
def _split(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", text.lower().replace("_", " ")))


def _find_arguments(sentence: str, tool: Tool, facts: Mapping[str, str | None]) -> dict[str, Any] | None:
    """The arguments that a sentence gives; None where a required one is open."""
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    given: dict[str, Any] = {}
    for name, schema in properties.items():
        shape: Mapping[str, Any] = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
        value = _find_value(sentence, name, shape, facts)
        if value is not None:
            given[name] = value
        elif name in tool.parameters.get("required", ()):
            return None
    return given


def _find_value(sentence: str, name: str, shape: Mapping[str, Any], facts: Mapping[str, str | None]) -> Any:
    if "enum" in shape:
        named = [
            value
            for value in shape["enum"]
            if re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", sentence, re.IGNORECASE)
        ]
        return max(named, key=lambda value: len(str(value)), default=None)
    match shape.get("type"):
        case "boolean":
            is_on, is_off = _ON.search(sentence) is not None, _OFF.search(sentence) is not None
            return is_on if is_on != is_off else None
        case "integer" | "number":
            number = re.search(r"(?<![\w.-])-?\d{1,15}(?:\.\d{1,15})?(?!\w|\.\d)", sentence)
            if number is None or (shape["type"] == "integer" and "." in number[0]):
                return None
            return int(number[0]) if shape["type"] == "integer" else float(number[0])
        case "string":
            quoted = re.search(r"[\"“]([^\"”]+)[\"”]|(?<!\w)'([^']+)'(?!\w)", sentence)
            return (quoted[1] or quoted[2]) if quoted else facts.get(name)
        case _:
            return None
