"""The events of a conversation as policy rules see them: what the agent said, heard and called, in order.

They are read from a trajectory's turns alone, so any recorded conversation can be judged by them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from trialogue.trajectory import Turn
from trialogue.world.speech import split_sentences

Record = dict[str, Any]
_WORD = re.compile(r"[a-z]+")
_JUNK = re.compile(r"[\W_]+")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")
_DIGIT = re.compile(r"\d")
_IDS = ("_id", "_number")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_UNREAD = object()
LONGEST = 16_000
"""Characters of one text that rules read."""
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)


class Event:
    """Something the agent said, heard from the user, or called."""

    __slots__ = (
        *("_data", "_lowered", "_squashed", "_statements", "_vocabulary"),
        *("arguments", "failed", "kind", "name", "place", "text", "turn"),
    )

    def __init__(self, place: int, turn: int, kind: Literal["said", "heard", "called"], text: str) -> None:
        self.place = place
        self.turn = turn
        """Place among the conversation's turns: of the message, or of the message with the call."""
        self.kind = kind
        self.text = text if len(text) <= LONGEST or kind == "called" else text[:LONGEST]
        """The words, or the result of the call."""
        self.name = ""
        self.arguments: dict[str, Any] = {}
        self.failed = False
        self._data: Any = _UNREAD
        self._lowered = ""
        self._squashed = ""
        self._statements: list[str] | None = None
        self._vocabulary: frozenset[str] | None = None

    @property
    def data(self) -> Any:
        """The result of a call, read as JSON where it is JSON."""
        if self._data is _UNREAD:
            try:
                self._data = json.loads(self.text)
            except (ValueError, RecursionError):
                self._data = self.text
        return self._data

    @property
    def lowered(self) -> str:
        """The text in small letters, with plain apostrophes."""
        if not self._lowered:
            self._lowered = self.text.lower().replace("\u2019", "'")
        return self._lowered

    @property
    def statements(self) -> list[str]:
        """The sentences that are no questions, in small letters."""
        if self._statements is None:
            self._statements = [part for part in split_sentences(self.lowered) if not part.endswith("?")]
        return self._statements

    @property
    def vocabulary(self) -> frozenset[str]:
        """The words of the text in small letters: a pattern need not be tried where none of its words is."""
        if self._vocabulary is None:
            self._vocabulary = frozenset(_WORD.findall(self.lowered))
        return self._vocabulary

    @property
    def squashed(self) -> str:
        """The text without anything but small letters and digits."""
        if not self._squashed:
            self._squashed = squash(self.text)
        return self._squashed


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
        self.policy = policy
        self.all: list[Event] = []
        self.said: list[Event] = []
        self.heard: list[Event] = []
        self.called: list[Event] = []
        self.messages: list[Message] = []
        self.findings: dict[Any, Any] = {}
        """What rules have worked out about the whole conversation, to be looked up by other rules."""
        self._records: list[tuple[int, str, Record]] | None = None
        waiting: dict[str, tuple[int, str, Any]] = {}
        for number, turn in enumerate(turns):
            message = turn.message
            if turn.side == "user":
                if message.role == "user" and not message.tool_calls:
                    self.heard.append(self._add(number, "heard", message.content))
            elif message.role == "tool":
                place, name, arguments = waiting.pop(message.tool_call_id or "", (number, "", {}))
                event = self._add(place, "called", message.content)
                event.name = name
                event.arguments = arguments if isinstance(arguments, dict) else {}
                event.failed = turn.failed
                self.called.append(event)
            elif message.tool_calls:
                self.messages.append(Message(number, len(message.tool_calls), bool(message.content.strip())))
                for call in message.tool_calls:
                    waiting[call.id] = (number, call.name, call.arguments)
            elif message.content:
                self.said.append(self._add(number, "said", message.content))

    def _add(self, turn: int, kind: Literal["said", "heard", "called"], text: str) -> Event:
        event = Event(len(self.all), turn, kind, text)
        self.all.append(event)
        return event

    # -- what the user said -------------------------------------------------------------------------------

    def find_last_heard(self, event: Event) -> Event | None:
        """The user's last words before an event."""
        return next((item for item in reversed(self.all[: event.place]) if item.kind == "heard"), None)

    def find_last_said(self, event: Event) -> Event | None:
        """The agent's last words before an event."""
        return next((item for item in reversed(self.all[: event.place]) if item.kind == "said"), None)

    def was_heard(self, value: Any, event: Event) -> bool:
        """Whether the user said this value before an event."""
        return any(is_stated(value, item) for item in self.heard if item.place < event.place)

    # -- what tools have shown ----------------------------------------------------------------------------

    def find_records(self, event: Event) -> Iterator[tuple[str, Record]]:
        """Every record with an id that a tool had shown before an event, by its id in small letters."""
        if self._records is None:
            self._records = [
                (call.place, identity, record)
                for call in self.called
                if not call.failed
                for identity, record in find_identified(call.data)
            ]
        for place, identity, record in self._records:
            if place >= event.place:
                return
            yield identity, record

    def find_record(self, identity: Any, event: Event) -> Record | None:
        """A record as the tools had last shown it before an event."""
        wanted = str(identity).lower()
        found: Record | None = None
        for known, record in self.find_records(event):
            if known == wanted:
                found = record if found is None else {**found, **record}
        return found

    def was_shown(self, pattern: str, event: Event) -> bool:
        """Whether any result before an event matched a pattern for small letters."""
        return any(
            item.place < event.place and not item.failed and re.search(pattern, item.lowered)
            for item in self.called
        )


def find_identified(data: Any, key: str = "") -> Iterator[tuple[str, Record]]:
    """The records inside a result with their ids: the key they stand under where it has a digit, else the
    first field that is or ends in an id. An item of an order goes by its own id, not by its product's."""
    if isinstance(data, list):
        for item in cast("list[Any]", data):
            if isinstance(item, dict | list):
                yield from find_identified(item)
    elif isinstance(data, dict):
        record = cast("Record", data)
        identity = key if _DIGIT.search(key) else record.get("item_id", "")
        for field, value in record.items():
            if isinstance(value, dict | list):
                yield from find_identified(value, field if isinstance(value, dict) else "")
            elif not identity and isinstance(value, str) and (field == "id" or field.endswith(_IDS)):
                identity = value
        if identity:
            yield str(identity).lower(), record


def find_leaves(value: Any) -> Iterator[Any]:
    """The plain values inside a value."""
    if isinstance(value, dict):
        for inner in cast("dict[str, Any]", value).values():
            yield from find_leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("Iterable[Any]", value):
            yield from find_leaves(inner)
    else:
        yield value


@lru_cache(maxsize=4096)
def squash(text: str) -> str:
    """A text without anything but small letters and digits, so that "Ann-Lee" is "ann lee"."""
    return _JUNK.sub("", text.lower())


def find_numbers(text: str) -> set[float]:
    """The numbers that a text gives, as digits or small ones as words."""
    plain = _THOUSANDS.sub("", text)
    numbers = {float(number) for number in _NUMBER.findall(plain)}
    words = plain.lower().split()
    return numbers | {float(SMALL.index(word)) for word in words if word in SMALL}


def is_stated(value: Any, event: Event) -> bool:
    """Whether the words of an event give a value. Yes or no, and nothing at all, need not be given."""
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return float(value) in find_numbers(event.text)
    text = str(value).lower()
    return text in event.lowered or squash(text) in event.squashed
