"""Databases: tables of typed records that many conversations share and each may change for itself.

A `Database` object is a shared, never-changing `Store` plus its own changes. Opening one copies nothing; a
record is copied when it is touched. A tool works on drafts: they become the database's own when the tool
returns, and are dropped when it raises, so a refused call leaves everything as it was.
"""

# Table and Database are one mechanism in two classes.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from trialogue.errors import DomainError, RecordNotFound
from trialogue.world.tools import Tool, clean_schema, find_tools, shorten
from trialogue.world.values import (
    GONE,
    MODULUS,
    Change,
    Slot,
    canonical,
    compare,
    copy_value,
    hash_entry,
    is_same,
    merge,
    to_json_value,
)

__all__ = ["Change", "Database", "Record", "Store", "Table", "canonical"]

_UNTOUCHED: Any = object()
_NONE: frozenset[Slot] = frozenset()
_ODD: Any = object()


class Record(BaseModel):
    """A typed record of a table. Assigning to a field is checked against its type."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


R = TypeVar("R")
T = TypeVar("T")


class Store:
    """An immutable set of records, possibly laid over another: what environments share."""

    def __init__(
        self, entries: dict[Slot, Any], below: Store | None = None, moved: frozenset[Slot] = _NONE
    ) -> None:
        self.entries = entries
        self.below = below
        self.moved = moved
        """Slots that were removed and added again: they stand behind the others of their table."""
        self._hashes: dict[Slot, int] = {}
        self._indexes: dict[tuple[str, str], dict[Any, list[str]]] = {}
        self._positions: dict[str, dict[str, int]] = {}
        self._sum: int | None = None

    def get(self, slot: Slot) -> Any:
        """The value at a slot, `GONE` where there is none."""
        value = self.entries.get(slot, _UNTOUCHED)
        if value is _UNTOUCHED:
            return GONE if self.below is None else self.below.get(slot)
        return value

    def positions(self, table: str) -> dict[str, int]:
        """The keys of a table in order, with numbers that grow along it."""
        found = self._positions.get(table)
        if found is None:
            found = self._positions[table] = self._find_positions(table)
        return found

    def _find_positions(self, table: str) -> dict[str, int]:
        below = self.below.positions(table) if self.below is not None else {}
        own = [slot for slot in self.entries if slot[0] == table]
        if all(
            slot[1] in below and slot not in self.moved and self.entries[slot] is not GONE for slot in own
        ):
            return below  # nothing added or removed: one list of keys serves both
        found = dict(below)
        number = next(reversed(below.values()), -1)
        for slot in own:
            if self.entries[slot] is GONE or slot in self.moved:
                found.pop(slot[1], None)
            if self.entries[slot] is not GONE and slot[1] not in found:
                number += 1
                found[slot[1]] = number
        return found

    def find(self, table: str, field: str, value: Any) -> list[str]:
        """Keys of all records whose field equals a value, and perhaps of others: an index is built on
        first use. Values that cannot be looked up are left to the caller's own comparison."""
        try:
            hash(value)
        except TypeError:
            return list(self.positions(table))
        index = self._indexes.get((table, field))
        if index is None:
            index = self._indexes[table, field] = self._build_index(table, field)
        found = index.get(value, []) + index.get(_ODD, [])
        if self.below is not None:
            below = self.below.find(table, field, value)
            return [key for key in below if (table, key) not in self.entries] + found
        return found

    def _build_index(self, table: str, field: str) -> dict[Any, list[str]]:
        index: dict[Any, list[str]] = {}
        for (name, key), record in self.entries.items():
            if name != table or record is GONE:
                continue
            value = read_field(table, record, field)
            try:
                index.setdefault(value, []).append(key)
            except TypeError:
                index.setdefault(_ODD, []).append(key)
        return index

    def hash(self, slot: Slot) -> int:
        """A number for the record at a slot, 0 where there is none."""
        if self.below is not None and slot not in self.entries:
            return self.below.hash(slot)
        known = self._hashes.get(slot)
        if known is None:
            known = self._hashes[slot] = hash_entry(slot, self.entries.get(slot, GONE))
        return known

    @property
    def sum(self) -> int:
        """The sum of all records' numbers: computed once for a store, however many share it."""
        if self._sum is None:
            total = sum(self.hash(slot) for slot in self.entries)
            if self.below is not None:
                total += self.below.sum - sum(self.below.hash(slot) for slot in self.entries)
            self._sum = total % MODULUS
        return self._sum


