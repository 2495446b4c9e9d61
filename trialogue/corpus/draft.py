"""Draft a scenario with a language model: from a short brief to a folder that people review and correct.

First the tables are drafted, then the tools, the policy, and tasks with a small database each. Every draft is
checked. A wrong one is returned to the model with the problem, a limited number of times. An existing folder,
a drafted scenario or an MCP server, only gets more tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from trialogue.config import DraftConfig
from trialogue.durable import append, write
from trialogue.errors import ConfigError, DomainError, ModelError
from trialogue.messages import Frozen, Message
from trialogue.reading import find_object, from_json, read_table
from trialogue.score.check import find_task_problems
from trialogue.talk.model import Model
from trialogue.task import Assertion, Check, Expected, Setup, Side, Task
from trialogue.trajectory import Turn
from trialogue.world.domain import Domain, from_list
from trialogue.world.find import find_domain
from trialogue.world.simulated import (
    FILE,
    NEW,
    Scenario,
    SimulatedDomain,
    TableShape,
    ToolShape,
    explain_draft,
    make_domain,
)

T = TypeVar("T")
Watch = Callable[[str], None]

PROMPTS: dict[str, str] = read_table(__file__, "prompts.toml")["draft"]


class _Tables(Frozen):
    summary: str = Field(min_length=1)
    tables: dict[str, TableShape] = Field(min_length=1)


class _Tools(Frozen):
    tools: tuple[ToolShape, ...] = Field(min_length=1)


class _Policy(Frozen):
    policy: str = Field(min_length=40)


class _Task(Frozen):
    wish: str = Field(min_length=20)
    family: str = Field(min_length=1)
    database: dict[str, dict[str, dict[str, Any]]] = Field(min_length=1)
    changes: dict[str, dict[str, dict[str, Any] | None]] = {}
    say: tuple[str | tuple[str, ...], ...] = ()


class _Wish(Frozen):
    wish: str = Field(min_length=20)
    family: str = Field(min_length=1)
    checks: tuple[Check, ...] = ()


class Drafter:
    """Asks a model for drafts and refuses unusable ones."""

    def __init__(self, model: Model, repairs: int, watch: Watch | None = None) -> None:
        self.model = model
        self.repairs = repairs
        self.watch: Watch = watch if watch is not None else _say_nothing
        self.asked = 0
        self.repaired = 0

    async def ask(self, what: str, prompt: str, read: Callable[[Any], T]) -> T:
        """A draft that `read` accepts. Problems are returned to the model, a limited number of times."""
        turns = [_say("system", PROMPTS["form"]), _say("user", prompt)]
        problem = ""
        for attempt in range(self.repairs + 1):
            self.asked += 1
            answer = (await self.model.reply(turns, [])).content
            try:
                draft = read(_read_object(answer))
            except ValidationError as error:
                problem = explain_draft(error)
            except (DomainError, ValueError) as error:
                problem = str(error)
            else:
                self.watch(f"{what}: ok" + (f" after {attempt} repairs" if attempt else ""))
                return draft
            self.repaired += 1
            self.watch(f"{what}: {problem}")
            turns += [
                _say("assistant", answer or "(nothing)"),
                _say("user", f"That cannot be used: {problem}. Answer again with the whole JSON object."),
            ]
        raise ModelError(f"{what}: refused after {self.repairs} repairs: {problem}", "infrastructure")

    async def draft_scenario(self, brief: str) -> tuple[Scenario, str]:
        """Tables, tools and policy of a new scenario."""
        tables = await self.ask("tables", PROMPTS["tables"].format(brief=brief), _Tables.model_validate)
        shown = json.dumps(
            tables.model_dump(mode="json", exclude_defaults=True)["tables"], ensure_ascii=False
        )

        def read_tools(value: Any) -> Scenario:
            tools = _Tools.model_validate(value).tools
            scenario = Scenario(summary=tables.summary, tables=tables.tables, tools=tools)
            if not any(tool.writes and not tool.ends for tool in tools):
                raise ValueError("no tool changes anything; at least one has to write")
            if all(tool.writes for tool in tools):
                raise ValueError("every tool writes; at least one has to look something up")
            make_domain("draft", scenario, "draft", from_list("draft", []))
            return scenario

        scenario = await self.ask("tools", PROMPTS["tools"].format(brief=brief, tables=shown), read_tools)
        policy = await self.ask(
            "policy",
            PROMPTS["policy"].format(brief=brief, tables=shown, tools=_show_tools(scenario)),
            _Policy.model_validate,
        )
        return scenario, policy.policy.rstrip() + "\n"

    async def draft_task(self, domain: Domain, number: int, earlier: Sequence[Task]) -> Task:
        """Draft one more task: with its own database if the tools are simulated, else only a wish."""
        known = {" ".join(task.instructions.lower().split()) for task in earlier}

        def is_double(wish: str) -> None:
            if " ".join(wish.lower().split()) in known:
                raise ValueError("that wish exists already")

        told = "; ".join(f"«{task.instructions[:120]}»" for task in earlier[-8:]) or "(there is none yet)"
        split = "train"
        if not isinstance(domain, SimulatedDomain):
            tools = json.dumps([tool.schema["function"] for tool in domain.database.tools.values()])

            def read_wish(value: Any) -> Task:
                wish = _Wish.model_validate(value)
                is_double(wish.wish)
                unknown = [check.name for check in wish.checks if check.name not in domain.database.tools]
                if unknown:
                    raise ValueError(f"checks: there is no tool {unknown[0]}")
                for check in wish.checks:
                    try:
                        re.compile(check.matches)
                    except re.error as error:
                        raise ValueError(
                            f"checks: '{check.matches}' is not a regular expression: {error}"
                        ) from None
                return Task(
                    id=f"wish-{number}",
                    domain=domain.name,
                    instructions=wish.wish,
                    expected=Expected(checks=wish.checks),
                    split=split,
                    meta={"family": wish.family},
                )

            prompt = PROMPTS["wishes"].format(policy=domain.policy, tools=tools, number=number, earlier=told)
            return await self.ask(f"wish {number}", prompt, read_wish)

        def read_task(value: Any) -> Task:
            draft = _Task.model_validate(value)
            is_double(draft.wish)
            reached = Assertion(name="is_reached", arguments={"changes": draft.changes})
            task = Task(
                id=f"task-{number}",
                domain=domain.name,
                instructions=draft.wish,
                setup=Setup(data=draft.database),
                expected=Expected(assertions=(reached,), say=draft.say),
                split=split,
                meta={"family": draft.family},
            )
            if not draft.changes and not draft.say:
                raise ValueError('"changes" and "say" are both empty: nothing could be checked')
            for problem in find_task_problems(domain, task):
                raise ValueError(problem)
            environment = domain.open(task)
            fixed = {
                table: {key: part for key, part in records.items() if not key.startswith(NEW)}
                for table, records in draft.changes.items()
            }
            environment.do(reached.model_copy(update={"name": "lay", "arguments": {"changes": fixed}}))
            if any(fixed.values()) and not environment.difference():
                raise ValueError('"changes" changes nothing')
            return task

        prompt = PROMPTS["tasks"].format(
            policy=domain.policy,
            tables=json.dumps(domain.database.schemas(), ensure_ascii=False),
            tools=_show_tools(domain.scenario),
            number=number,
            earlier=told,
            new=NEW,
        )
        return await self.ask(f"task {number}", prompt, read_task)


def _say(role: Literal["system", "user", "assistant"], text: str) -> Turn:
    side: Side = "user" if role == "assistant" else "agent"
    return Turn(side=side, message=Message(role=role, content=text))


def _say_nothing(text: str) -> None:
    """The default of `watch`."""


def _read_object(answer: str) -> dict[str, Any]:
    found = find_object(answer)
    try:
        value: Any = from_json(found) if found else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return cast("dict[str, Any]", value)


def _show_tools(scenario: Scenario) -> str:
    return json.dumps(scenario.model_dump(mode="json", exclude_defaults=True)["tools"], ensure_ascii=False)


def read_brief(folder: Path, file: str | None) -> str | None:
    """The brief of a new scenario; None if the folder exists already."""
    if folder.exists():
        return None
    if file is None:
        raise ConfigError(f"{folder} does not exist; describe the new scenario in a file: --brief FILE")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", folder.name):
        raise ConfigError(
            f"'{folder.name}' is not a valid name for a domain: use small letters, digits and _"
        )
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the brief {file}: {error}") from None


def write_folder(folder: Path, brief: str, scenario: Scenario, policy: str, model: str) -> None:
    """Write the folder of a new scenario, without tasks."""
    folder.mkdir(parents=True)
    files = {
        FILE: scenario.model_dump_json(indent=2, exclude_defaults=True) + "\n",
        "policy.md": policy,
        "brief.md": brief + "\n",
        "tasks.jsonl": "",
        "README.md": PROMPTS["readme"].format(name=folder.name, model=model),
    }
    for name, text in files.items():
        write(folder / name, text)


async def draft(config: DraftConfig, model: Model, watch: Watch | None = None) -> dict[str, Any]:
    """Draft a scenario into a new folder, or more tasks into an existing one. Finished drafts are kept."""
    folder = Path(config.folder)
    drafter = Drafter(model, config.repairs, watch)
    brief = read_brief(folder, config.brief)
    if brief is not None:
        scenario, policy = await drafter.draft_scenario(brief)
        write_folder(folder, brief, scenario, policy, config.drafter.model)
    domain = find_domain(str(folder))
    if domain.source == "domain":
        raise ConfigError(
            f"{folder} is a domain with its own code; only scenarios and MCP servers can be drafted"
        )
    tasks = _read_tasks(domain)
    for _ in range(config.tasks):
        number = len(tasks) + 1
        while any(task.id.endswith(f"-{number}") for task in tasks):
            number += 1
        task = await drafter.draft_task(domain, number, tasks)
        tasks.append(task)
        line = task.model_dump_json(exclude_defaults=True, exclude={"domain"})
        append(folder / "tasks.jsonl", line + "\n")
    return {
        "folder": str(folder),
        "source": domain.source,
        "tools": len(domain.database.tools),
        "tasks": len(tasks),
        "asked": drafter.asked,
        "repaired": drafter.repaired,
    }


def _read_tasks(domain: Domain) -> list[Task]:
    try:
        return domain.tasks("all")
    except DomainError:  # none yet
        return []
