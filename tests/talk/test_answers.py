"""What endpoints answer is data: bounded in bytes, read once, and never believed about itself."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from endpoint import completion, reset, send, status
from store import Store, hold, make

from trialogue import Message, ModelError, ToolCall, Turn
from trialogue.config import Limits, Speaker
from trialogue.talk.model import to_clean
from trialogue.talk.openai import OpenAIModel
from trialogue.talk.rate_limit import Breaker, Down
from trialogue.trajectory import Reply

HELLO = [Turn(side="agent", message=Message(role="user", content="Hi"))] * 2
MB = 1_000_000


# -- bytes --------------------------------------------------------------------------------------------------


def pour(status: int, megabytes: int) -> Callable[[BaseHTTPRequestHandler], None]:
    """A body that long, written as it goes."""

    def fault(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(megabytes * MB))
        handler.end_headers()
        handler.close_connection = True
        with suppress(OSError):
            for _ in range(megabytes):
                handler.wfile.write(b" " * MB)

    return fault


@cache
def pack(megabytes: int) -> bytes:
    """A sound answer with a message that long, a thousandth of it as gzip; never whole in memory."""
    before, after = json.dumps(completion("|")).encode().split(b"|")
    packer = zlib.compressobj(1, wbits=31)
    parts = [packer.compress(before), *(packer.compress(b"x" * MB) for _ in range(megabytes))]
    return b"".join([*parts, packer.compress(after), packer.flush()])


def zipped(handler: BaseHTTPRequestHandler, megabytes: int = 300, **headers: str) -> None:
    with suppress(OSError):
        send(handler, 200, pack(megabytes), **{"Content_Encoding": "gzip", **headers})


MEASURE = """
import asyncio, resource, sys
from trialogue.config import Speaker
from trialogue.errors import ModelError
from trialogue.messages import Message
from trialogue.talk.openai import OpenAIModel
from trialogue.trajectory import Turn

async def main():
    speaker = Speaker(base_url=sys.argv[1], timeout=60, retries=0)
    models = [OpenAIModel("agent", "agent", speaker, 64) for _ in range(int(sys.argv[2]))]
    turns = [Turn(side="agent", message=Message(role="user", content="Hi"))] * 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = await asyncio.gather(*(model.reply(turns, []) for model in models), return_exceptions=True)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1000)
    for error in told:
        assert isinstance(error, ModelError), error
        print(error.blame, error)

