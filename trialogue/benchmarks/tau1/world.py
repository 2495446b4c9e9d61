"""The world of a TAU-bench conversation: one database, tools that answer in text, the hash of its authors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trialogue.benchmarks.toolkit import Toolkit
from trialogue.task import Side, Task
from trialogue.world.domain import Domain, Environment
from trialogue.world.tools import Tool, ToolResult

TRANSFER = "transfer_to_human_agents"
"""The tool that ends a conversation."""
RESPOND = "respond"


def to_hashable(value: Any) -> Any:
    """Dictionaries as sorted pairs, lists as tuples: what the benchmark writes out and hashes."""
    if isinstance(value, dict):
        pairs = sorted(cast("dict[str, Any]", value).items())
        return tuple((key, to_hashable(inner)) for key, inner in pairs)
    if isinstance(value, list):
        return tuple(to_hashable(inner) for inner in cast("list[Any]", value))
    return value


class Tau1Toolkit(Toolkit):
    """A database kept as it is read: nothing is normalised."""

    generic = frozenset({"calculate", "think", TRANSFER})

    @staticmethod
    def write(value: Any) -> str:
        return repr(to_hashable(value))

    @staticmethod
    def bind(parts: list[tuple[str, str]]) -> str:
        inner = ", ".join(f"({name!r}, {text})" for name, text in parts)
        return f"({inner},)" if len(parts) == 1 else f"({inner})"

    def need(self, table: str, key: str, noun: str) -> Any:
        """A record for reading, or the benchmark's complaint."""
        found = self.look(table, key)
        if found is None:
            raise ValueError(f"{noun} not found")
        return found


@dataclass(slots=True)
class Gold:
    """Where a task's gold calls lead."""

    task: Task
    digest: str
    hash: str | None = None


@dataclass(frozen=True, eq=False)
class Tau1Domain(Domain):
    """A domain with its tools as they are offered."""

    agent_tools: Mapping[str, Tool] = field(default_factory=lambda: {})
    golds: OrderedDict[str, Gold] = field(default_factory=OrderedDict[str, Gold], init=False, repr=False)

    def open(self, task: Task) -> Tau1Environment:
        return Tau1Environment(self, task)


class Tau1Environment(Environment):
    """One conversation's world; no task of the benchmark sets anything up."""

    __slots__ = ("_task", "toolkit")

    def __init__(self, domain: Tau1Domain, task: Task) -> None:
        self.domain = domain
        self._task = task
        self.toolkit = cast("Toolkit", domain.database).fork()
        self.database = self.toolkit
        self.user_database = None

    @property
    def task(self) -> Task:
        return self._task

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self.domain.agent_tools

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> ToolResult:
        tool = self.domain.agent_tools.get(name)
        if tool is None or side == "user":
            return ToolResult(f"Unknown action {name}", True)
        if isinstance(arguments, str):
            return ToolResult(f"Error: {name}: the arguments are not a JSON object", True)
        try:
            result = tool.run(self.toolkit, arguments)
        except Exception as error:  # noqa: BLE001 - the benchmark shows any exception to the caller
            return ToolResult(f"Error: {error}", True, tool.ends)
        return ToolResult(result if isinstance(result, str) else self.toolkit.show(result), False, tool.ends)

    def reopen(self) -> Tau1Environment:
        return Tau1Environment(self.domain, self.task)

    def reach_gold(self) -> Tau1Environment:
        """A fresh world in which the gold calls were carried out, refused ones included."""
        gold = self.reopen()
        for call in self.task.expected.calls:
            if call.name not in (TRANSFER, RESPOND):
                gold.call(call.name, call.arguments)
        return gold

    def gold(self) -> Gold:
        """Where the gold calls lead, found once."""
        known = self.domain.golds.get(self.task.id)
        if known is None or (known.task is not self.task and known.task != self.task):
            known = self.domain.golds[self.task.id] = Gold(self.task, self.reach_gold().digest())
        return known
