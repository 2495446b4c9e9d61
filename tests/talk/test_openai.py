"""The real client against a real server on loopback that is scripted, and faulty by schedule."""

from __future__ import annotations

import itertools
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trialogue import (
    Call,
    ConfigError,
    Database,
    Domain,
    Expected,
    Message,
    ModelError,
    Record,
    Reply,
    RolloutSettings,
    Table,
    Task,
    Turn,
    rollout,
    tool,
)
from trialogue.config import EvalConfig, Limits, Speaker
from trialogue.run import read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.score.reward import grade
from trialogue.talk.openai import OpenAIModel
from trialogue.world.domain import STOP, from_list

KEY = "sk-secret-0123456789"


class Order(Record):
    status: str = "pending"


class Store(Database):
    orders: Table[Order]

    @tool(writes=True)
    def cancel(self, order_id: str) -> Order:
        """Cancel an order."""
        self.orders[order_id].status = "cancelled"
        return self.orders[order_id]


TASK = Task(
    id="t",
    domain="store",
    instructions="Have W1 cancelled.",
    expected=Expected(calls=(Call(name="cancel", arguments={"order_id": "W1"}),)),
)
domain = Domain("store", "Help.", Store.load({"orders": {"W1": {}}}), from_list("store", [TASK]))


def answer(content: str | None = None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": content, **message},
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
    }


def calling(name: str, arguments: str, identity: str | None = "call_1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return answer(
        tool_calls=[{"id": identity, "type": "function", "function": function}], finish="tool_calls"
    )


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """The script: an agent that cancels, a user that asks and then stops."""
    last = request["messages"][-1]
    if request["model"] == "user":
        return answer("Please cancel W1." if len(request["messages"]) <= 2 else f"Thank you. {STOP}")
    return answer("It is cancelled.") if last["role"] == "tool" else calling("cancel", '{"order_id": "W1"}')


def find_broken(messages: list[dict[str, Any]]) -> str | None:
    """What a strict endpoint has against a history."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return "a tool result without its call"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return "a call without its result"
        for call in message.get("tool_calls", ()):
            if not re.fullmatch("[A-Za-z0-9_-]{1,64}", call["function"]["name"]):
                return "a tool's name is letters, digits, _ or -"
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                return "arguments are no JSON"
            if not isinstance(arguments, dict):
                return "arguments are no object"
            waiting.append(call["id"])
    return "a call without its result" if waiting else None


Fault = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Serves the script; requests to the agent's model meet the scheduled faults first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: Iterator[Fault | dict[str, Any] | None] = iter(())
        self.requests: list[dict[str, Any]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({**body, "authorization": self.headers["Authorization"]})
        fault = next(self.server.faults, None) if body["model"] != "user" else None
        broken = find_broken(body["messages"])
        if broken is not None:
            send(self, 400, {"error": {"message": broken}})
        elif callable(fault):
            fault(self)
        else:
            send(self, 200, fault or respond(body))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def send(handler: BaseHTTPRequestHandler, status: int, body: Any, **headers: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in {
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **headers,
    }.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


def status(code: int, message: str = "no", **headers: str) -> Fault:
    return lambda handler: send(handler, code, {"error": {"message": message}}, **headers)


def hang(handler: BaseHTTPRequestHandler) -> None:
    handler.server.closing.wait(10)  # type: ignore[attr-defined]
    handler.close_connection = True


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def truncate(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 200, b'{"id": "x", "choi', Content_Length="500")
    handler.close_connection = True


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(100):
        if handler.server.closing.wait(0.05):  # type: ignore[attr-defined]
            break
        try:
            handler.wfile.write(b" ")
        except OSError:
            break
    handler.close_connection = True


def not_json(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 200, b"<html>busy</html>")


def html(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 200, b"<html>busy</html>", Content_Type="text/html")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[Server]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.closing.set()
        running.shutdown()
        thread.join()


def make(
    server: Server, side: Any = "agent", name: str = "agent", **settings: Any
) -> tuple[OpenAIModel, list[float]]:
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        waits.append(seconds)

    speaker = Speaker(base_url=server.url, **{"timeout": 5.0, "retries": 3, **settings})
    return OpenAIModel(name, side, speaker, 256, pause=pause), waits


async def hold(server: Server, *faults: Any, **settings: Any) -> tuple[Any, list[float], OpenAIModel]:
    """One conversation whose agent meets faults; returns it, the waits and the agent's model."""
    server.faults = iter(faults)
    agent, waits = make(server, **settings)
    user, _ = make(server, "user", "user")
    try:
        groups = [
            group
            async for group in rollout(domain, [TASK], agent, user, RolloutSettings(grade=grade, redraws=0))
        ]
    finally:
        await agent.close()
        await user.close()
    [trajectory] = [*groups[0].trajectories, *groups[0].failed]
    assert KEY not in trajectory.to_json()
    return trajectory, waits, agent


