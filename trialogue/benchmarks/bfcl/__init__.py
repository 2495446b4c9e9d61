"""BFCL multi-turn: the user's turns are fixed; in each the agent calls functions until it calls none."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trialogue.benchmarks.bfcl import package as files
from trialogue.benchmarks.bfcl.execute import find_functions, parse_call
from trialogue.benchmarks.bfcl.world import Apis, BfclDomain, find_entry_tools, find_opened, grade_bfcl
from trialogue.benchmarks.folder import find_version
from trialogue.benchmarks.rules import BenchmarkRules
from trialogue.benchmarks.toolkit import Plain
from trialogue.errors import ConfigError, DomainError
from trialogue.messages import ToolCall
from trialogue.reading import reading
from trialogue.task import Assertion, Expected, Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domain import STOP, from_list
from trialogue.world.tools import Tool

ALL = "all"
TRUTH = TypeAdapter(list[list[str]])
"""The gold calls of each turn."""
MAX_STEPS = 20
"""Maximum number of messages with calls in one user turn. One more loses the entry."""
POLICY = """\
You carry out what the user asks for by calling functions. Within a turn, go on calling until the request is
fulfilled as far as it can be; then answer without a call, and the next turn begins. Say so where a function
or a value you would need is missing.
"""
ADDED = "There are more functions now. Please try again."


def find(name: str = "", data: str | None = None) -> BfclDomain:
    """The category `base`, `miss_func`, `miss_param` or `long_context`, or `all` of them, optionally followed
    by `@v3` or `@v4`."""
    category, _, wanted = name.partition("@")
    if category not in (*files.CATEGORIES, ALL) or wanted not in ("", *files.GENERATIONS):
        allowed = ", ".join([*files.CATEGORIES, ALL])
        raise ConfigError(
            f"there is no 'bfcl:{name}'; allowed are {allowed}, optionally followed by @v3 or @v4"
        )
    package = files.find_package(data)
    with reading(package, ConfigError):
        return _find(category, files.find_generation(package, wanted), package)


@lru_cache(maxsize=16)
def _find(category: str, generation: str, package: Path) -> BfclDomain:
    name = f"bfcl:{category}"
    categories = files.CATEGORIES if category == ALL else (category,)
    found = [_read_tasks(package, generation, item, name) for item in categories]
    # Alternate, so that the first tasks of `all` are of every category.
    tasks = [task for row in zip_longest(*found) for task in row if task is not None]
    official = files.read_added_sentence(package)
    added = official or ADDED
    tools = {key: tool for task in tasks for key, tool in find_entry_tools(package, task).items()}
    kind = type("Apis", (Apis,), {})
    kind.tools = tools
    return BfclDomain(
        name=name,
        policy=POLICY,
        database=kind.load({}),
        tasks=from_list(name, tasks),
        reward=grade_bfcl,
        oracle=lambda task, _seed: GoldCaller(task, package),
        user=lambda task, _seed: ScriptedUser(task, added),
        rules=BfclRules(),
        reference=f"{name}@{generation}",
        notes={
            "benchmark": "BFCL multi-turn",
            "version": find_version(package),
            "generation": generation,
            "wording": "official functions and user turns"
            + ("" if official else "; the sentence about added functions is ours"),
        },
        package=package,
    )


def _read_tasks(package: Path, generation: str, category: str, name: str) -> list[Task]:
    file = files.find_entries(package, generation, category)
    with reading(file, ConfigError):
        entries = files.read_entries(package, generation, category)
        tasks = [to_bfcl_task(entry, name, category) for entry in entries]
    if not tasks:
        raise ConfigError(f"{file} holds no task")
    return tasks


def to_bfcl_task(entry: Plain, name: str, category: str) -> Task:
    """One entry of the benchmark; its category is its family."""
    turns = ["\n".join(message["content"] for message in turn) for turn in entry["question"]]
    truth = TRUTH.validate_python(entry["ground_truth"])
    return Task(
        id=entry["id"],
        domain=name,
        instructions=next(text for text in turns if text),
        expected=Expected(assertions=(Assertion(name="is_every_turn_right"),)),
        meta={
            "family": category,
            "turns": turns,
            "missed_function": entry.get("missed_function", {}),
            "excluded_function": entry.get("excluded_function", []),
            "ground_truth": truth,
            **{key: entry[key] for key in ("initial_config", "involved_classes")},
        },
    )


class ScriptedUser:
    """Says the turns of an entry. In an empty turn new functions are announced."""

    def __init__(self, task: Task, added: str) -> None:
        self._turns: list[str] = task.meta["turns"]
        self._added = added
        self._world = find_opened(task)

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        number = sum(turn.message.role == "assistant" for turn in turns)
        if number >= len(self._turns):
            return Reply(STOP)
        if self._world is not None:
            self._world.enter(number)
        return Reply(self._turns[number] or self._added)


class GoldCaller:
    """Makes the gold calls of each turn in one message, then says that it is done."""

    def __init__(self, task: Task, package: Path) -> None:
        kinds = [files.load_class(package, name) for name in task.meta["involved_classes"]]
        owners: dict[str, Any] = {name: kind for kind in kinds for name in find_functions(kind)}
        truth: list[list[str]] = task.meta["ground_truth"]
        with reading(f"task {task.id}, ground_truth", DomainError):
            self._turns = [[_to_named(text, owners) for text in calls] for calls in truth]

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        number = sum(turn.message.role == "user" for turn in turns) - 1
        if turns[-1].message.role == "user" and number < len(self._turns) and self._turns[number]:
            return Reply(tool_calls=tuple(self._turns[number]))
        return Reply("Done.")


def _to_named(text: str, owners: dict[str, Any]) -> ToolCall:
    """A gold call with all arguments named."""
    call = parse_call(text)
    bound = inspect.signature(getattr(owners[call.name], call.name)).bind(
        None, *call.positional, **call.named
    )
    arguments = dict(list(bound.arguments.items())[1:])
    return ToolCall(id="call_0", name=call.name, arguments=arguments)


@dataclass(frozen=True)
class BfclRules(BenchmarkRules):
    """Too many messages with calls in one user turn end an entry."""

    def is_over(self, turns: Sequence[Turn]) -> bool:
        steps = 0
        for turn in reversed(turns):
            if turn.side == "user":
                break
            steps += bool(turn.message.tool_calls)
        return steps > MAX_STEPS
