"""Advantages: numbers worked out by hand, which one a run takes, and functions from outside the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trialogue.config import TrainConfig
from trialogue.errors import ConfigError
from trialogue.learn.advantages import (
    ADVANTAGES,
    build_rows,
    center,
    dr_grpo,
    find_advantage,
    grpo,
    leave_one_out,
    normalize,
    rloo,
)
from trialogue.learn.checks import Checks
from trialogue.messages import Message
from trialogue.task import Task
from trialogue.trajectory import Group, Reward, Tokens, Trajectory, Turn

Compute = Callable[[Sequence[float]], list[float]]
EVERY: tuple[Compute, ...] = (normalize, center, leave_one_out)
TASK = Task(id="t", domain="d", instructions="")


def test_advantages_of_grpo_are_divided_by_the_unbiased_spread() -> None:
    # mean 1/2, variance (4 · 1/4) / 3 = 1/3
    share = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert normalize([1.0, 0.0, 0.0, 1.0]) == pytest.approx([share, -share, -share, share])


def test_advantages_of_dr_grpo_are_not_divided() -> None:
    assert center([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_advantages_of_rloo_are_against_the_others() -> None:
    # 1 - mean(0, 0, 0.5) and so on
    assert leave_one_out([1.0, 0.0, 0.0, 0.5]) == pytest.approx([5 / 6, -0.5, -0.5, 1 / 6])


@pytest.mark.parametrize("compute", EVERY)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.0, 0.0], [0.3, 0.3, 0.3], [0.5, 0.5 + 1e-9]])
def test_groups_without_spread_have_no_signal(compute: Compute, rewards: list[float]) -> None:
    assert compute(rewards) == [0.0] * len(rewards)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=12), st.sampled_from(EVERY))
def test_advantages_sum_to_nothing_and_follow_the_rewards(rewards: list[float], compute: Compute) -> None:
    shares = compute(rewards)
    assert sum(shares) == pytest.approx(0, abs=1e-9)
    pairs = sorted(zip(rewards, shares, strict=True))
    assert all(first[1] <= second[1] + 1e-12 for first, second in pairwise(pairs))


def make_group(*rewards: float, replies: int = 2) -> Group:
    """Conversations of two replies, `7 8 | 9` and `3 | 4`."""
    said = (
        Tokens(start=True, prompt=(7, 8), reply=(9,), logprobs=(-0.5,)),
        Tokens(prompt=(3,), reply=(4,), logprobs=(-0.25,)),
    )
    turns = tuple(
        Turn(side="agent", message=Message(role="assistant", content="…"), tokens=tokens)
        for tokens in said[:replies]
    )
    talks = [
        Trajectory(id=f"t/{number}", task=TASK, turns=turns, end="user_stop", reward=Reward(value=reward))
        for number, reward in enumerate(rewards)
    ]
    return Group(task=TASK, trajectories=tuple(talks))


@pytest.mark.parametrize(
    ("name", "loss", "function"),
    [
        ("", "grpo", grpo),
        ("", "gspo", grpo),
        ("", "mine.py:loss", grpo),
        ("", "rloo", rloo),
        ("", "dr_grpo", dr_grpo),
        ("rloo", "dr_grpo", rloo),
    ],
)
def test_the_loss_chooses_the_advantage_where_none_is_named(name: str, loss: str, function: Any) -> None:
    assert find_advantage(name, loss) is function
    config = TrainConfig.model_validate({"advantage": {"name": name}, "loss": {"name": loss}})
    assert (config.advantage.name, config.loss.name) == (name, loss)
    assert set(ADVANTAGES) == {"grpo", "dr_grpo", "rloo"}


OWN = """
def late(group):
    return [[0.0, item.reward.value] for item in group.trajectories]

def best(group):
    top = max(item.value for item in group.trajectories)
    return [float(item.value == top) for item in group.trajectories]

def short(group):
    return [1.0]

def nothing(group):
    return None

def words(group):
    return ["a"] * len(group.trajectories)

def replies(group):
    return [[1.0]] * len(group.trajectories)

def broken(group):
    return group.no_such_thing

def two(group, other):
    return []

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "mine.py")


def test_a_function_of_ones_own_gives_numbers_per_reply_or_conversation(own: str) -> None:
    checks = Checks()
    rows = build_rows([make_group(1.0, 0.5)], find_advantage(f"{own}:late"), checks)
    assert [row.advantages for row in rows] == [[0, 0, 0.0, 0, 1.0], [0, 0, 0.0, 0, 0.5]]
    rows = build_rows([make_group(1.0, 1.0)], find_advantage(f"{own}:best"), checks)
    assert [row.advantages[-1] for row in rows] == [1.0, 1.0]  # a signal where the rewards do not differ
    assert checks.collect() == []  # only the built-in ones have to sum to zero


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("short", r"short \(mine.py, line 9\) on task t: it returned 1 values for 2 conversations"),
        ("nothing", r"nothing \(mine.py, line 12\) on task t: it returned NoneType, not one number per"),
        ("words", r"words \(mine.py, line 15\) on task t: 'a' of conversation t/0 is no finite number"),
        (
            "replies",
            r"replies \(mine.py, line 18\) on task t: 1 numbers for the 2 replies of conversation t/0",
        ),
        ("broken", r"AttributeError: .*no_such_thing.*mine.py, line 22"),
        ("two", r"two \(mine.py, line 24\): it is called as advantage\(group\), but takes"),
        ("number", r"advantage is of type int.*; it is called as advantage\(group\)"),
        ("lates", r"no advantage .*mine.py:lates.*did you mean.*late"),
    ],
)
def test_a_wrong_function_is_told_in_one_line_with_its_place(own: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        build_rows([make_group(1.0, 0.0)], find_advantage(f"{own}:{name}"))
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_known_is_refused_with_what_is_allowed() -> None:
    from trialogue.config import load_config

    for key in ("advantage.name", "loss.name", "engine.name"):
        with pytest.raises(ConfigError, match=r"must be one of .*module:name or path/to/file.py:name"):
            load_config(TrainConfig, None, [f"{key}=grop"])
