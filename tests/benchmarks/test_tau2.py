"""TAU2 as a domain of ours: tasks of each generation, gold replays, loop rules, judge, reading a checkout."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from trialogue.benchmarks.tau import tau2
from trialogue.benchmarks.tau.tau2.grade import judge_state
from trialogue.config import Limits, Speaker
from trialogue.errors import ConfigError
from trialogue.messages import Message, ToolCall
from trialogue.score.check import check
from trialogue.score.reward import grade, regrade
from trialogue.talk.find import find_model
from trialogue.talk.rollout import RolloutSettings, attempt, rollout
from trialogue.talk.scripted import ScriptedModel
from trialogue.task import Task
from trialogue.trajectory import Reply, Trajectory, Turn


def play_gold(domain: Any, task: Task) -> Any:
    """The verdict on a conversation that makes the gold calls and says what is to be said."""
    environment = domain.open(task)
    turns = [Turn(side="agent", message=Message(role="assistant", content=". ".join(task.expected.say)))]
    for number, call in enumerate(task.expected.calls):
        made = ToolCall(id=str(number), name=call.name, arguments=call.arguments)
        role = "assistant" if call.side == "agent" else "user"
        turns.append(Turn(side=call.side, message=Message(role=role, tool_calls=(made,))))
        environment.call(call.name, call.arguments, call.side)
    return judge_state(environment, turns)


@pytest.mark.parametrize("generation", ["v0.2", "v1.0.1", "verified"])
@pytest.mark.parametrize(("name", "sizes"), [("retail", (114, 74, 40)), ("airline", (50, 30, 20))])
def test_gold_scores_one(name: str, sizes: tuple[int, int, int], generation: str, data: Path) -> None:
    domain = tau2.find(f"{name}@{generation}", str(data))
    assert domain.notes["generation"] == generation
    tasks = domain.tasks("base")
    assert (len(tasks), len(domain.tasks("train")), len(domain.tasks("test"))) == sizes
    assert [task.id for task in tasks if play_gold(domain, task).reward != 1.0] == []


@pytest.mark.load
def test_all_of_telecom_opens_and_its_gold_scores_one(data: Path) -> None:
    domain = tau2.find("telecom", str(data))
    sizes = {split: len(domain.tasks(split)) for split in ("base", "train", "test", "small", "full")}
    assert sizes == {"base": 114, "train": 74, "test": 40, "small": 20, "full": 2285}
    verdicts = {task.id: play_gold(domain, task) for task in domain.tasks("full")}
    assert [name for name, verdict in verdicts.items() if verdict.reward != 1.0] == []


def test_an_untouched_world_scores_nothing_on_a_task_that_asks_for_something(data: Path) -> None:
    for name in ("retail", "airline", "telecom"):
        domain = tau2.find(name, str(data))
        for task in domain.tasks("test"):
            if not task.expected.nothing:
                assert judge_state(domain.open(task), []).reward == 0.0, task.id


def test_generations_differ_in_what_counts(data: Path) -> None:
    early = tau2.find("retail@v0.2", str(data)).tasks("test")[0]
    late = tau2.find("retail", str(data)).tasks("test")[0]
    assert early.meta["criteria"]["reward_basis"] == ["DB", "COMMUNICATE"]
    assert late.meta["criteria"]["reward_basis"] == ["DB", "NL_ASSERTION"]


@pytest.mark.parametrize("name", ["retial", "retail-solo", "retail@v7"])
def test_an_unknown_name_is_told(name: str, data: Path) -> None:
    with pytest.raises(ConfigError, match="allowed are"):
        tau2.find(name, str(data))


def test_missing_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"looked for data/tau2/domains/retail.*git clone"):
        tau2.find("retail", str(tmp_path))
    monkeypatch.delenv("TRIALOGUE_DATA", raising=False)
    with pytest.raises(ConfigError, match="--data DIR or TRIALOGUE_DATA"):
        tau2.find("retail")


def write_checkout(root: Path) -> Path:
    """A small tree laid out like a checkout, in words of its own."""
    domain = root / "data" / "tau2" / "domains" / "mock"
    domain.mkdir(parents=True)
    (domain / "db.json").write_text(json.dumps({"tasks": {}, "users": {}}))
    (domain / "user_db.json").write_text(json.dumps({"notifications": {}}))
    (domain / "policy.md").write_text("Be brief.")
    scenario = {"persona": "Curt", "instructions": "Make a task."}
    task = {"id": "one", "user_scenario": scenario, "evaluation_criteria": {"actions": []}}
    (domain / "tasks.json").write_text(json.dumps([task]))
    (domain / "split_tasks.json").write_text(json.dumps({"base": ["one"]}))
    simulator = root / "data" / "tau2" / "user_simulator"
    simulator.mkdir()
    for name in ("simulation_guidelines", "simulation_guidelines_tools"):
        (simulator / f"{name}.md").write_text(f"{name}<PERSONA_GUIDELINES>")
    agent = root / "src" / "tau2" / "agent"
    agent.mkdir(parents=True)
    (agent / "llm_agent.py").write_text(
        'raise SystemExit("never run")\n'
        'AGENT_INSTRUCTION = """\nDo well.\n""".strip()\n'
        'SYSTEM_PROMPT = "[{agent_instruction}] [{domain_policy}]"\n'
        'AGENT_SOLO_INSTRUCTION = "Alone; then {stop_function_name}."\n'
        'SYSTEM_PROMPT_SOLO = "[{agent_instruction}] [{domain_policy}] [{ticket}]"\n'
    )
    tools = root / "src" / "tau2" / "domains" / "mock"
    tools.mkdir(parents=True)
    (tools / "tools.py").write_text(
        "class MockTools:\n"
        "    @is_tool(ToolType.WRITE)\n"
        "    def create_task(self, user_id, title, description=None):\n"
        '        """Make a task.\n        Carefully.\n\n        Args:\n            title: What it is\n'
        '                called.\n        """\n'
    )
    return root


