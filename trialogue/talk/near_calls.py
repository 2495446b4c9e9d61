"""Near calls: replies that look like tool calls but were not read as calls.

Some models write a call as bare JSON, in a ```json fence or as `name(key="value")` although their template
asks for another form; the other side is then handed a call as text. `is_near_call` finds such replies, so
that a run can tell. `to_lenient` makes a domain whose agent's near calls are carried out
(`renderer.lenient=true`); what the agent sampled stays as it is. Only names of tools that the side has count:
quoted data is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from trialogue.messages import ToolCall, to_arguments
from trialogue.talk.model import Model
from trialogue.talk.render.parse import Arguments, Found, is_writable
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domain import Domain
from trialogue.world.tools import Tool

LONGEST = 20_000
"""Letters of a reply that are looked at; a longer one is no near call."""
PLACES = 4
"""Lines of a reply at which a call may begin: more are not tried, so that reading stays linear."""
MOST = 100
"""Calls in one reply that are read."""
_FENCE = "```"
_TAG = re.compile(r"</?(?:tools?|tool_calls?|function_calls?|functioncall)>")
_LANGUAGE = re.compile(r"[A-Za-z_]{0,20}[ \t]*\n")
_KEY = re.compile(r"\s{0,100}([A-Za-z_]\w{0,100})\s*=\s*")
_NAMED = re.compile(r"""\{\s{0,20}["']name["']\s{0,20}:\s{0,20}["']([^"'\n]{1,100})["']""")
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class NearCalls:
    """Calls in a text, and the text without them."""

    calls: list[Found]
    rest: str


def is_near_call(reply: Reply, tools: Collection[str]) -> bool:
    """Whether a reply holds no call but text that looks like one."""
    if reply.tool_calls or reply.finish != "stop":
        return False
    return find_near_calls(reply.content, tools) is not None or _names_tool(reply.content, tools)


def _names_tool(text: str, tools: Collection[str]) -> bool:
    """Whether a text holds an object with the name of a tool, such as a call that is cut off or not JSON."""
    return len(text) <= LONGEST and any(found[1] in tools for found in _NAMED.finditer(text))


def find_near_calls(text: str, tools: Collection[str]) -> NearCalls | None:
    """Calls of these tools written as text: in fences, else from a line on where one begins."""
    if len(text) > LONGEST or not any(name in text for name in tools):
        return None
    parts = text.split(_FENCE)
    if len(parts) > 1:
        calls: list[Found] = []
        rest = parts[0]
        for number, part in enumerate(parts[1:], 1):
            language = _LANGUAGE.match(part) if number % 2 else None
            found = _read(part[language.end() if language else 0 :], tools) if number % 2 else None
            if found is not None and not found.rest:
                calls += found.calls
            else:
                rest += f"{_FENCE}{part}{_FENCE}" if number % 2 else part
        return NearCalls(calls[:MOST], rest.strip()) if calls else None
    lines = text.splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if _begins_call(line.strip(), tools)]
    for place in places[:PLACES]:
        found = _read("".join(lines[place:]), tools)
        if found is not None:
            return NearCalls(found.calls, f"{''.join(lines[:place])}{found.rest}".strip())
    said = text.partition("{")[0]  # a sentence before it on the same line
    found = _read(text[len(said) :], tools) if said.rstrip().endswith((".", "!", "?", ":")) else None
    return None if found is None else NearCalls(found.calls, f"{said}{found.rest}".strip())


def _begins_call(line: str, tools: Collection[str]) -> bool:
    return line.startswith(("{", "[")) or bool(_TAG.match(line)) or line.partition("(")[0] in tools


def _read(block: str, tools: Collection[str]) -> NearCalls | None:
    """The calls that a block begins with, and what follows them."""
    calls: list[Found] = []
    block = _TAG.sub("\n", block)
    decoder = json.JSONDecoder()
    position = 0
    while len(calls) < MOST:
        while position < len(block) and (block[position].isspace() or block[position] in ";,"):
            position += 1
        if block.startswith(("{", "["), position):
            try:
                value, end = decoder.raw_decode(block, position)
            except (ValueError, RecursionError):
                break
            found = _to_found(value, tools)
        else:
            end = block.find("\n", position)
            end = len(block) if end < 0 else end
            found = _read_function(block[position:end].strip(), tools)
        if not found:
            break
        calls += found
        position = end
    return NearCalls(calls[:MOST], block[position:].strip()) if calls else None


def _to_found(value: Any, tools: Collection[str]) -> list[Found]:
    """The calls that a JSON value stands for; none where it holds anything else."""
    if isinstance(value, list):
        each = [_to_found(item, tools) for item in cast("list[Any]", value)]
        return [found for calls in each for found in calls] if all(each) else []
    if not isinstance(value, dict) or not is_writable(cast("Any", value)):
        return []
    shape = cast("dict[str, Any]", value)
    if isinstance(shape.get("tool_calls"), list):
        return _to_found(shape["tool_calls"], tools)
    if isinstance(shape.get("function"), dict):
        shape = cast("dict[str, Any]", shape["function"])
    name = shape.get("name", shape.get("function", shape.get("tool")))
    arguments: Any = shape.get("arguments", shape.get("parameters"))
    if isinstance(arguments, str):
        arguments = to_arguments(arguments)
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return []
    return [(name, cast("dict[str, Any]", arguments))]


def _read_function(line: str, tools: Collection[str]) -> list[Found]:
    """`name(key="value")` as a whole line. Arguments that cannot be read stay text, which is refused."""
    name, opened, inside = line.partition("(")
    if name not in tools or not opened or not inside.endswith(")"):
        return []
    return [(name, _read_keywords(inside[:-1]))]


def _read_keywords(text: str) -> Arguments:
    found: dict[str, Any] = {}
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        key = _KEY.match(text, position)
        if key is None:
            return text
        start = key.end()
        if text.startswith("'", start):
            end = text.find("'", start + 1)
            if end < 0:
                return text
            value: Any = text[start + 1 : end]
            end += 1
        else:
            try:
                value, end = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                word = text[start:].partition(",")[0]
                if word.strip() not in _WORDS:
                    return text
                value, end = _WORDS[word.strip()], start + len(word)
        found[key[1]] = value
        rest = text[end:].lstrip()
        if rest and not rest.startswith(","):
            return text
        position = len(text) - len(rest) + 1 if rest else len(text)
    return found if is_writable(found) else text


def to_lenient(domain: Domain) -> Domain:
    """The domain with an agent whose near calls are read as calls."""
    adapt = domain.rules.adapt_agent

    def make(task: Task, model: Model) -> Model:
        return Lenient(adapt(task, model))

    return replace(domain, rules=replace(domain.rules, adapt_agent=make))


@dataclass(frozen=True, slots=True)
class Lenient:
    """A model whose near calls are calls."""

    model: Model

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = await self.model.reply(turns, tools)
        if reply.tool_calls or reply.finish != "stop":
            return reply
        found = find_near_calls(reply.content, {tool.name for tool in tools})
        if found is None:
            return reply
        calls = tuple(
            ToolCall(id=f"near_{len(turns)}_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(found.calls)
        )
        return replace(reply, content=found.rest, tool_calls=calls)
