"""Slow conversations hold nobody up: throughput, staleness, and who was left out, on a clock that jumps."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import fields
from math import nan
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from trialogue import Reply
from trialogue.config import StragglerSettings, TrainConfig
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import BudgetError, ConfigError
from trialogue.learn.advantages import build_rows
from trialogue.learn.collect import Collector, Gate, RolloutBatch
from trialogue.learn.measure import measure_flow
from trialogue.learn.train import train
from trialogue.messages import Message
from trialogue.run import list_checkpoints, read_about, read_lines, read_trajectories
from trialogue.score.parties import Parties
from trialogue.task import Side, Task
from trialogue.trajectory import Group, Reward, Tokens, Trajectory, Turn
from trialogue.world.domain import Domain, Environment
from trialogue.world.find import find_domain
from trialogue.world.tools import ToolResult

Result = TypeVar("Result")
STEPS, TASKS, SIZE = 12, 6, 8
REPLY, UPDATE = 1.0, 4.0
"""Seconds of a user's reply and of an update; a straggler's reply takes fifty times as long."""


class Jumping(asyncio.SelectorEventLoop):
    """An event loop that does not wait: when nothing is ready, its clock jumps to what comes next."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0
        chooser: Any = self._selector  # type: ignore[attr-defined]
        select = chooser.select

        def jump(timeout: float | None = None) -> Any:
            found = select(0)
            if not found and timeout:
                self.now += timeout
            return found

        chooser.select = jump

    def time(self) -> float:
        return self.now


def play(work: Coroutine[Any, Any, Result]) -> tuple[Result, float]:
    """Run to the end; gives the seconds it would have taken."""
    loop = Jumping()
    try:
        return loop.run_until_complete(work), loop.now
    finally:
        loop.close()


class Slow:
    """A user who thinks before each reply."""

    def __init__(self, model: Any, seconds: float) -> None:
        self.model, self.seconds = model, seconds

    async def reply(self, turns: Any, tools: Any) -> Reply:
        await asyncio.sleep(self.seconds)
        return await self.model.reply(turns, tools)


def make_user(domain: Any, share: float, started: Counter[str]) -> Any:
    def user(task: Task, seed: int) -> Slow:
        started[task.family] += 1
        drawn = random.Random(seed)
        slow = drawn.random() < share
        return Slow(domain.user(task, seed), REPLY * drawn.uniform(0.5, 1.5) * (50 if slow else 1))

    return user


class SlowTools(Domain):
    """A domain whose tools are answered from outside, now and then very late."""

    draws: ClassVar[random.Random]
    share: ClassVar[float]
    due: ClassVar[float]

    def open(self, task: Task) -> SlowWorld:
        return SlowWorld(self, super().open(task).prepared)


class SlowWorld(Environment):
    __slots__ = ()

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> Any:
        return self._answer_late(name, arguments, side)

    async def _answer_late(self, name: str, arguments: dict[str, Any] | str, side: Side) -> ToolResult:
        SlowTools.due += SlowTools.share
        slow = SlowTools.due >= 1
        SlowTools.due -= slow
        await asyncio.sleep(REPLY * SlowTools.draws.uniform(0.5, 1.5) * (50 if slow else 1))
        return super().call(name, arguments, side)


def slow_tools(domain: Domain, share: float) -> Domain:
    SlowTools.draws, SlowTools.share, SlowTools.due = random.Random(0), share, 0.0
    return SlowTools(**{item.name: getattr(domain, item.name) for item in fields(domain) if item.init})


async def run_steps(
    wall: str, policy: str, share: float, slow: str = "user", **settings: Any
) -> tuple[list[list[Group]], Counter[str], Collector]:
    """Some steps of held conversations and an update each, as `train` makes them, without weights."""
    domain = find_domain(wall)
    if slow == "tool":
        domain, share = slow_tools(domain, share), 0.0
    config = TrainConfig.model_validate(
        {
            "domain": wall,
            "training": {"group_size": SIZE, "tasks_per_step": TASKS, "steps": STEPS},
            "rollout": {"redraws": 0},
            "stragglers": {"policy": policy, **settings},
        }
    )
    started: Counter[str] = Counter()
    parties = Parties(make_user(domain, share, started))
    collector = Collector(config, domain, domain.oracle, parties)  # type: ignore[arg-type]
    taken: list[list[Group]] = []
    for step in range(STEPS):
        taken.append(await collector.next_groups(step))
        await asyncio.sleep(UPDATE)
    await collector.close()
    return taken, started, collector


