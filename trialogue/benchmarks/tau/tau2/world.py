"""The environment of a TAU2 conversation: the toolkits of both sides and the set-up of a task.

It answers as the benchmark does: any exception of a tool becomes `Error: …`, and changes made before it are
kept. The state that the gold calls reach is computed once per task.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from trialogue.benchmarks.toolkit import Toolkit
from trialogue.errors import DomainError
from trialogue.messages import from_openai
from trialogue.task import Call, Side, Task
from trialogue.trajectory import Turn
from trialogue.world.domain import Domain, Environment
from trialogue.world.tools import Tool, ToolResult

KEPT = 4096
"""Number of tasks whose set-up is cached: more than each of the benchmarks has."""


@dataclass(slots=True)
class World:
    """A task after its set-up, shared by all its conversations."""

    task: Task
    agent_side: Toolkit
    user_side: Toolkit | None
    history: tuple[Turn, ...] = ()
    is_shared: bool = False
    """If a task sets data of the agent, the benchmark makes the user's tools read the agent's database."""
    gold: str | None = None


@dataclass(frozen=True, eq=False)
class Tau2Domain(Domain):
    """A domain with the tools of both sides, in the benchmark's or our own wording."""

    agent_tools: Mapping[str, Tool] = field(default_factory=lambda: {})
    user_tools: Mapping[str, Tool] = field(default_factory=lambda: {})
    solo: bool = False
    """Whether the agent works on a ticket without a user, with the tools of both sides."""
    solo_prompt: str = ""
    """The system prompt of an agent without a user, with a placeholder `{ticket}`."""
    worlds: OrderedDict[str, World] = field(default_factory=OrderedDict[str, World], init=False, repr=False)

    def open(self, task: Task) -> Tau2Environment:
        known = self.worlds.get(task.id)
        if known is None or (known.task is not task and known.task != task):
            known = self.worlds[task.id] = self._set_up(task)
            if len(self.worlds) > KEPT:
                self.worlds.popitem(last=False)
        return Tau2Environment(self, known)

    def _set_up(self, task: Task) -> World:
        user_database = cast("Toolkit | None", self.user_database)
        agent_side = cast("Toolkit", self.database).fork()
        user_side = user_database.fork() if user_database is not None else None
        environment = Tau2Environment(self, World(task, agent_side, user_side))
        setup = task.setup
        try:
            if setup.data:
                environment.database.update(setup.data)
                environment.is_shared = user_side is not None
            if setup.user_data:
                raise DomainError("data for the user's side is not supported")
            environment.settle()
            for call in setup.calls:
                environment.do(call)
            history = tuple(to_turns(task.meta.get("history") or ()))
            environment.replay_writes(history)
            environment.settle()
        except Exception as error:
            raise DomainError(f"task {task.id} cannot be set up: {error}") from error
        after, user_after = environment.agent_side, environment.user_side
        world = World(task, after.fork(), None, history, environment.is_shared)
        world.agent_side.copy_state(after)
        if user_after is not None:
            world.user_side = user_after.fork()
            world.user_side.copy_state(user_after)
        return world