def test_wording_is_read_from_a_checkout_without_running_it(tmp_path: Path) -> None:
    domain = tau2.find("mock", str(write_checkout(tmp_path)))
    assert domain.notes["wording"] == "official (checkout)"
    assert domain.policy == "[Do well.] [Be brief.]"
    assert list(domain.agent_tools) == ["create_task"]
    tool = domain.agent_tools["create_task"]
    assert tool.description == "Make a task.\n\nCarefully."
    assert tool.parameters["properties"]["title"]["description"] == "What it is\ncalled."
    assert "description" not in tool.parameters["properties"]["user_id"]
    [task] = domain.tasks("base")
    assert domain.user_prompt is not None
    assert domain.user_prompt(task) == (
        "simulation_guidelines_tools\n\n<scenario>\nPersona:\n\tCurt\n"
        "Instructions:\n\tMake a task.\n</scenario>"
    )


def test_without_official_wording_the_result_says_so(tmp_path: Path) -> None:
    root = write_checkout(tmp_path)
    (root / "src" / "tau2" / "agent" / "llm_agent.py").unlink()
    domain = tau2.find("mock", str(root))
    assert "not comparable" in domain.notes["wording"]
    assert len(domain.agent_tools) == 4


# -- in the conversation loop -------------------------------------------------------------------------------


def hold(domain: Any, task: Task, agent: list[Any], user: list[Any], **more: Any) -> Trajectory:
    agent_source, user_source = (
        lambda _task, _seed, lines=lines: ScriptedModel(lines) for lines in (agent, user)
    )
    return asyncio.run(attempt(domain, task, agent_source, user_source, RolloutSettings(grade=grade, **more)))


def call(name: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=(ToolCall(id="c", name=name, arguments=arguments),))


def find_task(domain: Any, name: str) -> Task:
    return next(task for task in domain.tasks("all") if task.id == name)


def test_the_agent_greets_and_a_stop_token_anywhere_ends(data: Path) -> None:
    domain = tau2.find("mock", str(data))
    task = find_task(domain, "update_task_1")
    agent = [call("update_task_status", task_id="task_1", status="completed"), "Done."]
    trajectory = hold(domain, task, agent, ["Please complete task_1.", "Thanks ###STOP### bye"])
    assert trajectory.turns[0].message.content == "Hi! How can I help you today?"
    assert trajectory.end == "user_stop"
    assert trajectory.value == 1.0


def test_a_history_is_taken_up(data: Path) -> None:
    domain = tau2.find("mock", str(data))
    task = find_task(domain, "update_task_with_message_history")
    agent = [call("update_task_status", task_id="task_2", status="completed"), "Done."]
    trajectory = hold(domain, task, agent, ["Mark it completed.", "###STOP###"])
    assert [turn.side for turn in trajectory.turns[:5]] == ["user", "agent", "agent", "agent", "user"]
    assert trajectory.value == 1.0


def test_a_conversation_with_a_history_is_graded_again(data: Path) -> None:
    domain = tau2.find("mock", str(data))
    task = find_task(domain, "update_task_with_message_history")
    agent = [call("update_task_status", task_id="task_2", status="completed"), "Done."]
    trajectory = hold(domain, task, agent, ["Mark it completed.", "###STOP###"])
    reward, mismatches = regrade(trajectory, domain.open(task))
    assert (reward, mismatches) == (trajectory.reward, [])


def test_ten_errors_in_all_end_it(data: Path) -> None:
    domain = tau2.find("mock", str(data))
    task = find_task(domain, "update_task_1")
    agent = [call("get_users"), call("nonsense")] * 12
    trajectory = hold(domain, task, agent, ["Go on."])
    assert sum(turn.failed for turn in trajectory.turns) == 10
    assert (trajectory.end, trajectory.value) == ("max_turns", 0.0)


def test_two_hundred_steps_end_it(data: Path) -> None:
    domain = tau2.find("mock", str(data))
    trajectory = hold(domain, find_task(domain, "update_task_1"), ["Yes?"], ["Hm."])
    assert len(trajectory.turns) == 201
    assert (trajectory.end, trajectory.value) == ("max_turns", 0.0)


