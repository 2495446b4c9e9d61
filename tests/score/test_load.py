"""Thousands of conversations at once: memory stays flat, no task and no file is left open.

`make test` holds some hundreds for a moment; `make test-load` holds 2,000 at once for ten minutes, with the
page of the run open meanwhile. TRIALOGUE_LOAD and TRIALOGUE_LOAD_SECONDS in the environment set other sizes.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any
from urllib.request import urlopen

import pytest

from trialogue import Reply, Task
from trialogue.config import EvalConfig, Limits, RunSettings, Speaker
from trialogue.run import Run, is_listed
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.world.find import find_domain

SECONDS = float(os.environ.get("TRIALOGUE_LOAD_SECONDS", "2"))
NAP = 0.05
"""Seconds between two looks at how late the event loop is."""
AT_ONCE = int(os.environ.get("TRIALOGUE_LOAD", "200"))


class Waiting:
    """A party that thinks before each reply, so that many conversations are under way at once."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.draw = model, random.Random(seed)

    async def reply(self, turns: Any, tools: Any) -> Reply:
        await asyncio.sleep(self.draw.uniform(0.0, SECONDS / 20))
        return await self.model.reply(turns, tools)


def read_memory() -> float:
    """Megabytes this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_page(run: Path) -> tuple[subprocess.Popen[str], str]:
    """The page of the run, in a process of its own."""
    command = [sys.executable, "-m", "trialogue", "view", str(run.parent), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        for word in line.split():
            if word.startswith("http://"):
                return process, word.rstrip(".,")
    raise AssertionError("the page did not open")


def read_page(address: str) -> int:
    with urlopen(address, timeout=10) as answer:
        return len(answer.read())


async def look(address: str, seen: list[int]) -> None:
    """Load the page again and again, as a browser would."""
    while True:
        for part in ("/", "/api/runs", "/api/run?run=load", "/api/conversations?run=load"):
            with suppress(OSError):
                where = address.rstrip("/") + part
                seen.append(await asyncio.to_thread(read_page, where))
        await asyncio.sleep(1)


async def watch_loop(late: list[float]) -> None:
    """Sleep and wake again and again; how many milliseconds too late is how long the event loop was held."""
    while True:
        due = time.monotonic() + NAP
        await asyncio.sleep(NAP)
        late.append(1000 * (time.monotonic() - due))


def watch_machine(late: list[float], over: Event) -> None:
    """The same in a thread that no event loop holds: how late the machine is."""
    while not over.is_set():
        due = time.monotonic() + NAP
        time.sleep(NAP)
        late.append(1000 * (time.monotonic() - due))


def to_lag(late: list[float]) -> str:
    """A lag in words.

    >>> to_lag([float(number) for number in range(1, 201)])
    '200 naps: median 101 ms, 99 % 199 ms, longest 200 ms'
    """
    ranked = sorted(late)
    middle, most = (ranked[int(share * len(ranked))] for share in (0.5, 0.99))
    return f"{len(late)} naps: median {middle:.0f} ms, 99 % {most:.0f} ms, longest {ranked[-1]:.0f} ms"


def test_a_held_event_loop_is_seen() -> None:
    late: list[float] = []
    machine: list[float] = []
    over = Event()
    thread = Thread(target=watch_machine, args=(machine, over))
    thread.start()

    async def hold() -> None:
        watching = asyncio.create_task(watch_loop(late))
        await asyncio.sleep(2.5 * NAP)
        time.sleep(0.4)  # noqa: ASYNC251 - what is to be seen
        await asyncio.sleep(2 * NAP)
        watching.cancel()

    asyncio.run(hold())
    over.set()
    thread.join()
    assert max(late) >= 300
    assert median(machine) < 100  # nobody held that one
    assert "naps" in to_lag(late)


@pytest.mark.load
@pytest.mark.timeout(SECONDS * 3 + 300)
async def test_many_at_once(tmp_path: Path) -> None:
    shop = find_domain("shop")
    oracle = find_model(Speaker(model="oracle"), "agent", shop, Limits())
    agenda = find_model(Speaker(model="agenda"), "user", shop, Limits())
    run = Run.create(RunSettings(directory=str(tmp_path), name="load"), "eval", "shop", EvalConfig(), 0)
    began = time.monotonic()
    ends: list[float] = []
    begun = most = 0
    memory: list[float] = []
    page: tuple[subprocess.Popen[str], str] | None = open_page(run.path) if SECONDS >= 60 else None
    seen: list[int] = []
    looking = asyncio.create_task(look(page[1], seen)) if page is not None else None
    await asyncio.sleep(0)
    files, tasks = count_files(), len(asyncio.all_tasks())
    late: list[float] = []
    machine: list[float] = []
    watching, over = asyncio.create_task(watch_loop(late)), Event()
    thread = Thread(target=watch_machine, args=(machine, over), daemon=True)
    thread.start()

    def endless() -> Iterator[Task]:
        """New tasks until the time is over; only a page of them is ever in memory."""
        for number in itertools.count():
            if 100 * number >= 2 * AT_ONCE and time.monotonic() - began > SECONDS:
                return
            yield from shop.tasks("train", 100, number)

    def keep(trajectory: Any) -> None:
        nonlocal begun
        run.add_trajectories("eval", [trajectory])
        begun -= 1

    def agent(task: Task, seed: int) -> Waiting:
        nonlocal begun, most
        begun += 1
        most = max(most, begun)
        return Waiting(oracle(task, seed), seed)

    groups = rollout(
        shop,
        endless(),
        agent,
        lambda task, seed: Waiting(agenda(task, seed), seed + 1),
        RolloutSettings(
            limits=Limits(seconds=10 * SECONDS + 600), concurrency=AT_ONCE, grade=grade, each=keep, redraws=0
        ),
    )
    async for group in groups:
        assert not group.failed, group.failed[0].error
        ends.append(time.monotonic() - began)
        if len(ends) % 500 == 0:
            watching.cancel()  # collecting garbage holds the event loop, and is the test's own doing
            memory.append(read_memory())
            watching = asyncio.create_task(watch_loop(late))
    watching.cancel()
    over.set()
    thread.join()
    memory.append(read_memory())
    if looking is not None and page is not None:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        page[0].terminate()
        page[0].communicate(timeout=30)
        assert len(seen) > SECONDS / 20
        files -= 1  # the pipe to the page
    await asyncio.sleep(0.05)
    left, still_open = len(asyncio.all_tasks()), count_files()
    assert left <= tasks
    assert abs(still_open - files) <= 2
    assert most == AT_ONCE
    run.close("finished")
    assert is_listed(run.path)
    settled = memory[len(memory) // 3 :]
    print(
        f"{len(ends)} conversations, {most} at once, {len(ends) / (time.monotonic() - began):.0f} a second; "
        f"memory {min(settled):.0f} to {max(settled):.0f} MB after warm-up; tasks {tasks} before, {left} "
        f"after; files {files} before, {still_open} after; {len(seen)} answers of the page; "
        f"event-loop lag of {to_lag(late)}; of a thread beside it, {to_lag(machine)}"
    )
    assert len(late) > 10
    if len(settled) > 3:
        assert max(settled) <= 1.05 * min(settled), settled
