"""Read TAU2's files: policies, guidelines and tasks of a generation."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trialogue.benchmarks.folder import DATA, find_data, find_file, read_data, read_text
from trialogue.errors import ConfigError
from trialogue.reading import reading
from trialogue.task import Assertion, Call, Expected, Setup, Side, Task
from trialogue.world.domain import TaskSource

GENERATIONS = {"v1.0.1": "tau2-bench", "v0.2": "tau2-bench-v0.2.0", "verified": "tau2-bench-verified"}
"""Generation → name of its folder where several generations are side by side."""
DEFAULT_BASIS = ["DB", "COMMUNICATE"]
PLACES = ("data/tau2/domains", "tau2/domains", "domains", "tau2-bench/data/tau2/domains", "")
HELP = (
    "Get it with `git clone https://github.com/sierra-research/tau2-bench` and name that folder, "
    "or `pip install inspect-evals`, whose tau2 data is found by itself"
)


def find_tau2_folder(data: str | None, domain: str) -> Path:
    """The folder of one domain."""
    places = [f"{place}/{domain}".lstrip("/") for place in PLACES]
    return find_data(data, places, f"tau2:{domain}", HELP, "inspect_evals/tau2/data")


def find_task_folder(folder: Path, generation: str, data: str | None) -> Path:
    """The folder with the tasks of a generation: beside the others, below the named folder, or `folder`."""
    domain = folder.name
    if domain not in ("retail", "airline"):
        return folder  # these tasks are the same in every generation
    name = GENERATIONS[generation]
    roots = [*folder.parents[:6], *([Path(data).expanduser()] if data else [])]
    for root in roots:
        for place in ("data/tau2/domains", "tau2/domains", "domains"):
            if (root / name / place / domain / "tasks.json").is_file():
                return root / name / place / domain
    found = guess_generation(folder)
    if generation not in found:
        raise ConfigError(
            f"the {domain} tasks in {folder} are of generation {' or '.join(found)}, not {generation}; put "
            f"the others into a folder {name} beside it, or ask for tau2:{domain}@{found[0]}"
        )
    return folder


def guess_generation(folder: Path) -> tuple[str, ...]:
    """The generations that a task file can belong to: early ones have no reward basis."""
    with reading(find_file(folder, "tasks", DATA), ConfigError):
        tasks: list[dict[str, Any]] = read_data(folder, "tasks")
        if any("reward_basis" in (task.get("evaluation_criteria") or {}) for task in tasks):
            return ("v1.0.1",)
    return ("verified",) if "verified" in str(folder) else ("v0.2",)


def read_policy(folder: Path, domain: str, solo: bool) -> str:
    """The policy as the agent sees it."""
    if not domain.startswith("telecom"):
        return read_text(folder, "policy_solo" if solo else "policy")
    main = read_text(folder, "main_policy_solo" if solo else "main_policy")
    support = "tech_support_manual"
    if domain == "telecom-workflow":
        support = "tech_support_workflow_solo" if solo else "tech_support_workflow"
    parts = {"main_policy": main, "tech_support_policy": read_text(folder, support)}
    return "\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in parts.items())


def find_tau2_tasks(folder: Path, domain: str, writes: frozenset[str]) -> TaskSource:
    """A task source over the benchmark's own splits; `all` is every task."""
    source = find_file(folder, "tasks", DATA)
    with reading(source, ConfigError):
        raw: list[dict[str, Any]] = list(read_data(folder, "tasks"))
    with reading(find_file(folder, "split_tasks", DATA), ConfigError):
        splits: dict[str, list[str]] = dict(read_data(folder, "split_tasks"))
        part = {name: split for split in ("base", "test", "train") for name in splits.get(split, ())}
    made: dict[str, Task] = {}

    def find(
        split: str,
        count: int | None = None,
        seed: int = 0,
        *,
        levels: Sequence[int] = (),
        families: Sequence[str] = (),
    ) -> list[Task]:
        if split != "all" and split not in splits:
            raise ConfigError(f"{domain} has no split '{split}'; it has {', '.join([*splits, 'all'])}")
        wanted = None if split == "all" else set(splits[split])
        chosen: list[Task] = []
        for number, shape in enumerate(raw, 1):
            if count is not None and len(chosen) >= count:
                break
            with reading(f"{source}, task {number}", ConfigError):
                name = str(shape["id"])
                if wanted is not None and name not in wanted:
                    continue
                if name not in made:
                    made[name] = to_tau2_task(shape, domain, writes, part.get(name, "full"))
            task = made[name]
            if (not families or task.family in families) and (not levels or task.level in levels):
                chosen.append(task)
        return chosen

    return find


