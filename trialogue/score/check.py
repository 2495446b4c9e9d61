"""Proving a domain: its schemas, its tasks, and that exactly the right outcome is paid for.

Every gold replay has to score 1 and every untouched state 0, so that a reward means what its author thinks.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from trialogue.activity import phase
from trialogue.config import Limits, Speaker
from trialogue.errors import DomainError, GradeError, TrialogueError
from trialogue.messages import Message, ToolCall
from trialogue.reading import explain
from trialogue.score.compliance import (
    RuleUsage,
    find_misquoted,
    find_uncovered,
    split_policy,
    tell_breach,
)
from trialogue.score.reward import PendingReward, grade, grade_outcome
from trialogue.talk.find import find_model
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.teacher.teacher import Unknowable, make_teacher
from trialogue.task import SPLITS, Call, Expected, Side, Task
from trialogue.trajectory import End, Reward, Trajectory, Turn
from trialogue.world.bugs import find_place
from trialogue.world.database import Database, canonical
from trialogue.world.domain import Domain, Environment
from trialogue.world.tools import Tool

PLAYED = 60
"""On how many tasks the oracle is played with the rule-based user."""
TRIED = 200
"""How many combinations of arguments a read tool is tried with at most."""


class Problem(NamedTuple):
    """Something wrong, with the task where it shows ("" where it is the domain as a whole)."""

    task: str
    problem: str


@dataclass(frozen=True, slots=True)
class PolicyCheck:
    """What the rules of a policy cover, and what was exercised by the honest agent."""

    rules: int
    sentences: int
    without_rule: list[str]
    """Sentences of the policy that no rule stands for."""
    never_exercised: list[str]
    """Rules that had nothing to look at in any conversation that was played."""


@dataclass
class Checked:
    """The outcome of a check."""

    domain: str
    tasks: int = 0
    played: int = 0
    problems: list[Problem] = field(default_factory=lambda: [])
    policy: PolicyCheck | None = None
    """None: the domain has no policy rules."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_data(self) -> dict[str, Any]:
        problems = [problem._asdict() for problem in self.problems]
        policy = None if self.policy is None else asdict(self.policy)
        return {
            "domain": self.domain,
            "tasks": self.tasks,
            "ok": self.ok,
            "problems": problems,
            "policy": policy,
        }


def check(domain: Domain, split: str | None = None, count: int | None = None, seed: int = 0) -> Checked:
    """Check a domain and its tasks: those of one split, or of all of them."""
    checked = Checked(domain.name)

    def note(task: str, problem: str) -> None:
        checked.problems.append(Problem(task, problem))

    for problem in find_domain_problems(domain):
        note("", problem)
    before = _fingerprint(domain)
    tasks = _find_tasks(domain, split, count, seed, lambda text: note("", text))
    checked.tasks = len(tasks)
    sound: list[Task] = []
    with phase("checking", len(tasks), "tasks") as seen:
        for task in tasks:
            problems = list(find_task_problems(domain, task))
            for problem in problems:
                note(task.id, problem)
            if not problems:
                sound.append(task)
            seen.done += 1
    for problem in find_writing_read_tools(domain, sound):
        note("", problem)
    played = find_playable(domain, sound)
    checked.played = len(played)
    is_ours = domain.oracle is None and domain.user is None and domain.reward is None
    can_learn = [task for task in played if is_ours and (task.expected.calls or task.expected.say)]
    can_learn = [] if played and domain.open(played[0]).remote else can_learn
    usage = RuleUsage()
    with phase(f"playing {len(played)} tasks"):
        lost = asyncio.run(find_lost(domain, played, seed, usage)) if played else []
        taught = asyncio.run(play_teacher(domain, can_learn, seed, usage)) if can_learn else Taught()
        for identity, problem in taught.judge(lost):
            note(identity, problem)
    if domain.policy_rules:
        for problem in find_misquoted(domain.policy, domain.policy_rules) if domain.policy.strip() else ():
            note("", problem)
        checked.policy = check_policy(domain, usage)
    if _fingerprint(domain) != before:
        note(
            "", "a tool changed what all conversations share; change a record only where a table gives it out"
        )
    return checked


