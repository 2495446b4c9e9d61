"""What the teacher has learned in a conversation, and whether that is enough to tell which value is meant.

A value that a tool returned is known. It is determined only if nothing else could be meant: the user said
it, it is the only one of its kind, or its record holds something the user said that no other record holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from trialogue.talk.evidence import Evidence, find_identity, to_pieces
from trialogue.world.domain import Environment

KEY = "*"
"""The field of a record that stands for the key it is listed under."""
_DEPTH = 3
"""Records looked through to tell which one is meant."""
_LONG = 3
"""Characters that a word needs to single out a record."""


def to_text(value: Any) -> str:
    """A leaf in the form that values are compared in."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return " ".join(str(value).lower().split())


@dataclass(slots=True, eq=False)
class Seen:
    """A record that a tool has shown."""

    fields: dict[str, list[Any]]
    """Its own plain values, by field; a list of plain values counts as several."""
    above: Seen | None
    below: list[Seen] = field(default_factory=lambda: [])
    _around: set[str] | None = None

    @property
    def identity(self) -> str | None:
        key = self.fields.get(KEY)
        if key:
            return to_text(key[0])
        plain = {name: values[0] for name, values in self.fields.items() if len(values) == 1}
        return find_identity(plain)

    def find_around(self) -> set[str]:
        """Its own values, those inside it, and those of the records it is part of."""
        if self._around is not None:
            return self._around
        found = self._around = {
            to_text(value) for seen in self._walk() for values in seen.fields.values() for value in values
        }
        above = self.above
        while above is not None:
            found.update(to_text(value) for values in above.fields.values() for value in values)
            above = above.above
        return found

    def _walk(self) -> Iterator[Seen]:
        yield self
        for inner in self.below:
            yield from inner._walk()