def count(taken: list[list[Group]]) -> int:
    return sum(len(group.trajectories) for groups in taken for group in groups)


@pytest.mark.parametrize("slow", ["user", "tool"])
@pytest.mark.parametrize("policy", ["cut", "async"])
def test_throughput_with_stragglers(wall: str, policy: str, slow: str) -> None:
    (smooth, _, _), alone = play(run_steps(wall, policy, 0.0, slow))
    (rough, _, _), together = play(run_steps(wall, policy, 0.05, slow))
    (_, _, _), waiting = play(run_steps(wall, "cut", 0.05, slow, quorum=1.0))
    blamed = Counter(item.blame for groups in rough for group in groups for item in group.failed)
    assert blamed.most_common(1)[0][0] == slow
    share = (count(rough) / together) / (count(smooth) / alone)
    times = f"waiting takes {waiting / alone:.1f} times as long"
    print(f"{policy}, slow {slow}: {share:.1%} of the throughput without; {times}")
    assert count(smooth) >= 0.95 * STEPS * TASKS * SIZE
    assert share >= 0.9
    assert waiting > 5 * alone  # what it is all about


def test_everything_begun_is_learned_from_or_told(wall: str) -> None:
    (taken, started, collector), _ = play(run_steps(wall, "async", 0.05))
    groups = [group for step in taken for group in step]
    ids = [item.id for group in groups for item in (*group.trajectories, *group.failed)]
    assert len(ids) == len(set(ids)) == STEPS * TASKS * SIZE == sum(started.values())
    assert collector.batches == []
    figures = [measure_flow(find_domain(wall).tasks("train"), step, [], SIZE, 0) for step in taken]
    for family in ("inside", "outside"):
        graded = sum(line["graded"].get(family, 0) for line in figures)
        cut = sum(line["cut"].get(family, 0) for line in figures)
        assert sum(line["started"][family] for line in figures) == started[family] == graded + cut
        assert 0.02 < cut / started[family] < 0.09  # the slow ones, of whichever family
    assert all(item.blame == "user" for group in groups for item in group.failed)
    assert all((item.error or "").startswith("cut: ") for group in groups for item in group.failed)


def test_only_what_rows_are_made_of_counts_as_trained(wall: str) -> None:
    inside, outside = find_domain(wall).tasks("train")[:2]
    tokens = Tokens(start=True, prompt=(1, 2), reply=(3,), logprobs=(-1.0,))
    turn = Turn(side="agent", message=Message(role="assistant", content="Done."), tokens=tokens)

    def hold(task: Task, values: Sequence[float], logprob: float = -1.0) -> Group:
        said = turn.model_copy(update={"tokens": tokens.model_copy(update={"logprobs": (logprob,)})})
        talks = [
            Trajectory(
                id=f"{task.id}/{logprob}/{number}",
                task=task,
                turns=(said if number else turn,),
                end="user_stop",
                reward=Reward(value=value),
            )
            for number, value in enumerate(values)
        ]
        return Group(task=task, trajectories=tuple(talks))

    groups = [hold(inside, (1, 0)), hold(outside, (1, 1)), hold(outside, (1, 0), nan)]
    found = measure_flow([inside, outside, outside], groups, build_rows(groups), 2, 0)
    assert found["started"] == found["graded"] == {"inside": 2, "outside": 4}
    assert found["trained"] == {"inside": 2, "outside": 1}  # one group has no signal, one of the other a NaN