def read_field(table: str, record: Any, field: str) -> Any:
    """A field of a record, typed or plain."""
    if isinstance(record, dict):
        return cast("dict[str, Any]", record).get(field)
    try:
        return getattr(record, field)
    except AttributeError:
        raise DomainError(f"the records of '{table}' have no field '{field}'") from None


class Table(Generic[R]):
    """The records of one kind, by key. `table[key]` hands out a record that may be changed in place."""

    __slots__ = ("_database", "_name")

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name

    def __getitem__(self, key: str) -> R:
        found = self._database._take((self._name, key))
        if found is GONE:
            raise RecordNotFound(f"{self._name} has no '{shorten(key)}'")
        return found

    def get(self, key: str) -> R | None:
        """The record, or None."""
        found = self._database._take((self._name, key))
        return None if found is GONE else found

    def __setitem__(self, key: str, record: R) -> None:
        if not isinstance(cast("Any", key), str):
            raise DomainError(f"keys of the table '{self._name}' are texts, not {type(key).__name__}")
        self._database._put((self._name, key), record)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise RecordNotFound(f"{self._name} has no '{shorten(key)}'")
        self._database._put((self._name, key), GONE)

    def __contains__(self, key: object) -> bool:
        return self._database._peek((self._name, cast("str", key))) is not GONE

    def __iter__(self) -> Iterator[str]:
        positions = self._database._store.positions(self._name)
        displaced, late = self._database._arrange(self._name)
        if not displaced and not late:
            return iter(positions)
        return iter([*(key for key in positions if key not in displaced), *late])

    def __len__(self) -> int:
        displaced, late = self._database._arrange(self._name)
        return len(self._database._store.positions(self._name)) - len(displaced) + len(late)

    def values(self) -> Iterator[R]:
        """Every record, each copied as it is handed out; `where` and `find` copy only what they find."""
        return (self[key] for key in list(self))

    def items(self) -> Iterator[tuple[str, R]]:
        """Every key and record."""
        return ((key, self[key]) for key in list(self))

    def where(self, **fields: Any) -> list[R]:
        """The records whose fields equal these values, found through an index, in the table's order."""
        return [self[key] for key in self._keys_where(fields)]

    def find(self, test: Callable[[R], bool]) -> list[R]:
        """The records that pass a test. The test must not change what it is shown."""
        return [self[key] for key in self if test(self._database._peek((self._name, key)))]

    def _keys_where(self, fields: dict[str, Any]) -> list[str]:
        if not fields:
            return list(self)
        name, peek = self._name, self._database._peek
        store = self._database._store
        touched = self._database._touched(name)
        field, wanted = next(iter(fields.items()))
        keys = [key for key in store.find(name, field, wanted) if key not in touched]
        keys += touched
        found: list[str] = []
        for key in keys:
            record = peek((name, key))
            if record is not GONE and all(
                read_field(name, record, field) == value for field, value in fields.items()
            ):
                found.append(key)
        if len(found) > 1:
            _, late = self._database._arrange(name)
            behind = {key: number for number, key in enumerate(late)}
            positions = store.positions(name)
            found.sort(key=lambda key: (1, behind[key]) if key in behind else (0, positions[key]))
        return found


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

    __slots__ = ("_changes", "_draft_moved", "_drafts", "_moved", "_store")

    tools: ClassVar[dict[str, Tool]] = {}
    _adapters: ClassVar[dict[str, TypeAdapter[Any]]] = {}
    _tables: ClassVar[frozenset[str]] = frozenset()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._adapters, cls._defaults = dict(cls._adapters), dict(cls._defaults)
        for name, hint in _find_hints(cls).items():
            if hasattr(Database, name):
                raise DomainError(
                    f"{cls.__name__}.{name}: every Database has a '{name}'; choose another name"
                )
            is_table = get_origin(hint) is Table
            try:
                cls._adapters[name] = TypeAdapter(get_args(hint)[0] if is_table else hint)
            except PydanticUserError as error:
                allowed = "a table is written Table[YourRecord]; a field needs a type pydantic knows"
                raise DomainError(f"{cls.__name__}.{name}: {allowed} ({error.message})") from None
            if name in vars(cls):
                cls._defaults[name] = vars(cls)[name]
            setattr(cls, name, _TableField(name) if is_table else _ValueField(name))
            cls._tables = cls._tables | {name} if is_table else cls._tables - {name}
        cls.tools = find_tools(cls)
        taken = sorted(name for name in cls.tools if hasattr(Database, name))
        if taken:
            raise DomainError(f"{cls.__name__}: every Database has a method '{taken[0]}'; rename the tool")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changes: dict[Slot, Any] = {}
        self._moved: frozenset[Slot] = _NONE
        self._drafts: dict[Slot, Any] | None = None
        self._draft_moved: frozenset[Slot] = _NONE

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN and name not in self._adapters:
            raise DomainError(
                f"{type(self).__name__} has no field '{name}': what a tool keeps must be a declared field "
                "or a record of a table, or it would escape comparison"
            )
        object.__setattr__(self, name, value)

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Self:
        """Validate plain data (`{table: {key: record}}`) into the base that all environments share."""
        data = {**copy_value(cls._defaults), **_to_mapping(data, f"{cls.__name__} data")}
        missing = sorted(set(cls._adapters) - set(data) - cls._tables)
        if missing:
            raise DomainError(f"{cls.__name__}: the data lacks {missing}")
        entries = {slot: cls._validate(slot, value) for slot, value in cls._read(data)}
        return cls(Store(copy_value(entries)))

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Iterator[tuple[Slot, Any]]:
        """Each value of plain data with its slot."""
        for name, content in data.items():
            if name not in cls._adapters:
                raise DomainError(f"{cls.__name__} has no '{name}'; it has {sorted(cls._adapters)}")
            if name in cls._tables:
                for key, record in _to_mapping(content, f"{cls.__name__} data, {name}").items():
                    yield (name, key), record
            else:
                yield ("", name), content

    @classmethod
    def _validate(cls, slot: Slot, value: Any) -> Any:
        name, key = slot
        try:
            return cls._adapters[name or key].validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join([name, key, *(str(part) for part in first["loc"])]).strip(".")
            raise DomainError(f"{cls.__name__} data, {where}: {first['msg']}") from None

    @classmethod
    def schemas(cls) -> dict[str, Any]:
        """The JSON schema of each field: of a table, that of its records."""
        known = _SCHEMAS.get(cls)
        if known is None:
            found = {name: adapter.json_schema() for name, adapter in cls._adapters.items()}
            known = _SCHEMAS[cls] = {name: clean_schema(schema) for name, schema in found.items()}
        return known

    def fork(self) -> Self:
        """A database of its own over the present state of this one."""
        return self.__class__(self.freeze())

    def reopen(self) -> Self:
        """A database of its own over the store this one was opened from."""
        return self.__class__(self._store)

    def freeze(self) -> Store:
        """The present state as a store to share."""
        return Store(copy_value(self._changes), self._store, self._moved) if self._changes else self._store

    def update(self, data: Mapping[str, Any]) -> None:
        """Lay data over the database: fields of known records are replaced, new records added."""
        for slot, part in self._read(_to_mapping(data, f"{type(self).__name__} data")):
            known = self._peek(slot)
            self._put(slot, copy_value(part) if known is GONE else merge(copy_value(known), copy_value(part)))

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
            shared = self._peek(slot)
            value = copy_value(shared)
            if value is not shared:  # what cannot change in place needs no copy
                layer[slot] = value
        return value

    def _put(self, slot: Slot, value: Any) -> None:
        layer = self._changes if self._drafts is None else self._drafts
        if value is not GONE:
            value = self._validate(slot, value)
            known = slot in self._changes or slot in layer or self._store.get(slot) is not GONE
            if known and self._peek(slot) is GONE:  # added again: behind the others, as in a dict
                layer.pop(slot, None)
                if self._drafts is None:
                    self._moved |= {slot}
                else:
                    self._draft_moved |= {slot}
        layer[slot] = value

    def _touched(self, table: str) -> dict[str, None]:
        """Keys of a table this database has values of its own for."""
        slots = (*self._changes, *(self._drafts or ()))
        return {slot[1]: None for slot in slots if slot[0] == table}

    def _arrange(self, table: str) -> tuple[set[str], dict[str, None]]:
        """Which keys of the store's table no longer stand where they did, and which follow behind."""
        displaced: set[str] = set()
        late: dict[str, None] = {}
        if not self._changes and not self._drafts:
            return displaced, late
        positions = self._store.positions(table)
        for layer, moved in ((self._changes, self._moved), (self._drafts or {}, self._draft_moved)):
            for slot, value in layer.items():
                name, key = slot
                if name != table or (key in positions and value is not GONE and slot not in moved):
                    continue
                if key in positions:
                    displaced.add(key)
                if value is GONE or slot in moved:
                    late.pop(key, None)
                if value is not GONE:
                    late[key] = None
        return displaced, late

    # -- transactions -----------------------------------------------------------------------------------

    def transact(self, action: Callable[[], T], writes: bool = True, what: str = "it") -> T:
        """Work on copies that count only when the action ends well, and only if it may write."""
        if self._drafts is not None:
            return action()  # within another: they count together
        drafts: dict[Slot, Any] = {}
        self._drafts = drafts
        try:
            result = action()
            moved = self._draft_moved
        finally:
            self._drafts = None
            self._draft_moved = _NONE
        if writes:
            for slot in moved:
                self._changes.pop(slot, None)
            self._moved |= moved
            self._changes.update(drafts)
        elif drafts and any(self._is_changed(slot, value) for slot, value in drafts.items()):
            raise DomainError(f"{what} changed the database but is not marked writes=True")
        return result

    def _is_changed(self, slot: Slot, value: Any) -> bool:
        return not is_same(self._peek(slot), value)

    def do(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call any public method by name, for the set-up calls and assertions of a task."""
        known = self.tools.get(name)
        if known is not None:
            return self.transact(lambda: known.run(self, dict(arguments)))
        method = None if name.startswith("_") or hasattr(Database, name) else getattr(type(self), name, None)
        if not callable(method):
            raise DomainError(f"{type(self).__name__} has no method '{name}'")
        try:
            return self.transact(lambda: method(self, **copy_value(dict(arguments))))
        except TypeError as error:
            raise DomainError(f"{type(self).__name__}.{name}: {error}") from error

    def save(self) -> tuple[dict[Slot, Any], frozenset[Slot]]:
        """The present state, for `restore`. Transactions never change a value in place, so this is cheap."""
        return dict(self._changes), self._moved

    def restore(self, state: tuple[dict[Slot, Any], frozenset[Slot]]) -> None:
        """Take everything back that was done since `save`."""
        self._changes, self._moved = state

    # -- comparing --------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Equal digests mean equal databases; the cost is that of the records touched."""
        total = self._store.sum
        for slot, value in self._changes.items():
            total += hash_entry(slot, value) - self._store.hash(slot)
        return f"{total % MODULUS:064x}"

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


_OWN = frozenset(Database.__slots__)
_SCHEMAS: WeakKeyDictionary[type[Database], dict[str, Any]] = WeakKeyDictionary()


def _find_hints(cls: type) -> dict[str, Any]:
    """The fields a class itself declares, with their types."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise DomainError(f"{cls.__name__}: {error}; define record types at the top of a module") from None
    own = vars(cls).get("__annotations__", {})
    return {
        name: hints[name]
        for name in own
        if not name.startswith("_") and get_origin(hints[name]) is not ClassVar
    }


def _to_mapping(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise DomainError(f"{where}: an object with names is needed, not {type(content).__name__}")
    return cast("Mapping[str, Any]", content)
