"""TAU-bench: recorded episodes, all tasks, loop rules, and reading a checkout."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from trialogue.benchmarks.folder import read_data, read_json_lines
from trialogue.benchmarks.tau import tau1
from trialogue.benchmarks.tau.tau1.data import to_tau1_task
from trialogue.benchmarks.tau.tau1.grade import judge_outcome
from trialogue.errors import ConfigError
from trialogue.messages import Message, ToolCall
from trialogue.score.reward import grade
from trialogue.talk.rollout import RolloutSettings, attempt
from trialogue.talk.scripted import ScriptedModel
from trialogue.task import Task
from trialogue.trajectory import Reply, Trajectory, Turn

INITIAL = {"retail": "5a4b2cb59f4d12de", "airline": "4587e6b48ad2b2c4"}


def find_writes(domain: Any) -> frozenset[str]:
    return frozenset(tool.name for tool in domain.agent_tools.values() if tool.writes)


def test_recorded_episodes_come_out_as_recorded(data: Path) -> None:
    domain = tau1.find("airline", str(data))
    rows = read_json_lines(data / "tau-bench-v1" / "golden" / "airline_gpt-4o.jsonl.gz")
    problems: list[str] = []
    known: dict[str, str] = {}  # many episodes end alike, and hashing a whole database takes its time
    for row in rows:
        task = to_tau1_task(row["task"], row["id"], domain.name, "test", find_writes(domain))
        environment = domain.open(task)
        turns: list[Turn] = []
        call: dict[str, Any] = {}
        for message in row["messages"]:
            if message["role"] == "tool":
                result = environment.call(call["name"], call["arguments"])
                if result.text != message["content"]:
                    problems.append(
                        f"{row['id']}: {call['name']}: {result.text!r} not {message['content']!r}"
                    )
                continue
            call = message.get("tool_call") or {}
            calls = (ToolCall(id="", name=call["name"]),) if call else ()
            said = Message(role=message["role"], content=message["content"] or "", tool_calls=calls)
            turns.append(Turn(side="agent" if message["role"] == "assistant" else "user", message=said))
        if not row["done"]:
            assert row["expected_reward"] == 0.0
            continue
        outcome = judge_outcome(environment, turns)
        for world in (environment, environment.reach_gold()):
            if world.digest() not in known:
                known[world.digest()] = world.toolkit.official_hash()
        hashes = known[environment.digest()], known[environment.gold().digest]
        expected = row["expected_info"]
        if (outcome.reward, hashes[0]) != (row["expected_reward"], row["final_data_hash"]):
            problems.append(f"{row['id']}: reward or final hash")
        if expected.get("gt_data_hash", hashes[1]) != hashes[1]:
            problems.append(f"{row['id']}: gold hash")
        if expected.get("r_actions", outcome.is_data_right) != outcome.is_data_right:
            problems.append(f"{row['id']}: data")
        if expected.get("outputs", outcome.outputs) != outcome.outputs:
            problems.append(f"{row['id']}: outputs")
    assert not problems, problems[:5]
    assert len(rows) == 100


@pytest.mark.parametrize(
    ("name", "sizes"), [("retail", {"train": 500, "dev": 20, "test": 115}), ("airline", {"test": 50})]
)
def test_gold_scores_one(name: str, sizes: dict[str, int], data: Path) -> None:
    domain = tau1.find(name, str(data))
    assert domain.database.official_hash().startswith(INITIAL[name])  # type: ignore[attr-defined]
    untouched = 0
    for split, size in sizes.items():
        tasks = domain.tasks(split)
        assert len(tasks) == size
        for task in tasks:
            environment = domain.open(task)
            before = environment.digest()
            for call in task.expected.calls:
                environment.call(call.name, call.arguments)
            said = Message(role="assistant", content=" ".join(str(item) for item in task.expected.say))
            assert judge_outcome(environment, [Turn(side="agent", message=said)]).reward == 1.0, task.id
            untouched += split == "test" and environment.digest() == before
    assert untouched == {"retail": 11, "airline": 20}[name]
    with pytest.raises(ConfigError, match="has no split 'base'"):
        domain.tasks("base")


def test_tools_and_policy_are_those_of_the_benchmark(data: Path) -> None:
    for name in INITIAL:
        domain = tau1.find(name, str(data))
        folder = data / "tau-bench-v1" / name
        assert [tool.schema for tool in domain.agent_tools.values()] == read_data(folder, "tools_info")
        assert domain.policy == (folder / "wiki.md").read_text()
        assert "user prompt in our own words" in domain.notes["wording"]


def test_missing_data_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"looked for tau_bench/envs/retail.*git clone"):
        tau1.find("retail", str(tmp_path))
    with pytest.raises(ConfigError, match="allowed are retail, airline"):
        tau1.find("telecom", str(tmp_path))


def test_a_checkout_is_read_without_running_it(tmp_path: Path) -> None:
    folder = tmp_path / "tau_bench" / "envs" / "retail"
    (folder / "data").mkdir(parents=True)
    (folder / "tools").mkdir()
    for table in ("orders", "products", "users"):
        (folder / "data" / f"{table}.json").write_text(json.dumps({}))
    (folder / "wiki.md").write_text("Be kind.")
    (folder / "tasks_test.py").write_text(
        'raise SystemExit("never run")\nTASKS_TEST = [Task(annotator="0", user_id="u", instruction="Go.", '
        'actions=[Action(name="think", kwargs={"thought": "x"})], outputs=["7"])]\n'
    )
    (folder / "tools" / "__init__.py").write_text("ALL_TOOLS = [Think]\n")
    (folder / "tools" / "think.py").write_text(
        "class Think(Tool):\n    @staticmethod\n    def get_info():\n"
        '        return {"type": "function", "function": {"name": "think", "description": "Ponder.", '
        '"parameters": {"type": "object"}}}\n'
    )
    (folder.parent / "user.py").write_text(
        "class LLMUserSimulationEnv:\n    def build_system_prompt(self, instruction):\n"
        '        shown = ""\n        return f"""You are a user.{shown}\nRules: none."""\n'
    )
    domain = tau1.find("retail", str(tmp_path))
    [task] = domain.tasks("test")
    assert (task.instructions, task.expected.say) == ("Go.", ("7",))
    assert [tool.description for tool in domain.agent_tools.values()] == ["Ponder."]
    assert domain.user_prompt is not None
    assert domain.user_prompt(task) == "You are a user.\n\nInstruction: Go.\n\nRules: none."
    assert domain.notes["wording"] == "official"


def hold(domain: Any, task: Task, agent: list[Any], user: list[Any]) -> Trajectory:
    agent_source, user_source = (
        lambda _task, _seed, lines=lines: ScriptedModel(lines) for lines in (agent, user)
    )
    return asyncio.run(attempt(domain, task, agent_source, user_source, RolloutSettings(grade=grade)))


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=arguments)


def test_the_user_opens_and_only_the_first_call_counts(data: Path) -> None:
    domain = tau1.find("airline", str(data))
    task = domain.tasks("test")[12]
    two = Reply(tool_calls=(call("think", thought="hm"), call("send_certificate", user_id="x", amount=1)))
    trajectory = hold(domain, task, [two, "Sorry."], ["Hello.", "###STOP###"])
    assert trajectory.turns[0].side == "user"
    assert len(trajectory.turns[1].message.tool_calls) == 1
    assert trajectory.end == "user_stop"


def test_a_transfer_ends_it_and_is_graded(data: Path) -> None:
    domain = tau1.find("airline", str(data))
    task = next(task for task in domain.tasks("test") if task.expected.nothing)
    transfer = Reply(tool_calls=(call("transfer_to_human_agents", summary="s"),))
    trajectory = hold(domain, task, [transfer], ["Hello."])
    assert (trajectory.end, trajectory.value) == ("agent_stop", 1.0)


def test_thirty_messages_of_the_agent_end_it_after_the_answer(data: Path) -> None:
    domain = tau1.find("airline", str(data))
    trajectory = hold(domain, domain.tasks("test")[0], ["Yes?"], ["Hm."])
    assert sum(turn.side == "agent" for turn in trajectory.turns) == 30
    assert trajectory.turns[-1].side == "user"
    assert (trajectory.end, trajectory.value) == ("max_turns", 0.0)


def test_the_user_hears_a_cue_that_the_agent_does_not(data: Path) -> None:
    heard: dict[str, list[str]] = {}

    class Listener:
        def __init__(self, name: str, line: str) -> None:
            self.name, self.line = name, line

        async def reply(self, turns: Any, tools: Any) -> Reply:
            heard.setdefault(self.name, [turn.message.content for turn in turns[1:]])
            return Reply(self.line)

    domain = tau1.find("airline", str(data))
    asyncio.run(
        attempt(
            domain,
            domain.tasks("test")[0],
            lambda _task, _seed: Listener("agent", "Sure."),
            lambda _task, _seed: Listener("user", "###STOP### x"),
            RolloutSettings(),
        )
    )
    assert heard == {"user": ["Hi! How can I help you today?"]}
