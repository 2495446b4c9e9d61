"""Grade recorded TAU2 conversations: the benchmark's results file, or JSON lines of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from trialogue.benchmarks.folder import read_json_file, read_json_lines
from trialogue.benchmarks.recorded import Recorded
from trialogue.benchmarks.tau import tau2
from trialogue.benchmarks.tau.tau2.data import to_tau2_task
from trialogue.benchmarks.tau.tau2.grade import ENDS_GRADED, judge_state, premature
from trialogue.benchmarks.tau.tau2.world import Tau2Domain, Tau2Environment, to_turns
from trialogue.errors import ConfigError, DomainError
from trialogue.reading import reading
from trialogue.score.compliance import find_breaches
from trialogue.task import Task


def score_tau2_file(path: Path, name: str, data: str | None) -> list[Recorded]:
    """Grade every conversation of a file, by the task in the file or else the task of that id in the
    benchmark's data. Statements for a judge are left out."""
    rows: list[Recorded] = []
    asked, _, generation = name.partition("@")
    with reading(path, ConfigError):
        for record, raw_task in read_conversations(path):
            alone = "-solo" if record.get("solo_mode") and not asked.endswith("-solo") else ""
            domain = tau2.find(f"{asked}{alone}" + (f"@{generation}" if generation else ""), data)
            rows.append(score_tau2_conversation(domain, record, _find_task(domain, record, raw_task)))
    return rows


def read_conversations(path: Path) -> Iterator[tuple[dict[str, Any], Mapping[str, Any] | None]]:
    """Each conversation with its task, if the file contains it."""
    lines = read_json_lines(path) if ".jsonl" in path.name else [read_json_file(path)]
    for shape in lines:
        if not isinstance(shape, dict):
            raise ConfigError(f"{path} holds neither conversations nor a TAU2 results file")
        whole = cast("dict[str, Any]", shape)
        if "simulations" not in whole:
            tasks = _read_tasks_beside(path) if "task_ref" in whole else {}
            yield whole, tasks.get(whole.get("task_ref"))
            continue
        known = {str(task["id"]): task for task in whole.get("tasks") or ()}
        info: dict[str, Any] = whole.get("info") or {}
        agent: dict[str, Any] = info.get("agent_info") or {}
        is_alone = "solo" in str(agent.get("implementation"))
        for simulation in whole["simulations"]:
            yield {"solo_mode": is_alone, **simulation}, known.get(str(simulation["task_id"]))


_TASKS: dict[Path, dict[Any, Mapping[str, Any]]] = {}


def _read_tasks_beside(path: Path) -> dict[Any, Mapping[str, Any]]:
    """The tasks in `RUN.tasks.json` for `RUN.jsonl`. All scripted runs share one file."""
    stem = path.name.partition(".jsonl")[0]
    names = (f"{stem}.tasks", f"{stem.partition('_')[0]}_tasks")
    for name in names:
        for ending in (".json", ".json.gz"):
            beside = path.with_name(name + ending)
            if beside in _TASKS:
                return _TASKS[beside]
            if beside.is_file():
                _TASKS[beside] = read_json_file(beside)
                return _TASKS[beside]
    return {}


def _find_task(domain: Tau2Domain, record: Mapping[str, Any], raw: Mapping[str, Any] | None) -> Task:
    if raw is not None:
        tools = (*domain.agent_tools.values(), *domain.user_tools.values())
        return to_tau2_task(raw, domain.name, frozenset(tool.name for tool in tools if tool.writes))
    wanted = str(record["task_id"])
    found = next((task for task in domain.tasks("all") if task.id == wanted), None)
    if found is None:
        raise DomainError(f"{domain.reference} has no task '{wanted}', and the file does not hold it")
    return found


def score_tau2_conversation(domain: Tau2Domain, record: Mapping[str, Any], task: Task) -> Recorded:
    """Execute the calls in a fresh environment and grade the result."""
    environment = domain.open(task)
    initial = environment.official_hashes()
    messages: list[Mapping[str, Any]] = record["messages"]
    mismatches = list(_replay(environment, messages[len(environment.history) :]))
    final = environment.official_hashes()
    reason = str(record["termination_reason"])
    if reason in ENDS_GRADED:
        verdict = judge_state(environment, to_turns(messages))
    else:
        verdict = premature(reason)
    breaches = find_breaches(domain.policy_rules, to_turns(messages), domain.policy)
    return Recorded(
        id=str(record["id"]),
        reward=verdict.reward,
        reward_breakdown=verdict.reward_breakdown,
        db_match=verdict.db_match,
        initial_db_hash=initial[0],
        final_db_hash=final[0],
        tool_mismatches=mismatches,
        more={
            "initial_user_db_hash": initial[1],
            "final_user_db_hash": final[1],
            "breaches": [breach.model_dump() for breach in breaches],
        },
    )


def _replay(environment: Tau2Environment, messages: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    calls: dict[str, Mapping[str, Any]] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            calls[call["id"]] = call
        if message["role"] != "tool":
            continue
        call = calls.get(message["id"])
        if call is None:
            raise DomainError(f"a tool result without a call: {message['id']}")
        side = "user" if message.get("requestor") == "user" else "agent"
        result = environment.call(call["name"], call["arguments"], side)
        if result.text != (message.get("content") or "") or result.failed != bool(message.get("error")):
            yield {"tool": call["name"], "recorded": message.get("content"), "now": result.text}
