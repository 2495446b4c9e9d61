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
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from trialogue.errors import DomainError, ToolError

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "__trialogue_tool__"


class ToolResult(NamedTuple):
    """What the speaker sees of a call, and whether the tool refused."""

    text: str
    failed: bool = False
    ends: bool = False


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
        setattr(function, _MARK, _Mark(writes, ends))
        return function

    return mark if method is None else mark(method)


def find_tools(cls: type) -> dict[str, Tool]:
    """The tools of a class, in the order they are written, inherited ones first."""
    found: dict[str, Tool] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            mark = getattr(value, _MARK, None)
            if isinstance(mark, _Mark):
                found[name] = _to_tool(name, value, mark)
            elif name in found:
                del found[name]  # overridden by something that is no tool
    return found


def _to_tool(name: str, method: Callable[..., Any], mark: _Mark) -> Tool:
    if name.startswith("_"):
        raise DomainError(f"tool {method.__qualname__}: a tool's name may not begin with an underscore")
    description, notes = parse_docstring(inspect.getdoc(method) or "")
    if not description:
        raise DomainError(
            f"tool {method.__qualname__} needs a docstring: it is what the agent reads about it"
        )
    arguments = _to_model(name, method, notes)
    fields = tuple(arguments.model_fields)

    def run(database: Any, given: dict[str, Any]) -> Any:
        return method(database, **validate(name, arguments, fields, given))

    return Tool(name, description, clean_schema(arguments.model_json_schema()), run, mark.writes, mark.ends)


def _to_model(name: str, method: Callable[..., Any], notes: Mapping[str, str]) -> type[BaseModel]:
    """A pydantic model of the method's parameters."""
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        where = f"tool {method.__qualname__}, parameter '{parameter.name}'"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise DomainError(f"{where}: *args and **kwargs have no schema; name each parameter")
        if parameter.name not in hints:
            raise DomainError(f"{where} needs a type hint")
        default: Any = ... if parameter.default is parameter.empty else parameter.default
        note = notes.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], FieldInfo(default=default, description=note))
    unknown = set(notes) - set(fields)
    if unknown:
        raise DomainError(
            f"tool {method.__qualname__} describes parameters it does not have: {sorted(unknown)}"
        )
    config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=False)
    return create_model(name, __config__=config, **fields)


def validate(
    name: str, model: type[BaseModel], fields: tuple[str, ...], given: dict[str, Any]
) -> dict[str, Any]:
    """Check arguments as JSON values, strictly: `"3"` is no integer. Returns them as Python values."""
    try:
        checked = model.__pydantic_validator__.validate_json(json.dumps(given))
    except ValidationError as error:
        raise ToolError(explain(name, fields, error)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"{name}: the arguments are not JSON values ({error})") from None
    return {field: getattr(checked, field) for field in fields}


def explain(name: str, fields: tuple[str, ...], error: ValidationError) -> str:
    """What is wrong with the arguments and what is allowed, on one line."""
    problems: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            problems.append(f"missing argument '{where}'")
        elif problem["type"] == "extra_forbidden":
            problems.append(f"unknown argument '{where}'")
        else:
            shown = repr(problem["input"])
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            problems.append(f"argument '{where}': {problem['msg'].lower()}, got {shown}")
    return f"{name}: {'; '.join(problems)} (it takes: {', '.join(fields) or 'no arguments'})"


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
        return clean_schema(definitions[shape["$ref"].rsplit("/", 1)[1]], definitions)
    clean: dict[str, Any] = {}
    for key, value in shape.items():
        if key == "$defs" or (key == "title" and isinstance(value, str)):
            continue
        if key == "properties":
            clean[key] = {field: clean_schema(inner, definitions) for field, inner in value.items()}
        else:
            clean[key] = clean_schema(value, definitions)
    return clean


def to_text(value: Any) -> str:
    """What the speaker reads of a tool's result: text stays as it is, everything else is compact JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=to_plain)


def to_plain(value: Any) -> Any:
    """One level of a value that JSON does not know."""
    if isinstance(value, BaseModel):
        return value.__dict__
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value))
    return to_jsonable_python(value)
