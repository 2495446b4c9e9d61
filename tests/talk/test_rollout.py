"""Many conversations at once: how many, in what order they come, what becomes of failing ones, replay."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from trialogue import (
    ConfigError,
    Database,
    Domain,
    DomainError,
    EngineError,
    GradeError,
    Group,
    ModelError,
    Reply,
    Reward,
    Setup,
    Task,
    Tool,
    Trajectory,
    Turn,
    rollout,
    tool,
)
from trialogue.config import Limits
from trialogue.errors import BudgetError
from trialogue.talk.model import Model
from trialogue.talk.rate_limit import off_the_clock
from trialogue.talk.replay import Recorder, Replay
from trialogue.talk.rollout import Deadline, RolloutSettings
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.trajectory import Finding, Tokens, Usage
from trialogue.world.domain import STOP, Environment, from_list


class Tally(Database):
    total: int = 0

    @tool(writes=True)
    def add(self, number: int) -> int:
        """Add a number."""
        if number == 13:
            raise RuntimeError("unlucky")
        self.total += number
        return self.total

    @tool
    def cheat(self) -> str:
        """Write without leave."""
        self.total = 1
        return "done"


TASKS = [Task(id=f"t{number}", domain="count", instructions="Count.") for number in range(6)]
DOMAIN = Domain("count", "Count.", Tally.load({}), from_list("count", TASKS))


class Acts:
    """A model that does what a function says."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        result = self.act()
        return await result if asyncio.iscoroutine(result) else result


def stopping(task: Task, seed: int) -> Model:
    return ScriptedModel(["Count!", STOP])


def seeded(task: Task, seed: int) -> Model:
    """Says and does what its seed tells, with tokens and usage such as a real one has."""
    chance = random.Random(seed)

    def act() -> Reply:
        if chance.random() < 0.5:
            return call("add", number=chance.randrange(10))
        ids = tuple(chance.randrange(100) for _ in range(3))
        tokens = Tokens(start=True, prompt=ids, reply=ids, logprobs=(-0.5, -0.25, -0.125))
        return Reply(f"{chance.random()}", tokens=tokens, usage=Usage(prompt=3, completion=3), reasoning="hm")

    return Acts(act)


