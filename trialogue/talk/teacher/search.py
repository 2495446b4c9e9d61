"""Finding out a value through read-only calls, with nothing but what an honest agent may know.

Calls are tried on a copy of the conversation's world, which costs microseconds, so that the teacher can look
for the shortest way from what it knows to what it needs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

from trialogue.errors import DomainError
from trialogue.talk.evidence import find_leaves
from trialogue.talk.teacher.knowledge import KEY, Knowledge, read_records, to_text
from trialogue.world.database import Database, canonical
from trialogue.world.domain import Domain, Environment
from trialogue.world.tools import Tool, ToolResult

LOOKS = re.compile(
    r"^(?:find|get|list|look|search|read|show|check|verify|identify|calculate)(?:_|$)", re.IGNORECASE
)
"""Tools that look something up: what they leave behind is nothing a user has to agree to."""
MOST_TRIED = 600
"""Calls tried for one value."""
DEPTH = 4
"""Calls in a row that one value may take."""
_SINGLE = 80
"""Values tried for the parameter of a tool that takes one."""
_SEVERAL = 8
"""Values tried for each parameter of a tool that takes several."""
_COMBINED = 200
_SHORT = 60
"""Characters of a result that may be a value itself."""
_VAGUE = {"id", "ids", "name", "number", "new", "type", "date"}


class Asked(tuple[str, dict[str, Any]]):
    """A call: the tool's name and its arguments."""


_NO_SOURCE = re.compile(r"^(?:calculate|think|reason|plan|transfer|send)(?:_|$)", re.IGNORECASE)
"""Tools that show nothing but what they were given."""


def is_lookup(tool: Tool) -> bool:
    """Whether a tool may be called without asking the user."""
    return not tool.ends and (not tool.writes or LOOKS.search(tool.name) is not None)


def is_source(tool: Tool) -> bool:
    """Whether a tool shows records and leaves everything as it is."""
    return not tool.ends and not tool.writes and not _NO_SOURCE.search(tool.name)


def is_change(tool: Tool) -> bool:
    """Whether a user has to agree before the tool is called."""
    return tool.writes and not tool.ends and LOOKS.search(tool.name) is None


@lru_cache(maxsize=4096)
def to_words(name: str) -> tuple[str, ...]:
    """The words of an identifier, in the singular."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).replace("_", " ").replace(".", " ").lower().split()
    return tuple(
        word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
        for word in words
    )


@lru_cache(maxsize=65536)
def match_names(one: str, other: str) -> int:
    """How alike two identifiers are, from 0 to 3."""
    left, right = set(to_words(one)), set(to_words(other))
    if left == right:
        return 3
    if left - _VAGUE and right - _VAGUE and (left <= right or right <= left):
        return 2
    return int(bool((left & right) - _VAGUE))


@dataclass(slots=True)
class Candidate:
    """A value that may be used as an argument."""

    value: Any
    fields: set[str]
    """What it was called where it was found."""
    asks: str = ""
    """The fact that has to be asked for first."""
    origin: int = -1
    """The call that returned it, in the order of the search."""


@dataclass(slots=True)
class Path:
    """Calls in a row, and the facts to ask for before them."""

    calls: list[tuple[str, dict[str, Any]]]
    asks: list[str]


_LEAVES: WeakKeyDictionary[Domain, dict[str, tuple[Any, set[str]]]] = WeakKeyDictionary()


def list_values(domain: Domain, environment: Environment) -> dict[str, tuple[Any, set[str]]]:
    """The texts in the records of a domain with their fields: what the user's words may name."""
    known = _LEAVES.get(domain)
    if known is None:
        known = _LEAVES[domain] = _collect(domain.database)
    laid = environment.task.setup.data
    return {**known, **_walk_all(laid)} if laid else known


def _collect(database: Database) -> dict[str, tuple[Any, set[str]]]:
    try:
        return _walk_all(database.to_data())
    except (TypeError, ValueError):
        return {}


def _walk_all(data: Mapping[str, Any]) -> dict[str, tuple[Any, set[str]]]:
    found: dict[str, tuple[Any, set[str]]] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in cast("dict[str, Any]", value).items():
                if isinstance(inner, dict) and len(key) > 1:
                    found.setdefault(key.lower(), (key, set()))[1].add(name)
                walk(inner, name if isinstance(inner, dict) and re.search(r"\d", key) else key)
        elif isinstance(value, list):
            for inner in cast("list[Any]", value):
                walk(inner, name)
        elif isinstance(value, str) and 1 < len(value) < 60:
            found.setdefault(value.lower(), (value, set()))[1].add(name)

    walk(data, "")
    return found


