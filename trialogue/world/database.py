"""Databases: tables of typed records that many conversations share and each may change for itself.

A `Database` object is a shared, never-changing `Store` plus its own changes. Opening one copies nothing; a
record is copied when it is touched. A tool works on drafts: they become the database's own when the tool
returns, and are dropped when it raises, so a refused call leaves everything as it was.
"""

# Table and Database are one mechanism in two classes.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import (
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from trialogue.errors import DomainError, RecordNotFound
from trialogue.world.tools import Tool, find_tools, to_plain

Slot = tuple[str, str]
"""Where a value stands: (table, key), or ("", field) for a field that is no table."""


class _Gone:
    def __repr__(self) -> str:
        return "GONE"


GONE: Any = _Gone()
"""Stands where a record was removed."""
_UNTOUCHED: Any = object()


class Record(BaseModel):
    """A typed record of a table. Assigning to a field is checked against its type."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


R = TypeVar("R")


class Change(NamedTuple):
    """One difference between two states, such as `orders.W1.status: pending → cancelled`."""

    path: str
    before: Any
    after: Any


class Store:
    """An immutable set of records, possibly laid over another: what environments share."""

    def __init__(self, entries: dict[Slot, Any], below: Store | None = None) -> None:
        self.entries = entries
        self.below = below
        self._hashes: dict[Slot, int] = {}
        self._indexes: dict[tuple[str, str], dict[Any, list[str]]] = {}
        self._keys: dict[str, dict[str, None]] = {}
        self._sum: int | None = None

    def get(self, slot: Slot) -> Any:
        """The value at a slot, `GONE` where there is none."""
        value = self.entries.get(slot, _UNTOUCHED)
        if value is _UNTOUCHED:
            return GONE if self.below is None else self.below.get(slot)
        return value

    def keys(self, table: str) -> dict[str, None]:
        """The keys of a table, in order."""
        found = self._keys.get(table)
        if found is None:
            found = dict(self.below.keys(table)) if self.below else {}
            for (name, key), value in self.entries.items():
                if name == table:
                    if value is GONE:
                        found.pop(key, None)
                    else:
                        found[key] = None
            self._keys[table] = found
        return found

    def find(self, table: str, field: str, value: Any) -> list[str]:
        """Keys of the records whose field equals a value: an index is built on first use."""
        index = self._indexes.get((table, field))
        if index is None:
            index = self._indexes[table, field] = {}
            for (name, key), record in self.entries.items():
                if name == table and record is not GONE:
                    index.setdefault(read_field(record, field), []).append(key)
        found = index.get(value, [])
        if self.below is not None:
            below = [k for k in self.below.find(table, field, value) if (table, k) not in self.entries]
            return below + found
        return found

    def hash(self, slot: Slot) -> int:
        """A number for the record at a slot, 0 where there is none."""
        known = self._hashes.get(slot)
        if known is None:
            known = self._hashes[slot] = hash_entry(slot, self.get(slot))
        return known

    @property
    def sum(self) -> int:
        """The sum of all records' numbers: computed once for a store, however many share it."""
        if self._sum is None:
            if self.below is None:
                self._sum = sum(hash_entry(slot, value) for slot, value in self.entries.items()) % _MODULUS
            else:
                more = sum(
                    hash_entry(slot, value) - self.below.hash(slot) for slot, value in self.entries.items()
                )
                self._sum = (self.below.sum + more) % _MODULUS
        return self._sum


_MODULUS = 1 << 256


