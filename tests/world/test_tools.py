"""Schemas, the check of arguments, and what authors may get wrong with `@tool`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from enum import Enum
from typing import Any, Literal

import pytest

from trialogue import Database, Domain, DomainError, Environment, Record, Table, Task, ToolError, tool
from trialogue.world.domain import from_list
from trialogue.world.tools import parse_docstring


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Item(Record):
    name: str
    count: int = 1


class Desk(Database):
    items: Table[Item]
    log: list[Any] = []

    @tool
    def find(
        self, name: str, colour: Colour = Colour.RED, copy: bool = False, json: int | None = None
    ) -> str:
        """Find an item.

        Args:
            name: What it is called,
                in whole words.
            json: A number with a name that libraries like to take.
        """
        return f"{name} {colour.value} {copy} {json}"

    @tool(writes=True)
    def book(self, day: date, items: list[Item], sizes: dict[str, float] | None = None) -> Any:
        """Book items for a day."""
        self.log.append([day.isoformat(), [item.name for item in items], sizes])
        return {"day": day, "items": items, "colours": {Colour.RED}, "by_day": {day: 1}}

    @tool(writes=True)
    def keep(self, words: list[str], more: Any = None) -> int:
        """Keep what was given."""
        self.log.append(words)
        self.log.append(more)
        words.append("mine")
        if isinstance(more, list):
            more.append("mine")
        return len(self.log)

    @tool
    def number(self, whole: int, real: float, kind: Literal["a", "b"]) -> list[Any]:
        """Take numbers."""
        return [whole, real, kind]

    @tool
    def broken(self) -> Any:
        """Answer what cannot be written down."""
        return object()

    @tool(ends=True)
    def hand_over(self) -> str:
        """End the conversation."""
        return "handed over"


def open_desk() -> Environment:
    task = Task(id="t", domain="desk", instructions="")
    domain = Domain("desk", "", Desk.load({"items": {}}), from_list("desk", [task]))
    return domain.open(task)


def test_a_schema_says_what_a_model_must_know() -> None:
    schema = Desk.tools["find"].schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find an item.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "description": "What it is called, in whole words."},
                    "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                    "copy": {"type": "boolean", "default": False},
                    "json": {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "default": None,
                        "description": "A number with a name that libraries like to take.",
                    },
                },
            },
        },
    }
    booking = Desk.tools["book"].parameters["properties"]
    assert booking["day"] == {"type": "string", "format": "date"}
    assert booking["items"]["items"]["properties"]["name"] == {"type": "string"}
    assert list(Desk.tools) == ["find", "book", "keep", "number", "broken", "hand_over"]
    assert [name for name, item in Desk.tools.items() if item.writes] == ["book", "keep"]
    json.dumps([item.schema for item in Desk.tools.values()])


def test_arguments_reach_the_method_as_python_values() -> None:
    desk = open_desk()
    assert desk.call("find", {"name": "pen", "colour": "blue", "json": 3}).text == "pen blue False 3"
    booked = desk.call("book", {"day": "2024-05-01", "items": [{"name": "pen"}], "sizes": {"a": 1}})
    assert json.loads(booked.text) == {
        "day": "2024-05-01",
        "items": [{"name": "pen", "count": 1}],
        "colours": ["red"],
        "by_day": {"2024-05-01": 1},
    }
    assert desk.call("number", {"whole": 1, "real": 2, "kind": "a"}).text == '[1,2.0,"a"]'


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("find", {}, "find: missing argument 'name' (it takes: name, colour, copy, json)"),
        (
            "find",
            {"name": "x", "size": 1},
            "find: unknown argument 'size' (it takes: name, colour, copy, json)",
        ),
        ("find", {"name": 3}, "argument 'name': input should be a valid string, got 3"),
        (
            "find",
            {"name": "x", "colour": "green"},
            "argument 'colour': input should be 'red' or 'blue', got 'green'",
        ),
        ("find", {"name": "x", "json": "3"}, "argument 'json': input should be a valid integer, got '3'"),
        (
            "number",
            {"whole": True, "real": 1, "kind": "a"},
            "argument 'whole': input should be a valid integer",
        ),
        (
            "number",
            {"whole": 1.5, "real": 1, "kind": "a"},
            "argument 'whole': input should be a valid integer",
        ),
        ("number", {"whole": 1, "real": "1", "kind": "a"}, "argument 'real': input should be a valid number"),
        (
            "number",
            {"whole": 1, "real": 1, "kind": "c"},
            "argument 'kind': input should be 'a' or 'b', got 'c'",
        ),
        ("book", {"day": "someday", "items": []}, "argument 'day': input should be a valid date"),
        ("book", {"day": "2024-05-01", "items": [{}]}, "missing argument 'items.0.name'"),
        ("hand_over", {"why": "so"}, "unknown argument 'why' (it takes: no arguments)"),
        ("find", "not json", "find: the arguments are not a JSON object"),
        ("fnd", {}, "there is no tool 'fnd'; the tools are find, book, keep, number, broken, hand_over"),
        ("__init__", {}, "there is no tool '__init__'"),
        ("_take", {"slot": ["items", "x"]}, "there is no tool '_take'"),
        ("digest", {}, "there is no tool 'digest'"),
        ("", {}, "there is no tool ''"),
    ],
)
def test_wrong_calls_are_told_what_is_allowed(name: str, arguments: Any, message: str) -> None:
    desk = open_desk()
    before = desk.digest()
    result = desk.call(name, arguments)
    assert result.failed
    assert not result.ends
    assert result.text.startswith("Error: ")
    assert message in result.text
    assert desk.digest() == before


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HUGE = "x" * 10_000_000


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("find", {HUGE: 1}),
        ("find", {"name": [HUGE]}),
        ("find", {str(number): 1 for number in range(50_000)}),
        ("find", {"name": "\ud800"}),
        ("find", {"\ud800": "x"}),
        ("book", {"day": "2024-05-01", "items": nest(100_000)}),
        ("book", {"day": "2024-05-01", "items": nest(500)}),
        ("book", {"day": "2024-05-01", "items": [], "sizes": {"a": "\ud800"}}),
        ("number", {"whole": float("nan"), "real": 1, "kind": "a"}),
        ("number", {"whole": 10**400, "real": float("nan"), "kind": HUGE}),
        (HUGE, {}),
        ("\ud800", {}),
    ],
)
def test_monstrous_arguments_come_back_as_short_errors(name: str, arguments: dict[str, Any]) -> None:
    result = open_desk().call(name, arguments)
    assert result.failed
    assert len(result.text) < 2000
    result.text.encode()


def test_large_arguments_are_fine_where_they_are_right() -> None:
    assert open_desk().call("find", {"name": HUGE}).text.startswith("xxx")
    assert open_desk().call("keep", {"words": ["x"] * 100_000, "more": nest(50)}).text == "2"


def test_a_tool_cannot_change_what_the_speaker_said() -> None:
    desk = open_desk()
    given = {"words": ["a"], "more": ["b"]}
    assert desk.call("keep", given).text == "2"
    assert given == {"words": ["a"], "more": ["b"]}


def test_a_result_that_cannot_be_written_down_is_the_domains_mistake() -> None:
    with pytest.raises(DomainError, match="a object cannot be written as JSON"):
        open_desk().call("broken", {})


def test_a_tool_may_end_the_conversation() -> None:
    assert open_desk().call("hand_over", {}).ends
    assert not open_desk().call("hand_over", {"x": 1}).ends


def no_docstring(self: Any, name: str) -> str:
    return name


def untyped(self: Any, name) -> str:  # type: ignore[no-untyped-def]
    """Do."""
    return name


def starred(self: Any, *names: str) -> str:
    """Do."""
    return names[0]


def positional(self: Any, name: str, /) -> str:
    """Do."""
    return name


def describes_too_much(self: Any, name: str) -> str:
    """Do.

    Args:
        nmae: Misspelt.
    """
    return name


async def waits(self: Any, name: str) -> str:
    """Do."""
    return name


def alone() -> str:
    """Do."""
    return ""


def unknown_type(self: Any, name: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Do."""
    return name