@dataclass(slots=True)
class Search:
    """Looks for calls that show a value."""

    environment: Environment
    """The world as the conversation has left it."""
    knowledge: Knowledge
    facts: dict[str, Any]
    """What the user can tell if asked, by name."""
    told: set[str]
    made: set[str] = field(default_factory=set[str])
    """Calls made since anything changed: making them again shows nothing new."""
    replayed: list[tuple[str, dict[str, Any]]] = field(default_factory=lambda: [])
    """Every call of the conversation, to open the same world again."""
    results: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    """What calls return as the world is now. Several searches try the same ones."""

    def find_path(self, goal: Callable[[str], bool], asks: bool = True, depth: int = DEPTH) -> Path | None:
        """The shortest way to a result that meets the goal."""
        for may_ask in (False, True) if asks else (False,):
            path = self._find(goal, may_ask, depth)
            if path is not None:
                return path
        return None

    def _find(self, goal: Callable[[str], bool], may_ask: bool, depth: int) -> Path | None:
        pool = self.list_candidates(may_ask)
        tools = [tool for tool in self.environment.tools.values() if is_source(tool)]
        tried: set[str] = set()
        made: list[tuple[str, dict[str, Any], list[Candidate]]] = []
        for _ in range(depth):
            shown: list[tuple[str, int]] = []
            for tool in tools:
                for arguments, used in list_arguments(tool, pool):
                    key = canonical([tool.name, arguments])
                    if key in tried or key in self.made:
                        continue
                    tried.add(key)
                    if len(tried) > MOST_TRIED:
                        return None
                    result = self.try_call(tool, arguments, key)
                    if result is None:
                        continue
                    made.append((tool.name, arguments, used))
                    if goal(result):
                        return _trace(made, len(made) - 1)
                    shown.append((result, len(made) - 1))
            if not shown:
                return None
            for text, number in shown:
                add_result(pool, text, number)
        return None

    def list_candidates(self, may_ask: bool) -> dict[str, Candidate]:
        """Values that may be used: shown by tools, said by the user, or to be asked for."""
        pool: dict[str, Candidate] = {}
        for name, value in self.facts.items():
            if value is not None and (name in self.told or may_ask):
                asks = "" if name in self.told or self.knowledge.names(value) else name
                add_value(pool, value, name, asks=asks)
        for seen in self.knowledge.records:
            for name, values in seen.fields.items():
                for value in values:
                    add_value(pool, value, name)
        for text in self.knowledge.texts:
            if len(text) < _SHORT and not text.startswith(("{", "[")):
                add_value(pool, text, "")
        lowered = self.knowledge.words.lower()
        for text, (value, fields) in list_values(self.environment.domain, self.environment).items():
            if text in lowered and self.knowledge.names(value):
                for name in fields or {""}:
                    add_value(pool, value, name)
        return pool

    def try_call(self, tool: Tool, arguments: dict[str, Any], key: str = "") -> str | None:
        """The result of a call on a world like this one, None if it is refused or empty."""
        key = key or canonical([tool.name, arguments])
        if key not in self.results:
            self.results[key] = self._try_anew(tool, arguments)
        return self.results[key]

    def _try_anew(self, tool: Tool, arguments: dict[str, Any]) -> str | None:
        result = self.try_plainly(tool, arguments)
        return None if result is None or is_empty(result) else result.text

    def try_plainly(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult | None:
        """The result of a call on a world like this one, though it is empty; None if it is refused."""
        environment = self.reopen() if tool.writes else self.environment
        try:
            result = environment.call(tool.name, arguments)
        except DomainError:
            return None
        except Exception:  # noqa: BLE001 - a domain's own code may raise anything
            return None
        return None if result.failed else result

    def reopen(self) -> Environment:
        """The present world once more, for calls that may leave something behind."""
        environment = self.environment.reopen()
        for name, arguments in self.replayed:
            environment.call(name, arguments)
        return environment

    def find_equal(self, name: str, arguments: dict[str, Any]) -> Path | None:
        """Another call that leaves the same world behind, with values that can be asked for: a customer can
        be identified by e-mail or by name and postcode."""
        wanted = self.reopen()
        if wanted.call(name, arguments).failed:
            return None
        digest = wanted.digest()
        if digest == self.environment.digest():
            return None
        for tool in self.environment.tools.values():
            if tool.name == name or tool.ends or not tool.writes:
                continue
            for given, used in list_arguments(tool, self.list_candidates(True)):
                environment = self.reopen()
                try:
                    result = environment.call(tool.name, given)
                except Exception:  # noqa: BLE001 - a domain's own code may raise anything
                    continue
                if not result.failed and environment.digest() == digest:
                    asks = [item.asks for item in used if item.asks]
                    return Path([(tool.name, given)], asks)
        return None


def is_empty(result: ToolResult) -> bool:
    text = result.text.strip()
    return result.failed or text in ("", "[]", "{}", "null", '""') or text.startswith("Error")


def _trace(made: Sequence[tuple[str, dict[str, Any], list[Candidate]]], last: int) -> Path:
    """The calls that lead to one of those made, in order."""
    needed: set[int] = set()
    waiting = [last]
    asks: list[str] = []
    while waiting:
        number = waiting.pop()
        if number in needed:
            continue
        needed.add(number)
        for item in made[number][2]:
            if item.origin >= 0:
                waiting.append(item.origin)
            if item.asks and item.asks not in asks:
                asks.append(item.asks)
    return Path([made[number][:2] for number in sorted(needed)], asks)


def add_value(pool: dict[str, Candidate], value: Any, name: str, asks: str = "", origin: int = -1) -> None:
    if isinstance(value, bool):
        return
    key = to_text(value)
    known = pool.get(key)
    if known is None:
        pool[key] = Candidate(value, {name}, asks, origin)
    else:
        known.fields.add(name)
        if not asks and known.asks:
            known.asks, known.origin = "", origin


def add_result(pool: dict[str, Candidate], text: str, number: int) -> None:
    """Put what a call returned among the values to try next."""
    records = list(read_records(text))
    for seen in records:
        for name, values in seen.fields.items():
            for value in values:
                if to_text(value) not in pool:
                    add_value(pool, value, name, origin=number)
    if records:
        return
    try:
        leaves = list(find_leaves(json.loads(text)))
    except (ValueError, RecursionError):
        leaves = [text] if len(text) < _SHORT else []
    for value in leaves:
        if value is not None and to_text(value) not in pool:
            add_value(pool, value, "", origin=number)


def list_arguments(
    tool: Tool, pool: Mapping[str, Candidate]
) -> Iterator[tuple[dict[str, Any], list[Candidate]]]:
    """Arguments of a tool that may be accepted, the likeliest first."""
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    required = [name for name in properties if name in tool.parameters.get("required", ())]
    if not required:
        yield {}, []
    choices: list[list[tuple[int, Any, Candidate | None]]] = []
    for name in required:
        found = rank(name, properties[name], pool, is_single=len(required) == 1)
        if not found:
            return
        choices.append(found)
    if not required:
        return
    combined = list(itertools.islice(itertools.product(*choices), 4 * _COMBINED))
    combined.sort(key=lambda chosen: -sum(item[0] for item in chosen))
    best = sum(item[0] for item in combined[0])
    near = [chosen for chosen in combined if sum(item[0] for item in chosen) >= best - len(required)]
    ordered = combined if len(required) == 1 else near[:_COMBINED]
    for chosen in ordered:
        values = [item[1] for item in chosen]
        if len({to_text(value) for value in values}) < len(values):
            continue
        used = [item[2] for item in chosen if item[2] is not None]
        yield dict(zip(required, values, strict=True)), used


def rank(
    name: str, schema: Any, pool: Mapping[str, Candidate], is_single: bool
) -> list[tuple[int, Any, Candidate | None]]:
    """The values that fit a parameter, the likeliest first."""
    shape = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    if "enum" in shape:
        return [(1, value, None) for value in shape["enum"]]
    kind = shape.get("type", "string")
    if kind == "boolean":
        return [(1, True, None), (1, False, None)]
    if kind not in ("string", "integer", "number"):
        return []
    found: list[tuple[int, Any, Candidate | None]] = []
    for item in pool.values():
        value = item.value
        if isinstance(value, str) != (kind == "string"):
            value = _convert(value, kind)
            if value is None:
                continue
        score = max(
            (match_names(name, field_name) for field_name in item.fields if field_name != KEY), default=0
        )
        if score or (is_single and (not isinstance(value, str) or any(sign.isdigit() for sign in value))):
            found.append((score + (KEY in item.fields), value, item))
    found.sort(key=lambda each: -each[0])
    return found[: _SINGLE if is_single else _SEVERAL]


def _convert(value: Any, kind: str) -> Any:
    try:
        return {"integer": int, "number": float, "string": str}[kind](value)
    except (TypeError, ValueError):
        return None
