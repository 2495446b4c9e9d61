"""The databases of TAU-bench, TAU2 and ACEBench: their tools take unchecked arguments.

These benchmarks check nothing before a tool runs, keep the changes that a tool made before it failed, and
compare whole databases by one hash. Records are plain dictionaries, normalized once when they are read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from trialogue.errors import DomainError
from trialogue.world.database import GONE, Database, Slot, Store
from trialogue.world.tools import Tool, parse_docstring

Plain = dict[str, Any]
"""A record as plain data."""
ToolKind = Literal["read", "write", "generic"]

_TEXTS: WeakKeyDictionary[Store, dict[Slot, str]] = WeakKeyDictionary()
"""The text of every record of a store that many databases share. It is hashed often and changes rarely."""
_WHOLE = "*"
"""Key of a whole table among these texts."""


def to_official_text(value: Any) -> str:
    """JSON with sorted keys, as the benchmarks hash it."""
    return json.dumps(value, sort_keys=True, default=str)


class Toolkit(Database):
    """A database whose tools return any exception as their answer, as in TAU-bench."""

    shapes: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """The type of each table's records, or of a single value. Reading fills in defaults."""
    notes: ClassVar[Mapping[str, str]] = {}
    """Descriptions of parameters by name, for tools whose docstring has none."""
    generic: ClassVar[frozenset[str]] = frozenset({"calculate", "transfer_to_human_agents"})
    """Tools that neither read nor write records."""

    @classmethod
    def _validate(cls, slot: Slot, value: Any) -> Any:
        name = slot[0] or slot[1]
        shape = cls.shapes.get(name)
        try:
            return value if shape is None else cls.to_record(shape.model_validate(value))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join([*(part for part in slot if part), *(str(part) for part in first["loc"])])
            raise DomainError(f"{cls.__name__} data, {where}: {first['msg']}") from None

    @classmethod
    def to_record(cls, value: BaseModel) -> Plain:
        """A checked record as plain data."""
        return value.model_dump()

    def copy_state(self, prepared: Any) -> None:
        """Copy the state that a set-up left outside the records."""

    def do(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a set-up function or assertion of a task. Changes made before a failure are kept."""
        method = None if name.startswith("_") or hasattr(Toolkit, name) else getattr(type(self), name, None)
        if not callable(method):
            raise DomainError(f"{type(self).__name__} has no method '{name}'")
        return method(self, **arguments)

    # -- one record --------------------------------------------------------------------------------------

    def look(self, table: str, key: str) -> Any:
        """A record for reading only, because it may be shared. None if there is none."""
        found = self._peek((table, key))
        return None if found is GONE else found

    def touch(self, table: str, key: str) -> Any:
        """A record to change in place."""
        return self._take((table, key))

    def lay(self, table: str, key: str, record: Any) -> None:
        """Store a record without checking it."""
        self._changes[table, key] = record

    def keys_where(self, table: str, field: str, value: Any) -> list[str]:
        """Keys of the records whose field equals a value, in the table's order. The field must never
        change."""
        try:
            return self._store.find(table, field, value)
        except TypeError:  # an unhashable value equals no key
            return []

    @staticmethod
    def show(result: Any) -> str:
        """The text that the caller gets for a result that is not text."""
        return json.dumps(result)

    # -- comparing as the benchmarks do ------------------------------------------------------------------

    def to_official(self) -> Plain:
        """The whole database in the shape that is hashed."""
        return self.to_data()

    @staticmethod
    def write(value: Any) -> str:
        """One value as hashed text."""
        return to_official_text(value)

    @staticmethod
    def bind(parts: list[tuple[str, str]]) -> str:
        """Named parts joined to one value of the hashed text."""
        return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in parts)}}}"

    def hash_whole(self) -> str:
        """The benchmark's hash of a small database."""
        return hashlib.sha256(to_official_text(self.to_official()).encode()).hexdigest()

    def official_hash(self) -> str:
        """The benchmark's own SHA-256 of the whole database.

        Only the records that this database has touched are serialized again.
        """
        layers = [self._changes]
        root = self._store
        while root.below is not None:
            layers.append(root.entries)
            root = root.below
        known = _TEXTS.get(root)
        if known is None:
            known = _TEXTS[root] = {slot: self.write(value) for slot, value in root.entries.items()}
        changed = {slot[0] or slot[1] for layer in layers for slot in layer}
        parts: list[tuple[str, str]] = []
        for name in sorted(self._adapters):
            whole = _WHOLE, name
            if name not in changed and whole in known:
                parts.append((name, known[whole]))
                continue
            parts.append((name, self._to_part(name, root, known)))
            if name not in changed:
                known[whole] = parts[-1][1]
        return hashlib.sha256(self.bind(parts).encode()).hexdigest()

    def _to_part(self, name: str, root: Store, known: Mapping[Slot, str]) -> str:
        """One table, or one single value, as hashed text."""
        if name not in self._tables:
            return self.write(self._peek(("", name)))
        records: list[tuple[str, str]] = []
        for key in sorted(getattr(self, name)):
            slot = name, key
            value = self._peek(slot)
            text = known[slot] if root.entries.get(slot) is value else self.write(value)
            records.append((key, text))
        return self.bind(records)


def kind_of(toolkit: type[Toolkit], name: str) -> ToolKind:
    """The benchmark's class of a tool."""
    if name in toolkit.generic:
        return "generic"
    return "write" if toolkit.tools[name].writes else "read"


@cache
def to_raw_tools(toolkit: type[Toolkit]) -> Mapping[str, Tool]:
    """The tools of a toolkit as its benchmark offers them: schemas contain titles and definitions, and
    arguments are not checked before the method runs."""
    return MappingProxyType({name: _to_raw_tool(toolkit, tool) for name, tool in toolkit.tools.items()})


def _to_raw_tool(toolkit: type[Toolkit], tool: Tool) -> Tool:
    method: Callable[..., Any] = getattr(toolkit, tool.name)
    hints = get_type_hints(method)
    _, notes = parse_docstring(inspect.getdoc(method) or "")
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        default: Any = ... if parameter.default is parameter.empty else parameter.default
        note = notes.get(parameter.name) or toolkit.notes.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], FieldInfo(default=default, description=note))
    parameters = create_model("parameters", **fields).model_json_schema()

    def run(database: Any, given: dict[str, Any]) -> Any:
        return method(database, **given)

    return Tool(tool.name, tool.description, parameters, run, tool.writes, tool.ends)