def canonical(value: Any) -> str:
    """One text per value: equal values have equal texts whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=to_plain)


def hash_entry(slot: Slot, value: Any) -> int:
    """A 256-bit number for one record. Numbers add up to the digest of a whole database, in any order."""
    if value is GONE:
        return 0
    text = f"{slot[0]}\0{slot[1]}\0{canonical(value)}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")


def read_field(record: Any, field: str) -> Any:
    """A field of a record, typed or plain."""
    return cast("dict[str, Any]", record).get(field) if isinstance(record, dict) else getattr(record, field)


_set = object.__setattr__


def copy_value(value: Any) -> Any:
    """A deep copy of JSON-like values and records, many times faster than `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: copy_value(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [copy_value(inner) for inner in cast("list[Any]", value)]
    if isinstance(value, Record):
        twin = value.__class__.__new__(value.__class__)
        _set(twin, "__dict__", {key: copy_value(inner) for key, inner in value.__dict__.items()})
        _set(twin, "__pydantic_fields_set__", value.__pydantic_fields_set__.copy())
        _set(twin, "__pydantic_extra__", None)
        _set(twin, "__pydantic_private__", None)
        return twin
    return value


class Table(Generic[R]):
    """The records of one kind, by key. `table[key]` hands out a record that may be changed in place."""

    __slots__ = ("_database", "_name")

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name

    def __getitem__(self, key: str) -> R:
        found = self._database._take((self._name, key))
        if found is GONE:
            raise RecordNotFound(f"{self._name} has no '{key}'")
        return found

    def get(self, key: str) -> R | None:
        """The record, or None."""
        found = self._database._take((self._name, key))
        return None if found is GONE else found

    def __setitem__(self, key: str, record: R) -> None:
        self._database._put((self._name, key), record)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise RecordNotFound(f"{self._name} has no '{key}'")
        self._database._put((self._name, key), GONE)

    def __contains__(self, key: object) -> bool:
        return self._database._peek((self._name, cast("str", key))) is not GONE

    def __iter__(self) -> Iterator[str]:
        keys = self._database._store.keys(self._name)
        layers = self._database._layers(self._name)
        if not layers:
            return iter(keys)
        merged = dict(keys)
        for key, value in layers:
            if value is GONE:
                merged.pop(key, None)
            else:
                merged[key] = None
        return iter(merged)

    def __len__(self) -> int:
        if not self._database._layers(self._name):
            return len(self._database._store.keys(self._name))
        return sum(1 for _ in self)

    def values(self) -> Iterator[R]:
        """Every record, each copied as it is handed out; `where` and `find` copy only what they find."""
        return (self[key] for key in list(self))

    def items(self) -> Iterator[tuple[str, R]]:
        """Every key and record."""
        return ((key, self[key]) for key in list(self))

    def where(self, **fields: Any) -> list[R]:
        """The records whose fields equal these values, found through an index."""
        (first, wanted), *rest = fields.items()
        return [self[key] for key in self._keys_where(first, wanted, rest)]

    def find(self, test: Callable[[R], bool]) -> list[R]:
        """The records that pass a test. The test must not change what it is shown."""
        return [self[key] for key in self if test(self._database._peek((self._name, key)))]

    def _keys_where(self, first: str, wanted: Any, rest: list[tuple[str, Any]]) -> list[str]:
        peek = self._database._peek
        changed = dict(self._database._layers(self._name))
        keys = [key for key in self._database._store.find(self._name, first, wanted) if key not in changed]
        keys += [key for key, record in changed.items() if record is not GONE]
        matching = [(first, wanted), *rest]
        return [
            key
            for key in keys
            if all(read_field(peek((self._name, key)), field) == value for field, value in matching)
        ]


class _TableField:
    """Gives `database.orders` its table."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, database: Database | None, owner: type) -> Any:
        return self if database is None else cast("Any", Table(database, self.name))

    def __set__(self, database: Database, value: Any) -> None:
        raise DomainError(f"the table '{self.name}' cannot be replaced; change its records")


class _ValueField:
    """Gives a field that is no table: a record or a plain value of which there is one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, database: Database | None, owner: type) -> Any:
        return self if database is None else database._take(("", self.name))

    def __set__(self, database: Database, value: Any) -> None:
        database._put(("", self.name), value)


class Database:
    """Subclass it with tables and tools; `load` reads data, `fork` opens a copy that costs nothing.

    class Shop(Database):
        orders: Table[Order]

        @tool(writes=True)
        def cancel_order(self, order_id: str) -> Order: ...
    """

    tools: ClassVar[dict[str, Tool]] = {}
    _adapters: ClassVar[dict[str, TypeAdapter[Any]]] = {}
    _tables: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapters = dict(cls._adapters)
        tables = set(cls._tables)
        for name, hint in get_type_hints(cls).items():
            if name.startswith("_") or name in adapters or get_origin(hint) is ClassVar:
                continue
            is_table = get_origin(hint) is Table
            adapters[name] = TypeAdapter(get_args(hint)[0] if is_table else hint)
            setattr(cls, name, _TableField(name) if is_table else _ValueField(name))
            if is_table:
                tables.add(name)
        cls._adapters = adapters
        cls._tables = frozenset(tables)
        cls.tools = find_tools(cls)

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changes: dict[Slot, Any] = {}
        self._drafts: dict[Slot, Any] | None = None

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Self:
        """Validate plain data (`{table: {key: record}}`) into the base that all environments share."""
        unknown = sorted(set(data) - set(cls._adapters))
        if unknown:
            raise DomainError(f"{cls.__name__} has no {unknown}; it has {sorted(cls._adapters)}")
        missing = sorted(set(cls._adapters) - set(data) - cls._tables)
        if missing:
            raise DomainError(f"{cls.__name__}: the data lacks {missing}")
        return cls(Store(dict(cls._read(data))))

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Iterator[tuple[Slot, Any]]:
        for name, content in data.items():
            if name in cls._tables:
                for key, record in content.items():
                    yield (name, key), cls._validate((name, key), record)
            else:
                yield ("", name), cls._validate(("", name), content)

    @classmethod
    def _validate(cls, slot: Slot, value: Any) -> Any:
        name, key = slot
        try:
            return cls._adapters[name or key].validate_python(value)
        except KeyError:
            raise DomainError(
                f"{cls.__name__} has no '{name or key}'; it has {sorted(cls._adapters)}"
            ) from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join([name, key, *(str(part) for part in first["loc"])]).strip(".")
            raise DomainError(f"{cls.__name__} data, {where}: {first['msg']}") from None

    def fork(self) -> Self:
        """A database of its own over the same store. Changes made to this one are laid in underneath."""
        return self.__class__(self.freeze())

    def freeze(self) -> Store:
        """The present state as a store to share."""
        return Store(dict(self._changes), self._store) if self._changes else self._store

    def update(self, data: Mapping[str, Any]) -> None:
        """Lay data over the database: fields of known records are replaced, new records added."""
        for name, content in data.items():
            if name not in self._adapters:
                raise DomainError(f"{type(self).__name__} has no '{name}'; it has {sorted(self._adapters)}")
            slots = [((name, key), part) for key, part in content.items()] if name in self._tables else None
            for slot, part in slots if slots is not None else [(("", name), content)]:
                known = self._peek(slot)
                merged = part if known is GONE else merge(known, part)
                self._changes[slot] = self._validate(slot, merged)

    # -- reading and writing one slot -------------------------------------------------------------------

    def _peek(self, slot: Slot) -> Any:
        """The value for looking only: it may be shared."""
        if self._drafts is not None and slot in self._drafts:
            return self._drafts[slot]
        value = self._changes.get(slot, _UNTOUCHED)
        return self._store.get(slot) if value is _UNTOUCHED else value

    def _take(self, slot: Slot) -> Any:
        """The value for whoever may change it: copied from the layer below on first touch."""
        layer = self._changes if self._drafts is None else self._drafts
        value = layer.get(slot, _UNTOUCHED)
        if value is _UNTOUCHED:
            value = copy_value(self._peek(slot))
            if value is not GONE:
                layer[slot] = value
        return value

    def _put(self, slot: Slot, value: Any) -> None:
        if value is not GONE:
            value = self._validate(slot, value)
        layer = self._changes if self._drafts is None else self._drafts
        layer[slot] = value

    def _layers(self, table: str) -> list[tuple[str, Any]]:
        """What this database has touched of a table, drafts last."""
        touched = [(slot[1], value) for slot, value in self._changes.items() if slot[0] == table]
        if self._drafts:
            touched += [(slot[1], value) for slot, value in self._drafts.items() if slot[0] == table]
        return touched

    @contextmanager
    def draft(self, writes: bool, what: str) -> Generator[None]:
        """Work on copies that count only when the block ends well, and only if it may write."""
        if self._drafts is not None:
            yield  # a tool calling another one: same draft
            return
        self._drafts = {}
        try:
            yield
            drafts = self._drafts
        finally:
            self._drafts = None
        if writes:
            self._changes.update(drafts)
        elif any(value != self._peek(slot) for slot, value in drafts.items()):
            raise DomainError(f"{what} changed the database but is not marked writes=True")

    def run(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """Run one tool as a transaction. Raises `ToolError` where the tool refuses."""
        with self.draft(tool.writes, f"tool '{tool.name}'"):
            return tool.run(self, arguments)

    def do(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call any public method by name, for the set-up calls and assertions of a task."""
        method = None if name.startswith("_") or hasattr(Database, name) else getattr(type(self), name, None)
        if not callable(method):
            raise DomainError(f"{type(self).__name__} has no method '{name}'")
        try:
            with self.draft(True, name):
                return method(self, **arguments)
        except TypeError as error:
            raise DomainError(f"{type(self).__name__}.{name}: {error}") from error

    # -- comparing -----------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Equal digests mean equal databases; the cost is that of the records touched."""
        total = self._store.sum
        for slot, value in self._changes.items():
            total += hash_entry(slot, value) - self._store.hash(slot)
        return f"{total % _MODULUS:064x}"

    def difference(self, other: Self | None = None) -> list[Change]:
        """What became different since the database was opened, or what differs from `other` (before)."""
        slots = dict.fromkeys(self._changes)
        if other is not None:
            if other._store is not self._store:
                raise ValueError("only databases opened from the same store can be compared")
            slots.update(dict.fromkeys(other._changes))
        changes: list[Change] = []
        for slot in sorted(slots):
            before = self._store.get(slot) if other is None else other._peek(slot)
            compare(".".join(part for part in slot if part), before, self._peek(slot), changes)
        return changes

    def to_data(self) -> dict[str, Any]:
        """The whole database as plain data. Costs its whole size."""
        data: dict[str, Any] = {}
        for name in self._adapters:
            if name in self._tables:
                table: Table[Any] = Table(self, name)
                data[name] = {key: to_json_value(self._peek((name, key))) for key in table}
            else:
                data[name] = to_json_value(self._peek(("", name)))
        return data


def to_json_value(value: Any) -> Any:
    """A value as plain JSON data."""
    return json.loads(json.dumps(value, default=to_plain))


def merge(known: Any, part: Any) -> Any:
    """Lay plain data over a value, field by field."""
    if isinstance(known, BaseModel):
        known = known.__dict__
    if not isinstance(known, dict) or not isinstance(part, dict):
        return part
    merged = dict(cast("dict[str, Any]", known))
    for key, value in cast("dict[str, Any]", part).items():
        merged[key] = merge(merged[key], value) if key in merged else value
    return merged


def compare(path: str, before: Any, after: Any, changes: list[Change]) -> None:
    """Append what differs between two values, as deep in them as possible."""
    before = before.__dict__ if isinstance(before, BaseModel) else before
    after = after.__dict__ if isinstance(after, BaseModel) else after
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast("dict[str, Any]", before), cast("dict[str, Any]", after)
        for key in list(old) + [key for key in new if key not in old]:
            compare(f"{path}.{key}", old.get(key, GONE), new.get(key, GONE), changes)
    elif before is GONE or after is GONE or canonical(before) != canonical(after):
        if before is after:
            return
        changes.append(
            Change(
                path,
                None if before is GONE else to_json_value(before),
                None if after is GONE else to_json_value(after),
            )
        )
