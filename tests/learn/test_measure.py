"""What a step tells about itself, on conversations small enough to count by hand."""

from __future__ import annotations

import pytest

from trialogue.learn.measure import by_family, measure, sampled, tokens_of, unique_ngrams
from trialogue.messages import Message, ToolCall
from trialogue.task import Task
from trialogue.trajectory import Group, Reward, Tokens, Trajectory, Turn

INSIDE = Task(id="in", domain="d", instructions="", meta={"family": "inside"})
OUTSIDE = Task(id="out", domain="d", instructions="", meta={"family": "outside"})


def said(*reply: int, tool: str | None = None) -> Turn:
    calls = () if tool is None else (ToolCall(id="c", name=tool, arguments={}),)
    tokens = Tokens(prompt=(90, 91), reply=reply, logprobs=(-1.0,) * len(reply))
    return Turn(side="agent", message=Message(role="assistant", tool_calls=calls), tokens=tokens)


def heard(failed: bool | None = None) -> Turn:
    if failed is None:
        tokens = Tokens(prompt=(80,), reply=(81, 82), logprobs=(0.0, 0.0))  # a user that is a local model
        return Turn(side="user", message=Message(role="user", content="Hm"), tokens=tokens)
    return Turn(side="agent", message=Message(role="tool", content="wet", tool_call_id="c"), failed=failed)


def hold(task: Task, value: float | None, *turns: Turn, end: str = "user_stop") -> Trajectory:
    reward = None if value is None else Reward(value=value)
    blame = "user" if value is None else None
    return Trajectory(
        id="t", task=task, turns=turns, end="error" if value is None else end, reward=reward, blame=blame
    )


GROUPS = [
    Group(
        task=INSIDE,
        trajectories=(
            hold(INSIDE, 1.0, heard(), said(1, 2, 3, 4, 5, tool="paint"), heard(False), said(6)),
            hold(INSIDE, 0.0, heard(), said(1, 2, 3, 4, tool="scrape"), heard(True), end="max_turns"),
        ),
        failed=(hold(INSIDE, None, heard(), said(7, 7, 7, 7, 7, 7)),),
    ),
    Group(
        task=OUTSIDE,
        trajectories=(
            hold(OUTSIDE, 0.0, heard(), said(1), end="too_long"),
            hold(OUTSIDE, 0.0, heard(), said(1)),
        ),
    ),
]


def test_the_figures_of_a_step() -> None:
    found = measure(GROUPS)
    assert found["conversations"] == 4
    assert (found["failed"], found["blame"]) == (1, {"user": 1})
    assert found["ends"] == {"max_turns": 1, "too_long": 1, "user_stop": 2}
    assert found["tools"] == {"paint": 1, "scrape": 1}
    assert (found["reward"], found["success"]) == (0.25, 0.25)
    assert found["reward_spread"] == 0.25
    assert (found["all_right"], found["all_wrong"], found["no_signal"]) == (0.0, 0.5, 0.5)
    assert (found["turns"], found["turns_max"]) == ((4 + 3 + 2 + 2) / 4, 4)
    assert (found["tool_calls"], found["tool_errors"]) == (0.5, 0.25)
    assert found["reply_tokens"] == (5 + 1 + 4 + 1 + 1) / 5
    assert found["response_tokens"] == (6 + 4 + 1 + 1) / 4
    assert found["cut_off"] == 0.25
    # group 1: 1234 2345 3456 and 1234 again; group 2 has none
    assert found["unique_4grams"] == (3 / 4 + 0) / 2
    assert found["unique_replies"] == (1 + 1 / 2) / 2
    assert found["families"] == {"inside": 0.5, "outside": 0.0}


def test_nothing_held_has_no_mean() -> None:
    found = measure([Group(task=INSIDE, trajectories=(), failed=(hold(INSIDE, None),))])
    assert (found["conversations"], found["failed"]) == (0, 1)
    assert "reward" not in found
    assert measure([])["conversations"] == 0


def test_an_empty_group_does_not_count_among_the_others() -> None:
    empty = Group(task=OUTSIDE, trajectories=(), failed=(hold(OUTSIDE, None),))
    assert measure([GROUPS[0], empty])["reward"] == measure([GROUPS[0]])["reward"]
    assert measure([GROUPS[0], empty])["all_wrong"] == 0.0


def test_only_the_agents_own_tokens_count() -> None:
    first = GROUPS[0].trajectories[0]
    assert sampled(first) == [(1, 2, 3, 4, 5), (6,)]
    assert tokens_of(first) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("sequences", "share"),
    [
        ([], 0.0),
        ([[1, 2, 3]], 0.0),
        ([[1, 2, 3, 4]], 1.0),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.5),
        ([[7] * 8], 0.2),
    ],
)
def test_unique_ngrams_by_hand(sequences: list[list[int]], share: float) -> None:
    assert unique_ngrams(sequences) == pytest.approx(share)


def test_conversations_without_a_family_are_left_out() -> None:
    plain = Task(id="p", domain="d", instructions="")
    assert by_family([hold(plain, 1.0), hold(INSIDE, 0.5)]) == {"inside": 0.5}
