"""An OpenAI-compatible endpoint in a process of its own: rule-based users of the shop answer, after a while,
and a seeded schedule of faults comes between.

`python tests/talk/endpoint.py '{"faults": 0.3}'` prints its port; a line on standard input ends it. Which
task a request is about is found in its system prompt, so the endpoint keeps no state, as real ones do not.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from random import Random
from subprocess import PIPE, Popen
from typing import Any
from urllib.request import urlopen

KINDS = (
    "429",
    "429 with a wait",
    "500",
    "reset",
    "hang",
    "truncated",
    "no choices",
    "null content",
    "content filter",
)


class Endpoint:
    """What is served, and what was seen."""

    def __init__(
        self,
        split: str = "test",
        count: int = 100,
        seed: int = 0,
        levels: tuple[int, ...] = (1,),
        faults: float = 0.0,
        latency: float = 0.0,
        down: tuple[float, float] | None = None,
        per_second: float | None = None,
        script: list[str] | None = None,
    ) -> None:
        from trialogue import find_domain

        self.tasks = {
            task.instructions.strip(): task
            for task in find_domain("shop").tasks(split, count, seed, levels=tuple(levels))
        }
        self.chance = Random(f"faults {seed}")
        self.faults, self.latency, self.down, self.per_second = faults, latency, down, per_second
        self.script = script
        self.began: float | None = None
        self.seen: Counter[str] = Counter()
        self.times: list[float] = []
        self.largest = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                size = 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.partition(b":")
                    if name.lower() == b"content-length":
                        size = int(value)
                body = await reader.readexactly(size)
                self.largest = max(self.largest, size)
                if line.startswith(b"GET"):
                    await send(writer, 200, {"seen": self.seen, "times": self.times, "largest": self.largest})
                elif not await self.answer(json.loads(body), writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False closes the connection."""
        now = time.monotonic()
        self.began = self.began or now
        self.times.append(now - self.began)
        recent = sum(self.times[-1] - earlier < 1.0 for earlier in self.times)
        if self.per_second is not None and recent > self.per_second:
            self.seen["too fast"] += 1
            await send(writer, 429, {"error": {"message": "too fast"}})
            return True
        if self.down is not None and self.down[0] <= self.times[-1] < self.down[1]:
            self.seen["while down"] += 1
            await send(writer, 503, {"error": {"message": "down"}})
            return True
        fault = self.chance.choice(KINDS) if self.chance.random() < self.faults else "none"
        self.seen[fault] += 1
        if fault != "none":
            return await self.fail(fault, writer)
        if self.latency:
            await asyncio.sleep(min(self.latency * self.chance.lognormvariate(0, 0.5), 10 * self.latency))
        await send(writer, 200, completion(await self.speak(request)))
        return True

    async def fail(self, fault: str, writer: asyncio.StreamWriter) -> bool:
        match fault:
            case "429":
                await send(writer, 429, {"error": {"message": "slow down"}})
            case "429 with a wait":
                await send(writer, 429, {"error": {"message": "slow down"}}, "Retry-After: 1\r\n")
            case "500":
                await send(writer, 500, {"error": {"message": "oh"}})
            case "reset":
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            case "hang":
                await asyncio.sleep(60)
                return False
            case "truncated":
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
                )
                await writer.drain()
                return False
            case "no choices":
                await send(writer, 200, {**completion(""), "choices": []})
            case "null content":
                await send(writer, 200, completion(None))
            case _:
                await send(writer, 200, completion("I am", "content_filter"))
        return True

    async def speak(self, request: dict[str, Any]) -> str:
        from trialogue import Message, Turn
        from trialogue.talk.agenda import make_agenda_user

        system, *said = request["messages"]
        if self.script is not None:  # says its lines, then the last again
            spoken = sum(item["role"] == "assistant" for item in said)
            return self.script[min(spoken, len(self.script) - 1)]
        scenario = system["content"].split("# Your scenario")[1].strip()
        turns = [
            Turn(side="user", message=Message(role=item["role"], content=item["content"])) for item in said
        ]
        if len(turns) == 1:  # the cue of whoever has nothing to answer yet
            turns = []
        return (await make_agenda_user(self.tasks[scenario], 0).reply(turns, [])).content


def completion(content: str | None, finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "user",
        "choices": [{"index": 0, "finish_reason": finish, "message": message}],
        "usage": {"prompt_tokens": 50, "completion_tokens": 10, "total_tokens": 60},
    }


async def send(writer: asyncio.StreamWriter, status: int, body: Any, headers: str = "") -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}{headers}\r\n".encode() + data)
    await writer.drain()


async def main(settings: dict[str, Any]) -> None:
    endpoint = Endpoint(**settings)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)


class Running:
    """An endpoint under way, from outside."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self._stats = f"http://127.0.0.1:{port}/stats"

    def look(self) -> dict[str, Any]:
        """What it has seen so far: counts by fault, and when each request came."""
        with urlopen(self._stats, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def run_endpoint(**settings: Any) -> Generator[Running]:
    process = Popen([sys.executable, __file__, json.dumps(settings)], stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Running(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.stdout.close()
        process.terminate()
        process.wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