def to_tau2_task(raw: Mapping[str, Any], domain: str, writes: frozenset[str], split: str = "test") -> Task:
    """One task of the benchmark."""
    state: Mapping[str, Any] = raw.get("initial_state") or {}
    data: Mapping[str, Any] = state.get("initialization_data") or {}
    criteria: Mapping[str, Any] | None = raw.get("evaluation_criteria")
    meta: dict[str, Any] = {}
    expected = Expected(nothing=True)
    if criteria is not None:
        actions: list[Mapping[str, Any]] = criteria.get("actions") or []
        assertions: list[Mapping[str, Any]] = criteria.get("env_assertions") or []
        said = tuple(criteria.get("communicate_info") or ())
        basis = criteria.get("reward_basis") or DEFAULT_BASIS
        is_asked = (
            bool(assertions)
            or (bool(said) and "COMMUNICATE" in basis)
            or (bool(actions) and "ACTION" in basis)
            or any(item["name"] in writes for item in actions)
        )
        meta["criteria"] = {
            "reward_basis": basis,
            "is_state_given": criteria.get("actions") is not None
            or criteria.get("env_assertions") is not None,
            "actions": [
                {"action_id": item["action_id"], "compare_args": item.get("compare_args")} for item in actions
            ],
            "nl_assertions": list(criteria.get("nl_assertions") or ()),
        }
        expected = Expected(
            calls=tuple(_to_call(item, "name", "requestor") for item in actions),
            say=said,
            assertions=tuple(
                Assertion(
                    **_to_call(item, "func_name", "env_type").model_dump(),
                    value=item.get("assert_value", True),
                )
                for item in assertions
            ),
            nothing=not is_asked,
        )
    for key in ("ticket", "user_tools"):
        if raw.get(key) is not None:
            meta[key] = raw[key]
    if state.get("message_history"):
        meta["history"] = state["message_history"]
    name = str(raw["id"])
    if name.startswith("["):  # in telecom the id begins with the kind of problem
        meta["family"] = name[1:].partition("]")[0]
    return Task(
        id=name,
        domain=domain,
        instructions=to_scenario(raw["user_scenario"]),
        setup=Setup(
            data=data.get("agent_data") or {},
            user_data=data.get("user_data") or {},
            calls=tuple(
                _to_call(item, "func_name", "env_type") for item in state.get("initialization_actions") or ()
            ),
        ),
        expected=expected,
        split=split,
        meta=meta,
    )


def _to_call(item: Mapping[str, Any], name: str, side: str) -> Call:
    asked: Side = "user" if item.get(side, "assistant") == "user" else "agent"
    return Call(name=item[name], arguments=item["arguments"], side=asked)


_SECTIONS = {
    "reason_for_call": "Reason for call",
    "known_info": "Known info",
    "unknown_info": "Unknown info",
    "task_instructions": "Task instructions",
}


def to_scenario(scenario: Mapping[str, Any]) -> str:
    """The user's scenario in the benchmark's layout."""
    instructions: Any = scenario["instructions"]
    if not isinstance(instructions, str):
        lines = [f"Domain: {instructions['domain']}"]
        for key, title in _SECTIONS.items():
            if instructions.get(key) is not None:
                lines.append(f"{title}:\n{textwrap.indent(instructions[key], chr(9))}")
        instructions = "\n".join(lines)
    persona = scenario.get("persona")
    lines = [] if persona is None else ["Persona:", textwrap.indent(persona, "\t")]
    return "\n".join([*lines, "Instructions:", textwrap.indent(instructions, "\t")])
