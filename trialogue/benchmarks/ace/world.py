"""The world of an ACEBench conversation: a phone or an airline, and calls one by one or as a text."""

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
"""Stands for a whole text of calls, where the agent writes them as text."""
_ZH_ONLY = frozenset({"mark_as_notified", "search_reminders"})


@dataclass(frozen=True, eq=False)
class AceDomain(Domain):
    """A domain of both worlds; which one a task is about stands in the task."""

    language: str = "en"
    alone: bool = False
    """True without a user: the agent is given its task and does it by itself."""
    quirks: bool = True
    """True grades as the benchmark does, oversights included."""
    phone: Toolkit = field(kw_only=True)
    airline: Toolkit = field(kw_only=True)
    policies: Mapping[str, str] = field(default_factory=lambda: {})
    wording: Mapping[str, str] = field(default_factory=lambda: {})
    """The official prompts, where a checkout has them."""

    def open(self, task: Task) -> AceEnvironment:
        return AceEnvironment(self, task)


class AceEnvironment(Environment):
    """One conversation's world. What a failing tool has changed so far stays changed."""

    __slots__ = ("_task", "_tools", "classes", "functions", "has_run")

    def __init__(self, domain: AceDomain, task: Task) -> None:
        self.domain = domain
        self._task = task
        self.classes: list[str] = task.meta["involved_classes"]
        is_travel = "Travel" in self.classes
        self.database = (domain.airline if is_travel else domain.phone).fork()
        self.user_database = None
        self.has_run = False
        """Whether anything was carried out at all: without it the benchmark has no state to compare."""
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
        """The functions as the task describes them, some of which may not exist."""
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
        except Exception as error:  # noqa: BLE001 - the benchmark turns any exception into an answer
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
        """Carry out the calls of a text in the benchmark's manner and return what the agent sees."""
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
                # An unknown function goes unnoticed where a call before it had a result to show.
                unseen = domain.quirks and call.name not in self.functions and results
                results.append(results[-1] if unseen else self._run(call))
            except Exception as error:  # noqa: BLE001 - the benchmark turns any exception into an answer
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
        """What is graded, class by class, as JSON has it; nothing where nothing was carried out."""
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
    """A description of parameters as a JSON schema: other names for types are put right."""
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
