"""The environment of a TAU-bench conversation: one database and tools that return text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trialogue.benchmarks.tau.tau1.tools import TRANSFER
from trialogue.benchmarks.toolkit import Toolkit
from trialogue.task import Side, Task
from trialogue.world.domain import Domain, Environment
from trialogue.world.tools import Tool, ToolResult

RESPOND = "respond"


@dataclass(slots=True)
class Gold:
    """The state that a task's gold calls reach."""

    task: Task
    digest: str
    hash: str | None = None


@dataclass(frozen=True, eq=False)
class Tau1Domain(Domain):
    """A domain with its tools as the benchmark offers them."""

    agent_tools: Mapping[str, Tool] = field(default_factory=lambda: {})
    golds: OrderedDict[str, Gold] = field(default_factory=OrderedDict[str, Gold], init=False, repr=False)

    def open(self, task: Task) -> Tau1Environment:
        return Tau1Environment(self, task)


class Tau1Environment(Environment):
    """The environment of one conversation. No task of the benchmark has a set-up."""

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
        except Exception as error:  # noqa: BLE001 - the benchmark shows every exception to the caller
            text = str(error)
            if type(error) is ValueError:  # TAU2 begins its text with a capital letter
                text = text[:1].lower() + text[1:]
            return ToolResult(f"Error: {text}", True, tool.ends)
        return ToolResult(result if isinstance(result, str) else self.toolkit.show(result), False, tool.ends)

    def reopen(self) -> Tau1Environment:
        return Tau1Environment(self.domain, self.task)

    def reach_gold(self) -> Tau1Environment:
        """A fresh environment after all gold calls, including refused ones."""
        gold = self.reopen()
        for call in self.task.expected.calls:
            if call.name not in (TRANSFER, RESPOND):
                gold.call(call.name, call.arguments)
        return gold

    def gold(self) -> Gold:
        """The state that the gold calls reach, computed once."""
        known = self.domain.golds.get(self.task.id)
        if known is None or (known.task is not self.task and known.task != self.task):
            known = self.domain.golds[self.task.id] = Gold(self.task, self.reach_gold().digest())
        return known