def test_nothing_is_older_than_allowed(wall: str) -> None:
    for staleness in (1, 3):
        (taken, _, _), _ = play(run_steps(wall, "async", 0.05, staleness=staleness))
        ages = {
            step - (int(item.id.split("/")[0]) - 1)
            for step, groups in enumerate(taken)
            for group in groups
            for item in group.trajectories
        }
        assert (min(ages), max(ages)) == (0, staleness)
    (taken, _, _), _ = play(run_steps(wall, "cut", 0.05))
    assert all(
        int(item.id.split("/")[0]) == step + 1
        for step, groups in enumerate(taken)
        for group in groups
        for item in group.trajectories
    )


def test_what_was_carried_is_kept_for_resuming(wall: str) -> None:
    async def work() -> tuple[list[dict[str, Any]], list[Group]]:
        domain = find_domain(wall)
        config = TrainConfig.model_validate(
            {
                "domain": wall,
                "training": {"group_size": SIZE, "tasks_per_step": TASKS},
                "stragglers": {"policy": "async"},
                "tasks": {"split": "train", "levels": (1, 2)},
            }
        )
        parties = Parties(make_user(domain, 0.05, Counter()))
        collector = Collector(config, domain, domain.oracle, parties)  # type: ignore[arg-type]
        groups = await collector.next_groups(0)
        data = collector.to_data(1)
        await collector.close()
        return data["batches"], groups

    (data, groups), _ = play(work())
    [kept] = json.loads(json.dumps(data))
    assert (kept["step"], kept["levels"]) == (0, [1, 2])
    assert kept["tasks"]
    assert {*kept["tasks"], *(group.task.id for group in groups)} == {
        f"train-{number}" for number in range(6)
    }
    assert len(kept["tasks"]) + len(groups) == 6


def test_nothing_is_taken_when_a_later_batch_cannot_go_on(wall: str) -> None:
    tasks = list(find_domain(wall).tasks("train"))

    async def hold(batch: RolloutBatch) -> AsyncGenerator[Group]:
        for number, task in enumerate(batch.tasks):
            await asyncio.sleep(1 if number < 3 else 10)
            if batch.step == 1 and number == 5:
                raise BudgetError("the budget is spent")
            yield Group(task=task, trajectories=())

    async def work() -> tuple[list[Group], list[dict[str, Any]]]:
        stragglers = {"policy": "async", "quorum": 0.5, "patience": 1.0, "staleness": 3}
        training = {"group_size": SIZE, "tasks_per_step": TASKS}
        config = TrainConfig.model_validate({"domain": wall, "training": training, "stragglers": stragglers})
        collector = Collector(config, find_domain(wall), None, Parties(None))  # type: ignore[arg-type]
        collector.hold = hold  # type: ignore[method-assign]
        collector.begin(0, tasks, ())
        groups = await collector._take(0, is_last=False)
        collector.begin(1, tasks, ())
        await asyncio.sleep(100)  # the rest of the first wave is over, and the budget is spent in the second
        with pytest.raises(BudgetError):
            await collector._take(1, is_last=False)
        data = collector.to_data(1)["batches"]
        await collector.close()
        return groups, data

    (groups, [kept]), _ = play(work())
    assert [group.task for group in groups] == tasks[:3]
    assert kept["tasks"] == [task.id for task in tasks[3:]]


