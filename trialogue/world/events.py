"""The events of a conversation as policy rules see them: what the agent said, heard and called, in order.

They are read from a trajectory's turns alone, so any recorded conversation can be judged by them. Whatever
several rules need is worked out once for the conversation, when the first of them asks.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from pydantic_core import from_json

from trialogue.trajectory import Turn
from trialogue.world.texts import Text, lazy, squash

Record = dict[str, Any]
Shown = tuple[int, str, Record, list[Any]]
"""A record that a tool has shown: place of the call, id in small letters, the record, its plain values."""
Kind = Literal["said", "heard", "called"]
_DIGIT = re.compile(r"\d")
_IDS = ("_id", "_number")
LONGEST = 16_000
"""Characters of one text that rules read."""


class Event(Text):
    """Something the agent said, heard from the user, or called."""

    name = ""
    """The tool that was called."""
    arguments: Mapping[str, Any] = {}
    failed = False

    def __init__(self, place: int, turn: int, kind: Kind, text: str) -> None:
        self.place = place
        self.turn = turn
        """Place among the conversation's turns: of the message, or of the message with the call."""
        self.kind = kind
        self.text = text if len(text) <= LONGEST or kind == "called" else text[:LONGEST]
        """The words, or the result of the call."""

    @lazy
    def data(self) -> Any:
        """The result of a call, read as JSON where it is JSON."""
        for read in (from_json, json.loads):  # the first is faster, the second reads a little more
            try:
                return read(self.text)
            except (ValueError, RecursionError):
                continue
        return self.text


class Message:
    """How many calls one message of the agent made, and whether it spoke besides."""

    __slots__ = ("calls", "has_words", "turn")

    def __init__(self, turn: int, calls: int, has_words: bool) -> None:
        self.turn = turn
        self.calls = calls
        self.has_words = has_words


class Events:
    """All events of a conversation, the records its tools have shown, and the policy it is held under."""

    def __init__(self, turns: Sequence[Turn], policy: str = "") -> None:
        self.turns = turns
        self.policy = policy
        self.all: list[Event] = []
        self.said: list[Event] = []
        self.heard: list[Event] = []
        self.called: list[Event] = []
        self.done: dict[str, list[Event]] = {}
        """The successful calls of each tool."""
        self.findings: dict[Any, Any] = {}
        """What rules have worked out about the whole conversation, to be looked up by other rules."""
        waiting: dict[str, tuple[int, str, Any]] = {}
        for number, turn in enumerate(turns):
            message = turn.message.__dict__  # pydantic takes five times as long for an attribute
            if message["role"] == "tool":
                if turn.side != "user":
                    call = waiting.pop(message["tool_call_id"] or "", (number, "", {}))
                    self._add_call(*call, message["content"], turn.failed)
            elif message["tool_calls"]:
                if turn.side != "user":
                    for call in message["tool_calls"]:
                        waiting[call.id] = (number, call.name, call.arguments)
            elif turn.side != "user":
                if message["content"]:
                    self.said.append(self._add(number, "said", message["content"]))
            elif message["role"] == "user":
                self.heard.append(self._add(number, "heard", message["content"]))

    def _add(self, turn: int, kind: Kind, text: str) -> Event:
        event = Event(len(self.all), turn, kind, text)
        self.all.append(event)
        return event

    def _add_call(self, turn: int, name: str, arguments: Any, result: str, failed: bool) -> None:
        event = self._add(turn, "called", result)
        event.name = name
        event.arguments = cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
        self.called.append(event)
        if failed:
            event.failed = True
        else:
            self.done.setdefault(name, []).append(event)

    @lazy
    def messages(self) -> list[Message]:
        """The agent's messages with calls."""
        return [
            Message(number, len(turn.message.tool_calls), bool(turn.message.content.strip()))
            for number, turn in enumerate(self.turns)
            if turn.side != "user" and turn.message.role != "tool" and turn.message.tool_calls
        ]

    @lazy
    def vocabulary(self) -> frozenset[str]:
        """All words that the agent said, in small letters."""
        return frozenset[str]().union(*[said.form.words for said in self.said])

    @lazy
    def faultless(self) -> list[tuple[Event, str]]:
        """What a rule has looked at that finds nothing wrong with what the agent said."""
        return [(said, "") for said in self.said]

    # -- what the user said -------------------------------------------------------------------------------

    def find_last_heard(self, event: Event) -> Event | None:
        """The user's last words before an event."""
        return self._find_last("heard", event)

    def find_last_said(self, event: Event) -> Event | None:
        """The agent's last words before an event."""
        return self._find_last("said", event)

    def _find_last(self, kind: Kind, event: Event) -> Event | None:
        for place in range(event.place - 1, -1, -1):
            if self.all[place].kind == kind:
                return self.all[place]
        return None

    def was_heard(self, value: Any, event: Event) -> bool:
        """Whether the user said this value before an event."""
        return is_stated(value, *self.find_heard(event))

    def find_heard(self, event: Event) -> list[Event]:
        """What the user said before an event, the last words first."""
        return [item for item in reversed(self.heard) if item.place < event.place]

    @lazy
    def given(self) -> list[Event]:
        """What the agent has learned: what the user said and what tools answered."""
        return [item for item in self.all if item.kind != "said"]

    # -- what tools have shown ----------------------------------------------------------------------------

    @lazy
    def shown(self) -> list[Shown]:
        """Every record with an id that a tool has shown, in order."""
        shown: list[Shown] = []
        for call in self.called:
            if not call.failed:
                _collect(call.data, "", call.place, shown)
        return shown

    @lazy
    def shown_by_id(self) -> dict[str, list[Shown]]:
        """The same by their ids."""
        known: dict[str, list[Shown]] = {}
        for item in self.shown:
            known.setdefault(item[1], []).append(item)
        return known

    def find_shown(self, event: Event) -> list[Shown]:
        """What tools had shown before an event."""
        return self.shown[: bisect_left(self.shown, event.place, key=_find_place)]

    def find_records(self, event: Event) -> Iterator[tuple[str, Record]]:
        """Every record with an id that a tool had shown before an event, by its id in small letters."""
        return ((identity, record) for _, identity, record, _ in self.find_shown(event))

    def find_record(self, identity: Any, event: Event) -> Record | None:
        """A record as the tools had last shown it before an event."""
        found: Record | None = None
        for place, _, record, _ in self.shown_by_id.get(str(identity).lower(), ()):
            if place < event.place:
                found = record if found is None else {**found, **record}
        return found

    def was_shown(self, pattern: str, event: Event) -> bool:
        """Whether any result before an event matched a pattern for small letters."""
        return any(
            item.place < event.place and not item.failed and re.search(pattern, item.lowered)
            for item in self.called
        )


