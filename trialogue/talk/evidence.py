"""What an agent can know at a point of a conversation: words, numbers, and the records tools have shown."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

from trialogue.trajectory import Turn
from trialogue.world.domain import Environment
from trialogue.world.events import find_leaves

_PIECE = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_BULLET = re.compile(r"^[^\S\n]*\d{1,2}[.)]\s", re.MULTILINE)
_ID = re.compile(r"(?<![\w#@.+-])[\w#@.+-]*\d[\w@.+-]*[\w]|\d")
_WORDS = dict(
    zip(
        (
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
        ),
        range(13),
        strict=True,
    )
)
_SMALL = 10
"""Whole numbers up to this are how many of something there are, and need no source in a sentence."""


def to_pieces(text: str) -> list[str]:
    """The runs of letters and digits in a text, in small letters."""
    return [piece.lower() for piece in _PIECE.findall(text)]


class Evidence:
    """Everything the agent has read so far, indexed to look values up."""

    def __init__(self) -> None:
        self._words: set[str] = set()
        self._joined = " "
        self._numbers: set[float] = set()
        self._records: dict[str, dict[str, Any]] = {}
        self._fields: dict[str, list[Any]] = {}
        self._choices: dict[str, set[str]] = {}
        """Values in small letters that a field was seen to have: what it may be mistaken for."""

    def add_text(self, text: str) -> None:
        plain = _THOUSANDS.sub("", text)
        pieces = to_pieces(plain)
        self._words.update(pieces)
        self._joined += " ".join(pieces) + " "
        self._numbers.update(float(number) for number in _NUMBER.findall(plain))
        self._numbers.update(float(_WORDS[piece]) for piece in pieces if piece in _WORDS)

    def add_result(self, text: str) -> None:
        """A tool's result: its text, and the records in it where it is JSON."""
        self.add_text(text)
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            return
        self._add_records(value, None)

    def _add_records(self, value: Any, above: str | None) -> None:
        if isinstance(value, list):
            for inner in cast("list[Any]", value):
                self._add_records(inner, above)
        if not isinstance(value, dict):
            return
        record = cast("dict[str, Any]", value)
        identity = find_identity(record) or above
        for field, inner in record.items():
            if isinstance(inner, dict | list):
                self._add_records(inner, None)
            elif inner is not None and not isinstance(inner, bool):
                self._fields.setdefault(field, []).append(inner)
                if identity is not None:
                    self._records.setdefault(identity, {})[field] = inner

    def forget(self, arguments: Any) -> None:
        """Something was written to the records that a call names: what was known of them may be no more."""
        for leaf in find_leaves(arguments):
            if isinstance(leaf, str):
                self._records.pop(leaf.lower(), None)

    # -- looking up ---------------------------------------------------------------------------------------

    def holds(self, value: Any) -> bool:
        """Whether a value of an argument was mentioned."""
        if isinstance(value, int | float):
            return float(value) in self._numbers
        text = _THOUSANDS.sub("", str(value))
        pieces = to_pieces(text)
        if not pieces or f" {' '.join(pieces)} " in self._joined:
            return True
        numbers = _NUMBER.findall(text)
        if numbers == [text.strip()]:
            return float(text) in self._numbers
        unknown = self.find_unknown(text)
        if numbers and all(float(number) in self._numbers for number in numbers):
            unknown = [piece for piece in unknown if not piece.isdigit()]
        if any(any(sign.isdigit() for sign in piece) for piece in unknown):
            return False
        return len(text.split()) > 1 and 2 * len(unknown) < len(pieces) and not _is_name(text)

    def find_unknown(self, value: Any) -> list[str]:
        """The words of a value that nobody said."""
        return [piece for piece in to_pieces(str(value)) if piece not in self._words]

    def find_unknown_values(self, text: str) -> list[str]:
        """Numbers and ids in a sentence of the agent that come from nowhere."""
        plain = _THOUSANDS.sub("", _BULLET.sub("", text))
        found: list[str] = []
        for match in _ID.finditer(plain):
            word = match.group().strip(".")
            try:
                number = float(word)
            except ValueError:
                if any(
                    any(sign.isdigit() for sign in piece) and piece not in self._words
                    for piece in to_pieces(word)
                ):
                    found.append(word)
                continue
            small = number.is_integer() and abs(number) <= _SMALL and "." not in word
            if not small and not self._knows(number) and word not in self._words:
                found.append(word)
        return found

    def _knows(self, number: float) -> bool:
        """Whether a number was mentioned, or is the sum or difference of two amounts that were."""
        if number in self._numbers:
            return True
        amounts = [each for each in self._numbers if not each.is_integer()]
        return any(
            round(number - each, 2) in amounts or round(number + each, 2) in amounts for each in amounts
        )

    # -- records ------------------------------------------------------------------------------------------

    def find_records(self, sentence: str) -> list[dict[str, Any]]:
        """The records whose id a sentence names."""
        return [self._records[piece] for piece in to_pieces(sentence) if piece in self._records]

    def find_fields(self, text: str, records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
        """The fields a text names last, with the values they have: in the records named, else anywhere."""
        named = [
            (text.lower().rfind(field.replace("_", " ")), field)
            for field in self._fields
            if re.search(rf"\b{re.escape(field.replace('_', ' '))}\b", text, re.IGNORECASE)
        ]
        if not named:
            return
        field = max(named)[1]
        known = [record[field] for record in records if field in record]
        if not records:
            known = self._fields[field]
        if known:
            yield field.replace("_", " "), known

    def find_swapped(self, value: str, record: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Words that are another record's value of a field, where this record's own value is not said."""
        said = set(to_pieces(value))
        for field, own in record.items():
            if not isinstance(own, str) or len(to_pieces(own)) != 1 or any(sign.isdigit() for sign in own):
                continue
            others = self._choices.get(field, set()) | {
                each.lower() for each in self._fields[field] if isinstance(each, str)
            }
            wrong = [each for each in others if each in said and each != own.lower()]
            if wrong and own.lower() not in said:
                yield field.replace("_", " "), own, wrong[0]

    def add_choices(self, field: str, values: Sequence[str]) -> None:
        """All values a field can have, where the world says so."""
        self._choices.setdefault(field, set()).update(value.lower() for value in values)

    def states(self, sentence: str, value: Any) -> bool:
        """Whether a sentence gives this value."""
        if isinstance(value, int | float):
            numbers = _NUMBER.findall(_THOUSANDS.sub("", sentence))
            return any(float(number) == float(value) for number in numbers)
        return f" {' '.join(to_pieces(str(value)))} " in f" {' '.join(to_pieces(sentence))} "


def find_identity(record: dict[str, Any]) -> str | None:
    """What a record is called by: its first field that is or ends in an id."""
    for field, value in record.items():
        if isinstance(value, str) and (field == "id" or field.endswith(("_id", "number"))):
            return value.lower()
    return None


def is_permitted(value: Any, schema: Any) -> bool:
    """Whether a value needs no source: a boolean, null, one of a list, or the default."""
    if value is None or isinstance(value, bool):
        return True
    if not isinstance(schema, dict):
        return False
    schema = cast("dict[str, Any]", schema)
    if value in schema.get("enum", ()) or value == schema.get("const") or value == schema.get("default"):
        return True
    inner = [schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", ())]
    inner += cast("dict[str, Any]", schema.get("properties", {})).values()
    return any(is_permitted(value, part) for part in inner if isinstance(part, dict))


def find_ungrounded(turns: Sequence[Turn], environment: Environment, free_text: Collection[str]) -> list[str]:
    """Arguments of the agent's calls that neither the user, nor a tool, nor the policy had mentioned."""
    evidence = Evidence()
    evidence.add_text(environment.policy)
    for tool in environment.tools.values():
        evidence.add_text(tool.description)
    found: list[str] = []
    for turn in turns:
        message = turn.message
        if turn.side == "user" and message.role == "user" and not message.tool_calls:
            evidence.add_text(message.content)
        if turn.side == "agent" and message.role == "tool":
            evidence.add_result(message.content)
        for call in message.tool_calls if turn.side == "agent" else ():
            tool = environment.tools.get(call.name)
            shapes: Any = {} if tool is None else tool.parameters.get("properties", {})
            given = call.arguments if isinstance(call.arguments, dict) else {}
            found += [
                f"{call.name}: {name} = {leaf!r}"
                for name, value in given.items()
                for leaf in find_leaves(value)
                if name not in free_text
                and not is_permitted(leaf, shapes.get(name, {}))
                and not evidence.holds(leaf)
            ]
    return found


def _is_name(text: str) -> bool:
    """Whether every word begins with a capital or a digit: a name or address is right or wrong as a whole."""
    words = text.split()
    return all(word[:1].isupper() or word[:1].isdigit() for word in words)
