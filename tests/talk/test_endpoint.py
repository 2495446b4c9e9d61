"""Users behind an endpoint that fails, lags, goes down, limits and costs: no score is ever wrong for it."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faulty_users import FAULTS, run_users

from trialogue import RolloutSettings, Task, Trajectory, find_domain, rollout
from trialogue.config import Budget, EvalConfig, Speaker
from trialogue.errors import BudgetError, ConfigError
from trialogue.records import unstamp
from trialogue.run import read_about, read_lines, read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.score.reward import grade
from trialogue.talk.agenda import make_agenda_user
from trialogue.talk.budget import Account, add_up, find_price, to_cost
from trialogue.talk.model import Model
from trialogue.talk.openai import OpenAIModel
from trialogue.talk.rate_limit import Breaker, Down, Pace
from trialogue.trajectory import Usage

SHOP = find_domain("shop")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-5150")


def make_user(
    server: Any, account: Account | None = None, patience: float = 0.02, **settings: Any
) -> OpenAIModel:
    """A user behind the endpoint, whose pauses are that much shorter."""

    async def pause(seconds: float) -> None:
        await asyncio.sleep(seconds * patience)

    speaker = Speaker(base_url=server.url, **{"timeout": 30.0, "retries": 8, **settings})
    return OpenAIModel("user", "user", speaker, 64, account=account or Account(), pause=pause)


async def hold(tasks: Sequence[Task], user: Any, **more: Any) -> tuple[list[Trajectory], list[Trajectory]]:
    groups = [
        group async for group in rollout(SHOP, tasks, SHOP.oracle, user, RolloutSettings(grade=grade, **more))
    ]
    held = [item for group in groups for item in group.trajectories]
    return held, [item for group in groups for item in [*group.failed, *group.excluded]]


def to_words(items: Sequence[Trajectory]) -> dict[str, Any]:
    """What was said and how it was graded, by task."""
    return {
        item.task.id: (item.end, item.value, [turn.message.content for turn in item.turns]) for item in items
    }


def same_user(task: Task, seed: int) -> Model:
    return make_agenda_user(task, 0)


@pytest.mark.load
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_faults_of_the_endpoint_change_no_score(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """30 % of the calls are at fault: each conversation ends as it does with a user that never fails."""
    tasks = SHOP.tasks("test", count, 0, levels=(1,))
    expected, _ = await hold(tasks, same_user)
    with run_users(count=count, faults=0.3) as server:
        user = make_user(server, timeout=3.0, retries=12)
        began = time.monotonic()
        held, failed = await hold(tasks, user, concurrency=100)
        wall = time.monotonic() - began
        await user.close()
        seen = server.look()["seen"]
    kinds = {name: count for name, count in seen.items() if name != "none"}
    assert set(kinds) == set(FAULTS) or count < 300
    share = sum(kinds.values()) / sum(seen.values())
    with capsys.disabled():
        print(f"\n{len(held)} conversations, {sum(seen.values())} calls, {share:.0%} at fault, {wall:.1f} s")
    assert 0.2 < share < 0.4
    assert len(held) == count
    assert to_words(held) == to_words(expected)
    assert [item for item in failed if item.end != "error" or item.reward is not None] == []
    answers = sum(turn.side == "user" for item in [*held, *failed] for turn in item.turns)
    assert seen["none"] >= answers  # an answer that came too late was asked for again, never used twice


@contextmanager
def watch_loop() -> Generator[dict[str, float]]:
    """How long the longest callback kept the event loop, in seconds of this thread's work and of the clock.
    Waiting in a callback (a sleep, a synchronous request) takes no work, so it is told by switches that the
    thread made of its own accord; on a busy machine the clock alone also counts other programs."""
    worst = {"work": 0.0, "clock": 0.0, "waited": 0.0}
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        run(self)
        passed, work = time.perf_counter() - began, time.thread_time() - worked
        worst["work"], worst["clock"] = max(worst["work"], work), max(worst["clock"], passed)
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > switches:
            worst["waited"] = max(worst["waited"], passed - work)

    asyncio.Handle._run = timed
    try:
        yield worst
    finally:
        asyncio.Handle._run = run


async def measure(count: int, limit: int) -> tuple[float, float, dict[str, float]]:
    """Wall-clock seconds, those the longest conversation waited for its user, and what kept the loop."""
    tasks = SHOP.tasks("test", count, 0, levels=(1,))
    await hold(tasks[:1], same_user)  # what is done once in a process
    with run_users(count=count, latency=0.2) as server:
        user = make_user(server, concurrency=limit)
        began = time.monotonic()
        with watch_loop() as worst:
            held, failed = await hold(tasks, user, concurrency=count)
        wall = time.monotonic() - began
        await user.close()
    assert (len(held), len(failed)) == (count, 0)
    own = [sum(turn.seconds for turn in item.turns if turn.side == "user") for item in held]
    return wall, max(own), worst


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_256_slow_users_take_no_longer_than_the_slowest(capsys: pytest.CaptureFixture[str]) -> None:
    """Of three tries the best counts: what blocks the loop blocks it each time, a busy machine does not."""
    tries: list[tuple[float, float, dict[str, float]]] = []
    while len(tries) < 3 and not (tries and is_good(*tries[-1])):
        tries.append(await measure(256, 64))
    with capsys.disabled():
        for wall, longest, worst in tries:
            kept = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in worst.items())
            print(f"\n256 users: {wall:.2f} s, the longest {longest:.2f} s; longest callback: {kept}")
    assert any(is_good(*item) for item in tries)


def is_good(wall: float, longest: float, worst: dict[str, float]) -> bool:
    return wall <= 1.15 * longest and worst["work"] <= 0.05 and worst["waited"] <= 0.05


@pytest.mark.load
async def test_slow_users_are_asked_at_once() -> None:
    wall, longest, _ = await measure(24, 24)
    assert wall <= 1.5 * longest + 1.0


# -- an endpoint that is down -------------------------------------------------------------------------------


async def test_conversations_pause_while_the_endpoint_is_down(caplog: pytest.LogCaptureFixture) -> None:
    tasks = SHOP.tasks("test", 30, 0, levels=(1,))
    expected, _ = await hold(tasks, same_user)
    with run_users(count=30, down=(0.2, 2.5), latency=0.05) as server:
        user = make_user(server, retries=2, patience=0.1)
        held, failed = await hold(tasks, user, concurrency=10)
        await user.close()
        seen = server.look()["seen"]
    assert to_words(held) == to_words(expected)
    assert failed == []
    assert user.breaker.outages >= 1
    assert seen["while down"] < 60
    assert "openai:user is down" in caplog.text
    assert "openai:user is back" in caplog.text


async def test_an_outage_is_not_waited_for_without_end_and_stops_the_clock() -> None:
    now = 0.0
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)

    async def fail() -> None:
        raise Down("no")

    async def answer() -> str:
        return "here"

    breaker = Breaker("it", 2, 100.0, pause, lambda: now)
    assert await breaker.through(answer) == "here"
    for _ in range(2):
        with pytest.raises(Down, match=r"^no$"):
            await breaker.through(fail)
    assert breaker.is_open
    with pytest.raises(Down, match="it has been down for more than 100 s"):
        await breaker.through(fail)
    assert waits[:6] == [1, 2, 4, 8, 16, 30]
    assert 100 < now < 140
    assert await breaker.through(answer) == "here"  # who comes later tries once more
    assert waits[-1] == 30
    assert not breaker.is_open


async def test_those_who_wait_together_give_up_together() -> None:
    now, tries = 0.0, 0

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    async def fail() -> None:
        nonlocal tries
        tries += 1
        raise Down("no")

    breaker = Breaker("it", 1, 100.0, pause, lambda: now)
    with pytest.raises(Down):
        await breaker.through(fail)
    for _ in range(2):
        before = now, tries
        told = await asyncio.gather(*(breaker.through(fail) for _ in range(50)), return_exceptions=True)
        assert all("it has never answered; is its address right?" in str(error) for error in told)
        assert now - before[0] < 100
        assert tries - before[1] < 10


# -- limits and money ---------------------------------------------------------------------------------------


async def test_limits_are_kept_by_pacing() -> None:
    tasks = SHOP.tasks("test", 6, 0, levels=(1,))
    with run_users(count=6, per_second=25) as server:
        user = make_user(server, requests_per_minute=600, patience=1.0)
        held, _ = await hold(tasks, user)
        await user.close()
        look = server.look()
    assert len(held) == 6
    assert "too fast" not in look["seen"]
    assert len(look["times"]) / (look["times"][-1] + 1.5) <= 10.5


async def test_tokens_a_minute_are_settled_by_what_was_used() -> None:
    now = 0.0

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    pace = Pace(tokens=6000, clock=lambda: now, pause=pause)
    for _ in range(60):
        reckoned = await pace.wait(1000)
        pace.settle(reckoned, 100)
    assert 55 <= now <= 65  # 6000 tokens are a minute's worth


async def test_a_request_is_charged_with_its_own_tokens_whoever_else_asks() -> None:
    tasks = SHOP.tasks("test", 16, 0, levels=(1,))
    with run_users(count=16) as server:
        user = make_user(server)
        charged: list[int] = []

        class Watched(Pace):
            def settle(self, reckoned: int, used: int) -> None:
                charged.append(used)

        user._pace = Watched(tokens=60_000_000)
        held, _ = await hold(tasks, user)
        await user.close()
    assert len(held) == 16
    assert sum(charged) == user.ledger.tokens > 0


def test_prices_come_from_the_table_and_can_be_overridden() -> None:
    assert find_price("gpt-4.1-mini-2025-04-14") == find_price("gpt-4.1-mini") != find_price("gpt-4.1")
    assert find_price("gpt-4.12") is None
    assert find_price("mine", None, {"mine": (1.0, 2.0)}) == (1.0, 2.0)
    assert find_price("gpt-4.1", (3.0, 4.0)) == (3.0, 4.0)
    usage = Usage(prompt=1_000_000, completion=500_000, cached=400_000)
    assert to_cost(usage, (2.0, 8.0, 0.5)) == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 4.0)
    assert to_cost(usage, (2.0, 8.0)) == pytest.approx(6.0)
    with pytest.raises(ConfigError, match="the price of 'mine' is not known"):
        Account(Budget(usd=1.0)).open("user", "mine", None)


def to_config(server: Any, folder: Path, name: str, **more: Any) -> EvalConfig:
    settings: dict[str, Any] = {
        "user": {"model": "openai:user", "base_url": server.url, "price": (1.0, 10.0)},
        "tasks": {"count": 12, "levels": (1,)},
        "limits": {"reply_tokens": 64},
        "run": {"directory": str(folder), "name": name},
    }
    return EvalConfig.model_validate({**settings, **more})


async def test_a_budget_is_never_passed_and_the_run_goes_on_with_more(tmp_path: Path) -> None:
    with run_users(count=12) as server:
        whole = await evaluate(to_config(server, tmp_path, "whole"))
        spent = sum(line["usd"] for line in whole["ledger"])
        assert whole["cost"] == pytest.approx(spent)
        budget = Budget(tokens=6000)
        with pytest.raises(BudgetError, match=r"the budget is spent \(\d+ of 6000 tokens\)"):
            await evaluate(to_config(server, tmp_path, "short", budget=budget, rollout={"concurrency": 4}))
        run = tmp_path / "short"
        assert read_about(run)["state"] == "stopped"
        [line] = add_up(line for _, line in read_lines(run / "ledger.jsonl"))
        assert 6000 - 3500 < line["prompt"] + line["completion"] <= 6000
        finished = list(read_trajectories(run))
        assert 0 < len(finished) < 12
        more = to_config(server, tmp_path, "short", budget=Budget(usd=1.0))
        again = await evaluate(more, resume=run)
    assert (again["conversations"], again["pass^1"]) == (12, whole["pass^1"])
    words = {item.id: item.to_json() for item in read_trajectories(run)}
    assert words == {item.id: item.to_json() for item in read_trajectories(tmp_path / "whole")}
    assert sum(line["usd"] for line in again["ledger"]) == pytest.approx(spent)  # nothing was paid for twice


def find_key(folder: Path) -> list[Path]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file for file in files if b"sk-canary-5150" in file.read_bytes()]


async def test_the_ledger_is_by_role_and_model_and_a_replay_is_free(tmp_path: Path) -> None:
    with run_users(count=12) as server:
        first = await evaluate(to_config(server, tmp_path, "first"))
        calls = server.look()["seen"]["none"]
        recording = tmp_path / "first" / "recordings" / "user.jsonl"
        again = to_config(server, tmp_path, "again", user={"model": f"replay:{recording}"})
        second = await evaluate(again)
        assert server.look()["seen"]["none"] == calls
        lines = recording.read_text().splitlines(keepends=True)
        recording.write_text("".join(lines[: len(lines) // 2]))
        partial = await evaluate(
            again.model_copy(update={"run": again.run.model_copy(update={"name": "no"})})
        )
        allowed = to_config(
            server,
            tmp_path,
            "partial",
            user={
                "model": f"replay:{recording}",
                "otherwise": "openai:user",
                "base_url": server.url,
            },
        )
        filled = await evaluate(allowed)
        asked = server.look()["seen"]["none"] - calls
    [line] = first["ledger"]
    assert (line["role"], line["model"], line["calls"]) == ("user", "user", calls)
    assert line["seconds"] > 0
    assert second["ledger"] == []
    runs = [(tmp_path / name / "trajectories" / "eval.jsonl") for name in ("first", "again", "partial")]
    texts = [sorted(map(unstamp, run.read_bytes().splitlines())) for run in runs]
    assert texts[0] == texts[1] == texts[2]
    assert partial["failed"] > 0
    assert partial["blame"] == {"infrastructure": partial["failed"]}
    assert filled["conversations"] == 12
    assert 0 < asked <= calls - len(lines) // 2
    assert find_key(tmp_path) == []
    assert (
        json.loads((tmp_path / "first" / "config.json").read_text())["user"]["api_key_env"]
        == "OPENAI_API_KEY"
    )
