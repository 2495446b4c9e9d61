"""Grade recorded TAU-bench episodes: JSON lines with task and messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trialogue.benchmarks.folder import read_json_lines
from trialogue.benchmarks.recorded import Recorded
from trialogue.benchmarks.tau import tau1
from trialogue.benchmarks.tau.tau1.data import to_tau1_task
from trialogue.benchmarks.tau.tau1.grade import judge_outcome
from trialogue.benchmarks.tau.tau1.world import Tau1Domain
from trialogue.errors import ConfigError
from trialogue.messages import Message, ToolCall
from trialogue.reading import reading
from trialogue.trajectory import Turn


def score_tau1_file(path: Path, name: str, data: str | None) -> list[Recorded]:
    """Grade every episode of a file by the task in it. An unfinished episode gets 0, as in the benchmark."""
    domain = tau1.find(name, data)
    with reading(path, ConfigError):
        return [score_tau1_episode(domain, record) for record in read_json_lines(path)]


def score_tau1_episode(domain: Tau1Domain, record: Mapping[str, Any]) -> Recorded:
    writes = frozenset(tool.name for tool in domain.agent_tools.values() if tool.writes)
    environment = domain.open(to_tau1_task(record["task"], str(record["id"]), domain.name, "test", writes))
    initial = environment.toolkit.official_hash()
    turns: list[Turn] = []
    mismatches: list[dict[str, Any]] = []
    call: Mapping[str, Any] = {}
    for message in record["messages"]:
        if message["role"] == "tool":
            result = environment.call(call["name"], dict(call["arguments"]))
            if result.text != message["content"]:
                mismatches.append({"tool": call["name"], "recorded": message["content"], "now": result.text})
            continue
        call = message.get("tool_call") or {}
        calls = (ToolCall(id="", name=call["name"], arguments=call["arguments"]),) if call else ()
        said = Message(role=message["role"], content=message.get("content") or "", tool_calls=calls)
        turns.append(Turn(side="agent" if message["role"] == "assistant" else "user", message=said))
    outcome = judge_outcome(environment, turns) if record.get("done", True) else None
    return Recorded(
        id=str(record["id"]),
        reward=0.0 if outcome is None else outcome.reward,
        reward_breakdown=None if outcome is None else outcome.parts,
        db_match=None if outcome is None else outcome.is_data_right,
        initial_db_hash=initial,
        final_db_hash=environment.toolkit.official_hash(),
        tool_mismatches=mismatches,
    )