def no_json(self: Any, run: Callable[[], int]) -> str:
    """Do."""
    return ""


def no_schema(self: Any, thing: threading_lock) -> str:  # type: ignore[valid-type]
    """Do."""
    return ""


threading_lock = type(__import__("threading").Lock())


def fine(self: Any) -> str:
    """Do."""
    return ""


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("act", no_docstring, "tool Broken.act needs a docstring"),
        ("act", untyped, "tool Broken.act, parameter 'name' needs a type hint"),
        ("act", starred, "parameter 'names': .* have no schema; name each"),
        ("act", positional, "parameter 'name': .* have no schema"),
        ("act", describes_too_much, r"describes parameters it does not have: \['nmae'\]"),
        ("act", waits, "a tool is a plain method, not async"),
        ("act", alone, "takes `self` first"),
        ("act", unknown_type, "name 'Missing' is not defined"),
        ("act", no_json, "no finite JSON schema"),
        ("act", no_schema, "a type that has no JSON form"),
        ("_act", fine, "may not begin with an underscore"),
        ("update", fine, "every Database has a method 'update'"),
        ("act", staticmethod(fine), "a tool is a plain method"),
    ],
)
def test_mistakes_of_authors_are_told_where_they_are(name: str, method: Any, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        type("Broken", (Database,), {name: tool(method)})


def test_the_mark_wants_a_method() -> None:
    with pytest.raises(DomainError, match="marks methods of a Database, not a str"):
        tool("cancel")  # type: ignore[type-var]


class Quiet(Desk):
    def find(self, name: str) -> str:  # type: ignore[override]
        return name

    @tool
    def number(self, whole: int) -> int:  # type: ignore[override]
        """Take one number."""
        return whole


def test_a_subclass_replaces_and_takes_away_tools() -> None:
    assert "find" not in Quiet.tools
    assert list(Quiet.tools["number"].parameters["properties"]) == ["whole"]
    assert "find" in Desk.tools


def test_a_refusal_is_an_error_with_its_text() -> None:
    with pytest.raises(ToolError, match="missing argument 'name'"):
        Desk.load({}).do("find", {})


def test_docstrings_are_read_in_sections() -> None:
    text = "Do it.\n\nAt once.\n\nArgs:\n    a: One.\n    b (int): Two: three.\n\nReturns:\n    c: no."
    assert parse_docstring(text) == ("Do it.\n\nAt once.", {"a": "One.", "b": "Two: three."})