def find_playable(domain: Domain, tasks: Sequence[Task]) -> list[Task]:
    """Some of the tasks that the rule-based parties can play."""
    if domain.source == "simulated":
        return []  # nobody answers for simulated tools here
    return spread([task for task in tasks if domain.user is not None or "agenda" in task.meta], PLAYED)


def check_policy(domain: Domain, usage: RuleUsage) -> PolicyCheck:
    """How far the rules of a domain cover its policy."""
    names = [rule.name for rule in domain.policy_rules]
    return PolicyCheck(
        rules=len(names),
        sentences=len(list(split_policy(domain.policy))),
        without_rule=find_uncovered(domain.policy, domain.policy_rules),
        never_exercised=[name for name in names if usage.conversations and not usage.exercised[name]],
    )


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """Some of the tasks, evenly spaced."""
    step = max(1, len(tasks) / count)
    return [tasks[int(number * step)] for number in range(min(count, len(tasks)))]


def _fingerprint(domain: Domain) -> int:
    sides = (domain.database, domain.user_database)
    return hash(tuple(canonical(side.to_data()) for side in sides if side is not None))


# -- the domain as a whole ---------------------------------------------------------------------------------


def find_domain_problems(domain: Domain) -> Iterator[str]:
    """What is wrong with the domain before any task is looked at."""
    if not domain.policy.strip():
        yield "the policy is empty"
    if not domain.database.tools:
        yield "the agent has no tools"
    if not domain.rules.stop_tokens or not all(token.strip() for token in domain.rules.stop_tokens):
        yield "a stop token is empty"
    for side in (domain.database, domain.user_database):
        for tool in side.tools.values() if side is not None else ():
            yield from find_schema_problems(tool)


_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}


def find_schema_problems(tool: Tool) -> Iterator[str]:
    """What would make an endpoint refuse a tool."""
    where = f"tool {tool.name}"
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool.name):
        yield f"{where}: a name is 1 to 64 letters, digits, _ or -"
    if not tool.description.strip():
        yield f"{where}: it has no description"
    if tool.parameters.get("type") != "object":
        yield f"{where}: its parameters are no schema of type object"
    yield from _find_wrong(tool.parameters, where)


