"""Grade recorded ACEBench episodes: JSON lines with `lang`, `category`, `id` and `steps`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trialogue.benchmarks import ace
from trialogue.benchmarks.ace.execute import UnreadableCalls
from trialogue.benchmarks.ace.grade import judge
from trialogue.benchmarks.ace.world import AceDomain
from trialogue.benchmarks.folder import read_json_lines
from trialogue.benchmarks.recorded import Recorded
from trialogue.errors import ConfigError, DomainError
from trialogue.reading import reading
from trialogue.task import Task


def score_ace_file(path: Path, name: str, data: str | None) -> list[Recorded]:
    """Grade the episodes of one category and language; skip others in the file."""
    domain = ace.find(name, data)
    tasks = {task.id: task for task in domain.tasks("all")}
    category = domain.name.replace("ace:", "agent_")
    wanted = category, domain.language
    with reading(path, ConfigError):
        return [
            score_ace_episode(domain, tasks, record)
            for record in read_json_lines(path)
            if (record.get("category", category), record.get("lang", domain.language)) == wanted
        ]


def score_ace_episode(domain: AceDomain, tasks: Mapping[str, Task], record: Mapping[str, Any]) -> Recorded:
    task = tasks.get(str(record["id"]))
    if task is None:
        raise DomainError(f"{domain.reference} has no task '{record['id']}'")
    environment = domain.open(task)
    initial = environment.digest()
    mismatches: list[dict[str, Any]] = []
    for step in record["steps"]:
        now: Any
        try:
            now = environment.execute(step["call"])
        except UnreadableCalls as error:
            now = None
            if "raised" not in step:
                now = str(error)
        if now != step.get("result"):
            mismatches.append({"tool": step["call"], "recorded": step.get("result"), "now": now})
    verdict = judge(environment, [step["call"] for step in record["steps"]])
    parts = {"END_TO_END": float(verdict.end_to_end), "PROCESS": verdict.process}
    return Recorded(
        id=str(record["id"]),
        reward=float(verdict.end_to_end),
        reward_breakdown=parts,
        db_match=verdict.end_to_end,
        initial_db_hash=initial,
        final_db_hash=environment.digest(),
        tool_mismatches=mismatches,
        more={"process_accuracy": verdict.process, "final_state": environment.to_state()},
    )
