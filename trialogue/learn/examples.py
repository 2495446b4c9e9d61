"""Read conversations to imitate."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trialogue.errors import DomainError, RunError
from trialogue.messages import from_openai
from trialogue.reading import from_json, reading
from trialogue.task import Task
from trialogue.trajectory import Turn
from trialogue.world.tools import Tool, shorten


class Example(NamedTuple):
    """One row of a file in the OpenAI shape."""

    id: str
    turns: list[Turn]
    """In the agent's perspective, the system prompt first."""
    tools: list[Tool]
    task: Task
    """Its id and split, where the file tells them."""


def read_parquet(path: Path) -> Iterator[Example]:
    """The rows of a parquet file with `messages` and `tools`, which may be JSON text."""
    from pyarrow import parquet

    with reading(f"cannot read {path}", RunError):
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    for number, row in enumerate(rows):
        with reading(f"{path}, row {number}", RunError):
            messages = _to_list(row["messages"])
            tools = [_to_tool(shape) for shape in _flatten(_to_list(row.get("tools")))]
            turns = [
                Turn(side="user" if shape["role"] == "user" else "agent", message=from_openai(shape))
                for shape in messages
            ]
        identity = str(row.get("id", number))
        task = Task(
            id=str(row.get("task") or identity), domain="", instructions="", split=str(row.get("split") or "")
        )
        yield Example(identity, turns, tools, task)


def _to_list(value: Any) -> list[Any]:
    value = from_json(value) if isinstance(value, str) else value
    return list(value or ())


def _flatten(tools: list[Any]) -> Iterator[dict[str, Any]]:
    """Tools one by one; some data sets put all of them into one `function` list."""
    for shape in tools:
        inner = shape.get("function", shape)
        yield from inner if isinstance(inner, list) else [inner]


def _to_tool(shape: dict[str, Any]) -> Tool:
    return Tool(
        shape["name"], shape.get("description") or "", shape.get("parameters") or {"type": "object"}, _refuse
    )


def _refuse(database: Any, arguments: dict[str, Any]) -> Any:
    raise DomainError(f"a tool of a recorded conversation cannot be called ({shorten(arguments)})")
