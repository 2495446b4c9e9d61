"""Domains, the rules of their conversations, and environments: `Domain.open(task)` gives the single-use world
of one conversation."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

from trialogue.config import Limits
from trialogue.errors import ConfigError, DomainError, ToolError, suggest
from trialogue.reading import from_json, reading
from trialogue.seams import check_signature
from trialogue.task import Call, Setup, Side, Task
from trialogue.trajectory import Reward, Trajectory, Turn
from trialogue.world.bugs import CheckedTasks
from trialogue.world.database import Change, Database
from trialogue.world.policy_rules import Rule
from trialogue.world.tools import Tool, ToolResult, shorten, to_text
from trialogue.world.values import clean_text


class TaskSource(Protocol):
    """Where a domain's tasks come from: a file, or a generator that never runs dry."""

    def __call__(
        self,
        split: str,
        count: int | None = None,
        seed: int = 0,
        *,
        levels: Sequence[int] = (),
        families: Sequence[str] = (),
    ) -> list[Task]: ...


RewardFunction = Callable[[Task, Trajectory, "Environment"], Reward | Awaitable[Reward]]
"""May be awaited, where a judge has to be asked."""
REWARD_ARGUMENTS = ("task", "trajectory", "environment")
Hook = Callable[[Any, Any], None]
RuleUse = Literal["required", "report", "off"]
T = TypeVar("T")


STOP = "###STOP###"
"""What a simulated user writes to end the conversation."""
_QUOTES = tuple("\"'`\u2018\u201c\u201e\u00ab<([{")


def _as_it_is(task: Task, model: Any) -> Any:
    return model


@dataclass(frozen=True)
class ConversationRules:
    """Who opens a conversation, who may end it, and when it is over.

    The defaults are what `talk.conversation` does in every domain. A benchmark whose loop differs subclasses
    them and puts its rules into `Domain.rules`.
    """

    opens: Side = "user"
    """Who speaks first. A greeting of the domain comes before."""
    user_cue: str | None = None
    """Words of the agent that a user who opens is given to answer. The agent does not see them."""
    stop_tokens: tuple[str, ...] = (STOP,)
    """Words with which the user ends the conversation."""
    stop_anywhere: bool = False
    """True: a stop token anywhere in the user's text ends it. False: it must close the message."""
    first_call_only: bool = False
    """True: keep only the first tool call of a message."""
    grade_at_cap: bool = False
    """True: grade a conversation that reached a cap, instead of giving it 0."""
    ends_stuck: bool = True
    """True: end a conversation in which nothing moves on any more (`talk.stuck`)."""
    adapt_agent: Callable[[Task, Any], Any] = _as_it_is
    """Wraps the agent's model, for example so that it writes its calls as text."""

    def most_calls(self, limits: Limits) -> int:
        """Number of tool calls to keep of one message. The first one beyond `limits.calls` is refused."""
        return 1 if self.first_call_only or limits.first_call_only else limits.calls + 1

    def is_spent(self, limits: Limits, observations: int, failures: int) -> bool:
        """Whether the limits' counts are reached. Asked after each tool result and each message."""
        return observations >= limits.observations or failures >= limits.tool_errors

    def is_over(self, turns: Sequence[Turn]) -> bool:
        """Whether a cap of the domain's own is reached. Asked after each message with its tool results,
        before anything that the message says is taken as its end."""
        return False

    def is_last(self, turns: Sequence[Turn]) -> bool:
        """Whether the message just said, which has no calls, ends the conversation."""
        return turns[-1].side == "user" and self.is_stop(turns[-1].message.content)

    def is_stop(self, text: str) -> bool:
        """Whether the user ends the conversation with this text. A sentence that mentions the stop token,
        quoted or in its middle, does not: the token has to close the message."""
        if self.stop_anywhere:
            return any(token in text for token in self.stop_tokens)
        text = text.rstrip()
        for token in self.stop_tokens:
            before = text.removesuffix(token)
            if before != text and not (before[-1:].isalnum() or before[-1:] in _QUOTES):
                return True
        return False


@dataclass(slots=True)
class Prepared:
    """A task set up once: what all its conversations open."""

    task: Task
    database: Database
    user_database: Database | None
    gold: Environment | None = None
    """Where the gold calls lead, once somebody had to know."""


_KEPT = 1024
"""How many tasks a domain keeps prepared."""


