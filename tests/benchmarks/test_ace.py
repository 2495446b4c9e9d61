"""ACEBench against the recorded vectors of its own executor and checker, and in our conversation."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from trialogue.benchmarks import ace
from trialogue.benchmarks.ace.execute import UnreadableCalls, read_calls, write_calls
from trialogue.benchmarks.ace.grade import find_share, find_wrong
from trialogue.benchmarks.ace.recorded import score_ace_episode
from trialogue.benchmarks.folder import read_json_lines
from trialogue.benchmarks.recorded import score_recorded
from trialogue.config import EvalConfig, load_config
from trialogue.errors import ConfigError
from trialogue.run import read_trajectories
from trialogue.score.check import check
from trialogue.score.evaluate import evaluate
from trialogue.score.rescore import rescore
from trialogue.score.reward import grade, regrade
from trialogue.talk.rollout import RolloutSettings, attempt
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.task import Call, Task
from trialogue.trajectory import Trajectory


def find(data: Path, name: str) -> Any:
    return ace.find(name, str(data))


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("category", ["multi_turn", "multi_step"])
def test_every_vector(data: Path, category: str, language: str) -> None:
    domain = find(data, f"{category}@{language}")
    tasks = {task.id: task for task in domain.tasks("all")}
    records = [
        record
        for record in read_json_lines(data / "acebench" / "golden" / "agent_scripted.jsonl.gz")
        if (record["category"], record["lang"]) == (f"agent_{category}", language)
    ]
    assert len(records) == {"multi_turn": 90, "multi_step": 60}[category]
    for record in records:
        graded = score_ace_episode(domain, tasks, record)
        where = record["id"], record["kind"]
        assert graded.tool_mismatches == [], where
        assert graded.more["final_state"] == record["final_state"], where
        assert graded.db_match is record["end_to_end"], where
        assert graded.more["process_accuracy"] == record["process_accuracy"], where


def test_a_file_is_graded(data: Path) -> None:
    path = data / "acebench" / "golden" / "agent_scripted.jsonl.gz"
    rows = score_recorded(path, "ace:multi_step@zh", str(data))
    assert len(rows) == 60
    assert not any(row.tool_mismatches for row in rows)
    assert "PROCESS=" in rows[0].to_line()


def test_calls_are_read_as_literals() -> None:
    [call] = read_calls("[f(a='x', b=-1, c=[{'d': (1, None)}], e=word)]")
    assert call.arguments == {"a": "x", "b": -1, "c": [{"d": (1, None)}], "e": "word"}
    assert [call.name for call in read_calls("f(), g(x=1)")] == ["f", "g"]
    assert read_calls("hello") == []
    for text in ("[f(a=__import__('os').system('true'))]", "[f(a=1+1)]", "[f(**x)]", "[f(] ", ""):
        with pytest.raises(UnreadableCalls):
            read_calls(text)
    assert write_calls([Call(name="f", arguments={"a": "it's"})]) == '[f(a="it\'s")]'


def test_code_in_a_text_is_never_run(data: Path, tmp_path: Path) -> None:
    domain = find(data, "multi_step")
    environment = domain.open(domain.tasks("all")[0])
    target = tmp_path / "made"
    for text in (f"[__import__('os').mkdir(path='{target}')]", f"[login_device(x=open('{target}', 'w'))]"):
        environment.execute(text)
    assert not target.exists()


def test_oversights_can_be_mended() -> None:
    state = [{"BaseApi": {"wifi": False}}, {"MessageApi": {"inbox": {"1": "a", "2": "b"}}}]
    expected = [{"BaseAPI": {"wifi": True}}, {"MessageApi": {"inbox": {"1": "a"}}}]
    assert find_wrong(state, expected) == []
    assert len(find_wrong(state, expected, quirks=False)) == 2
    assert find_wrong([], expected) == ["wrong number of class"]


def test_milestones_are_followed_greedily() -> None:
    assert find_share(["b", "a"], ["a", "b"]) == 0.5
    assert find_share(["x"], [["a", "b", "c"], ["x", "y", "z"]]) == 0.333
    assert find_share([], []) == 1.0


def hold(domain: Any, task: Task, agent: Any, user: Any) -> Trajectory:
    return asyncio.run(attempt(domain, task, agent, user, RolloutSettings(grade=grade)))


def test_alone_the_agent_ends_it(data: Path) -> None:
    domain = find(data, "multi_step@zh")
    task = next(task for task in domain.tasks("all") if task.expected.calls)
    trajectory = hold(domain, task, domain.oracle, domain.user)
    assert (trajectory.end, trajectory.value) == ("agent_stop", 1.0)
    assert regrade(trajectory, domain.open(task)) == (trajectory.reward, [])
    idle = hold(domain, task, lambda _task, _seed: ScriptedModel(["Shall I?"]), domain.user)
    assert (idle.end, idle.value, len(idle.turns)) == ("max_turns", 0.0, 41)


def test_the_benchmark_grades_what_is_there_at_its_cap_and_hears_no_early_end(data: Path) -> None:
    """With its oversights. Without them, running out of messages is 0, and an end is an end."""
    task = next(task for task in find(data, "multi_step").tasks("all") if task.expected.calls)
    calls = [call(item.name, **item.arguments) for item in task.expected.calls]
    outcomes: dict[str, Any] = {}
    for name in ("multi_step", "multi_step@en-mended"):
        domain = find(data, name)
        endless = hold(domain, task, lambda _task, _seed: ScriptedModel([*calls, "And now?"]), domain.user)
        early = ["finish conversation", *calls, "finish conversation"]
        hasty = hold(domain, task, lambda _task, _seed, lines=early: ScriptedModel(lines), domain.user)
        outcomes[name] = [(item.end, item.value) for item in (endless, hasty)]
        assert regrade(endless, domain.open(task)) == (endless.reward, [])
    assert outcomes["multi_step"] == [("max_turns", 1.0), ("agent_stop", 1.0)]
    assert outcomes["multi_step@en-mended"] == [("max_turns", 0.0), ("agent_stop", 0.0)]


def test_calls_can_be_text(data: Path, tmp_path: Path, announced: Path) -> None:
    domain = find(data, "multi_turn")
    task = domain.tasks("all")[0]
    script, user = tmp_path / "agent.jsonl", tmp_path / "user.jsonl"
    lines = [*task.meta["mile_stone"], "Sent [it]. Anything else?"]
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    user.write_text('"Send it."\n"finish conversation"\n')
    settings = ["domain=ace:multi_turn@en-text", f"data={data}", "tasks.count=1", "run.name=text"]
    settings += [f"agent.model=scripted:{script}", f"user.model=scripted:{user}", f"run.directory={tmp_path}"]
    result = asyncio.run(evaluate(load_config(EvalConfig, None, settings)))
    assert (result["pass^1"], result["notes"]["calls"]) == (1.0, "text")
    [trajectory] = read_trajectories(tmp_path / "text")
    assert [row.same for row in rescore(tmp_path / "text", data=str(data))] == [True]
    assert trajectory.reward is not None
    assert trajectory.reward.parts == {"END_TO_END": 1.0, "PROCESS": 1.0}
    assert trajectory.turns[2].message.content.startswith("[{'status': True, ")


def test_the_domain_proves_itself_where_milestones_suffice(data: Path) -> None:
    domain = find(data, "multi_turn")
    checked = check(domain)
    assert checked.problems == []
    assert [len([t for t in find(data, name).tasks("all") if t.expected.calls]) for name in NAMES] == GOLD


NAMES = ("multi_turn", "multi_turn@zh", "multi_step", "multi_step@zh")
GOLD = [21, 29, 10, 14]
"""For how many tasks the milestones alone lead to the expected end."""


def test_a_checkout_has_the_prompts(data: Path, tmp_path: Path) -> None:
    (tmp_path / "data_all").symlink_to(data / "acebench" / "data_all")
    assert "not comparable" in ace.find("multi_turn", str(tmp_path)).notes["wording"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "data_all").symlink_to(data / "acebench" / "data_all")
    code = other / "model_inference"
    (code / "multi_turn").mkdir(parents=True)
    (code / "prompt_en.py").write_text(
        'raise SystemExit\nTRAVEL_PROMPT_EN = "Fly."\nBASE_PROMPT_EN = "Ring."\n'
    )
    (code / "multi_turn" / "APIModel_user.py").write_text(
        'SYSTEM_PROMPT_TRAVEL_EN = "T {instruction}"\nSYSTEM_PROMPT_BASE_EN = "B {instruction}"\n'
    )
    domain = ace.find("multi_turn", str(other))
    task = domain.tasks("all")[0]
    assert domain.notes["wording"] == "official"
    assert domain.open(task).policy == "Ring."
    assert domain.user_prompt is not None
    assert domain.user_prompt(task) == f"B {task.instructions}"


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"looked for data_all.*git clone"):
        ace.find("multi_turn", str(tmp_path))
    with pytest.raises(ConfigError, match="allowed are multi_turn, multi_step"):
        ace.find("multi_turn@fr", str(tmp_path))


def test_tools_are_offered_as_the_task_describes_them(data: Path) -> None:
    domain = find(data, "multi_turn")
    environment = domain.open(domain.tasks("all")[0])
    order = environment.tools["add_food_delivery_order"].schema["function"]["parameters"]
    assert order["type"] == "object"
    assert order["properties"]["items"]["type"] == "array"
    assert "dict" not in json.dumps(order["properties"]["items"]["items"]["type"])
    refused = environment.call("search_reminders", {"keyword": "x"})
    assert refused.failed