def test_a_lone_agent_works_on_the_ticket(data: Path) -> None:
    domain = tau2.find("mock-solo", str(data))
    task = find_task(domain, "update_task_1")
    environment = domain.open(task)
    assert "update the status of task_1" in environment.policy
    assert {"dismiss_notification", "done"} <= set(environment.tools)
    done = [call("update_task_status", task_id="task_1", status="completed"), call("done")]
    trajectory = hold(domain, task, done, ["never asked"])
    assert (trajectory.end, trajectory.value) == ("agent_stop", 1.0)
    talking = hold(domain, task, ["Hello?"], ["never asked"])
    assert (talking.end, talking.value) == ("max_turns", 0.0)


def test_user_and_agent_act_on_the_same_phone(data: Path) -> None:
    domain = tau2.find("telecom", str(data))
    task = next(task for task in domain.tasks("base") if "user_abroad_roaming_disabled_off" in task.id)
    environment = domain.open(task)
    assert "failed" in environment.call("run_speed_test", {}, "user").text
    assert not environment.call("enable_roaming", {"customer_id": "C1001", "line_id": "L1002"}).failed
    environment.call("toggle_roaming", {}, "user")
    assert environment.user_side is not None
    assert environment.user_side.look("", "surroundings")["roaming_allowed"] is True
    assert environment.call("run_speed_test", {}).text == "Error: Tool 'run_speed_test' not found."


@pytest.mark.parametrize("name", ["mock", "retail"])
def test_the_domain_proves_itself(name: str, data: Path) -> None:
    """Refused gold calls, ungradable worlds and what only a judge can tell are no faults of ours."""
    assert check(tau2.find(name, str(data))).problems == []


@pytest.mark.parametrize("name", ["telecom", "telecom-solo", "airline"])
def test_gold_parties_win_every_task(name: str, data: Path) -> None:
    domain = tau2.find(name, str(data))
    agent, user = (find_model(Speaker(model=who), side, domain, Limits()) for who, side in GOLD)

    async def win() -> list[float]:
        tasks = domain.tasks("test")
        groups = rollout(domain, tasks, agent, user, RolloutSettings(grade=grade))
        return [item.value async for group in groups for item in group.trajectories]

    assert asyncio.run(win()) == [1.0] * len(domain.tasks("test"))


GOLD: tuple[tuple[str, Any], ...] = (("oracle", "agent"), ("gold", "user"))


def nl_task(data: Path) -> tuple[Any, Task]:
    domain = tau2.find("retail", str(data))
    return domain, next(task for task in domain.tasks("all") if task.meta["criteria"]["nl_assertions"])


def judged(data: Path, answer: str) -> Trajectory:
    from dataclasses import replace

    domain, task = nl_task(data)
    domain = replace(domain, judge=lambda _task, _seed: ScriptedModel([answer]))
    agent = [call(item.name, **item.arguments) for item in task.expected.calls]
    return hold(domain, task, [*agent, "All done."], ["Help.", "###STOP###"])


def to_answer(task: Task, met: bool) -> str:
    statements = task.meta["criteria"]["nl_assertions"]
    results = [{"expectedOutcome": text, "reasoning": "", "metExpectation": met} for text in statements]
    return f"```json\n{json.dumps({'results': results})}\n```"


def test_a_judge_counts(data: Path) -> None:
    _, task = nl_task(data)
    assert judged(data, to_answer(task, True)).value == 1.0
    refused = judged(data, to_answer(task, False))
    assert refused.value == 0.0
    assert refused.reward is not None
    assert refused.reward.parts["NL_ASSERTION"] == 0.0


@pytest.mark.parametrize("answer", ["I think it is fine.", '{"results": []}', '{"results": [{"met": 1}]}'])
def test_a_judge_that_fails_is_never_a_grade(answer: str, data: Path) -> None:
    trajectory = judged(data, answer)
    assert trajectory.reward is None
    assert (trajectory.end, trajectory.blame) == ("error", "judge")


def test_without_a_judge_the_statements_are_left_out_and_it_is_said(data: Path) -> None:
    domain, task = nl_task(data)
    agent = [call(item.name, **item.arguments) for item in task.expected.calls]
    trajectory = hold(domain, task, [*agent, "All done."], ["Help.", "###STOP###"])
    assert trajectory.reward is not None
    assert "NL_ASSERTION" not in trajectory.reward.parts
    assert any("no judge" in line for line in trajectory.reward.why)


async def test_telecom_reports_the_share_of_criteria(data: Path) -> None:
    domain = tau2.find("telecom", str(data))
    task = next(task for task in domain.tasks("base") if len(task.expected.assertions) > 1)
    groups = rollout(
        domain,
        [task],
        lambda _task, _seed: ScriptedModel(["Sorry."]),
        lambda _task, _seed: ScriptedModel(["Help.", "###STOP###"]),
        RolloutSettings(grade=grade),
    )
    async for group in groups:
        reward = group.trajectories[0].reward
        assert reward is not None
        assert 0.0 <= reward.parts["TCR"] < 1.0
        assert reward.value == 0.0
