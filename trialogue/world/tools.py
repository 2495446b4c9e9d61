"""Tools: methods of a `Database` marked with `@tool`, with a schema from their type hints and docstring.

Arguments are validated before the method runs; whatever is wrong with them comes back to the speaker as a
`ToolError` that says what is allowed.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from trialogue.errors import DomainError, ToolError
from trialogue.world.values import to_json

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "__trialogue_tool__"
_LOOKS = re.compile(
    r"(?:find|get|list|look|search|read|show|check|verify|identify|calculate)(?:_|$)", re.IGNORECASE
)
"""Names of tools that look something up, whatever they leave behind."""


class ToolResult(NamedTuple):
    """What the speaker sees of a call, and whether the tool refused."""

    text: str
    failed: bool = False
    ends: bool = False
    changes: dict[str, Any] = {}
    """What a simulated tool says it changed."""
    usage: Any = None
    """What asking a model for the result was billed."""


@dataclass(frozen=True)
class Tool:
    """One tool as a model sees it (`name`, `description`, `parameters`) and as the world runs it."""

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[[Any, dict[str, Any]], Any]
    """Takes the database and the arguments; may return an awaitable."""
    writes: bool = False
    ends: bool = False
    """A successful call ends the conversation."""

    @property
    def changes(self) -> bool:
        """Whether a user has to agree to a call: it writes, and neither ends the conversation nor is called
        like a tool that looks something up."""
        return self.writes and not self.ends and not _LOOKS.match(self.name)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The OpenAI function-calling shape."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class _Mark(NamedTuple):
    writes: bool
    ends: bool


@overload
def tool(method: Method, /) -> Method: ...
@overload
def tool(*, writes: bool = False, ends: bool = False) -> Callable[[Method], Method]: ...
def tool(method: Any = None, /, *, writes: bool = False, ends: bool = False) -> Any:
    """Mark a method of a `Database` as a tool.

    `writes=True` lets it change the database; without it a change is an error of the domain.
    `ends=True` makes a successful call the end of the conversation.
    """

    def mark(function: Method) -> Method:
        try:
            setattr(function, _MARK, _Mark(writes, ends))
        except AttributeError:
            raise DomainError(f"@tool marks methods of a Database, not a {type(function).__name__}") from None
        return function

    return mark if method is None else mark(method)


def find_tools(cls: type) -> dict[str, Tool]:
    """The tools of a class, in the order they are written, inherited ones first."""
    found: dict[str, Tool] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            mark = getattr(value, _MARK, None)
            if isinstance(mark, _Mark):
                found[name] = _to_tool(owner, name, value, mark)
            elif name in found:
                del found[name]  # overridden by something that is no tool
    return found


def _to_tool(owner: type, name: str, method: Any, mark: _Mark) -> Tool:
    where = f"tool {owner.__name__}.{name}"
    if not inspect.isfunction(method) or inspect.iscoroutinefunction(method):
        raise DomainError(f"{where}: a tool is a plain method, not async, static or a class method")
    if name.startswith("_"):
        raise DomainError(f"{where}: a tool's name may not begin with an underscore")
    description, notes = parse_docstring(inspect.getdoc(method) or "")
    if not description:
        raise DomainError(f"{where} needs a docstring: it is what the agent reads about it")
    hints = _find_hints(where, method)
    unknown = sorted(set(notes) - set(hints))
    if unknown:
        raise DomainError(f"{where} describes parameters it does not have: {unknown}")
    arguments = Arguments(name, _to_model(where, method, hints, notes), hints)

    def run(database: Any, given: dict[str, Any]) -> Any:
        return method(database, **arguments.validate(given))

    return Tool(name, description, arguments.schema, run, mark.writes, mark.ends)


def _find_hints(where: str, method: Callable[..., Any]) -> dict[str, Any]:
    """The type of each parameter, `self` aside."""
    try:
        hints = get_type_hints(method, include_extras=True)
    except NameError as error:
        raise DomainError(f"{where}: {error}; a type hint must be known at the top of the module") from None
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters.pop(0).kind > inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise DomainError(f"{where}: a tool is a method and takes `self` first")
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise DomainError(f"{where}, parameter '{parameter.name}': *, ** and / have no schema; name each")
        if parameter.name not in hints:
            raise DomainError(f"{where}, parameter '{parameter.name}' needs a type hint")
    return {parameter.name: hints[parameter.name] for parameter in parameters}


def _to_model(
    where: str, method: Callable[..., Any], hints: Mapping[str, Any], notes: Mapping[str, str]
) -> type[BaseModel]:
    """A pydantic model of the parameters. They stand in it under aliases, so any name will do."""
    fields: dict[str, Any] = {}
    for number, (name, hint) in enumerate(hints.items()):
        default = inspect.signature(method).parameters[name].default
        default = ... if default is inspect.Parameter.empty else default
        fields[f"field_{number}"] = (
            hint,
            Field(default=default, alias=name, description=notes.get(name)),
        )
    try:
        return create_model(method.__name__, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    except (PydanticUserError, TypeError) as error:
        raise DomainError(f"{where}: a parameter has a type that has no JSON form: {error}") from None


class Arguments:
    """The parameters of one tool: their schema, and the check of what a speaker gives for them."""

    def __init__(self, name: str, model: type[BaseModel], hints: Mapping[str, Any]) -> None:
        self.name = name
        self.names = tuple(hints)
        try:
            self.schema: dict[str, Any] = clean_schema(model.model_json_schema())
        except (PydanticUserError, RecursionError) as error:
            raise DomainError(f"tool {name}: a parameter has no finite JSON schema: {error}") from None
        self._validator = model.__pydantic_validator__
        self._is_simple = all(is_simple(hint) for hint in hints.values())

    def validate(self, given: dict[str, Any]) -> dict[str, Any]:
        """Check arguments as JSON values, strictly: `"3"` is no integer. Returns them as Python values."""
        try:
            if self._is_simple:
                checked = self._validator.validate_python(given)
            else:
                checked = self._validator.validate_json(json.dumps(given))
        except ValidationError as error:
            raise ToolError(self._explain(error)) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"{self.name}: the arguments are not JSON values ({shorten(error)})") from None
        return dict(zip(self.names, checked.__dict__.values(), strict=True))

    def _explain(self, error: ValidationError) -> str:
        """What is wrong with the arguments and what is allowed, on one line."""
        problems: list[str] = []
        found = error.errors(include_url=False, include_context=False)
        for problem in found[:_SHOWN]:
            where = shorten(".".join(str(part) for part in problem["loc"]))
            if problem["type"] == "missing":
                problems.append(f"missing argument '{where}'")
            elif problem["type"] == "extra_forbidden":
                problems.append(f"unknown argument '{where}'")
            elif where:
                shown = shorten(repr(problem["input"]))
                problems.append(f"argument '{where}': {problem['msg'].lower()}, got {shown}")
            else:
                problems.append(f"the arguments are no usable JSON: {shorten(problem['msg'])}")
        if len(found) > _SHOWN:
            problems.append(f"and {len(found) - _SHOWN} more problems")
        return f"{self.name}: {'; '.join(problems)} (it takes: {', '.join(self.names) or 'no arguments'})"


_SHOWN = 8
"""How many problems of one call are told."""


def is_simple(hint: Any) -> bool:
    """Whether a value of this type is checked alike as JSON and as Python, and comes out as a fresh one."""
    if hint in (str, int, float, bool, type(None)) or get_origin(hint) is Literal:
        return True
    if get_origin(hint) in (list, Union, UnionType):
        return all(is_simple(part) for part in get_args(hint))
    return False


def shorten(value: object) -> str:
    """What a speaker wrote, short enough to be told back."""
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Example|Examples):\s*$")
_ENTRY = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its prose and the notes of its `Args:` section.

    >>> parse_docstring("Cancel it.\\n\\nArgs:\\n    order_id: Such as W1,\\n        not the number.")
    ('Cancel it.', {'order_id': 'Such as W1, not the number.'})
    """
    prose: list[str] = []
    notes: dict[str, str] = {}
    section = ""
    name = ""
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading[1]
        elif not section:
            prose.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            entry = _ENTRY.match(line)
            if entry and (not name or not line.startswith(" " * 8)):
                name = entry[1]
                notes[name] = entry[2].strip()
            elif line.strip() and name:
                notes[name] = f"{notes[name]} {line.strip()}".strip()
    return "\n".join(prose).strip(), notes


def clean_schema(schema: Any, definitions: Mapping[str, Any] | None = None) -> Any:
    """A pydantic schema without titles and with every reference put in place: what models read best."""
    if isinstance(schema, list):
        return [clean_schema(item, definitions) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    shape = cast("dict[str, Any]", schema)
    definitions = cast("Mapping[str, Any]", shape.get("$defs", {})) if definitions is None else definitions
    if "$ref" in shape:
        beside = {key: value for key, value in shape.items() if key != "$ref"}
        return clean_schema({**definitions[shape["$ref"].rsplit("/", 1)[1]], **beside}, definitions)
    clean: dict[str, Any] = {}
    for key, value in shape.items():
        if key == "$defs" or (key == "title" and isinstance(value, str)):
            continue
        if key in ("default", "enum", "const"):
            clean[key] = value
        elif key == "properties":
            clean[key] = {field: clean_schema(inner, definitions) for field, inner in value.items()}
        else:
            clean[key] = clean_schema(value, definitions)
    return clean


def to_text(value: Any) -> str:
    """What the speaker reads of a tool's result: text stays as it is, everything else is compact JSON."""
    return value if isinstance(value, str) else to_json(value)
