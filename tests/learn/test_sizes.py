"""How much a course learns in the minutes that are given: numbers worked by hand."""

import pytest

from trialogue.learn.sizes import (
    BATCH,
    EPOCHS,
    ColdStart,
    Pace,
    Reinforcement,
    Sizes,
    plan_cold_start,
    plan_lengths,
    plan_reinforcement,
)

PACE = Pace(held=0.01, learned=0.03, longest=900, reply=50)


def test_the_cold_start_takes_its_share_of_the_minutes() -> None:
    cold = plan_cold_start(10, PACE)
    assert cold == ColdStart(examples=3600, epochs=EPOCHS, test_tasks=200, dev_tasks=100)  # 360 s / 0.1 s
    assert cold.steps == round(EPOCHS * 3600 * 0.95 / BATCH)
    assert plan_cold_start(1, PACE) == ColdStart(360, EPOCHS, 40, 24)
    assert plan_cold_start(60, PACE).examples == 21600
    assert plan_cold_start(60, PACE).test_tasks == 200


def test_a_model_too_slow_for_the_minutes_still_sees_two_batches_once() -> None:
    slow = Pace(held=0.01, learned=30.0)
    assert plan_cold_start(10, slow) == ColdStart(2 * BATCH, 1.0, 200, 100)


def test_recorded_conversations_are_gone_through_as_often_as_there_is_time() -> None:
    assert plan_cold_start(10, PACE, recorded=4000).epochs == 3.0
    assert plan_cold_start(10, PACE, recorded=40).epochs == 2 * EPOCHS
    assert plan_cold_start(1, PACE, recorded=10_000).epochs == pytest.approx(0.12)


def test_reinforcement_takes_the_rest_and_leaves_room_for_the_last_test() -> None:
    cold = plan_cold_start(10, PACE)
    # 240 s, less 200 and 6 × 100 conversations of 0.05 s; a step: 128 × (0.05 + 0.03) s
    assert plan_reinforcement(240, PACE, 0.05, cold) == Reinforcement(steps=19, eval_every=4)
    assert plan_reinforcement(60, PACE, 0.05, cold) == Reinforcement(0, 0)
    assert plan_reinforcement(-5, PACE, 0.05, cold).steps == 0


def test_replies_and_conversations_get_half_as_much_again_as_the_teacher_needs() -> None:
    assert plan_lengths(PACE) == (128, 2048)
    assert plan_lengths(Pace(1, 1, longest=400, reply=40)) == (64, 1024)


def test_sizes_are_read_as_they_were_written() -> None:
    from dataclasses import asdict

    whole = Sizes(plan_cold_start(10, PACE), PACE, 64, 1024, True, Reinforcement(12, 2))
    for sizes in (whole, Sizes(whole.cold)):
        assert Sizes.read(asdict(sizes)) == sizes