asyncio.run(main())
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("fault", "count", "text"),
    [
        (pour(200, 200), 1, "it is longer than 16000000 bytes, the limit of an answer"),
        (zipped, 1, "it is longer than 16000000 bytes, the limit of an answer"),
        (pour(500, 50), 4, "500 Internal Server Error"),
    ],
)
def test_a_body_without_end_takes_no_memory(server: Store, fault: Any, count: int, text: str) -> None:
    server.faults = iter([fault] * count)
    command = [sys.executable, "-c", MEASURE, server.url, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, *told = done.stdout.splitlines()
    assert int(grown) < 100, done.stdout
    assert len(told) == count
    assert all(line.startswith("infrastructure ") and text in line for line in told)


async def test_the_limit_of_an_answer_is_a_setting(server: Store) -> None:
    model, _ = make(server, answer_bytes=2000, retries=0)
    server.faults = iter([completion("x" * 1000), completion("x" * 2000)])
    assert len((await model.reply(HELLO, [])).content) == 1000
    with pytest.raises(ModelError, match="it is longer than 2000 bytes"):
        await model.reply(HELLO, [])
    await model.close()


async def test_gzip_is_read_and_nothing_else_that_is_packed(server: Store) -> None:
    model, _ = make(server, retries=0)
    server.faults = iter(
        [
            lambda handler: zipped(handler, 1),
            lambda handler: zipped(handler, 1, Content_Encoding="gzip, gzip"),
            lambda handler: send(handler, 200, b"no gzip", Content_Encoding="gzip"),
        ]
    )
    assert len((await model.reply(HELLO, [])).content) == MB
    for text in ("content encoding is 'gzip, gzip'", "it is not gzip"):
        with pytest.raises(ModelError, match=text):
            await model.reply(HELLO, [])
    await model.close()


async def test_another_origin_is_not_followed_and_the_same_one_is(
    server: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(place: str, code: int = 307) -> Callable[[BaseHTTPRequestHandler], None]:
        return lambda handler: send(handler, code, b"", Location=place)

    with Store() as other:
        model, _ = make(server, retries=0)
        elsewhere = f"http://127.0.0.1:{other.server_address[1]}/v1/chat/completions"
        server.faults = iter(
            [to("/v1/elsewhere"), completion("Here."), to(elsewhere + "?key=1"), *[to("/")] * 4]
        )
        assert (await model.reply(HELLO, [])).content == "Here."
        told = f"{server.url}/chat/completions redirects to {elsewhere}, which is not followed"
        with pytest.raises(ModelError, match=told) as caught:
            await model.reply(HELLO, [])
        assert caught.value.blame == "infrastructure"
        assert "key=1" not in str(caught.value)
        with pytest.raises(ModelError, match="redirects more than 3 times"):
            await model.reply(HELLO, [])
        assert other.requests == []
        await model.close()


# -- shapes -------------------------------------------------------------------------------------------------

_CALL = {"id": "call_1", "type": "function", "function": {"name": "cancel", "arguments": "{}"}}


def raw(body: bytes | str) -> Callable[[BaseHTTPRequestHandler], None]:
    data = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    return lambda handler: send(handler, 200, data)


MALFORMED: dict[str, Any] = {
    "nested lists": raw("[" * 10_000 + "]" * 10_000),
    "nested in a field": raw(
        json.dumps(completion("x"))[:-1] + ',"deep":' + "[" * 10_000 + "]" * 10_000 + "}"
    ),
    "nested objects": raw('{"choices":' * 10_000 + "1" + "}" * 10_000),
    "many values": raw("[" + "[]," * MB + "[]]"),
    "a long number": raw('{"usage": ' + "9" * 5000 + "}"),
    "not UTF-8": raw(b'{"choices": "\xff\xfe"}'),
    "empty": raw(""),
    "a number": raw("12"),
    "null": raw("null"),
    "choices an object": raw('{"choices": {"0": 1}}'),
    "a choice that is text": raw('{"choices": ["x"]}'),
    "message a list": raw('{"choices": [{"message": []}]}'),
    "no message": raw('{"choices": [{"message": null}]}'),
    "reasoning an object": completion("x", reasoning={"text": "hm"}),
    "reasoning_content a list": completion("x", reasoning_content=["hm"]),
    "content a number": completion(12),  # type: ignore[arg-type]
    "content an object": completion({"a": 1}),  # type: ignore[arg-type]
    "refusal true": completion(None, refusal=True),
    "finish a list": completion("x", finish=["stop"]),  # type: ignore[arg-type]
    "calls a text": completion(tool_calls="cancel"),
    "a call that is text": completion(tool_calls=["cancel"]),
    "function a text": completion(tool_calls=[{**_CALL, "function": "cancel"}]),
    "name a number": completion(tool_calls=[{**_CALL, "function": {"name": 1, "arguments": "{}"}}]),
    "arguments a list": completion(tool_calls=[{**_CALL, "function": {"name": "cancel", "arguments": [1]}}]),
    "id an object": completion(tool_calls=[{**_CALL, "id": {}}]),
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_whatever_an_answer_holds_it_is_the_endpoints_fault(server: Store, kind: str) -> None:
    trajectory, waits, _ = await hold(server, MALFORMED[kind], MALFORMED[kind], retries=1)
    assert (trajectory.end, trajectory.blame, trajectory.reward) == ("error", "infrastructure", None)
    assert "gave no usable reply in 2 tries: an unreadable answer: " in trajectory.error
    assert "\n" not in trajectory.error
    assert len(waits) == 1


async def test_arguments_nested_without_end_are_text(server: Store) -> None:
    deep = json.loads('{"a":' * 200 + "1" + "}" * 200)
    text = '{"a":' * 10_000 + "1" + "}" * 10_000
    for arguments in (deep, text):
        call = {**_CALL, "function": {"name": "cancel", "arguments": arguments}}
        trajectory, _, _ = await hold(server, completion(tool_calls=[call], finish="tool_calls"))
        assert trajectory.end == "user_stop"
        [first, *_] = [turn for turn in trajectory.turns if turn.message.role == "tool"]
        assert first.message.content == "Error: cancel: the arguments are not a JSON object"


# -- usage --------------------------------------------------------------------------------------------------


def using(**usage: Any) -> Any:
    return {**completion("It is done."), "usage": usage}


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "fault",
    [
        using(prompt_tokens=10**80, completion_tokens=10**80),
        using(prompt_tokens=-(10**9), completion_tokens=-5, prompt_tokens_details={"cached_tokens": -1}),
        using(prompt_tokens=10, completion_tokens=2, prompt_tokens_details={"cached_tokens": 10**12}),
        using(prompt_tokens="many", completion_tokens=[1]),
        using(prompt_tokens=True, completion_tokens=1, prompt_tokens_details=[]),
        {**completion("It is done."), "usage": "a lot"},
        raw(json.dumps(using(prompt_tokens=1, completion_tokens=2)).replace(": 1,", f": {HUGE},")),
        raw(json.dumps(using(prompt_tokens=1, completion_tokens=2)).replace(": 1,", ": NaN,")),
        raw(json.dumps(using(prompt_tokens=1, completion_tokens=2)).replace(": 1,", ": 1e999,")),
    ],
)
async def test_usage_is_a_report_that_is_bounded(
    server: Store, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The conversation goes on, costs no more than was sent and received, and two answers warn once."""
    caplog.set_level(logging.WARNING, "trialogue")
    trajectory, _, agent = await hold(server, fault, fault, price=(1.0, 10.0, 0.5))
    assert (trajectory.end, trajectory.error) == ("user_stop", None)
    ledger = agent.ledger
    most = len(json.dumps(server.requests[-1]))
    assert 0 <= ledger.cached <= ledger.prompt <= ledger.calls * most
    assert 0 <= ledger.completion <= ledger.calls * 1000
    assert 0 <= ledger.usd <= (ledger.prompt + 10 * ledger.completion) / 1e6
    warned = [item.getMessage() for item in caplog.records if "usage that cannot be" in item.getMessage()]
    assert len(warned) == 1
    assert len(warned[0]) < 300


async def test_honest_usage_is_taken_as_it_is(server: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trialogue")
    details = {"cached_tokens": 8.0}
    fault = using(prompt_tokens=12.0, completion_tokens=7, prompt_tokens_details=details)
    _, _, agent = await hold(server, fault)
    assert (agent.ledger.prompt, agent.ledger.completion, agent.ledger.cached) == (12, 7, 8)
    assert caplog.records == []


# -- calls --------------------------------------------------------------------------------------------------


def test_many_calls_are_told_apart_in_linear_time() -> None:
    """Of 50 times the calls each is still looked at once; comparing pairs would take 2,500 times as long."""

    def measure(count: int) -> float:
        call = ToolCall(id="same", name="find")
        began = time.process_time()
        cleaned = to_clean(Reply(tool_calls=(call,) * count)).tool_calls
        assert len({call.id for call in cleaned}) == count
        return time.process_time() - began

    assert measure(50_000) < 500 * max(measure(1_000), 0.001)
    tricky = [ToolCall(id=name, name="find") for name in ("a", "a_2", "a", "a", "a_3", "a_2_4")]
    ids = [call.id for call in to_clean(Reply(tool_calls=tuple(tricky))).tool_calls]
    assert len(set(ids)) == len(ids)


async def test_a_message_of_20000_calls_is_read_to_its_limit(server: Store) -> None:
    calls = [{**_CALL, "id": None}] * 20_000
    began = time.process_time()
    trajectory, _, _ = await hold(server, completion(tool_calls=calls, finish="tool_calls"))
    assert time.process_time() - began < 5
    results = [turn for turn in trajectory.turns if turn.message.role == "tool"]
    assert trajectory.end == "max_turns"
    assert len(results) <= Limits().calls + 1


# -- an endpoint that is down -------------------------------------------------------------------------------


async def test_an_endpoint_that_answers_with_errors_only_is_said_to(server: Store) -> None:
    now = 0.0

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    speaker = Speaker(base_url=server.url, retries=1)
    model = OpenAIModel("agent", "agent", speaker, 64, pause=pause)
    model.breaker.clock = lambda: now
    server.faults = iter([status(500, "the disk is full")] * 50)
    for _ in range(2):
        with pytest.raises(ModelError, match="the disk is full"):
            await model.reply(HELLO, [])
    assert model.breaker.is_open
    with pytest.raises(ModelError) as caught:
        await asyncio.gather(*(model.reply(HELLO, []) for _ in range(3)))
    text = str(caught.value)
    assert "has answered with nothing but errors, at last 500 Internal Server Error: the disk is full" in text
    assert "address" not in text
    await model.close()


async def test_without_retries_nothing_is_waited_for(server: Store) -> None:
    model, waits = make(server, retries=0)
    server.faults = iter([reset, status(503)] * 10)
    for _ in range(10):
        with pytest.raises(ModelError, match=r"no usable reply in 1 try: (Read|RemoteProtocol)Error"):
            await model.reply(HELLO, [])
        with pytest.raises(ModelError, match="no usable reply in 1 try: 503"):
            await model.reply(HELLO, [])
    assert waits == []
    assert not model.breaker.is_open
    await model.close()


async def test_a_breaker_without_patience_never_opens() -> None:
    async def fail() -> None:
        raise Down("no")

    breaker = Breaker("it", 1, 0.0)
    for _ in range(3):
        with pytest.raises(Down, match=r"^no$"):
            await breaker.through(fail)
    assert not breaker.is_open
