"""Replies that look like tool calls but were not read as calls: counted, told, and read where asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from click.testing import CliRunner

from trialogue.cli.main import main
from trialogue.config import TrainConfig
from trialogue.learn.checks import Checks
from trialogue.learn.measure import measure
from trialogue.run import find_files, read_about, read_trajectories
from trialogue.talk.near_calls import Lenient, find_near_calls, is_near_call
from trialogue.trajectory import Group, Reply, Tokens, Turn
from trialogue.view.api import Answers
from trialogue.view.report import write_report
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain
from trialogue.world.scaffold import write_domain
from trialogue.world.tools import Tool

TOOLS = ("cancel_order", "get_order")
CALL = '{"name": "cancel_order", "arguments": {"order_id": "A108"}}'
FOUND = [("cancel_order", {"order_id": "A108"})]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (CALL, ""),
        (f"```json\n{CALL}\n```", ""),
        (f"```\n{CALL}\n```", ""),
        (f"```json\n{CALL}", ""),  # a fence that is not closed
        (f"I cancel it.\n\n```json\n{CALL}\n```\nOne moment.", "I cancel it.\n\n\nOne moment."),
        (f"I cancel it.\n{CALL}", "I cancel it."),
        (f"{CALL}\n\nIt is done.", "It is done."),
        (f"Let me cancel it. {CALL}", "Let me cancel it."),
        (f"<tools>\n{CALL}\n</tools>", ""),
        (f"{CALL}\n</tool_call>", ""),
        (f"[{CALL}]", ""),
        (json.dumps({"name": "cancel_order", "parameters": {"order_id": "A108"}}, indent=2), ""),
        (json.dumps({"name": "cancel_order", "arguments": '{"order_id": "A108"}'}), ""),
        (json.dumps({"type": "function", "function": json.loads(CALL)}), ""),
        (json.dumps({"tool_calls": [{"function": json.loads(CALL)}]}), ""),
        ('cancel_order(order_id="A108")', ""),
        ("```python\ncancel_order(order_id='A108')\n```", ""),
    ],
)
def test_calls_written_as_text(text: str, rest: str) -> None:
    found = find_near_calls(text, TOOLS)
    assert found is not None
    assert (found.calls, found.rest) == (FOUND, rest)
    assert is_near_call(Reply(text), TOOLS)
    assert not is_near_call(Reply(text), ())
    assert not is_near_call(Reply(text, finish="length"), TOOLS)


@pytest.mark.parametrize("text", [CALL[:-2], CALL.replace('"', "'"), f"One moment. {CALL[:-1]}"])
def test_calls_that_cannot_be_read_are_counted_and_not_carried_out(text: str) -> None:
    assert find_near_calls(text, TOOLS) is None
    assert is_near_call(Reply(text), TOOLS)
    assert not is_near_call(Reply(text), ("other",))


def test_several_calls_and_values_of_every_kind() -> None:
    text = "get_order(order_id='A1', deep=True)\ncancel_order(order_id=\"A, 2\", why=None, lines=[1, 2])"
    found = find_near_calls(text, TOOLS)
    assert found is not None
    first, second = found.calls
    assert first == ("get_order", {"order_id": "A1", "deep": True})
    assert second == ("cancel_order", {"order_id": "A, 2", "why": None, "lines": [1, 2]})
    broken = find_near_calls("get_order(A1)", TOOLS)
    assert broken is not None
    assert broken.calls == [("get_order", "A1")]  # the world says what is wrong with it


@pytest.mark.parametrize(
    "text",
    [
        "It is done.",
        "I will use cancel_order for that.",
        "Shall I call cancel_order(order_id='A108') now?",
        '{"name": "Mira", "arguments": {"order_id": "A108"}}',
        '{"name": "refund_order", "arguments": {}}',
        '{"name": "cancel_order"}',
        '{"name": "cancel_order", "arguments": [1]}',
        '{"order": {"name": "cancel_order", "status": "placed"}}',
        'Your order: ```json\n{"id": "A108", "last": "cancel_order"}\n```',
        f"[{CALL}, 3]",
        CALL[:-2],
        CALL + " " * 30_000,
    ],
)
def test_other_texts_are_none(text: str) -> None:
    assert find_near_calls(text, TOOLS) is None


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 19_000, "{\n" * 9_000, '[\n"cancel_order",' * 1_100, "```" * 6_000, "`" * 19_000),
        *("<tools>\n" * 2_400, "cancel_order(" * 1_500, "cancel_order(a" + "=" * 18_000 + ")"),
        *("cancel_order(" + "a=1," * 4_500 + ")", "cancel_order(" + "a" * 18_000 + ")"),
        *('{"name": "cancel_order", "arguments": ' + "[" * 18_000, "cancel_order(a=" + "9" * 18_000 + ")"),
        *(
            "cancel_order(a='" * 1_200,
            (CALL + "\n") * 330,
            "cancel_order()\n" * 1_300,
            "{ cancel_order" + "\n" * 9_000,
        ),
    ],
)
def test_reading_takes_no_time(text: str) -> None:
    text += " cancel_order"
    assert len(text) <= 20_000
    began = perf_counter()
    find_near_calls(text[:20_000], TOOLS)
    assert perf_counter() - began < 1.0  # a few milliseconds on a quiet machine


@pytest.fixture
def bakery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Domain:
    """A domain, a script of an agent that writes its call as text, and one of a user."""
    monkeypatch.chdir(tmp_path)
    write_domain(tmp_path / "bakery")
    scripts = {
        "agent.txt": [f"```json\n{CALL}\n```", "It has been cancelled."],
        "user.txt": ["Cancel A108.", "Thank you. ###STOP###"],
    }
    for name, lines in scripts.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    return find_domain("bakery")


def run_eval(*settings: str, verb: str = "eval") -> Any:
    words = [verb, "bakery", "--agent", "scripted:agent.txt", "--user", "scripted:user.txt"]
    result = CliRunner().invoke(main, [*words, "run.name=near", *settings])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("verb", ["eval", "rollout"])
def test_an_evaluation_tells_near_calls(bakery: Domain, verb: str) -> None:
    result = run_eval(verb=verb)
    told = json.loads(Path("runs/near/result.json").read_text())
    held = [item for file in find_files(Path("runs/near")) for item in read_trajectories(file)]
    assert told["near_calls"] == len(held) == told["conversations"]
    line = f"near calls: {len(held)} replies look like tool calls"
    assert line in result.output
    assert "renderer.lenient=true" in result.output
    assert Answers(Path("runs")).run("near")["health"]["near_calls"].startswith(line)
    assert line in write_report(Path("runs/near")).read_text()
    assert "marks" not in read_about(Path("runs/near"))
    assert all(item.turns[1].message.content.startswith("```json") for item in held)


def sum_outcomes(run: str) -> float:
    held = [item for file in find_files(Path(run)) for item in read_trajectories(file)]
    return sum(item.reward.outcome or 0.0 for item in held if item.reward is not None)


def test_a_lenient_renderer_reads_them(bakery: Domain) -> None:
    strict = run_eval()
    Path("runs/near").rename("runs/strict")
    result = run_eval("renderer.lenient=true")
    assert "near calls" in strict.output
    assert "near calls" not in result.output
    told = json.loads(Path("runs/near/result.json").read_text())
    assert "near_calls" not in told
    assert told["tools"]["cancel_order"] >= 1
    assert sum_outcomes("runs/near") > sum_outcomes("runs/strict")  # the script breaks rules of the policy
    [mark] = read_about(Path("runs/near"))["marks"]
    assert mark.startswith("renderer.lenient=true")
    assert json.loads(Path("runs/near/config.json").read_text())["renderer"] == {"lenient": True}
    held = [item for file in find_files(Path("runs/near")) for item in read_trajectories(file)]
    assert held[0].turns[1].message.tool_calls[0].name == "cancel_order"
    assert held[0].turns[1].message.content == ""


async def test_what_was_sampled_is_kept() -> None:
    tokens = Tokens(start=True, prompt=(1, 2), reply=(3, 4), logprobs=(-0.1, -0.2))

    class Says:
        def __init__(self, reply: Reply) -> None:
            self.said = reply

        async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
            return self.said

    tool = Tool("cancel_order", "Cancel.", {"type": "object"}, lambda database, arguments: None)
    said = Reply(CALL, tokens=tokens, model="m")
    read = await Lenient(Says(said)).reply([], [tool])
    assert read.tokens is tokens
    assert replace(read, content=CALL, tool_calls=()) == said
    assert [(call.name, call.arguments) for call in read.tool_calls] == FOUND
    for other in (Reply("Hello."), replace(said, finish="length"), replace(read, content=CALL)):
        assert await Lenient(Says(other)).reply([], [tool]) is other


def test_a_training_step_warns(bakery: Domain) -> None:
    run_eval()
    held = [item for file in find_files(Path("runs/near")) for item in read_trajectories(file)]
    metrics = measure([Group(task=held[0].task, trajectories=tuple(held[:2]))])
    assert metrics["near_calls"] == 2
    checks = Checks(TrainConfig().checks)
    checks.see_conversations(metrics, 1)
    [warning] = checks.collect()
    assert warning.startswith("near calls: 2 replies")
