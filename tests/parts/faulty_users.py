"""Simulated users behind an endpoint in a process of its own, with a seeded schedule of faults.

`python tests/parts/faulty_users.py '{"faults": 0.3}'` prints its port; the end of standard input ends it. The
scenario in the system prompt tells which task a request is about, so the endpoint keeps no state.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from subprocess import PIPE, Popen
from threading import Lock
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent))

from endpoint import Answer, Endpoint, completion, hang, reset, status, truncate

USAGE = (50, 10)
FAULTS: dict[str, Answer] = {
    "429": status(429, "slow down"),
    "429 with a wait": status(429, "slow down", Retry_After="1"),
    "500": status(500),
    "reset": reset,
    "hang": hang,
    "truncated": truncate,
    "no choices": {**completion(""), "choices": []},
    "null content": completion(None),
    "content filter": completion("I am", "content_filter"),
}


class FaultyUsers:
    """Rule-based users of the shop, or `lines` in turn; counts what came between."""

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
        lines: list[str] | None = None,
    ) -> None:
        from trialogue import find_domain

        tasks = find_domain("shop").tasks(split, count, seed, levels=tuple(levels))
        self.tasks = {task.instructions.strip(): task for task in tasks}
        self.draw = Random(f"faults {seed}")
        self.faults, self.latency, self.down, self.per_second = faults, latency, down, per_second
        self.lines = lines
        self.lock = Lock()
        self.began: float | None = None
        self.seen: Counter[str] = Counter()
        self.times: list[float] = []
        self.largest = 0

    def look(self) -> dict[str, Any]:
        return {"seen": self.seen, "times": self.times, "largest": self.largest}

    def __call__(self, request: dict[str, Any], asked: int) -> Answer:
        with self.lock:
            kind, wait = self.decide(request)
        match kind:
            case "too fast":
                return 429, {"error": {"message": "too fast"}}
            case "while down":
                return 503, {"error": {"message": "down"}}
            case "none":
                time.sleep(wait)
                return completion(self.speak(request), usage=USAGE)
            case _:
                return FAULTS[kind]

    def decide(self, request: dict[str, Any]) -> tuple[str, float]:
        """What happens to a request, and how long a reply takes."""
        now = time.monotonic()
        self.began = self.began or now
        self.times.append(now - self.began)
        self.largest = max(self.largest, request["size"])
        recent = sum(self.times[-1] - earlier < 1.0 for earlier in self.times)
        wait = 0.0
        if self.per_second is not None and recent > self.per_second:
            kind = "too fast"
        elif self.down is not None and self.down[0] <= self.times[-1] < self.down[1]:
            kind = "while down"
        elif self.draw.random() < self.faults:
            kind = self.draw.choice(list(FAULTS))
        else:
            kind = "none"
            if self.latency:
                wait = min(self.latency * self.draw.lognormvariate(0, 0.5), 10 * self.latency)
        self.seen[kind] += 1
        return kind, wait

    def speak(self, request: dict[str, Any]) -> str:
        from trialogue import Message, Turn
        from trialogue.talk.agenda import make_agenda_user

        system, *said = request["messages"]
        if self.lines is not None:  # the last line is repeated
            spoken = sum(item["role"] == "assistant" for item in said)
            return self.lines[min(spoken, len(self.lines) - 1)]
        scenario = system["content"].split("# Your scenario")[1].strip()
        turns = [
            Turn(side="user", message=Message(role=item["role"], content=item["content"])) for item in said
        ]
        if len(turns) == 1:  # the message that asks a user to begin
            turns = []
        return asyncio.run(make_agenda_user(self.tasks[scenario], 0).reply(turns, [])).content


class Running:
    """The endpoint, seen from the test's process."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"

    def look(self) -> dict[str, Any]:
        """What it has seen so far: counts by fault, when each request came, the bytes of the largest."""
        with urlopen(self.url, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def run_users(**settings: Any) -> Generator[Running]:
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
    with Endpoint(FaultyUsers(**json.loads(sys.argv[1]))) as endpoint:
        print(endpoint.server_address[1], flush=True)
        sys.stdin.readline()