async def test_agent_and_user_are_served(server: Server) -> None:
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
        {**answer(), "choices": []},
        {**answer(), "choices": None},
        {"error": {"message": "overloaded"}},
        answer(None),
        answer("  "),
        answer(None, "content_filter"),
    ],
)
async def test_a_passing_fault_is_tried_again(server: Server, fault: Any) -> None:
    trajectory, waits, agent = await hold(server, fault, fault)
    assert (trajectory.end, trajectory.value) == ("user_stop", 1.0)
    assert len(waits) == 2
    assert waits[1] > waits[0] > 0
    assert agent.ledger.retries == 2
    usages = [turn.usage for turn in trajectory.turns if turn.side == "agent" and turn.usage is not None]
    assert sum(usage.prompt for usage in usages) == agent.ledger.prompt  # what was billed in vain included
    assert sum(usage.completion for usage in usages) == agent.ledger.completion


@pytest.mark.parametrize("fault", [hang, drip])
async def test_a_server_that_does_not_answer_is_given_up_in_time(server: Server, fault: Fault) -> None:
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
        ({**answer(), "choices": []}, "infrastructure", "an answer without choices"),
        (html, "infrastructure", "an unreadable answer: not JSON"),
        (answer(None, "content_filter"), "agent", "a message kept back by a content filter"),
    ],
)
async def test_a_lasting_fault_is_labelled_and_unscored(
    server: Server, fault: Any, blame: str, text: str
) -> None:
    trajectory, waits, _ = await hold(server, *[fault] * 4)
    assert (trajectory.end, trajectory.reward, trajectory.blame) == ("error", None, blame)
    assert text in trajectory.error
    assert len(waits) == 3


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
async def test_a_refusal_is_not_tried_again_and_never_quotes_the_key(server: Server, code: int) -> None:
    trajectory, waits, _ = await hold(server, status(code, f"Incorrect key {KEY} for this. " + "x" * 5000))
    assert (trajectory.end, trajectory.blame, waits) == ("error", "infrastructure", [])
    assert "Incorrect key (key) for this" in trajectory.error
    assert len(trajectory.error) < 1000


async def test_what_the_server_asks_to_wait_is_waited_within_reason(server: Server) -> None:
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


async def test_broken_arguments_and_unknown_tools_are_repaired(server: Server) -> None:
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


async def test_a_reply_cut_off_ends_as_too_long(server: Server) -> None:
    trajectory, _, _ = await hold(server, answer("I would", "length"))
    assert (trajectory.end, trajectory.value) == ("too_long", 0.0)
    trajectory, _, _ = await hold(server, status(400, "maximum context length is 4096 tokens"))
    assert (trajectory.end, trajectory.value) == ("too_long", 0.0)


async def test_a_user_without_room_is_no_fault_of_the_agent(server: Server) -> None:
    user, _ = make(server, "user", "other")
    server.faults = iter([status(400, "maximum context length is 4096 tokens"), *[answer("", "length")] * 4])
    turns = [Turn(side="user", message=Message(role="system", content="Be a user."))]
    for text in ("has no room for the conversation", r"an empty message \(finish reason length\)"):
        with pytest.raises(ModelError, match=text) as caught:
            await user.reply(turns, [])
        assert caught.value.blame == "user"
    await user.close()


async def test_the_newer_name_of_the_limit_is_found_out(server: Server) -> None:
    told = status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    trajectory, _, _ = await hold(server, told)
    assert trajectory.value == 1.0
    sent = [request for request in server.requests if request["model"] == "agent"]
    assert ["max_tokens" in request for request in sent] == [True, False, False]
    assert sent[1]["max_completion_tokens"] == 256


async def test_refusals_and_reasoning_are_kept(server: Server) -> None:
    model, _ = make(server)
    server.faults = iter([answer(None, refusal="I may not."), answer("Yes.", reasoning_content="Hm.")])
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


@pytest.fixture
def store(tmp_path: Path) -> str:
    """This module's domain where it can be found by path."""
    copy = tmp_path / "store.py"
    copy.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return str(copy)


async def test_a_whole_evaluation_leaves_no_key_behind(server: Server, store: str, tmp_path: Path) -> None:
    server.faults = iter([status(401, f"bad key {KEY}"), status(500, KEY)])
    config = EvalConfig.model_validate(
        {
            "domain": store,
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
def test_the_key_is_in_no_file_no_line_and_no_traceback(server: Server, tmp_path: Path) -> None:
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
