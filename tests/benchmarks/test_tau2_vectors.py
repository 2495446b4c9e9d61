"""Every recorded and scripted conversation of tau2-golden: tool results, hashes and the official grade."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trialogue.benchmarks.folder import read_json_lines
from trialogue.benchmarks.tau import tau2
from trialogue.benchmarks.tau.tau2.data import to_tau2_task
from trialogue.benchmarks.tau.tau2.grade import Tau2Verdict, judge_state, premature
from trialogue.benchmarks.tau.tau2.world import Tau2Domain, to_turns

FILES = {
    "claude-sonnet-4-5__airline": 25,
    "gpt-4.1__airline": 20,
    "gpt-4.1__retail": 40,
    "gpt-4.1__telecom-nouser": 40,
    "gpt-4.1__telecom": 40,
    "gpt-oss-120b__airline": 25,
    "toolorchestra-gpt5__retail": 35,
    "scripted_airline": 60,
    "scripted_mock": 138,
    "scripted_retail": 148,
    "scripted_telecom": 222,
}


def find_domain(row: dict[str, Any], data: Path) -> Tau2Domain:
    return tau2.find(row["domain"] + ("-solo" if row["solo_mode"] else ""), str(data))


def find_writes(domain: Tau2Domain) -> frozenset[str]:
    tools = [*domain.agent_tools.values(), *domain.user_tools.values()]
    return frozenset(tool.name for tool in tools if tool.writes)


def replay(
    row: dict[str, Any], raw_task: dict[str, Any], domain: Tau2Domain, problems: list[str]
) -> Tau2Verdict:
    """Carry a conversation's calls out and compare every answer and hash."""
    environment = domain.open(to_tau2_task(raw_task, domain.name, find_writes(domain)))
    if environment.official_hashes() != (row["initial_db_hash"], row["initial_user_db_hash"]):
        problems.append(f"{row['id']}: initial hashes")
    calls: dict[str, dict[str, Any]] = {}
    for message in row["messages"][row.get("n_history_messages") or 0 :]:
        calls.update({call["id"]: call for call in message.get("tool_calls") or ()})
        if message["role"] == "tool":
            call = calls[message["id"]]
            side = "user" if message["requestor"] == "user" else "agent"
            result = environment.call(call["name"], call["arguments"], side)
            if (result.text, result.failed) != (message["content"], message["error"]):
                problems.append(f"{row['id']}: {call['name']} {result.text!r} not {message['content']!r}")
    if environment.official_hashes() != (row["final_db_hash"], row["final_user_db_hash"]):
        problems.append(f"{row['id']}: final hashes")
    reason = row["termination_reason"]
    if reason not in ("user_stop", "agent_stop"):
        return premature(reason)
    return judge_state(environment, to_turns(row["messages"]))


def compare(verdict: Tau2Verdict, expected: dict[str, Any], identity: str, problems: list[str]) -> None:
    if verdict.reward_basis is not None:
        verdict.reward_basis = [part for part in verdict.reward_basis if part != "NL_ASSERTION"]
    for name, value in expected.items():
        if getattr(verdict, name) != value:
            problems.append(f"{identity}: {name} is {getattr(verdict, name)!r}, not {value!r}")


@pytest.mark.parametrize("name", FILES)
def test_conversations_come_out_as_the_benchmark_graded_them(name: str, data: Path) -> None:
    folder = data / "tau2-golden"
    tasks_name = "scripted_tasks.json.gz" if name.startswith("scripted") else f"{name}.tasks.json.gz"
    tasks = json.loads(gzip.decompress((folder / tasks_name).read_bytes()))
    rows = read_json_lines(folder / f"{name}.jsonl.gz")
    problems: list[str] = []
    for row in rows:
        domain = find_domain(row, data)
        verdict = replay(row, tasks[row["task_ref"]], domain, problems)
        compare(verdict, row["expected"], row["id"], problems)
    assert not problems, problems[:5]
    assert len(rows) == FILES[name]


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("scripted")])
def test_recorded_conversations_regrade_with_the_present_task(name: str, data: Path) -> None:
    problems: list[str] = []
    rows = read_json_lines(data / "tau2-golden" / f"{name}.jsonl.gz")
    for row in rows:
        expected = row["expected_with_v1_0_1_task"]
        domain = find_domain(row, data)
        task = next((item for item in domain.tasks("base") if item.id == row["task_id"]), None)
        assert task is not None
        environment = domain.open(task)
        turns = to_turns(row["messages"])
        environment.replay_writes(turns)
        reason = row["termination_reason"]
        verdict = judge_state(environment, turns) if reason.endswith("_stop") else premature(reason)
        compare(verdict, expected, row["id"], problems)
    assert not problems, problems[:5]


def test_prompts_and_tools_are_those_of_the_benchmark(data: Path) -> None:
    shapes = json.loads(gzip.decompress((data / "tau2-golden" / "prompts_and_tools.json.gz").read_bytes()))
    for name, shape in shapes.items():
        domain = tau2.find(name, str(data))
        assert domain.policy == shape["agent_system_prompt"]
        assert [tool.schema for tool in domain.agent_tools.values()] == shape["agent_tools"]
        assert [tool.schema for tool in domain.user_tools.values()] == (shape.get("user_tools") or [])
        environment = domain.open(domain.tasks("all")[0]) if name in ("retail", "airline") else None
        if environment is not None:
            hashes = environment.official_hashes()
            assert hashes == (shape["initial_db_hash"], shape["initial_user_db_hash"])


def test_user_prompts_are_those_of_the_benchmark(data: Path) -> None:
    rows = read_json_lines(data / "tau2-golden" / "user_prompts.jsonl.gz")
    for row in rows:
        domain = tau2.find(row["domain"], str(data))
        task = next(task for task in domain.tasks("base") if task.id == row["task_id"])
        assert domain.user_prompt is not None
        assert domain.user_prompt(task) == row["user_system_prompt"]
    assert len(rows) == 288