def _find_place(shown: Shown) -> int:
    return shown[0]


def _collect(data: Any, key: str, place: int, shown: list[Shown]) -> list[Any]:
    """Add the records inside a result with their ids: the key they stand under where it has a digit, else the
    first field that is or ends in an id. An item of an order goes by its own id, not by its product's.
    Returns the plain values."""
    leaves: list[Any] = []
    if type(data) is list:
        for item in cast("list[Any]", data):
            if type(item) is dict or type(item) is list:
                leaves += _collect(item, "", place, shown)
            else:
                leaves.append(item)
    elif type(data) is dict:
        record = cast("Record", data)
        identity = key if key and _DIGIT.search(key) else record.get("item_id", "")
        for field, value in record.items():
            if type(value) is dict:
                leaves += _collect(value, field, place, shown)
            elif type(value) is list:
                leaves += _collect(value, "", place, shown)
            else:
                leaves.append(value)
                if not identity and (field == "id" or field.endswith(_IDS)) and isinstance(value, str):
                    identity = value
        if identity:
            shown.append((place, str(identity).lower(), record, leaves))
    return leaves


def find_leaves(value: Any) -> list[Any]:
    """The plain values inside a value."""
    if isinstance(value, dict):
        inside: Iterable[Any] = cast("dict[str, Any]", value).values()
    elif isinstance(value, list | tuple):
        inside = cast("Iterable[Any]", value)
    else:
        return [value]
    return [leaf for inner in inside for leaf in find_leaves(inner)]


def is_stated(value: Any, *texts: Text) -> bool:
    """Whether one of some texts gives a value. Yes or no, and nothing at all, need not be given."""
    if not texts:
        return False
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return any(float(value) in text.numbers for text in texts)
    wanted = str(value).lower()
    for text in texts:
        if wanted in text.lowered:
            return True
    plain = squash(wanted)
    return any(plain in text.squashed for text in texts)
