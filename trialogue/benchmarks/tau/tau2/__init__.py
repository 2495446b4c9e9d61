"""TAU2-bench: retail, airline, telecom and mock. Users may have their own tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from trialogue.benchmarks.folder import DATA, Missing, find_file, find_version, read_data, read_text
from trialogue.benchmarks.rules import BenchmarkRules, count_messages
from trialogue.benchmarks.tau.airline import AirlineTools
from trialogue.benchmarks.tau.mock import MockTools, MockUserTools
from trialogue.benchmarks.tau.retail import RetailTools
from trialogue.benchmarks.tau.tau2 import data as files
from trialogue.benchmarks.tau.tau2.grade import grade_tau2
from trialogue.benchmarks.tau.tau2.policy import RULES
from trialogue.benchmarks.tau.tau2.wording import apply, find_wording
from trialogue.benchmarks.tau.tau2.world import Tau2Domain
from trialogue.benchmarks.tau.telecom import TelecomTools, keep_in_step, key_lists
from trialogue.benchmarks.tau.telecom_user import TelecomUserTools
from trialogue.benchmarks.toolkit import Toolkit, to_raw_tools
from trialogue.errors import ConfigError
from trialogue.reading import reading
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.task import Task
from trialogue.trajectory import Turn

NAMES = ("retail", "airline", "telecom", "telecom-workflow", "mock")
ALONE = ("telecom", "telecom-workflow", "mock")
"""Domains in which the agent can also work on a ticket without a user."""
GREETING = "Hi! How can I help you today?"
MAX_STEPS = 200
MAX_ERRORS = 10


@dataclass(frozen=True)
class Tau2Rules(BenchmarkRules):
    """Each message after the first is a step, and so is each round of tool results. Without a user, a text
    message of the agent ends the conversation."""

    stop_tokens: tuple[str, ...] = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
    stop_anywhere: bool = True
    solo: bool = False

    def is_over(self, turns: Sequence[Turn]) -> bool:
        return (
            count_messages(turns) > MAX_STEPS
            or sum(turn.failed for turn in turns) >= MAX_ERRORS
            or (self.solo and turns[-1].message.role == "assistant")
        )


def find(name: str = "", data: str | None = None) -> Tau2Domain:
    """The domain `retail`, `retail@v0.2`, `telecom-solo`, …; `data` is the folder of its files."""
    asked, _, generation = name.partition("@")
    generation = generation or "v1.0.1"
    domain = asked.removesuffix("-solo")
    solo = asked.endswith("-solo")
    if domain not in NAMES or (solo and domain not in ALONE):
        allowed = ", ".join([*NAMES, *(f"{item}-solo" for item in ALONE)])
        raise ConfigError(
            f"there is no 'tau2:{name}'; allowed are {allowed}, followed by @GENERATION if needed"
        )
    if generation not in files.GENERATIONS:
        raise ConfigError(
            f"TAU2 has no generation '{generation}'; allowed are {', '.join(files.GENERATIONS)}"
        )
    folder = files.find_tau2_folder(data, domain.removesuffix("-workflow"))
    with reading(folder, ConfigError):
        return _find(domain, solo, generation, folder, files.find_task_folder(folder, generation, data))


@lru_cache(maxsize=32)
def _find(domain: str, solo: bool, generation: str, folder: Path, task_folder: Path) -> Tau2Domain:
    database, user_database = _read_databases(folder)
    wording = find_wording(folder, domain)
    guidelines = {with_tools: _read_guidelines(folder, with_tools) for with_tools in (False, True)}
    agent_tools = apply(wording, to_raw_tools(type(database)), "agent")
    user_tools = {} if user_database is None else apply(wording, to_raw_tools(type(user_database)), "user")
    writes = frozenset(tool.name for tool in (*agent_tools.values(), *user_tools.values()) if tool.writes)
    policy = files.read_policy(folder, domain, solo)
    name = f"tau2:{domain}{'-solo' if solo else ''}"

    def user_prompt(task: Task) -> str:
        has_tools = user_database is not None and task.meta.get("user_tools") != []
        told = cast("str", guidelines[has_tools])
        return f"{told.replace('<PERSONA_GUIDELINES>', '')}\n\n<scenario>\n{task.instructions}\n</scenario>"

    return Tau2Domain(
        name=name,
        policy=wording.system.replace("{policy}", policy),
        database=database,
        tasks=files.find_tau2_tasks(task_folder, name, writes),
        user_database=user_database,
        after_call=keep_in_step if user_database is not None and domain.startswith("telecom") else None,
        greeting=None if solo else GREETING,
        rules=Tau2Rules(opens="agent" if solo else "user", solo=solo),
        reward=grade_tau2,
        policy_rules=RULES.get(domain, ()) if not solo else (),
        oracle=_work_alone if solo else None,
        user_prompt=user_prompt if guidelines[True] is not None else None,
        reference=f"{name}@{generation}",
        notes={
            "benchmark": "TAU2",
            "version": find_version(folder),
            "generation": generation,
            "wording": wording.source,
            "judge": "none: statements that only a judge can grade are left out",
        },
        agent_tools=agent_tools,
        user_tools=user_tools,
        solo=solo,
        solo_prompt=wording.solo.replace("{policy}", policy),
    )


def _work_alone(task: Task, seed: int) -> ScriptedModel:
    """Make the gold calls of both sides and close the ticket."""
    calls = [call(item.name, **item.arguments) for item in task.expected.calls]
    return ScriptedModel([*calls, call("done")])


@lru_cache(maxsize=8)
def _read_databases(folder: Path) -> tuple[Toolkit, Toolkit | None]:
    """The databases of a domain, shared by its variants."""
    with reading(find_file(folder, "db", DATA), ConfigError):
        data: dict[str, Any] = read_data(folder, "db")
        match folder.name:
            case "retail":
                return RetailTools.load(data), None
            case "airline":
                return AirlineTools.load(data), None
            case "telecom":
                own = TelecomTools.load(key_lists(data))
            case _:
                own = MockTools.load(data)
    with reading(folder / "user_db", ConfigError):
        if folder.name == "telecom":
            around: dict[str, Any] = {"device": {}, "surroundings": {}, **read_data(folder, "user_db")}
            return own, TelecomUserTools.load(around)
        return own, MockUserTools.load(_read_inbox(folder))


def _read_inbox(folder: Path) -> dict[str, Any]:
    try:
        return read_data(folder, "user_db")
    except Missing:  # some copies of the data do not contain it
        return {"notifications": {}}


def _read_guidelines(folder: Path, with_tools: bool) -> str | None:
    stem = "simulation_guidelines_tools" if with_tools else "simulation_guidelines"
    for place in (folder.parents[1] / "user_simulator", folder.parent / "user_simulator"):
        try:
            return read_text(place, stem)
        except Missing:
            continue
    return None
