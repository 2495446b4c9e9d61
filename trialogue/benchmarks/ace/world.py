"""The environment of an ACEBench conversation: a phone or an airline, with tool calls or calls as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trialogue.benchmarks.ace.execute import (
    ASK_NOTHING,
    BROKEN,
    UNBOUND,
    UnreadableCalls,
    read_calls,
    to_answer_text,
    to_seen,
)
from trialogue.benchmarks.ace.texts import WORLD
from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.task import Call, Side, Task
from trialogue.world.domain import Domain, Environment
from trialogue.world.tools import Tool, ToolResult

EXECUTE = "execute"
"""The name of a call whose argument is a text of calls."""
_ZH_ONLY = frozenset({"mark_as_notified", "search_reminders"})


@dataclass(frozen=True, eq=False)
class AceDomain(Domain):
    """A domain with a phone and an airline. The task says which one it is about."""

    language: str = "en"
    alone: bool = False
    """Whether the agent solves its task without a user."""
    quirks: bool = True
    """Whether to grade like the benchmark, including its mistakes."""
    phone: Toolkit = field(kw_only=True)
    airline: Toolkit = field(kw_only=True)
    policies: Mapping[str, str] = field(default_factory=lambda: {})
    wording: Mapping[str, str] = field(default_factory=lambda: {})
    """The official prompts, if a checkout has them."""

    def open(self, task: Task) -> AceEnvironment:
        return AceEnvironment(self, task)


class AceEnvironment(Environment):
    """The environment of one conversation. Changes made by a tool before it fails are kept."""

    __slots__ = ("_task", "_tools", "classes", "functions", "has_run")

    def __init__(self, domain: AceDomain, task: Task) -> None:
        self.domain = domain
        self._task = task
        self.classes: list[str] = task.meta["involved_classes"]
        is_travel = "Travel" in self.classes
        self.database = (domain.airline if is_travel else domain.phone).fork()
        self.user_database = None
        self.has_run = False
        """Whether any call was executed. Without one the benchmark has no state to compare."""
        absent = _ZH_ONLY if domain.language == "en" else frozenset[str]()
        kinds = self.classes if is_travel else ["BaseApi", *self.classes]
        self.functions = {name for kind in kinds for name in WORLD["functions"][kind]} - absent
        if not is_travel:
            given: Mapping[str, Any] = task.meta["initial_config"].get("BaseApi", {})
            self.database.wifi = given.get("wifi", False)
            self.database.logged_in = given.get("logged_in", True)
        self._tools: dict[str, Tool] | None = None

    @property
    def task(self) -> Task:
        return self._task

    @property
    def policy(self) -> str:
        return self.domain.policies["travel" if "Travel" in self.classes else "phone"]

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The functions as the task describes them. Some of them may not exist."""
        if self._tools is None:
            described: list[Plain] = self._task.meta["function"]
            self._tools = {shape["name"]: _to_tool(shape, self.database) for shape in described}
        return self._tools

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> ToolResult:
        if name == EXECUTE and isinstance(arguments, dict) and "text" in arguments and side == "agent":
            return self._call_text(str(arguments["text"]))
        if isinstance(arguments, str) or side == "user":
            return ToolResult(f"Error: {name}: the arguments are not a JSON object", True)
        try:
            result = self._run(Call(name=name, arguments=arguments))
        except Exception as error:  # noqa: BLE001 - the benchmark returns every exception as an answer
            self.has_run = self.has_run or self.domain.alone
            return ToolResult(f"Error during execution: {error}", True)
        self.has_run = True
        return ToolResult(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))

    def _call_text(self, text: str) -> ToolResult:
        try:
            seen = self.execute(text)
        except UnreadableCalls as error:
            return ToolResult(f"Error: {error}", True)
        return ToolResult(str(seen), isinstance(seen, str) or seen == list(BROKEN))

    def execute(self, text: str) -> Any:
        """Execute the calls in a text like the benchmark and return what the agent sees."""
        domain = self.domain
        try:
            calls = read_calls(text, domain.alone)
        except UnreadableCalls:
            if domain.alone:
                return ASK_NOTHING
            raise
        results: list[Any] = []
        for call in calls:
            try:
                # The benchmark answers an unknown function with the result of the previous call, if any.
                unseen = domain.quirks and call.name not in self.functions and results
                results.append(results[-1] if unseen else self._run(call))
            except Exception as error:  # noqa: BLE001 - the benchmark returns every exception as an answer
                if domain.quirks and not domain.alone:
                    return list(BROKEN)
                results.append(f"Error during execution: {error}")
        self.has_run = True
        return to_seen([to_answer_text(result) for result in results])

    def _run(self, call: Call) -> Any:
        if call.name not in self.functions:
            if self.domain.quirks:
                raise NameError(UNBOUND)
            raise NameError(f"there is no function '{call.name}'")
        return getattr(self.database, call.name)(**call.arguments)

    def reopen(self) -> AceEnvironment:
        return AceEnvironment(self.domain, self._task)

    def to_state(self) -> list[Plain]:
        """The graded state of each class as JSON data; empty if no call was executed."""
        if not self.has_run:
            return []
        data = self.database.to_data()
        return [{kind: {name: data[name] for name in WORLD["graded"][kind]}} for kind in self.classes]


_TYPES = {
    "dict": "object",
    "list": "array",
    "float": "number",
    "int": "integer",
    "str": "string",
    "tuple": "array",
}


def _to_tool(shape: Plain, database: Any) -> Tool:
    known = database.tools.get(shape["name"])
    return Tool(
        shape["name"],
        shape.get("description") or shape["name"],
        to_schema(shape.get("parameters") or {"type": "object", "properties": {}}),
        lambda toolkit, arguments: getattr(toolkit, shape["name"])(**arguments),
        known is not None and known.writes,
    )


def to_schema(shape: Any) -> Any:
    """Convert a description of parameters to a JSON schema by replacing other names of types."""
    if isinstance(shape, list):
        return [to_schema(item) for item in cast("list[Any]", shape)]
    if not isinstance(shape, dict):
        return shape
    schema: Plain = {}
    for key, value in cast("Plain", shape).items():
        if key == "properties":
            schema[key] = {name: to_schema(inner) for name, inner in value.items()}
        elif key == "type" and isinstance(value, str):
            if value != "any":
                schema[key] = _TYPES.get(value, value)
        elif key in ("enum", "default", "required"):
            schema[key] = value
        else:
            schema[key] = to_schema(value)
    return schema