async def test_a_gate_lets_replies_end_and_holds_others_back() -> None:
    events: list[str] = []

    class Sampler:
        async def sample(self, prompts: Any, params: Any, *, session: str | None = None) -> Any:
            events.append(f"begin {session}")
            await asyncio.sleep(0.01)
            events.append(f"end {session}")
            return []

        async def end_session(self, session: str) -> None: ...

    gate = Gate(Sampler())
    first = asyncio.create_task(gate.sample([], None, session="a"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    async with gate.closed():
        second = asyncio.create_task(gate.sample([], None, session="b"))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        events.append("update")
    await asyncio.gather(first, second)
    assert events == ["begin a", "end a", "update", "begin b", "end b"]


def test_redrawing_needs_whole_steps(wall: str) -> None:
    config = TrainConfig.model_validate(
        {"stragglers": {"policy": "cut"}, "training": {"redraw_no_signal": 1}}
    )
    with pytest.raises(ConfigError, match=r"redraw_no_signal needs whole steps"):
        Collector(config, find_domain(wall), None, Parties(None))  # type: ignore[arg-type]
    assert StragglerSettings().policy == "wait"


SLOW_USER = """
import asyncio


class Slow:
    def __init__(self, model):
        self.model, self.said = model, 0

    async def reply(self, turns, tools):
        self.said += 1
        if self.said == 2:
            await asyncio.sleep(0.7)
        return await self.model.reply(turns, tools)


def user(task, seed):
    model = ScriptedModel(["Paint it.", "Paint it again.", "###STOP###"])
    return Slow(model) if seed % 5 == 0 else model
"""


def make_slow(wall: Path, file: Path) -> Path:
    text = wall.read_text(encoding="utf-8")
    file.write_text(text.replace("TASKS = [", SLOW_USER + "\n\nTASKS = [", 1), encoding="utf-8")
    return file


async def test_nobody_samples_while_a_checkpoint_is_saved(
    train_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine never has to save while it samples. The torch engine could, so it is made strict here. One
    conversation comes back to its agent while the weights change, and samples after the change."""
    enter, sample = Gate.sample, TorchEngine.sample
    publish, save_state = TorchEngine.publish, TorchEngine.save_state
    changing = asyncio.Event()
    calls = busy = 0

    async def come_back(self: Gate, *given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            await changing.wait()
        return await enter(self, *given, **more)

    async def sample_slowly(self: TorchEngine, *given: Any, **more: Any) -> Any:
        nonlocal busy
        busy += 1
        try:
            await asyncio.sleep(0.2)
            return await sample(self, *given, **more)
        finally:
            busy -= 1

    async def publish_slowly(self: TorchEngine) -> int:
        changing.set()
        await asyncio.sleep(0.01)
        return await publish(self)

    async def save_strictly(self: TorchEngine, path: Path) -> None:
        assert not busy
        await save_state(self, path)
        assert not busy

    monkeypatch.setattr(Gate, "sample", come_back)
    monkeypatch.setattr(TorchEngine, "sample", sample_slowly)
    monkeypatch.setattr(TorchEngine, "publish", publish_slowly)
    monkeypatch.setattr(TorchEngine, "save_state", save_strictly)
    run = await train(
        train_config(
            training__steps=2,
            training__checkpoint_every=1,
            stragglers__policy="async",
            stragglers__quorum=0.5,
            stragglers__patience=1.0,
        )
    )
    [wave] = json.loads((list_checkpoints(run)[0] / "trainer.json").read_text())["batches"]
    assert wave["tasks"]  # some were under way
    assert read_about(run)["state"] == "finished"


async def test_partial_conversations_go_on_with_newer_weights(
    train_config: Callable[..., TrainConfig], trained: Path, tmp_path: Path, wall: str
) -> None:
    file = make_slow(Path(wall), tmp_path / "slow.py")
    config = train_config(
        domain=str(file),
        learner__model=str(trained),
        training__steps=6,
        training__tasks_per_step=6,
        training__checkpoint_every=1,
        training__eval_every=3,
        stragglers__policy="async",
        stragglers__quorum=0.6,
        stragglers__patience=1.0,
    )
    run = await train(config)
    lines = [line for _, line in read_lines(run / "metrics.jsonl") if "kind" not in line]
    assert max(line["staleness_max"] for line in lines) in (1, 2)
    begun = Counter[str]()
    ended = Counter[str]()
    for line in lines:
        begun.update(line["started"])
        ended.update(line["graded"])
        ended.update(line["cut"])
    assert begun == ended == Counter({"inside": 72, "outside": 72})
    held = [item for item in read_trajectories(run) if not item.id.startswith("eval-")]
    assert len({item.id for item in held}) == len(held) == 144
    learned = Counter(item.task.family for item in held if "advantage" in item.meta)
    assert sum((Counter(line["trained"]) for line in lines), Counter[str]()) == learned
    versions = [{turn.tokens.version for turn in item.turns if turn.tokens is not None} for item in held]
    assert any(len(found) > 1 for found in versions)  # one conversation, two versions of the weights
    assert any(
        json.loads((folder / "trainer.json").read_text())["batches"] for folder in list_checkpoints(run)[:1]
    )