@dataclass(frozen=True, eq=False)
class Domain:
    """A policy, a database with tools, and tasks over it."""

    name: str
    policy: str
    """The agent's system prompt."""
    database: Database
    tasks: TaskSource
    user_database: Database | None = None
    """Where the user has tools of their own (dual control)."""
    after_call: Hook | None = None
    """Called with both databases after each call, to keep the two sides in step."""
    greeting: str | None = None
    """The agent's fixed first words; without them the user opens."""
    rules: ConversationRules = field(default_factory=ConversationRules)
    """Who opens a conversation, who may end it, and when it is over."""
    reward: RewardFunction | None = None
    """None: the outcome reward over what the task expects."""
    policy_rules: tuple[Rule, ...] = ()
    """The policy as rules that are checked in every conversation."""
    rule_use: RuleUse = "required"
    """What broken rules change: the setting `reward.rules`."""
    oracle: Callable[[Task, int], Any] | None = None
    """Makes a model that solves a task through the public interface."""
    user: Callable[[Task, int], Any] | None = None
    """Makes a rule-based user for a task."""
    user_guidelines: str | None = None
    """How an LLM is told to play the user here; None takes the general guidelines."""
    user_prompt: Callable[[Task], str] | None = None
    """The whole system prompt of whoever plays the user, in place of guidelines and scenario."""
    persona: Callable[[int], tuple[str, str]] | None = None
    """Name and words of a user's manner, by the seed of the conversation; empty where it has none."""
    judge: Callable[[Task, int], Any] | None = None
    """Makes the model that judges what only a reader can, where the reward asks for one."""
    tool_model: Callable[[Task, int], Any] | None = None
    """Makes the model that answers for tools that are simulated."""
    source: str = "domain"
    """What answers its tools: the domain's own code, a simulator, or an MCP server."""
    endless: bool = False
    """Tasks are generated: another seed gives other tasks, as many as are asked for."""
    reference: str = ""
    """How to find this domain again; the name where empty."""
    notes: dict[str, str] = field(default_factory=lambda: {})
    """Printed with every result, such as the version of a benchmark's data."""
    _prepared: OrderedDict[str, Prepared] = field(
        default_factory=OrderedDict[str, Prepared], init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.reward is not None:
            check_signature(self.reward, REWARD_ARGUMENTS, "reward")
        if not isinstance(self.tasks, CheckedTasks):
            object.__setattr__(self, "tasks", CheckedTasks(self.name, self.tasks, self.database))

    def open(self, task: Task) -> Environment:
        """A fresh environment. The work of setting a task up is done once for all its conversations."""
        known = self._prepared.get(task.id)
        if known is None or (known.task is not task and known.task != task):
            known = self._prepared[task.id] = self._prepare(task)
            if len(self._prepared) > _KEPT:
                self._prepared.popitem(last=False)
        return Environment(self, known)

    def _prepare(self, task: Task) -> Prepared:
        prepared = Prepared(task, self.database.fork(), _fork(self.user_database))
        environment = Environment(self, prepared)
        try:
            environment.set_up(task.setup)
        except (ToolError, DomainError) as error:
            raise DomainError(f"task {task.id}, setup: {error}") from error
        prepared.database = environment.database.fork()
        prepared.user_database = _fork(environment.user_database)
        return prepared

    @classmethod
    def load(cls, beside: str | Path, database: type[Database], **more: Any) -> Domain:
        """Read `policy.md`, `database.json` and `tasks.jsonl` from the folder of `beside` (a `__file__`).
        With `tasks`, a list or a function that makes them, `tasks.jsonl` is not read."""
        folder = Path(beside).resolve()
        folder = folder if folder.is_dir() else folder.parent
        name = str(more.pop("name", folder.name))
        source = read_file(folder / "database.json")
        with reading(folder / "database.json", DomainError):
            try:
                loaded = database.load(from_json(source))
            except DomainError as error:
                raise DomainError(f"{folder / 'database.json'}: {error}") from error
        more.setdefault("reference", str(Path(beside).resolve()))
        policy = read_file(folder / "policy.md")
        tasks: Any = more.pop("tasks", None)
        if tasks is None:
            tasks = from_file(folder, name)
        elif not callable(tasks):
            tasks = from_list(name, tasks)
        return cls(name=name, policy=policy, database=loaded, tasks=cast("TaskSource", tasks), **more)


def _fork(database: Database | None) -> Database | None:
    return None if database is None else database.fork()


def read_file(path: Path) -> str:
    """A domain's file as text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "; write {} into it if each task brings its own records" if path.suffix == ".json" else ""
        raise DomainError(f"the domain needs a file {path.name} at {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"cannot read {path}: {error}") from None


def read_tasks(path: Path, domain: str) -> list[Task]:
    """Tasks from JSON lines; the domain's name is filled in."""
    tasks: list[Task] = []
    for number, line in enumerate(read_file(path).split("\n"), 1):  # JSON may hold other line separators
        if not line.strip():
            continue
        with reading(f"{path}, line {number}", DomainError):
            data: Any = from_json(line)
        known = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        named = f", task {shorten(known['id'])}" if "id" in known else ""
        with reading(f"{path}, line {number}{named}", DomainError):
            tasks.append(Task.model_validate({"domain": domain, **known} if known else data))
    return tasks


def from_file(folder: Path, domain: str) -> TaskSource:
    """A task source over the `tasks.jsonl` of a folder."""
    path = folder / "tasks.jsonl"
    return from_list(domain, read_tasks(path, domain), path)


def from_list(domain: str, tasks: Iterable[Task], where: object = "") -> TaskSource:
    """A task source over a fixed list; `where` is the file it was read from."""
    known = list(tasks)
    twice = [identity for identity, number in Counter(task.id for task in known).items() if number > 1]
    if twice:
        raise DomainError(f"{domain}: task ids must be unique; repeated: {sorted(twice)}")

    def find(
        split: str,
        count: int | None = None,
        seed: int = 0,
        *,
        levels: Sequence[int] = (),
        families: Sequence[str] = (),
    ) -> list[Task]:
        chosen = [task for task in known if split in ("all", task.split)]
        if not known:
            raise DomainError(f"{where or domain} holds no task")
        if not chosen:
            splits = sorted({task.split for task in known})
            hint = suggest(split, splits)
            raise ConfigError(f"{domain} has no tasks in split '{split}'; it has {', '.join(splits)}{hint}")
        chosen = [
            task
            for task in chosen
            if (not levels or task.level in levels) and (not families or task.family in families)
        ]
        return chosen[:count]

    return find


class Environment:
    """The world of one conversation: single use, cheap, and changed only through calls."""

    __slots__ = ("database", "domain", "prepared", "user_database")

    remote: ClassVar[bool] = False
    """True where calls are answered from outside: they are awaited, and cannot be carried out again."""

    def __init__(self, domain: Domain, prepared: Prepared) -> None:
        self.domain = domain
        self.prepared = prepared
        self.database = prepared.database.reopen()
        user_database = prepared.user_database
        self.user_database = None if user_database is None else user_database.reopen()

    @property
    def task(self) -> Task:
        return self.prepared.task

    @property
    def policy(self) -> str:
        return self.domain.policy

    @property
    def history(self) -> Sequence[Turn]:
        """What was said before the conversation begins."""
        return ()

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self.database.tools

    @property
    def user_tools(self) -> Mapping[str, Tool]:
        return {} if self.user_database is None else self.user_database.tools

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> ToolResult:
        """Run a tool for one side. Whatever the caller did wrong comes back as text."""
        tools = self.tools if side == "agent" else self.user_tools
        tool = tools.get(name)
        if tool is None:
            known = f"the tools are {', '.join(tools)}" if tools else "you have no tools"
            return ToolResult(f"Error: there is no tool '{shorten(clean_text(name))}'; {known}", True)
        if isinstance(arguments, str):
            return ToolResult(f"Error: {name}: the arguments are not a JSON object", True)
        database = self._find_database(side)
        try:
            # Writing the result down belongs to the call: where it fails, nothing has happened.
            text = self._change(
                database, lambda: to_text(tool.run(database, arguments)), tool.writes, f"tool '{name}'"
            )
        except ToolError as error:
            return ToolResult(clean_text(f"Error: {error}"), True)
        return ToolResult(clean_text(text), False, tool.ends)

    def do(self, call: Call) -> Any:
        """Run a set-up call or assertion of a task: any public method of that side's database."""
        database = self._find_database(call.side)
        return self._change(database, lambda: database.do(call.name, call.arguments), True, call.name)

    def set_up(self, setup: Setup) -> None:
        """Lay a task's data in and run its calls."""
        if setup.data:
            self._change(self.database, lambda: self.database.update(setup.data), True, "setup.data")
        if setup.user_data:
            user_database = self._find_database("user")
            self._change(
                user_database, lambda: user_database.update(setup.user_data), True, "setup.user_data"
            )
        for call in setup.calls:
            self.do(call)

    def _change(self, database: Database, action: Callable[[], T], writes: bool, what: str) -> T:
        """Act on one database and keep the other in step; if either fails, both are as before."""
        hook = self.domain.after_call
        if hook is None:
            return database.transact(action, writes, what)
        both = [side for side in (self.database, self.user_database) if side is not None]
        before = [side.save() for side in both]
        try:
            result = database.transact(action, writes, what)
            both[0].transact(lambda: both[-1].transact(lambda: hook(self.database, self.user_database)))
        except BaseException:
            for side, state in zip(both, before, strict=True):
                side.restore(state)
            raise
        return result

    def _find_database(self, side: Side) -> Database:
        database = self.database if side == "agent" else self.user_database
        if database is None:
            raise DomainError(f"{self.domain.name}: the user has no database")
        return database

    def digest(self) -> str:
        """Equal digests mean equal worlds on both sides."""
        if self.user_database is None:
            return self.database.digest()
        return f"{self.database.digest()}-{self.user_database.digest()}"

    def difference(self, other: Environment | None = None) -> list[Change]:
        """What changed since opening, or how this differs from another environment of the task."""
        changes = self.database.difference(None if other is None else other.database)
        if self.user_database is not None:
            theirs = self.user_database.difference(None if other is None else other.user_database)
            changes += [Change(f"user.{change.path}", change.before, change.after) for change in theirs]
        return changes

    def reopen(self) -> Environment:
        """A fresh environment of the same task."""
        return Environment(self.domain, self.prepared)

    async def close(self) -> None:
        """Let go of what the conversation held open outside, such as a server."""

    def replay(self, calls: Iterable[tuple[str, dict[str, Any] | str, Side]]) -> list[ToolResult]:
        """Run calls one after the other."""
        return [self.call(name, arguments, side) for name, arguments, side in calls]
