"""Scenarios whose tools are simulated by a language model. Each task has its own small database.

The model answers a call from the current database and returns the changes as a patch. The patch is checked
against the schema and applied to the database, so that later answers can be checked against it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Union, cast

from pydantic import ConfigDict, Field, ValidationError, create_model, model_validator

from trialogue.errors import ConfigError, DomainError, ModelError, ToolError
from trialogue.messages import Frozen, Message
from trialogue.reading import find_object, from_json, read_table
from trialogue.task import Side, Task
from trialogue.trajectory import Trajectory, Turn, Usage
from trialogue.world.database import Database, Record, Table
from trialogue.world.domain import Domain, Environment, TaskSource, from_file, read_file
from trialogue.world.tools import Arguments, Tool, ToolResult, shorten, to_text
from trialogue.world.values import canonical, clean_text

FILE = "scenario.json"
Patch = dict[str, dict[str, dict[str, Any] | None]]
"""Table → key → changed fields, or null to remove the record."""
NEW = "*"
"""In expected changes: a record whose key is not known in advance. Further ones are *2, *3, …"""

# -- the schema --------------------------------------------------------------------------------------------

_TYPES: dict[str, Any] = {"text": str, "integer": int, "number": float, "boolean": bool, "texts": list[str]}


class FieldShape(Frozen):
    """A field of a record, or a parameter of a tool."""

    type: Literal["text", "integer", "number", "boolean", "texts"] = "text"
    description: str = ""
    choices: tuple[str, ...] = ()
    """The only texts allowed."""
    optional: bool = False

    @model_validator(mode="after")
    def _choices_are_texts(self) -> FieldShape:
        if self.choices and self.type not in ("text", "texts"):
            raise ValueError(f"only texts have choices, not type {self.type}")
        return self

    def to_hint(self) -> Any:
        kind: Any = Literal[self.choices] if self.choices else _TYPES[self.type]
        if self.choices and self.type == "texts":
            kind = list[kind]
        return Union[kind, None] if self.optional else kind  # noqa: UP007 - a Literal made on the spot


class TableShape(Frozen):
    """A table of records."""

    description: str = ""
    fields: dict[str, FieldShape] = Field(min_length=1)


class ToolShape(Frozen):
    """A drafted tool."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")
    description: str = Field(min_length=1)
    writes: bool = False
    ends: bool = False
    parameters: dict[str, FieldShape] = {}


class Scenario(Frozen):
    """The contents of `scenario.json`."""

    summary: str = Field(min_length=1)
    tables: dict[str, TableShape] = Field(min_length=1)
    tools: tuple[ToolShape, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_can_be_used(self) -> Scenario:
        names = [tool.name for tool in self.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"there are two tools {twice[0]}")
        fields = [(f"table {table}", name) for table, shape in self.tables.items() for name in shape.fields]
        places = [("a table", table) for table in self.tables]
        places += [(f"tool {tool.name}", name) for tool in self.tools for name in tool.parameters]
        for place, name in (*places, *fields):
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"{place}: '{name}' is not a valid name; use small letters, digits and _")
        taken = sorted(name for name in (*self.tables, *names) if hasattr(Simulated, name))
        if taken:
            raise ValueError(f"'{taken[0]}' is reserved; choose another name")
        for place, name in fields:
            if hasattr(Record, name):
                raise ValueError(f"{place}: a field may not be called '{name}'")
        return self


class Simulated(Database):
    """A database whose tools are answered by a model. Its tables come from a scenario."""

    def lay(self, changes: Mapping[str, Any]) -> None:
        """Apply a patch to the database. If any part is wrong, nothing is changed."""
        self.transact(lambda: self._lay(changes))

    def _lay(self, changes: Mapping[str, Any]) -> None:
        for name, records in changes.items():
            if name not in self._tables or not isinstance(records, Mapping):
                raise DomainError(
                    f"changes: there is no table '{name}'; the tables are {sorted(self._tables)}"
                )
            table: Table[Any] = getattr(self, name)
            for key, part in cast("Mapping[str, Any]", records).items():
                if part is None:
                    if key not in table:
                        raise DomainError(f"changes: {name} has no '{shorten(key)}' to remove")
                    del table[key]
                elif not isinstance(part, Mapping):
                    raise DomainError(f"changes: {name}.{shorten(key)} is neither fields nor null")
                else:
                    self.update({name: {key: part}})

    def is_reached(self, changes: dict[str, Any]) -> bool:
        """Whether exactly these changes were made to the database."""
        fixed = {
            name: {key: part for key, part in records.items() if not _is_new(key)}
            for name, records in changes.items()
        }
        fresh = self.reopen()
        fresh.lay(fixed)
        wanted, found = fresh.to_data(), self.to_data()
        for name in self._tables:
            before: dict[str, Any] = wanted[name]
            after: dict[str, Any] = found[name]
            if any(key not in after or canonical(after[key]) != canonical(before[key]) for key in before):
                return False
            added = [record for key, record in after.items() if key not in before]
            specified = [part for key, part in changes.get(name, {}).items() if _is_new(key)]
            if len(added) != len(specified):
                return False
            for part in specified:
                match = next((record for record in added if _fits(record, part)), None)
                if match is None:
                    return False
                added.remove(match)
        return True


