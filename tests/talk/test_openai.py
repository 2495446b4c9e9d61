"""The real client against a real server on loopback that is scripted, and faulty by schedule."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import store
from endpoint import Fault, calling, completion, drip, hang, reset, send, status, truncate
from store import KEY, Store, hold, make

from trialogue import ConfigError, Message, ModelError, Reply, Turn
from trialogue.config import EvalConfig, Limits, Speaker
from trialogue.run import read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.talk.openai import OpenAIModel


def not_json(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 200, b"<html>busy</html>")


def html(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 200, b"<html>busy</html>", Content_Type="text/html")


async def test_agent_and_user_are_served(server: Store) -> None:
    trajectory, waits, agent = await hold(server, temperature=0.5, top_p=0.9)
    assert (trajectory.end, trajectory.value) == ("user_stop", 1.0)
    assert waits == []
    assert (agent.ledger.calls, agent.ledger.prompt, agent.ledger.completion) == (2, 20, 4)
    opening, first, *_ = server.requests
    assert first["authorization"] == f"Bearer {KEY}"
    assert (first["max_tokens"], first["temperature"], first["top_p"]) == (256, 0.5, 0.9)
    assert first["tools"][0]["function"]["name"] == "cancel"
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["role"] for message in opening["messages"]] == ["system", "user"]
    assert "tools" not in opening
    answered = server.requests[2]["messages"]
    assert answered[-2]["tool_calls"][0]["function"] == {"name": "cancel", "arguments": '{"order_id": "W1"}'}
    assert answered[-1] == {"role": "tool", "content": '{"status":"cancelled"}', "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    "fault",
    [
        status(429),
        status(500),
        status(503),
        status(408),
        reset,
        truncate,
        not_json,
        html,
        {**completion(), "choices": []},
        {**completion(), "choices": None},
        {"error": {"message": "overloaded"}},
        completion(None),
        completion("  "),
        completion(None, "content_filter"),
    ],
)
async def test_a_passing_fault_is_tried_again(server: Store, fault: Any) -> None:
    trajectory, waits, agent = await hold(server, fault, fault)
    assert (trajectory.end, trajectory.value) == ("user_stop", 1.0)
    assert len(waits) == 2
    assert waits[1] > waits[0] > 0
    assert agent.ledger.retries == 2
    usages = [turn.usage for turn in trajectory.turns if turn.side == "agent" and turn.usage is not None]
    assert sum(usage.prompt for usage in usages) == agent.ledger.prompt  # what was billed in vain included
    assert sum(usage.completion for usage in usages) == agent.ledger.completion


@pytest.mark.parametrize("fault", [hang, drip])
async def test_a_server_that_does_not_answer_is_given_up_in_time(server: Store, fault: Fault) -> None:
    started = time.monotonic()
    trajectory, waits, _ = await hold(server, fault, timeout=0.2)
    assert trajectory.value == 1.0
    assert len(waits) == 1
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("fault", "blame", "text"),
    [
        (status(429), "infrastructure", "gave no usable reply in 4 tries: 429 Too Many Requests: no"),
        (status(500), "infrastructure", "500 Internal Server Error: no"),
        (reset, "infrastructure", "ReadError"),
        ({**completion(), "choices": []}, "infrastructure", "an answer without choices"),
        (html, "infrastructure", "an unreadable answer: not JSON"),
        (completion(None, "content_filter"), "agent", "a message kept back by a content filter"),
    ],
)
async def test_a_lasting_fault_is_labelled_and_unscored(
    server: Store, fault: Any, blame: str, text: str
) -> None:
    trajectory, waits, _ = await hold(server, *[fault] * 4)
    assert (trajectory.end, trajectory.reward, trajectory.blame) == ("error", None, blame)
    assert text in trajectory.error
    assert len(waits) == 3


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
async def test_a_refusal_is_not_tried_again_and_never_quotes_the_key(server: Store, code: int) -> None:
    trajectory, waits, _ = await hold(server, status(code, f"Incorrect key {KEY} for this. " + "x" * 5000))
    assert (trajectory.end, trajectory.blame, waits) == ("error", "infrastructure", [])
    assert "Incorrect key (key) for this" in trajectory.error
    assert len(trajectory.error) < 1000


async def test_what_the_server_asks_to_wait_is_waited_within_reason(server: Store) -> None:
    date = formatdate(time.time() + 20, usegmt=True)
    asks = [status(429, Retry_After=text) for text in ("7", "100000", date)]
    trajectory, waits, _ = await hold(server, *asks)
    assert trajectory.value == 1.0
    assert 7.0 <= waits[0] <= 8.0
    assert 60.0 <= waits[1] <= 64.0
    assert 10 < waits[2] <= 21
    _, waits, _ = await hold(server, status(429, Retry_After="soon"), status(429, Retry_After="-5"))
    assert 0 < waits[0] < 2
    assert waits[1] == 0


async def test_broken_arguments_and_unknown_tools_are_repaired(server: Store) -> None:
    trajectory, _, _ = await hold(
        server,
        calling("cancel", '{"order_id": '),
        calling("cancle", "{}"),
        calling("cancel", '{"order_id": NaN}'),
        calling("cancel", '{"order_id": "\\ud800"}', None),
        calling("\ud800", "[1, 2]"),
        calling("cancel", '{"order_id": "W1"}', ""),
    )
    assert (trajectory.end, trajectory.value) == ("user_stop", 1.0)
    results = [turn.message.content for turn in trajectory.turns if turn.message.role == "tool"]
    assert results[0] == "Error: cancel: the arguments are not a JSON object"
    assert results[1] == "Error: there is no tool 'cancle'; the tools are cancel"
    assert all(text.startswith("Error: ") for text in results[2:5])
    assert len(results) == 6
    sent = [request for request in server.requests if request["model"] == "agent"]
    # The server refuses broken histories, so what was malformed is told in a form it accepts.
    told = sent[1]["messages"][-2]["tool_calls"][0]["function"]
    assert told == {"name": "cancel", "arguments": json.dumps({"malformed": '{"order_id": '})}
    kept = [turn.message.tool_calls[0] for turn in trajectory.turns if turn.message.tool_calls]
    assert kept[0].arguments == '{"order_id": '


async def test_a_reply_cut_off_ends_as_too_long(server: Store) -> None:
    trajectory, _, _ = await hold(server, completion("I would", "length"))
    assert (trajectory.end, trajectory.value) == ("too_long", 0.0)
    trajectory, _, _ = await hold(server, status(400, "maximum context length is 4096 tokens"))
    assert (trajectory.end, trajectory.value) == ("too_long", 0.0)


async def test_a_user_without_room_is_no_fault_of_the_agent(server: Store) -> None:
    user, _ = make(server, "user", "other")
    server.faults = iter(
        [status(400, "maximum context length is 4096 tokens"), *[completion("", "length")] * 4]
    )
    turns = [Turn(side="user", message=Message(role="system", content="Be a user."))]
    for text in ("has no room for the conversation", r"an empty message \(finish reason length\)"):
        with pytest.raises(ModelError, match=text) as caught:
            await user.reply(turns, [])
        assert caught.value.blame == "user"
    await user.close()


async def test_the_newer_name_of_the_limit_is_found_out(server: Store) -> None:
    told = status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    trajectory, _, _ = await hold(server, told)
    assert trajectory.value == 1.0
    sent = [request for request in server.requests if request["model"] == "agent"]
    assert ["max_tokens" in request for request in sent] == [True, False, False]
    assert sent[1]["max_completion_tokens"] == 256


async def test_refusals_and_reasoning_are_kept(server: Store) -> None:
    model, _ = make(server)
    server.faults = iter(
        [completion(None, refusal="I may not."), completion("Yes.", reasoning_content="Hm.")]
    )
    turns = [Turn(side="agent", message=Message(role="user", content="Hi"))] * 2
    replies: list[Reply] = [await model.reply(turns, []) for _ in range(2)]
    assert [(reply.content, reply.reasoning) for reply in replies] == [("I may not.", None), ("Yes.", "Hm.")]
    await model.close()


def test_a_missing_key_and_a_password_in_the_address_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="begins with neither http:// nor https://"):
        OpenAIModel("gpt", "agent", Speaker(base_url="127.0.0.1:8123/v1"), 64)
    with pytest.raises(ConfigError, match="openai:gpt: the variable MY_KEY holds no key"):
        OpenAIModel("gpt", "agent", Speaker(base_url="http://127.0.0.1:9/v1", api_key_env="MY_KEY"), 64)
    with pytest.raises(ConfigError, match="openai:gpt needs a key: set OPENAI_API_KEY, or name an endpoint"):
        OpenAIModel("gpt", "agent", Speaker(), 16)
    with pytest.raises(ConfigError, match=r"agent.base_url holds a password") as caught:
        OpenAIModel("gpt", "agent", Speaker(base_url="http://me:hidden@host/v1"), 16)
    assert "hidden" not in str(caught.value)


async def test_a_whole_evaluation_leaves_no_key_behind(server: Store, tmp_path: Path) -> None:
    server.faults = iter([status(401, f"bad key {KEY}"), status(500, KEY)])
    config = EvalConfig.model_validate(
        {
            "domain": store.__file__,
            "agent": {"model": "openai:agent", "base_url": server.url, "price": (1.0, 10.0)},
            "user": {"model": "openai:user", "base_url": server.url},
            "tasks": {"trials": 2},
            "limits": Limits(seconds=30),
            "run": {"directory": str(tmp_path / "runs"), "name": "one"},
        }
    )
    result = await evaluate(config)
    assert result["pass^1"] == 1.0
    assert result["failed"] == 1
    assert result["blame"] == {"infrastructure": 1}
    assert result["cost"] > 0
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"run.json", "config.json", "eval.jsonl", "agent.jsonl"}
    assert not [file for file in files if KEY in file.read_text()]


@pytest.mark.timeout(300)  # two processes of their own
def test_the_key_is_in_no_file_no_line_and_no_traceback(server: Store, tmp_path: Path) -> None:
    """A server that quotes the key in each of its errors, and commands that say all they can."""

    def quote(handler: BaseHTTPRequestHandler) -> None:
        send(handler, 401, {"error": {"message": f"no such key: {handler.headers['Authorization']}"}})

    server.faults = itertools.repeat(quote)
    where = f"base_url={server.url}"
    (tmp_path / "brief.md").write_text("A library.")
    commands = {
        "eval": ["shop", "--agent=openai:agent", f"agent.{where}", "--tasks=2", "run.name=r"],
        "draft": ["library", "--brief=brief.md", "--model=openai:agent", f"drafter.{where}"],
    }
    for verb, words in commands.items():
        command = [sys.executable, "-m", "trialogue", "--debug", verb, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        assert ("Traceback" in done.stderr) == (verb == "draft")
        assert KEY not in done.stdout + done.stderr
    assert any(
        "no such key" in item.error for item in read_trajectories(tmp_path / "runs" / "r") if item.error
    )
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
