"""The environment of a BFCL conversation: fresh instances of the package's classes.

Functions may be added during the conversation.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from trialogue.benchmarks.ace.world import to_schema
from trialogue.benchmarks.bfcl.execute import Instances
from trialogue.benchmarks.bfcl.grade import GoldTurn, Step, find_fault, reach_gold_turns
from trialogue.benchmarks.bfcl.package import load_class, read_functions
from trialogue.benchmarks.toolkit import Plain
from trialogue.errors import DomainError
from trialogue.messages import ToolCall
from trialogue.reading import reading
from trialogue.task import Side, Task
from trialogue.trajectory import Reward, Trajectory, Turn
from trialogue.world.database import Change, Database, canonical
from trialogue.world.domain import Domain, Environment
from trialogue.world.tools import Tool, ToolResult
from trialogue.world.values import compare

ERROR = "Error during execution: "
_KEPT = 1024


class Apis(Database):
    """An empty database: the state is in instances of the benchmark's classes."""


@dataclass(frozen=True, eq=False)
class BfclDomain(Domain):
    """One category of the benchmark, or all of them."""

    package: Path = field(kw_only=True)
    golds: OrderedDict[str, tuple[Task, list[GoldTurn]]] = field(
        default_factory=OrderedDict[str, tuple[Task, list[GoldTurn]]], init=False, repr=False
    )

    def open(self, task: Task) -> BfclEnvironment:
        with reading(f"task {task.id}", DomainError):
            environment = BfclEnvironment(self, task)
        _OPENED.set(environment)
        return environment

    def find_gold(self, task: Task) -> list[GoldTurn]:
        """The results and states of a task's gold calls, computed once."""
        known = self.golds.get(task.id)
        if known is None or (known[0] is not task and known[0] != task):
            truth = task.meta["ground_truth"]
            known = self.golds[task.id] = task, reach_gold_turns(self.make_instances(task), truth)
            if len(self.golds) > _KEPT:
                self.golds.popitem(last=False)
        return known[1]

    def make_instances(self, task: Task) -> Instances:
        classes = {name: load_class(self.package, name) for name in task.meta["involved_classes"]}
        return Instances(classes, task.meta["initial_config"], task.family == "long_context")


class BfclEnvironment(Environment):
    """The instances of one conversation. `tools` may grow during the conversation."""

    __slots__ = ("_task", "_tools", "instances", "missed")

    def __init__(self, domain: BfclDomain, task: Task) -> None:
        self.domain = domain
        self._task = task
        self.database = domain.database
        self.user_database = None
        self.instances = domain.make_instances(task)
        self.missed: dict[str, list[str]] = task.meta["missed_function"]
        late = {name for names in self.missed.values() for name in names}
        self._tools = {
            name: tool for name, tool in find_entry_tools(domain.package, task).items() if name not in late
        }

    @property
    def task(self) -> Task:
        return self._task

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self._tools

    def enter(self, turn: int) -> None:
        """Add the functions that were held back until this turn."""
        known = find_entry_tools(self.domain.package, self._task)
        for name in self.missed.get(str(turn), ()):
            if name in known:
                self._tools[name] = known[name]

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> ToolResult:
        if side == "user":
            return ToolResult(f"{ERROR}the user has no functions", True)
        text = run_call(name, arguments)(self.instances)
        return ToolResult(text, text.startswith(ERROR))

    def reopen(self) -> BfclEnvironment:
        return BfclEnvironment(self.domain, self._task)

    def to_data(self) -> dict[str, Any]:
        """The public state of every instance as plain data."""
        return cast("dict[str, Any]", _to_plain(self.instances.to_state(), frozenset()))

    def digest(self) -> str:
        return hashlib.sha256(canonical(self.to_data()).encode("utf-8", "surrogatepass")).hexdigest()

    def difference(self, other: Environment | None = None) -> list[Change]:
        before = cast("BfclEnvironment", other or self.reopen())
        changes: list[Change] = []
        old, new = before.to_data(), self.to_data()
        for name in new:
            compare(name, old[name], new[name], changes)
        return changes


_OPENED: ContextVar[BfclEnvironment | None] = ContextVar("opened", default=None)
"""The environment of the conversation in this context, to which its scripted user adds functions."""


def find_opened(task: Task) -> BfclEnvironment | None:
    """The environment of a task that was opened last in the same conversation."""
    opened = _OPENED.get()
    return opened if opened is not None and opened.task.id == task.id else None


def find_entry_tools(package: Path, task: Task) -> dict[str, Tool]:
    """Every function of the involved classes, except those that the entry excludes."""
    excluded = set(task.meta["excluded_function"])
    return {
        shape["name"]: _to_tool(shape)
        for kind in task.meta["involved_classes"]
        for shape in read_functions(package, kind)
        if shape["name"] not in excluded
    }


def _to_tool(shape: Plain) -> Tool:
    name: str = shape["name"]
    return Tool(
        name,
        shape["description"],
        to_schema(shape["parameters"]),
        lambda instances, arguments: instances.run(name, arguments),
        writes=True,  # what the benchmark's code changes is not known in advance
    )


def run_call(name: str, arguments: dict[str, Any] | str) -> Callable[[Instances], str]:
    if isinstance(arguments, str):
        return lambda _: f"{ERROR}the arguments of {name} are not a JSON object"
    return lambda instances: instances.run(name, arguments)


def _to_plain(value: Any, inside: frozenset[int]) -> Any:
    """Objects as dictionaries of their public attributes. Cycles are cut off."""
    if value is None or isinstance(value, str | int | float):
        return value
    if id(value) in inside:
        return "..."
    inside |= {id(value)}
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {str(key): _to_plain(inner, inside) for key, inner in items}
    if isinstance(value, list | tuple):
        return [_to_plain(inner, inside) for inner in cast("Sequence[Any]", value)]
    if hasattr(value, "__dict__"):
        held = cast("dict[str, Any]", vars(value))
        return _to_plain({key: held[key] for key in held if not key.startswith("_")}, inside)
    return str(value)


def to_steps(turns: Sequence[Turn], stop: str) -> list[list[Step]]:
    """The agent's messages with calls, by user turn."""
    steps: list[list[Step]] = []
    for turn in turns:
        message = turn.message
        if turn.side == "user":
            if message.content != stop:
                steps.append([])
        elif message.tool_calls and steps:
            steps[-1].append([_to_run(call) for call in message.tool_calls])
    return steps


def _to_run(call: ToolCall) -> Callable[[Instances], str]:
    return run_call(call.name, call.arguments)


def grade_bfcl(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    """1 if every turn is right. The calls are executed again, as in the benchmark."""
    domain = cast("BfclDomain", environment.domain)
    steps = to_steps(trajectory.turns, domain.rules.stop_tokens[0])
    fault = find_fault(domain.find_gold(task), steps, domain.make_instances(task))
    return Reward(
        value=float(fault is None),
        parts={"VALID": float(fault is None)},
        why=(fault or "everything as expected",),
    )
