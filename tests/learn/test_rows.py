"""Rows out of conversations: what was sampled is what is trained on, id by id."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trialogue.engine.api import Row
from trialogue.engine.update import check_rows
from trialogue.learn.advantages import to_rows
from trialogue.messages import Message
from trialogue.task import Task
from trialogue.trajectory import Tokens, Trajectory, Turn

TASK = Task(id="t", domain="d", instructions="")


def say(side: str, tokens: Tokens | None = None, role: str | None = None) -> Turn:
    role = role or ("assistant" if side == "agent" else "user")
    return Turn(side=side, message=Message(role=role, content="…"), tokens=tokens)


def to_trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(id="talk", task=TASK, turns=turns, end="user_stop")


FIRST = Tokens(start=True, prompt=(5, 6, 7), reply=(8, 9), logprobs=(-0.1, -0.2))
SECOND = Tokens(prompt=(3,), reply=(4,), logprobs=(-0.3,))
TALK = to_trajectory(
    say("user"), say("agent", FIRST), say("agent", role="tool"), say("agent", SECOND), say("user")
)


def test_a_conversation_is_one_row() -> None:
    [row] = to_rows(TALK, 0.5)
    assert row == Row(
        tokens=[5, 6, 7, 8, 9, 3, 4],
        mask=[0, 0, 0, 1, 1, 0, 1],
        logprobs=[0.0, 0.0, 0.0, -0.1, -0.2, 0.0, -0.3],
        advantages=[0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.5],
        id="talk",
        turns=[0, 0, 0, 0, 0, 1, 1],
    )


def test_a_new_row_begins_where_history_was_rewritten() -> None:
    again = SECOND.model_copy(update={"start": True, "prompt": (5, 6, 9, 3)})
    rows = to_rows(to_trajectory(say("agent", FIRST), say("agent", again)), 1.0)
    assert [row.tokens for row in rows] == [[5, 6, 7, 8, 9], [5, 6, 9, 3, 4]]
    assert [row.mask for row in rows] == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert [row.turns for row in rows] == [[0] * 5, [1] * 5]


def test_each_reply_may_have_an_advantage_of_its_own() -> None:
    [row] = to_rows(TALK, [1.0, -2.0])
    assert row.advantages == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, -2.0]


@pytest.mark.parametrize("advantage", [[], [1.0], [1.0, 2.0, 3.0]])
def test_advantages_must_match_replies(advantage: list[float]) -> None:
    with pytest.raises(ValueError, match=f"talk: {len(advantage)} advantages for 2 replies"):
        to_rows(TALK, advantage)


def test_the_other_side_can_be_learned() -> None:
    talk = to_trajectory(say("user", FIRST), say("agent", SECOND), say("user", SECOND))
    [row] = to_rows(talk, 1.0, side="user")
    assert row.tokens == [5, 6, 7, 8, 9, 3, 4]
    assert to_rows(to_trajectory(say("user", FIRST)), 1.0) == []


ids = st.integers(0, 99)
talks = st.lists(
    st.tuples(st.booleans(), st.lists(ids, min_size=1, max_size=6), st.lists(ids, min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(talks, st.floats(-3, 3))
def test_nothing_is_lost_and_only_sampled_ids_are_trained(
    talk: list[tuple[bool, list[int], list[int]]], advantage: float
) -> None:
    turns: list[Turn] = []
    for number, (start, prompt, reply) in enumerate(talk):
        tokens = Tokens(
            start=start or not number,
            prompt=tuple(prompt),
            reply=tuple(reply),
            logprobs=tuple(-0.01 * token for token in reply),
        )
        turns += [say("user"), say("agent", tokens)]
    rows = to_rows(to_trajectory(*turns), advantage)
    check_rows(rows)
    assert len(rows) == 1 + sum(start for start, _, _ in talk[1:])
    laid = [token for row in rows for token in row.tokens]
    assert laid == [token for _, prompt, reply in talk for token in (*prompt, *reply)]
    marked = [
        (token, logprob, share)
        for row in rows
        for token, mask, logprob, share in zip(
            row.tokens, row.mask, row.logprobs, row.advantages, strict=True
        )
        if mask
    ]
    assert marked == [(token, -0.01 * token, advantage) for _, _, reply in talk for token in reply]
    for row in rows:
        for mask, logprob, share in zip(row.mask, row.logprobs, row.advantages, strict=True):
            assert mask or (logprob, share) == (0.0, 0.0)