def _find_wrong(schema: Any, where: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"{where}: a schema is an object, not {schema!r}"
        return
    shape = cast("dict[str, Any]", schema)
    kinds: Any = shape.get("type", [])
    for kind in cast("list[Any]", kinds) if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            yield f"{where}: there is no type {kind!r}; allowed are {', '.join(sorted(_TYPES))}"
    properties: Any = shape.get("properties", {})
    if not isinstance(properties, dict):
        yield f"{where}: `properties` is no object"
        properties = {}
    fields = cast("dict[str, Any]", properties)
    required: Any = shape.get("required", [])
    names = cast("list[Any]", required) if isinstance(required, list) else [required]
    for name in names:
        if name not in fields and "additionalProperties" not in shape:
            yield f"{where}: it requires {name!r}, which it does not describe"
    if "enum" in shape and (not isinstance(shape["enum"], list) or not shape["enum"]):
        yield f"{where}: `enum` lists no values"
    if "$ref" in shape:
        yield f"{where}: it refers to {shape['$ref']!r}; schemas must stand by themselves"
    for name, inner in fields.items():
        yield from _find_wrong(inner, f"{where}, {name}")
    for key in ("items", "additionalProperties"):
        if key in shape:
            yield from _find_wrong(shape[key], f"{where}, {key}")
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for inner in shape.get(key, ()):
            yield from _find_wrong(inner, f"{where}, {key}")


def _find_tasks(
    domain: Domain, split: str | None, count: int | None, seed: int, note: Callable[[str], None]
) -> list[Task]:
    """The tasks to check, asked for twice: the same question has to give the same tasks."""

    def ask() -> list[Task]:
        if split is not None:
            return domain.tasks(split, count, seed)
        try:
            return domain.tasks("all", count, seed)
        except TrialogueError:  # a generator may know its splits only one by one
            each = None if count is None else -(-count // len(SPLITS))
            return [task for name in SPLITS for task in domain.tasks(name, each, seed)][:count]

    tasks = ask()
    if not tasks:
        note("there are no tasks" + (f" in split '{split}'" if split else ""))
    if ask() != tasks:
        note("the same split, count and seed gave different tasks the second time")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            note(f"the task id '{task.id}' stands for more than one task")
        seen.add(task.id)
    return tasks


# -- one task ----------------------------------------------------------------------------------------------


def find_task_problems(domain: Domain, task: Task) -> Iterator[str]:
    """What is wrong with a task: its set-up, its gold replay, or what it pays for nothing."""
    if not task.instructions.strip():
        yield "the user's instructions are empty"
    try:
        environment = domain.open(task)
        environment.digest()
    except Exception as error:  # noqa: BLE001 - a domain's own code may raise anything
        yield f"the set-up fails: {_tell(error, domain)}"
        return
    try:
        problem = _check_rewards(task, environment)
    except Exception as error:  # noqa: BLE001 - as above
        problem = _tell(error, domain)
    if problem:
        yield problem


def _check_rewards(task: Task, environment: Environment) -> str | None:
    expected = task.expected
    if environment.remote and expected == Expected():
        return None  # a mere wish: whether it was fulfilled is for verification and judges to say
    own_rule = environment.domain.reward is not None
    try:
        untouched = _grade(task, to_conversation(task, (), (), environment), environment)
    except GradeError:
        if not own_rule:
            raise
        untouched = Reward(value=0.0)  # a benchmark may refuse to grade it
    if untouched is None:
        return None  # judged by somebody who cannot be asked here
    if expected.nothing and not untouched.is_success:
        return f"expected.nothing is set, but doing nothing scores {_show(untouched)}"
    pays = untouched.value > 0 if untouched.success is None else untouched.success
    if not expected.nothing and pays and not _is_judged(task, environment):
        return (
            f"doing and saying nothing scores {untouched.value:g}; expect a change or something to say, "
            "or set expected.nothing"
        )
    if expected.assertions and not expected.calls:
        return None  # it is told what must hold, but not how to get there
    fresh = environment.reopen()
    said = [item if isinstance(item, str) else item[0] for item in expected.say]
    refused: list[str] = []
    conversation = to_conversation(task, expected.calls, said, fresh, refused)
    if refused and not own_rule:
        return refused[0]
    gold = _grade(task, conversation, fresh)
    if gold is None or gold.is_success:
        return None
    if own_rule and expected.assertions and fresh.user_tools and not _has_user_calls(expected.calls):
        return None  # what must hold may be up to the user, whose calls are not told
    return refused[0] if refused else f"the gold replay scores {_show(gold)}"


def _show(reward: Reward) -> str:
    return f"{reward.value:g}: {'; '.join(reward.why)}"


def _has_user_calls(calls: Sequence[Call]) -> bool:
    return any(call.side == "user" for call in calls)


def _nobody(task: Task, seed: int) -> None:
    """A judge who is never asked."""


def _is_judged(task: Task, environment: Environment) -> bool:
    """Whether somebody who cannot be asked here would have a say, were there a judge."""
    domain = replace(environment.domain, judge=_nobody)
    fresh = domain.open(task)
    return _grade(task, to_conversation(task, (), (), fresh), fresh) is None


def to_conversation(
    task: Task,
    calls: Sequence[Call],
    say: Sequence[str],
    environment: Environment,
    refused: list[str] | None = None,
) -> Trajectory:
    """A conversation of these calls and words, carried out, with a proper end. `refused` takes what the
    tools say of calls they refuse."""
    turns = [Turn(side="user", message=Message(role="user", content="Hello."))]
    end: End = "user_stop"

    def carry_out(number: int, call: Call) -> None:
        nonlocal end
        called = ToolCall(id=f"call_{number}", name=call.name, arguments=call.arguments)
        role = "assistant" if call.side == "agent" else "user"
        turns.append(Turn(side=call.side, message=Message(role=role, tool_calls=(called,))))
        result = environment.call(call.name, call.arguments, call.side)
        if result.failed and refused is not None:
            refused.append(f"the gold call {call.name} is refused: {result.text.removeprefix('Error: ')}")
        observed = Message(role="tool", content=result.text, tool_call_id=called.id)
        turns.append(Turn(side=call.side, message=observed, failed=result.failed))
        if result.ends:
            end = "agent_stop" if call.side == "agent" else "user_stop"

    def is_last(call: Call) -> bool:
        tools = environment.tools if call.side == "agent" else environment.user_tools
        return call.name in tools and tools[call.name].ends

    numbered = list(enumerate(calls))
    for number, call in numbered:
        if not is_last(call):
            carry_out(number, call)
    if say:
        turns.append(Turn(side="agent", message=Message(role="assistant", content=". ".join(say))))
    for number, call in numbered:  # what ends the conversation comes after everything that must be said
        if is_last(call):
            carry_out(number, call)
    if end == "user_stop":
        words = f"Thank you. {environment.domain.rules.stop_tokens[0]}"
        turns.append(Turn(side="user", message=Message(role="user", content=words)))
    return Trajectory(id=task.id, task=task, turns=tuple(turns), end=end)


def _grade(task: Task, trajectory: Trajectory, environment: Environment) -> Reward | None:
    """The reward without the rules of the policy; None where a judge would have to be waited for."""
    reward = grade_outcome(task, trajectory, environment)
    if isinstance(reward, PendingReward):
        reward.close()
        return None
    return reward


def _tell(error: Exception, domain: Domain) -> str:
    """What a domain's own code raised, in which of its tools or functions, and on which line."""
    if isinstance(error, TrialogueError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        text = f"{error.title}: {explain(error)}"
    return text + find_place(error, domain.database)


# -- tools that say they only read -------------------------------------------------------------------------


def find_writing_read_tools(domain: Domain, tasks: Sequence[Task]) -> Iterator[str]:
    """Read tools that change something. Arguments to try are taken from the tasks and the database."""
    if not tasks or domain.open(tasks[0]).remote:
        return
    known: dict[str, list[Any]] = {}
    for task in tasks[:TRIED]:
        for call in task.expected.calls:
            for name, value in call.arguments.items():
                values = known.setdefault(name, [])
                if value not in values and len(values) < 5:
                    values.append(value)
    sides: list[tuple[Side, Database | None]] = [("agent", domain.database), ("user", domain.user_database)]
    for side, database in sides:
        for tool in database.tools.values() if database is not None else ():
            if not tool.writes and database is not None:
                problem = _try_out(domain, tasks[0], tool, side, _candidates(tool, known, database))
                if problem:
                    yield problem


def _try_out(
    domain: Domain, task: Task, tool: Tool, side: Side, tries: Iterator[dict[str, Any]]
) -> str | None:
    for arguments in tries:
        environment = domain.open(task)
        before = environment.digest()
        try:
            result = environment.call(tool.name, arguments, side)
        except DomainError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - a domain's own code may raise anything
            return f"tool {tool.name} breaks on {arguments}: {_tell(error, domain)}"
        if environment.digest() != before:
            return f"tool '{tool.name}' changed the database but is not marked writes=True"
        if not result.failed:
            return None
    return None


def _candidates(tool: Tool, known: Mapping[str, list[Any]], database: Database) -> Iterator[dict[str, Any]]:
    """Arguments that have a chance to be accepted, the likeliest first."""
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    required = [name for name in properties if name in tool.parameters.get("required", ())]
    texts = _texts(database)
    anything = [value for values in texts.values() for value in values]
    usual: dict[str, list[Any]] = {"integer": [1], "number": [1.0], "boolean": [True], "array": [[]]}
    pools: list[list[Any]] = []
    for name in required:
        schema: Mapping[str, Any] = properties[name] if isinstance(properties[name], dict) else {}
        kind = str(schema.get("type"))
        pool = [*known.get(name, ()), *schema.get("enum", ()), *texts.get(name, ()), *usual.get(kind, ())]
        pools.append(pool + anything if kind == "string" and "enum" not in schema else pool)
    likely = itertools.islice(itertools.product(*(pool[:4] for pool in pools)), TRIED)
    for values in itertools.chain(likely, itertools.islice(itertools.product(*pools), TRIED)):
        yield dict(zip(required, values, strict=True))


def _texts(database: Database) -> dict[str, list[str]]:
    """Keys and texts in the first records of each table, by field: what a tool is likely to ask for."""
    found: dict[str, list[str]] = {}
    for table in database.to_data().values():
        if isinstance(table, dict):
            for key, record in itertools.islice(cast("dict[str, Any]", table).items(), 3):
                found.setdefault("", []).append(key)
                for name, value in cast("dict[str, Any]", record).items() if isinstance(record, dict) else ():
                    if isinstance(value, str):
                        found.setdefault(name, []).append(value)
    return found


# -- playing it --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Taught:
    """What the teacher made of some tasks."""

    solved: set[str] = field(default_factory=set[str])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    unknowable: list[Problem] = field(default_factory=list[Problem])

    def judge(self, lost: Sequence[Problem]) -> list[Problem]:
        """What the gold agent lost counts where the teacher loses it too: a policy may ask for look-ups that
        no gold call makes. The teacher's reason is told, since it goes the way an agent has to go."""
        told = [
            Problem(
                task,
                f"the teacher with the agenda user loses: {self.lost[task]}" if task in self.lost else text,
            )
            for task, text in lost
            if task not in self.solved
        ]
        unknown = {task for task, _ in self.unknowable}
        return sorted({*self.unknowable, *(each for each in told if each.task not in unknown)})


async def play_teacher(domain: Domain, tasks: Sequence[Task], seed: int, usage: RuleUsage) -> Taught:
    """Let the teacher play tasks with the rule-based user. A task is unknowable if it has a gold argument or
    an answer that no user says and no tool shows: a model that learns it learns to invent."""
    limits = Limits(seconds=30)
    user = find_model(Speaker(model="agenda"), "user", domain, limits, seed)
    settings = RolloutSettings(limits=limits, seed=seed, redraws=0, grade=grade)
    beginning = f"{Unknowable.__name__}: "
    taught = Taught()
    async for group in rollout(domain, tasks, make_teacher(domain), user, settings):
        for item in group.failed:
            text = item.error or ""
            if text.startswith("ModelError: "):
                taught.lost[item.task.id] = text.removeprefix("ModelError: ")
            if text.startswith(beginning):
                told = text.removeprefix(beginning).removeprefix(f"task {item.task.id}: ")
                taught.unknowable.append(Problem(item.task.id, told))
        for item in group.trajectories:
            usage.add(domain.policy_rules, item.turns, domain.policy)
            if item.is_success and item.reward is not None and not item.reward.breaches:
                taught.solved.add(item.task.id)
            else:
                taught.lost[item.task.id] = "; ".join(item.reward.why) if item.reward else item.end
    return taught


async def find_lost(
    domain: Domain, tasks: Sequence[Task], seed: int, usage: RuleUsage | None = None
) -> list[Problem]:
    """The tasks that the oracle (or, without one, the gold agent) loses with the rule-based user, and the
    rules that it breaks. `usage` counts the rules."""
    limits = Limits(seconds=30)
    agent = find_model(Speaker(model="oracle"), "agent", domain, limits, seed)
    user = find_model(Speaker(model="agenda"), "user", domain, limits, seed)
    who = "the oracle" if domain.oracle is not None else "the gold agent"
    problems: list[Problem] = []
    settings = RolloutSettings(limits=limits, seed=seed, redraws=0, grade=grade)
    async for group in rollout(domain, tasks, agent, user, settings):
        problems += [
            Problem(item.task.id, f"{who} with the agenda user fails: {item.error}") for item in group.failed
        ]
        for item in group.trajectories:
            if usage is not None:
                usage.add(domain.policy_rules, item.turns, domain.policy)
            if item.reward is None:
                continue
            if not item.is_success:
                why = "; ".join(item.reward.why)
                problems.append(
                    Problem(item.task.id, f"{who} with the agenda user loses ({item.end}): {why}")
                )
            problems += [
                Problem(item.task.id, f"{who} with the agenda user: {tell_breach(breach)}")
                for breach in item.reward.breaches
                if item.is_success
            ]
    return sorted(problems)
