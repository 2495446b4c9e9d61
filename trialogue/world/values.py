"""Values of a database: copying, comparing and writing down records and JSON-like data. Pure functions."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple, cast
from uuid import UUID

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from trialogue.errors import DomainError

Slot = tuple[str, str]
"""Where a value stands: (table, key), or ("", field) for a field that is no table."""


class _Gone:
    def __repr__(self) -> str:
        return "GONE"


GONE: Any = _Gone()
"""Stands where there is no value, or none any more."""
_UNCHANGING = frozenset(
    {str, int, float, bool, bytes, type(None), _Gone, date, datetime, time, timedelta, Decimal, UUID}
)
_set = object.__setattr__


class Change(NamedTuple):
    """One difference between two states, such as `orders.W1.status: pending → cancelled`."""

    path: str
    before: Any
    after: Any


def clean_text(text: str) -> str:
    """Text that can be written to a file: halves of characters, which no encoding has, are marked."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def copy_value(value: Any) -> Any:
    """A deep copy of JSON-like values and records, many times faster than `copy.deepcopy`."""
    kind = value.__class__
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return {key: copy_value(inner) for key, inner in value.items()}
    if kind is list:
        return [copy_value(inner) for inner in value]
    if kind in _field_names or isinstance(value, BaseModel):
        twin = kind.__new__(kind)
        _set(twin, "__dict__", {name: copy_value(inner) for name, inner in _own_fields(value).items()})
        _set(twin, "__pydantic_fields_set__", value.__pydantic_fields_set__.copy())
        _set(twin, "__pydantic_extra__", copy_value(value.__pydantic_extra__))
        _set(twin, "__pydantic_private__", copy_value(value.__pydantic_private__))
        return twin
    return deepcopy(value)


_field_names: dict[type, tuple[str, ...]] = {}
"""The fields of each kind of record met so far: pydantic takes its time to tell, and to tell a record."""


def _own_fields(model: BaseModel) -> dict[str, Any]:
    kind = model.__class__
    names = _field_names.get(kind)
    if names is None:
        names = _field_names[kind] = tuple(kind.model_fields)
    fields = cast("dict[str, Any]", model.__dict__)
    if len(fields) != len(names):  # cached properties are kept there too
        fields = {name: fields[name] for name in names if name in fields}
    return fields


def to_fields(model: BaseModel) -> dict[str, Any]:
    """What a record holds, without what it merely keeps at hand."""
    fields = _own_fields(model)
    return {**fields, **model.__pydantic_extra__} if model.__pydantic_extra__ else fields


def is_record(value: Any) -> bool:
    return value.__class__ in _field_names or isinstance(value, BaseModel)


def to_plain(value: Any) -> Any:
    """One level of a value that JSON does not know."""
    if is_record(value):
        return to_fields(value)
    if isinstance(value, set | frozenset):
        items = cast("set[Any]", value)
        try:
            return sorted(items)
        except TypeError:
            return sorted(items, key=canonical)
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, ValueError) as error:
        raise DomainError(f"a {type(value).__name__} cannot be written as JSON: {error}") from None


def to_json_value(value: Any) -> Any:
    """A value as plain JSON data that shares nothing with it."""
    if isinstance(value, Enum):
        return to_json_value(value.value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {to_json_key(key): to_json_value(inner) for key, inner in items}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in cast("list[Any]", value)]
    return to_json_value(to_plain(value))


def to_json_key(key: Any) -> str:
    """The name JSON gives to a key of a dictionary."""
    plain = to_json_value(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def to_json(value: Any, sort_keys: bool = False) -> str:
    """Compact JSON of any value a database or a tool's result may hold."""
    try:
        return _encode_sorted(value) if sort_keys else _encode(value)
    except TypeError:  # a dictionary with keys JSON has no name for, such as dates
        plain = to_json_value(value)
        return _encode_sorted(plain) if sort_keys else _encode(plain)
    except (ValueError, RecursionError) as error:
        raise DomainError(f"a {type(value).__name__} cannot be written as JSON: {error}") from None


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=to_plain).encode
_encode_sorted = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=to_plain, sort_keys=True
).encode


def canonical(value: Any) -> str:
    """One text per value: equal values have equal texts whatever the order of their keys."""
    return to_json(value, sort_keys=True)


MODULUS = 1 << 256


def hash_entry(slot: Slot, value: Any) -> int:
    """A 256-bit number for one record. Numbers add up to the digest of a whole database, in any order."""
    if value is GONE:
        return 0
    text = f"{slot[0]}\0{slot[1]}\0{canonical(value)}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")


def merge(known: Any, part: Any) -> Any:
    """Lay plain data over a value, field by field."""
    known = to_fields(known) if isinstance(known, BaseModel) else known
    if not isinstance(known, dict) or not isinstance(part, dict):
        return part
    merged = dict(cast("dict[str, Any]", known))
    for key, inner in cast("dict[str, Any]", part).items():
        merged[key] = merge(merged[key], inner) if key in merged else inner
    return merged


def is_same(before: Any, after: Any) -> bool:
    """Whether two values have the same canonical text, which is only written where a look does not tell."""
    if before is after:
        return True
    if before is GONE or after is GONE:
        return False
    kind = before.__class__
    if kind is after.__class__:
        if kind is str or kind is int or kind is bool:
            return before == after
        if kind is list:
            return len(before) == len(after) and all(map(is_same, before, after))
        if kind is dict:
            return before.keys() == after.keys() and all(is_same(before[key], after[key]) for key in before)
        if kind in _field_names:
            return is_same(to_fields(before), to_fields(after))
    return canonical(before) == canonical(after)


def compare(path: str, before: Any, after: Any, changes: list[Change]) -> None:
    """Append what differs between two values, as deep in them as possible."""
    if before is after:
        return
    before = to_fields(before) if is_record(before) else before
    after = to_fields(after) if is_record(after) else after
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast("dict[Any, Any]", before), cast("dict[Any, Any]", after)
        for key in list(old) + [key for key in new if key not in old]:
            compare(f"{path}.{to_json_key(key)}", old.get(key, GONE), new.get(key, GONE), changes)
    elif not is_same(before, after):
        was = None if before is GONE else to_json_value(before)
        changes.append(Change(path, was, None if after is GONE else to_json_value(after)))