class Tau2Environment(Environment):
    """The environment of one conversation."""

    __slots__ = ("_stale", "agent_side", "is_shared", "user_side", "world")

    def __init__(self, domain: Tau2Domain, world: World) -> None:
        self.domain = domain
        self.world = world
        self.agent_side = _open(world.agent_side)
        self.user_side = None if world.user_side is None else _open(world.user_side)
        self.database = self.agent_side
        self.user_database = self.user_side
        self.is_shared = world.is_shared
        self._stale = False

    @property
    def task(self) -> Task:
        return self.world.task

    @property
    def policy(self) -> str:
        if not self.domain.solo:
            return self.domain.policy
        return self.domain.solo_prompt.replace("{ticket}", str(self.task.meta.get("ticket")))

    @property
    def history(self) -> Sequence[Turn]:
        return self.world.history

    @property
    def tools(self) -> Mapping[str, Tool]:
        if not self.domain.solo:
            return self.domain.agent_tools
        return {**self.domain.agent_tools, **self.domain.user_tools, "done": DONE}

    @property
    def user_tools(self) -> Mapping[str, Tool]:
        if self.domain.solo:
            return {}
        offered = self.task.meta.get("user_tools")
        known = self.domain.user_tools
        return known if offered is None else {name: tool for name, tool in known.items() if name in offered}

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> ToolResult:
        if isinstance(arguments, str):
            return ToolResult(f"Error: {name}: the arguments are not a JSON object", True)
        tool = None
        try:
            tool, toolkit = self._find(name, side, self.domain.solo)
            result = tool.run(toolkit, arguments)
            if tool.writes or self._stale:
                self.settle()
        except Exception as error:  # noqa: BLE001 - the benchmark shows every exception to the caller
            self._stale = self._stale or (tool is not None and tool.writes)
            return ToolResult(f"Error: {error}", True)
        return ToolResult(result if isinstance(result, str) else toolkit.show(result), False, tool.ends)

    def do(self, call: Call) -> Any:
        toolkit = self.agent_side if call.side == "agent" else self.user_side
        if toolkit is None:
            raise DomainError(f"{self.domain.name}: the user has no database")
        result = toolkit.do(call.name, call.arguments)
        self.settle()
        return result

    def settle(self) -> None:
        """Synchronize both sides."""
        self._stale = False
        if self.domain.after_call is not None:
            self.domain.after_call(self.agent_side, self.user_side)

    def _find(self, name: str, side: Side, solo: bool) -> tuple[Tool, Toolkit]:
        domain = self.domain
        toolkit = self.agent_side
        tools = domain.agent_tools
        if solo and side == "user":
            raise ValueError("User tool calls are not allowed in solo mode")
        if side == "user" or (solo and name in domain.user_tools):
            if self.user_side is None:
                raise ValueError("User tools not available")
            toolkit, tools = self.user_side, domain.user_tools
        elif solo and name == "done":
            return DONE, toolkit
        tool = tools.get(name)
        if tool is None:
            raise ValueError(f"Tool '{name}' not found.")
        if self.is_shared and toolkit is self.user_side:
            raise AttributeError("'MockDB' object has no attribute 'notifications'")
        return tool, toolkit

    def replay_writes(self, turns: Sequence[Turn]) -> None:
        """Execute the writing calls of a history again, as the benchmark does."""
        for turn in turns:
            for call in turn.message.tool_calls:
                tool = self.domain.agent_tools.get(call.name) or self.domain.user_tools.get(call.name)
                if tool is not None and tool.writes:
                    self.call(call.name, call.arguments, turn.side)

    # -- comparing ---------------------------------------------------------------------------------------

    def digest(self) -> str:
        digest = self.agent_side.digest()
        if self.user_side is None:
            return digest
        return f"{digest}-{digest if self.is_shared else self.user_side.digest()}"

    def official_hashes(self) -> tuple[str, str | None]:
        """The benchmark's own hashes of both databases."""
        own = self.agent_side.official_hash()
        if self.user_side is None:
            return own, None
        return own, own if self.is_shared else self.user_side.official_hash()

    def reopen(self) -> Tau2Environment:
        return Tau2Environment(self.domain, self.world)

    def reach_gold(self) -> Tau2Environment:
        """A fresh environment after the gold calls. As in the benchmark, refused calls are skipped and the
        two sides are not synchronized."""
        gold = self.reopen()
        for call in self.task.expected.calls:
            try:
                tool, toolkit = gold._find(call.name, call.side, solo=False)
                tool.run(toolkit, call.arguments)
            except Exception:  # noqa: BLE001 - the benchmark's own rule
                continue
        return gold

    def gold_digest(self) -> str:
        """The digest of the state that the gold calls reach."""
        if self.world.gold is None:
            self.world.gold = self.reach_gold().digest()
        return self.world.gold


def _open(toolkit: Toolkit) -> Toolkit:
    opened = toolkit.fork()
    opened.copy_state(toolkit)
    return opened


DONE = Tool(
    "done",
    "Call this function when the ticket is solved.",
    {"properties": {}, "title": "parameters", "type": "object"},
    lambda database, given: "###STOP###",
    ends=True,
)


def to_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Convert the benchmark's messages, in which a tool result names the side that called it."""
    turns: list[Turn] = []
    side: Side = "agent"
    for shape in messages:
        role = shape["role"]
        if role == "tool":
            asked = shape.get("requestor")
            side = side if asked is None else "user" if asked == "user" else "agent"
            message = from_openai({"role": "tool", "content": shape.get("content")})
            message = message.model_copy(update={"tool_call_id": shape.get("id")})
            turns.append(Turn(side=side, message=message, failed=bool(shape.get("error"))))
        elif role in ("assistant", "user"):
            side = "agent" if role == "assistant" else "user"
            turns.append(Turn(side=side, message=from_openai(shape)))
    return turns