def _is_new(key: str) -> bool:
    return key.startswith(NEW)


def _fits(record: dict[str, Any], part: dict[str, Any]) -> bool:
    return all(canonical(record.get(name)) == canonical(value) for name, value in part.items())


def make_database_class(scenario: Scenario) -> type[Simulated]:
    """The database class of a scenario, with its tools."""
    hints: dict[str, Any] = {}
    for name, table in scenario.tables.items():
        fields: dict[str, Any] = {
            field: (
                shape.to_hint(),
                Field(default=None if shape.optional else ..., description=shape.description or None),
            )
            for field, shape in table.fields.items()
        }
        record = create_model(f"{name}_record", __base__=Record, **fields)
        hints[name] = Table[record]
    database = cast(
        "type[Simulated]", type("Scenario", (Simulated,), {"__annotations__": hints, "__slots__": ()})
    )
    database.tools = {tool.name: _to_tool(tool) for tool in scenario.tools}
    return database


def _to_tool(shape: ToolShape) -> Tool:
    hints = {name: parameter.to_hint() for name, parameter in shape.parameters.items()}
    fields: dict[str, Any] = {
        f"field_{number}": (
            hints[name],
            Field(
                default=None if parameter.optional else ...,
                alias=name,
                description=parameter.description or None,
            ),
        )
        for number, (name, parameter) in enumerate(shape.parameters.items())
    }
    model = create_model(shape.name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    arguments = Arguments(shape.name, model, hints)
    return Tool(
        shape.name,
        shape.description,
        arguments.schema,
        lambda database, given: arguments.validate(given),
        shape.writes,
        shape.ends,
    )


# -- the model that answers --------------------------------------------------------------------------------

REPAIRS = 2
"""Number of further attempts after an unusable answer."""

INSTRUCTIONS: str = read_table(__file__, "simulated.toml")["instructions"]


class SimulatedAnswer(NamedTuple):
    """The result and the changes of a call, as the model reports them."""

    result: ToolResult
    changes: Patch


def read_answer(text: str, tool: Tool, database: Simulated) -> SimulatedAnswer:
    """Read an answer and apply its changes to the database. Raise a `DomainError` if it cannot be used."""
    found = find_object(text)
    try:
        value: Any = from_json(found) if found else None
    except (ValueError, RecursionError) as error:
        raise DomainError(f"that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DomainError("that is not a JSON object")
    answer = cast("dict[str, Any]", value)
    changes: Any = answer.get("changes") or {}
    if answer.get("error"):
        if changes:
            raise DomainError("a tool that refuses changes nothing")
        return SimulatedAnswer(ToolResult(clean_text(f"Error: {answer['error']}"), True), {})
    if "result" not in answer:
        raise DomainError('there is neither "result" nor "error"')
    if not isinstance(changes, dict):
        raise DomainError('"changes" is not an object')
    if changes and not tool.writes:
        raise DomainError(f"{tool.name} only reads, so it changes nothing")
    database.lay(cast("Patch", changes))
    shown = clean_text(to_text(answer["result"]))
    return SimulatedAnswer(
        ToolResult(shown, False, tool.ends, cast("Patch", changes)), cast("Patch", changes)
    )


@dataclass(frozen=True, eq=False)
class SimulatedDomain(Domain):
    """A domain whose tools are answered by `tool_model`."""

    scenario: Scenario = field(kw_only=True)

    def open(self, task: Task) -> SimulatedEnvironment:
        return SimulatedEnvironment(self, super().open(task).prepared)


class SimulatedEnvironment(Environment):
    """The database of one conversation and the model that answers from it."""

    __slots__ = ()

    remote: ClassVar[bool] = True

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> Any:
        tools = self.tools if side == "agent" else self.user_tools
        if name not in tools or isinstance(arguments, str):
            return super().call(name, arguments, side)
        try:
            tools[name].run(self.database, arguments)  # checks the arguments
        except ToolError as error:
            return ToolResult(clean_text(f"Error: {error}"), True)
        return self._ask(tools[name], arguments)

    async def _ask(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        make = self.domain.tool_model
        if make is None:
            raise ConfigError(
                f"the tools of {self.domain.name} are simulated; name the model: simulator.model=openai:NAME"
            )
        database = cast("Simulated", self.database)
        tables = json.dumps(database.schemas(), ensure_ascii=False)
        summary = cast("SimulatedDomain", self.domain).scenario.summary
        system = INSTRUCTIONS.format(summary=summary, tables=tables)
        state = json.dumps(database.to_data(), ensure_ascii=False)
        schema = json.dumps(tool.schema["function"], ensure_ascii=False)
        given = json.dumps(arguments, ensure_ascii=False)
        asked = f"# Database\n{state}\n\n# Tool\n{schema}\n\n# Call\n{tool.name} {given}"
        turns = [_say("system", system), _say("user", asked)]
        problem = ""
        billed: Usage | None = None
        for _ in range(REPAIRS + 1):
            try:
                reply = await make(self.task, 0).reply(turns, [])
            except ModelError as error:
                raise ModelError(f"the simulator: {error}", "infrastructure") from error
            if reply.usage is not None:
                billed = reply.usage if billed is None else billed + reply.usage
            try:
                return read_answer(reply.content, tool, database).result._replace(usage=billed)
            except DomainError as error:
                problem = str(error)
                turns += [
                    _say("assistant", reply.content or "(nothing)"),
                    _say("user", f"{problem}. Answer again."),
                ]
        raise DomainError(f"the simulator has no usable answer to {tool.name}: {problem}")

    def reopen(self) -> SimulatedEnvironment:
        return SimulatedEnvironment(cast("SimulatedDomain", self.domain), self.prepared)

    def retrace(self, trajectory: Trajectory) -> Iterator[Step]:
        """The recorded calls, one by one, with the database before and after each. A patch that cannot
        be applied raises a `DomainError`."""
        database = cast("Simulated", self.prepared.database.reopen())
        waiting = [(call, turn.side) for turn in trajectory.turns for call in turn.message.tool_calls]
        for number, turn in enumerate(trajectory.turns):
            if turn.message.role != "tool" or not waiting:
                continue
            call, _ = waiting.pop(0)
            before = database.to_data()
            database.lay(turn.changes)
            yield Step(number, call.name, call.arguments, turn, before, database.to_data())


class Step(NamedTuple):
    """One recorded call of a simulated tool."""

    turn: int
    name: str
    arguments: Any
    observed: Turn
    before: dict[str, Any]
    after: dict[str, Any]


def _say(role: Literal["system", "user", "assistant"], text: str) -> Turn:
    side: Side = "user" if role == "assistant" else "agent"
    return Turn(side=side, message=Message(role=role, content=text))


# -- the folder --------------------------------------------------------------------------------------------


def load_scenario(beside: str | Path, **more: Any) -> SimulatedDomain:
    """The domain of a folder with `scenario.json`, `policy.md` and `tasks.jsonl`."""
    folder = Path(beside).resolve()
    folder = folder if folder.is_dir() else folder.parent
    name = str(more.pop("name", folder.name))
    scenario = read_scenario(read_file(folder / FILE), str(folder / FILE))
    more.setdefault("reference", str(Path(beside).resolve()))
    return make_domain(name, scenario, read_file(folder / "policy.md"), from_file(folder, name), **more)


def make_domain(
    name: str, scenario: Scenario, policy: str, tasks: TaskSource, **more: Any
) -> SimulatedDomain:
    return SimulatedDomain(
        name=name,
        policy=policy,
        database=make_database_class(scenario).load({}),
        tasks=tasks,
        source="simulated",
        scenario=scenario,
        **more,
    )


def read_scenario(text: str, where: str) -> Scenario:
    try:
        return Scenario.model_validate_json(text)
    except ValidationError as error:
        raise DomainError(f"{where}: {explain_draft(error)}") from None


def explain_draft(error: ValidationError) -> str:
    """The first few problems of drafted data."""
    lines: list[str] = []
    for problem in error.errors(include_url=False)[:5]:
        place = ".".join(shorten(part) for part in problem["loc"])
        lines.append(f"{place}: {problem['msg']}" if place else problem["msg"])
    return "; ".join(lines)