class Knowledge:
    """What was said and shown so far."""

    def __init__(self, environment: Environment) -> None:
        self.evidence = Evidence()
        self.evidence.add_text(environment.policy)
        for tool in environment.tools.values():
            self.evidence.add_text(tool.description)
        self.heard = Evidence()
        """The user's words alone."""
        self.words = ""
        self.records: list[Seen] = []
        self.texts: list[str] = []
        self._pieces = " "

    def hear(self, text: str) -> None:
        """Take in what the user said."""
        self.evidence.add_text(text)
        self.heard.add_text(text)
        self.words += f"\n{text}"
        self._pieces += " ".join(to_pieces(text)) + " "

    def see(self, text: str) -> None:
        """Take in what a tool returned. A record seen before is replaced."""
        self.evidence.add_result(text)
        self.texts.append(text)
        for seen in read_records(text):
            self._add(seen)

    def _add(self, seen: Seen) -> None:
        identity = seen.identity
        if identity is not None:
            self.records = [
                known
                for known in self.records
                if known.identity != identity
                or known.above is not None
                or known.fields.keys() != seen.fields.keys()
            ]
        self.records.append(seen)

    def preview(self, text: str) -> Knowledge:
        """What would be known after another result. The original is left as it is."""
        other = object.__new__(Knowledge)
        other.evidence, other.heard, other.words = self.evidence, self.heard, self.words
        other._pieces, other.texts = self._pieces, [*self.texts, text]
        other.records = list(self.records)
        for seen in read_records(text):
            other._add(seen)
        return other

    # -- asking -------------------------------------------------------------------------------------------

    def names(self, value: Any) -> bool:
        """Whether the user said this value, word for word."""
        text = to_text(value)
        pieces = to_pieces(text)
        if not pieces or isinstance(value, bool):
            return False
        if isinstance(value, int | float):
            return self.heard.holds(value)
        return f" {' '.join(pieces)} " in self._pieces

    def find_leaves(self, wanted: Callable[[str], bool]) -> list[Any]:
        """Plain values of the records seen, the latest first."""
        found = [
            value
            for seen in reversed(self.records)
            for values in seen.fields.values()
            for value in values
            if wanted(to_text(value))
        ]
        return list({to_text(value): value for value in found}.values())

    def is_looked_up(self, key: str) -> bool:
        """Whether a tool has shown the record that is called this."""
        text = to_text(key)
        return any(seen.identity == text and (len(seen.fields) > 1 or seen.below) for seen in self.records)

    def is_determined(self, value: Any, given: Sequence[Any] = (), depth: int = _DEPTH) -> bool:
        """Whether nothing else could be meant by this value; `given` is what else is known to be meant."""
        if self.names(value):
            return True
        text = to_text(value)
        meant = {to_text(item) for item in given}
        listed: set[str] = set()
        places: list[tuple[Seen, str]] = []
        for seen in self.records:
            for name, values in seen.fields.items():
                own = {to_text(item) for item in values}
                if text in own and len(own) == 1:
                    places.append((seen, name))
                elif text in own:
                    listed |= own
        return any(
            self._is_singled_out(seen, name, text, meant, depth, listed - {text})
            and self._is_own(seen, text, given, depth)
            for seen, name in places
        )

    def _is_own(self, seen: Seen, text: str, given: Sequence[Any], depth: int) -> bool:
        """Whether the record itself is the one that is meant, where it is one of several in a list."""
        identity = seen.identity
        if identity is None or identity == text or not depth:
            return True
        is_listed = any(
            len(values) > 1 and any(to_text(item) == identity for item in values)
            for other in self.records
            for values in other.fields.values()
        )
        return not is_listed or self.is_determined(identity, given, depth - 1)

    def _is_singled_out(
        self, seen: Seen, name: str, text: str, meant: set[str], depth: int, listed: set[str] | None = None
    ) -> bool:
        others = [
            other
            for other in self.records
            if other is not seen
            and name in other.fields
            and (name != KEY or other.fields.keys() == seen.fields.keys())
            and any(to_text(value) != text for value in other.fields[name])
        ]
        if not others and not listed:
            return True
        elsewhere = [other.find_around() for other in others]
        for word in seen.find_around():
            if word == text or any(word in around for around in elsewhere):
                continue
            if word in meant or (len(word) >= _LONG and self.names(word)):
                return True
            if (
                depth
                and len(word) >= 2
                and not word.isalpha()
                and self._is_known_by(word, text, meant, depth)
            ):
                return True
        return False

    def _is_known_by(self, word: str, text: str, meant: set[str], depth: int) -> bool:
        """Whether a reference to another record says which one is meant."""
        for seen in self.records:
            if seen.identity == word and text not in seen.find_around():
                name = next(key for key, values in seen.fields.items() if to_text(values[0]) == word)
                if self._is_singled_out(seen, name, word, meant, depth - 1):
                    return True
        return False

    def find_siblings(self, value: Any) -> list[Any]:
        """The values listed beside a value, itself included, in their order."""
        text = to_text(value)
        for seen in self.records:
            for name, values in seen.fields.items():
                if any(to_text(item) == text for item in values):
                    if len(values) > 1:
                        return values
                    beside = [
                        other.fields[name][0]
                        for other in self.records
                        if name in other.fields and other.fields.keys() == seen.fields.keys()
                    ]
                    return list({to_text(item): item for item in beside}.values())
        return [value]


def read_records(text: str) -> Iterator[Seen]:
    """The records in a tool's result, those inside others after them."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return
    yield from _walk(value, None, None)


def _walk(value: Any, key: str | None, above: Seen | None) -> Iterator[Seen]:
    if isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _walk(inner, None, above)
    if not isinstance(value, dict):
        return
    record = cast("dict[str, Any]", value)
    fields: dict[str, list[Any]] = {}
    if key is not None and re.search(r"\d", key):
        fields[KEY] = [key]
    inside: list[tuple[str, Any]] = []
    for name, inner in record.items():
        if isinstance(inner, list) and not any(
            isinstance(item, dict | list) for item in cast("list[Any]", inner)
        ):
            fields[name] = cast("list[Any]", inner)
        elif isinstance(inner, dict | list):
            inside.append((name, cast("Any", inner)))
        elif inner is not None:
            fields[name] = [inner]
    fields = {name: values for name, values in fields.items() if values}
    is_map = not fields and all(isinstance(inner, dict) for _, inner in inside)
    seen = above if is_map else Seen(fields, above)
    if seen is not None and not is_map:
        if above is not None:
            above.below.append(seen)
        yield seen
    for name, inner in inside:
        yield from _walk(inner, name, seen)