def one(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    return Reward(value=1.0)


async def collect(
    agent: Any, user: Any = stopping, tasks: Sequence[Task] = TASKS, **more: Any
) -> list[Group]:
    more.setdefault("grade", one)
    return [group async for group in rollout(DOMAIN, tasks, agent, user, RolloutSettings(**more))]


async def test_no_more_conversations_than_allowed_are_held_at_once() -> None:
    present = peak = 0

    async def wait() -> Reply:
        nonlocal present, peak
        present += 1
        peak = max(peak, present)
        await asyncio.sleep(0.002)
        present -= 1
        return Reply("Yes.")

    groups = await collect(lambda task, seed: Acts(wait), group_size=4, concurrency=3)
    assert peak == 3
    assert [len(group.trajectories) for group in groups] == [4] * 6


async def test_groups_come_out_as_they_finish() -> None:
    gate = asyncio.Event()

    async def wait() -> Reply:
        await gate.wait()
        return Reply("Late.")

    def agent(task: Task, seed: int) -> Model:
        return Acts(wait) if task.id == "t0" else ScriptedModel(["Quick."])

    seen: list[str] = []
    async for group in rollout(DOMAIN, TASKS, agent, stopping, RolloutSettings(group_size=2, concurrency=12)):
        seen.append(group.task.id)
        if len(seen) == 5:
            gate.set()
    assert seen[-1] == "t0"
    assert sorted(seen) == [task.id for task in TASKS]


async def test_the_source_of_tasks_may_have_no_end() -> None:
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield Task(id=f"e{asked}", domain="count", instructions="")

    async with aclosing(
        rollout(DOMAIN, endless(), seeded_text, stopping, RolloutSettings(concurrency=4))
    ) as groups:
        got = [await anext(groups) for _ in range(20)]
    assert len({group.task.id for group in got}) == 20
    assert asked <= 40


def seeded_text(task: Task, seed: int) -> Model:
    return ScriptedModel([str(seed)])


async def test_closing_early_cancels_what_is_under_way() -> None:
    cancelled: list[str] = []

    async def wait() -> Reply:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("yes")
            raise
        return Reply("Never.")

    def agent(task: Task, seed: int) -> Model:
        return ScriptedModel(["Quick."]) if task.id == "t0" else Acts(wait)

    async with aclosing(rollout(DOMAIN, TASKS, agent, stopping)) as groups:
        assert (await anext(groups)).task.id == "t0"
    assert len(cancelled) == 5


def fails(error: BaseException) -> Any:
    def act() -> Reply:
        raise error

    return lambda task, seed: Acts(act)


def says(reply: Reply) -> Any:
    return lambda task, seed: ScriptedModel([reply])


def refuse_to_grade(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    raise GradeError("no verdict")


async def judge_for_ever(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    await asyncio.sleep(60)
    return Reward(value=1.0)


async def cancel_the_audit(trajectory: Trajectory) -> Sequence[Finding]:
    assert trajectory.value == 1.0
    raise asyncio.CancelledError


def cannot_be_made(task: Task, seed: int) -> Model:
    raise ModelError("no such model")


def hang() -> Any:
    return asyncio.sleep(60)


BROKEN = Task(id="broken", domain="count", instructions="", setup=Setup(data={"nothing": 1}))


@pytest.mark.parametrize(
    ("what", "blame", "text"),
    [
        ({"agent": fails(RuntimeError("bad words"))}, "agent", "RuntimeError: bad words"),
        ({"user": fails(RuntimeError("bad mood"))}, "user", "RuntimeError: bad mood"),
        ({"agent": fails(ModelError("down", "infrastructure"))}, "infrastructure", "ModelError: down"),
        ({"agent": fails(ModelError("no words"))}, "agent", "ModelError: no words"),
        ({"agent": fails(ConnectionResetError("gone"))}, "infrastructure", "ConnectionResetError: gone"),
        ({"agent": fails(EngineError("out of memory"))}, "infrastructure", "EngineError: out of memory"),
        ({"agent": fails(TimeoutError("slow model"))}, "agent", "TimeoutError: slow model"),
        ({"agent": fails(asyncio.CancelledError())}, "infrastructure", "was cancelled"),
        ({"agent": says(call("add", number=13))}, "tool", "RuntimeError: unlucky"),
        ({"agent": says(call("cheat"))}, "tool", "DomainError: tool 'cheat' changed the database"),
        ({"grade": refuse_to_grade}, "judge", "GradeError: no verdict"),
        ({"grade": judge_for_ever, "limits": Limits(seconds=0.05)}, "judge", "took longer than 0.05 s"),
        ({"audit": cancel_the_audit}, "infrastructure", "was cancelled"),
        ({"agent": cannot_be_made}, "agent", "no such model"),
        (
            {"user": lambda task, seed: Acts(hang), "limits": Limits(seconds=0.05)},
            "user",
            "longer than 0.05 s",
        ),
        ({"tasks": [BROKEN]}, "tool", "Tally has no 'nothing'"),
    ],
)
async def test_a_failure_is_labelled_held_anew_and_never_scored(
    what: dict[str, Any], blame: str, text: str
) -> None:
    given: dict[str, Any] = {"agent": seeded_text, "tasks": TASKS[:1], "redraws": 2, **what}
    [group] = await collect(**given)
    assert group.trajectories == ()
    assert len(group.failed) == 3
    for draw, trajectory in enumerate(group.failed):
        assert trajectory.end == "error"
        assert trajectory.reward is None
        assert trajectory.blame == blame
        assert text in (trajectory.error or "")
        assert trajectory.id == f"{group.task.id}/0" + (f".{draw}" if draw else "")
    assert len({trajectory.seed for trajectory in group.failed}) == 3
    with pytest.raises(ValueError, match="has no reward"):
        _ = group.failed[0].value


@pytest.mark.parametrize("fault", [RuntimeError("stuck"), asyncio.CancelledError()])
async def test_an_environment_that_cannot_be_closed_spoils_nothing(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def close(self: Environment) -> None:
        raise fault

    monkeypatch.setattr(Environment, "close", close)
    groups = await collect(seeded_text)
    assert [[item.value for item in group.trajectories] for group in groups] == [[1.0]] * 6
    assert sum("t3/0: " in line and "clos" in line for line in caplog.messages) == 1


async def test_the_collector_leaves_alone_what_was_there_only_while_conversations_go_on() -> None:
    class Loaded:
        itself: Any

    model = Loaded()
    model.itself = model  # only the collector can take it away
    gone = weakref.ref(model)
    usual = gc.get_threshold()
    frozen: list[int] = []
    rare: list[int] = []

    def look(task: Task, seed: int) -> Model:
        frozen.append(gc.get_freeze_count())
        rare.append(gc.get_threshold()[2])
        return seeded_text(task, seed)

    first = rollout(DOMAIN, TASKS, look, stopping, RolloutSettings(grade=one))
    async with aclosing(first):
        await anext(first)
        await collect(look)  # another one begins and ends meanwhile
        assert gc.get_freeze_count() > 0
    assert min(frozen) > 1000
    assert min(rare) > usual[2]
    assert gc.get_threshold() == usual
    del model
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() == 0


async def test_a_wrong_set_up_is_told_at_once() -> None:
    def misconfigured(task: Task, seed: int) -> Model:
        raise ConfigError("choose another user")

    with pytest.raises(ConfigError, match="choose another user"):
        await collect(misconfigured, tasks=TASKS[:2])


async def test_siblings_of_one_that_cannot_go_on_stop_with_it() -> None:
    told: list[str] = []
    gate = asyncio.Event()

    async def wait() -> Reply:
        await gate.wait()
        return Reply("Late.")

    def agent(task: Task, seed: int) -> Model:
        if not begun:
            begun.append(seed)
            return fails(BudgetError("spent"))(task, seed)
        return Acts(wait)

    begun: list[int] = []
    with pytest.raises(BudgetError, match="spent"):
        await collect(agent, tasks=TASKS[:1], group_size=3, each=lambda item: told.append(item.id))
    gate.set()
    await asyncio.sleep(0.05)
    assert told == []


@pytest.mark.parametrize("place", ["entering", "leaving"])
async def test_a_cut_holds_for_a_conversation_that_stops_or_starts_its_clock(place: str) -> None:
    deadline, going_on = Deadline(), asyncio.Event()

    async def wait() -> Reply:
        if place == "entering":
            await going_on.wait()
        with off_the_clock():
            await (going_on.wait() if place == "leaving" else asyncio.sleep(60))
        await asyncio.sleep(60)
        return Reply("Never said.")

    def agent(task: Task, seed: int) -> Model:
        return Acts(wait)

    held = asyncio.create_task(collect(agent, tasks=TASKS[:1], deadline=deadline))
    await asyncio.sleep(0.02)
    going_on.set()  # the conversation goes on first,
    deadline.cut()  # the clock rings next, in the same turn of the loop
    async with asyncio.timeout(5):
        [group] = await held
    [failed] = group.failed
    assert (failed.end, failed.meta["cut"]) == ("error", True)
    assert failed.error == "cut: still under way when its step no longer waited"


async def test_each_conversation_is_told_when_it_is_over_and_draws_go_on_where_they_were() -> None:
    told: list[str] = []
    await collect(
        fails(OSError("weather")),
        tasks=TASKS[:1],
        redraws=1,
        failures=lambda task, trial: 3,
        each=lambda item: told.append(item.id),
    )
    assert told == ["t0/0.3", "t0/0.4"]


async def test_a_passing_failure_is_made_good_within_the_budget() -> None:
    tries: Counter[str] = Counter()

    def agent(task: Task, seed: int) -> Model:
        tries[task.id] += 1
        if tries[task.id] <= int(task.id[1:]):
            return fails(OSError("weather"))(task, seed)
        return ScriptedModel(["Yes."])

    groups = {group.task.id: group for group in await collect(agent, redraws=2)}
    assert [len(groups[f"t{n}"].failed) for n in range(6)] == [0, 1, 2, 3, 3, 3]
    assert [len(groups[f"t{n}"].trajectories) for n in range(6)] == [1, 1, 1, 0, 0, 0]
    assert groups["t2"].trajectories[0].id == "t2/0.2"
    assert [item.turns[0].message.content for item in groups["t2"].failed] == ["Count!", "Count!"]


async def test_conversations_on_record_are_left_out() -> None:
    groups = await collect(seeded_text, group_size=2, skip=lambda task, trial: task.id != "t3" or trial == 0)
    assert [[item.id for item in group.trajectories] for group in groups] == [["t3/1"]]


async def test_the_same_seed_gives_the_same_bytes() -> None:
    def to_bytes(groups: list[Group]) -> bytes:
        return "\n".join(item.to_json() for group in groups for item in group.trajectories).encode()

    one_run, other_run = [await collect(seeded, group_size=3, seed=5) for _ in range(2)]
    assert to_bytes(one_run) == to_bytes(other_run)
    assert to_bytes(one_run) != to_bytes(await collect(seeded, group_size=3, seed=6))
    assert len({item.seed for group in one_run for item in group.trajectories}) == 18


async def test_a_recording_is_played_back_without_one_call(tmp_path: Path) -> None:
    calls = 0

    def counted(source: Any) -> Any:
        def make(task: Task, seed: int) -> Model:
            nonlocal calls
            model = source(task, seed)

            class Counted:
                async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
                    nonlocal calls
                    calls += 1
                    return await model.reply(turns, tools)

            return Counted()

        return make

    agent = Recorder(counted(seeded), tmp_path / "deep" / "agent.jsonl")
    user = Recorder(counted(stopping), tmp_path / "user.jsonl")
    held = await collect(agent, user, group_size=2, seed=3)
    made, calls = calls, 0
    assert made > 24
    again = await collect(
        Replay(tmp_path / "deep" / "agent.jsonl"), Replay(tmp_path / "user.jsonl"), group_size=2, seed=3
    )
    assert calls == 0
    assert [item.to_json() for group in again for item in group.trajectories] == [
        item.to_json() for group in held for item in group.trajectories
    ]

    def changed(task: Task, seed: int) -> Model:
        return ScriptedModel(["Count, please!", STOP])

    diverged = await collect(Replay(tmp_path / "deep" / "agent.jsonl"), changed, seed=3, redraws=0)
    for group in diverged:
        [failed] = group.failed
        assert failed.blame == "infrastructure"
        assert "the conversation took another course" in (failed.error or "")
    live = await collect(Replay(tmp_path / "deep" / "agent.jsonl", counted(seeded)), changed, seed=3)
    assert all(group.trajectories for group in live)
    assert calls > 0


async def test_a_recording_cut_off_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    recorder = Recorder(says(Reply("a\u2028b")), path)
    await collect(recorder, tasks=TASKS[:1])
    path.write_text(path.read_text() + '{"key": "12')
    [group] = await collect(Replay(path), tasks=TASKS[:1])
    assert group.trajectories[0].turns[1].message.content == "a\u2028b"
    path.write_text('{"key": "12\n' + path.read_text())
    with pytest.raises(ConfigError, match="line 1: not a recorded reply"):
        Replay(path)
    with pytest.raises(ConfigError, match="cannot read the recording"):
        Replay(tmp_path / "none")


def test_errors_of_a_domain_stay_errors_outside_a_rollout() -> None:
    with pytest.raises(DomainError, match="task broken, setup"):
        DOMAIN.open(BROKEN)


@pytest.mark.parametrize("passes_first", [False, True])
async def test_a_deadline_passes_beside_a_conversation_that_has_timed_out(passes_first: bool) -> None:
    deadline = Deadline()

    async def hold() -> None:
        async with asyncio.timeout(0) as clock:
            if not passes_first:
                deadline.add(clock)
            try:
                await asyncio.sleep(60)
            finally:
                deadline.cut()
                deadline.add(clock)

    with pytest.raises(TimeoutError):
        await hold()
