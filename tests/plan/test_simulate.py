"""The simulation of the loop: laws that any such loop keeps, with figures worked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest

from trialogue.assumptions import PlanSettings
from trialogue.config import Limits
from trialogue.plan.lengths import Lengths, Part
from trialogue.plan.simulate import PARTS, Loop, Simulation, Step
from trialogue.plan.timing import Sampling

FREE = Sampling(0.0, 0.0, 0.0, 0.0, 0.0, 10**9)
"""Sampling that takes no time."""


def of(*conversations: tuple[Part, ...]) -> Lengths:
    """These conversations, one after the other."""

    class InTurn(Lengths):
        def draw(self, random: Random) -> Any:
            number = next(numbers)
            return self.recorded[number % len(self.recorded)]

    numbers = iter(range(1 << 30))
    return InTurn(PlanSettings(), Limits(), 100, 0.0, conversations)


def run(lengths: Lengths, **settings: Any) -> list[Step]:
    usual = Loop(4, 10**6, 1, FREE, lambda conversations, tokens, sampled: 0.0, steps=1)
    return Simulation(replace(usual, **settings), lengths).run()


USER = Part("user", 10, 2.0)
REPLY = Part("agent", 50, 0.0)
TOOL = Part("tool", 30, 0.5)


def test_nothing_is_faster_than_the_conversation_that_waits_longest() -> None:
    [step] = run(of((USER, REPLY), (USER, REPLY, USER, REPLY, USER)), conversations=10)
    assert step.collect == pytest.approx(6.0)
    assert step.typical == pytest.approx(4.0)
    assert (step.finished, step.calls, step.completion) == (10, 20, 200)
    assert step.parts["user"] == pytest.approx(6.0)


def test_an_endpoint_with_few_slots_is_a_queue() -> None:
    [step] = run(of((USER, REPLY)), conversations=10, user_at_once=2)
    assert step.collect == pytest.approx(10 * 2.0 / 2)
    assert step.parts["limit"] == pytest.approx(8.0)
    assert step.busiest == 2


def test_requests_a_second_are_kept() -> None:
    [step] = run(of((USER, REPLY)), conversations=20, user_per_second=4.0)
    assert step.collect == pytest.approx(19 / 4 + 2.0)
    assert step.busiest == 4


def test_decode_steps_are_shared_and_take_longer_with_more_conversations() -> None:
    slow = Sampling(0.01, 0.0, 0.004, 0.0, 0.0, 10**9)
    two, ten = (run(of((REPLY,)), conversations=n, sampling=slow)[0].collect for n in (2, 10))
    assert two == pytest.approx(50 * 0.01)  # reading the weights
    assert ten == pytest.approx(50 * 10 * 0.004)  # computing ten tokens
    half = run(of((REPLY,)), conversations=10, sampling=slow, replicas=2)[0].collect
    assert half == pytest.approx(50 * 5 * 0.004)


def test_prompts_are_read_once_and_the_shared_beginning_once_for_each_sampler() -> None:
    reads = Sampling(0.0, 0.0, 0.0, 0.001, 0.0, 10**9)
    [step] = run(of((Part("user", 10, 0.0), REPLY, TOOL, REPLY)), conversations=1, sampling=reads)
    assert step.collect == pytest.approx(0.001 * (100 + 10 + 30) + 0.5)


def test_a_full_cache_makes_conversations_wait() -> None:
    small = Sampling(0.01, 0.0, 0.0, 0.0, 0.0, 100 + 2 * 60)
    [step] = run(of((Part("user", 10, 0.0), REPLY)), conversations=6, sampling=small)
    assert step.collect == pytest.approx(3 * 50 * 0.01)  # two at a time
    assert step.parts["cache"] == pytest.approx(1.0)


def test_few_conversations_at_once_make_the_others_queue() -> None:
    [step] = run(of((USER, REPLY)), conversations=6, at_once=2)
    assert step.collect == pytest.approx(6.0)
    assert step.parts["queue"] == pytest.approx(4.0)


def test_a_processor_that_holds_conversations_takes_them_one_by_one() -> None:
    turns = (Part("user", 1, 0.0), REPLY)
    one = run(of(turns), conversations=8, turn_seconds=0.1)[0]
    four = run(of(turns), conversations=8, turn_seconds=0.1, workers=4)[0]
    assert one.collect == pytest.approx(8 * 2 * 0.1)
    assert four.collect == pytest.approx(2 * 2 * 0.1)


def test_cut_stops_waiting_and_async_goes_on_with_the_rest() -> None:
    slow = (Part("user", 10, 50.0), REPLY)
    lengths = [(USER, REPLY), (USER, REPLY), (USER, REPLY), slow]
    [whole] = run(of(*lengths), conversations=8)
    assert whole.collect == pytest.approx(50.0)
    settings = {"policy": "cut", "quorum": 0.75, "patience": 1.5}
    [cut] = run(of(*lengths), conversations=8, **settings)
    assert cut.collect == pytest.approx(2.0 * 1.5)
    assert (cut.finished, cut.cut) == (6, 2)
    update = {"update_seconds": lambda conversations, tokens, sampled: 30.0}
    first, second, third = run(
        of(*lengths), conversations=8, steps=3, **{**settings, **update, "policy": "async", "staleness": 4}
    )
    assert (first.finished, first.cut, first.collect) == (6, 0, pytest.approx(3.0))
    # The slow ones of the first step are over 50 s after its beginning: in the second step.
    assert second.finished == 6 + (2 if second.collect + 33 >= 50 else 0)
    assert third.finished + second.finished >= 14


def test_conversations_that_are_too_old_are_cut() -> None:
    forever = (Part("user", 10, 1000.0), REPLY)
    steps = run(
        of((USER, REPLY), (USER, REPLY), (USER, REPLY), forever),
        conversations=4, steps=3, policy="async", quorum=0.75, patience=1.0, staleness=1,
    )  # fmt: skip
    assert [step.cut for step in steps] == [0, 1, 2]


def test_the_parts_of_a_step_are_its_seconds() -> None:
    lengths = Lengths(PlanSettings(), Limits(), 4500, 2.0)
    slow = Sampling(0.005, 1e-8, 1e-4, 1e-5, 0.003, 200_000)
    [step] = run(lengths, conversations=64, sampling=slow, user_at_once=16, turn_seconds=0.001, at_once=48)
    assert set(step.parts) == set(PARTS)
    assert sum(step.parts.values()) == pytest.approx(step.collect)
    assert all(seconds >= 0 for seconds in step.parts.values())
    assert step.finished == 64


@pytest.mark.parametrize("users", [pytest.param(inf, marks=pytest.mark.load), 64])
def test_some_conversations_stand_for_many(users: float) -> None:
    lengths = Lengths(PlanSettings(), Limits(), 4500, 2.0)
    sampling = Sampling(0.005, 1e-9, 1e-5, 1e-6, 0.003, 10_000_000)
    settings: dict[str, Any] = {"conversations": 4000, "user_at_once": users, "turn_seconds": 0.0005}
    whole, few = (
        run(lengths, sampling=sampling, replicas=4, most=most, **settings)[0] for most in (4000, 500)
    )
    assert few.collect == pytest.approx(whole.collect, rel=0.15)
    assert few.calls == pytest.approx(whole.calls, rel=0.05)
    assert few.prompt == pytest.approx(whole.prompt, rel=0.1)
    assert max(few.parts, key=lambda part: few.parts[part]) == max(
        whole.parts, key=lambda part: whole.parts[part]
    )


def test_equal_seeds_give_equal_plans() -> None:
    lengths = Lengths(PlanSettings(), Limits(), 4500, 2.0)
    first, second = (run(lengths, conversations=50)[0] for _ in range(2))
    assert first == second


def test_invented_conversations_have_the_means_that_are_assumed() -> None:
    settings = PlanSettings(spread=0.3)
    limits = Limits(observations=200)
    random = Random(1)
    drawn = [Lengths(settings, limits, 4500, 2.0).draw(random) for _ in range(2000)]

    def mean(who: str) -> float:
        return sum(part.who == who for parts in drawn for part in parts) / len(drawn)

    assert mean("user") == pytest.approx(settings.user_turns, rel=0.05)
    assert mean("tool") == pytest.approx(settings.tool_calls, rel=0.05)
    tokens = [part.tokens for parts in drawn for part in parts if part.who == "agent"]
    assert sum(tokens) / len(tokens) == pytest.approx(settings.reply_tokens, rel=0.05)
    assert all(parts[0].who == "user" for parts in drawn)


def test_invented_conversations_keep_the_limits() -> None:
    limits = Limits(observations=5, context_tokens=5000, reply_tokens=60)
    random = Random(2)
    for _ in range(200):
        parts = Lengths(PlanSettings(), limits, 4500, 2.0).draw(random)
        assert sum(part.who != "agent" for part in parts) <= 5
        assert sum(part.tokens for part in parts) <= 500 or len(parts) == 1
        assert all(part.tokens <= 60 for part in parts if part.who == "agent")
