"""Conversations that go nowhere: when they end, and who is blamed."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import cache

import pytest

from tests.parts.stuck_users import FAULTS, FaultyUser, LoopingAgent, PatientUser
from trialogue import Message, Task, ToolCall, Trajectory, Turn, find_domain
from trialogue.config import EvalConfig, Speaker, TrainConfig
from trialogue.score.audit import audit
from trialogue.score.metrics import summarize
from trialogue.score.parties import settle_audit
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.talk.model import ModelSource
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.stuck import Stuck, find_stuck
from trialogue.view.terminal import tell_user_faults

SHOP = find_domain("shop")


def say(side: str, text: str) -> Turn:
    return Turn(side=side, message=Message(role="user" if side == "user" else "assistant", content=text))  # pyright: ignore[reportArgumentType]


def act(name: str, number: int = 0) -> list[Turn]:
    """A call of the agent and its result."""
    call = ToolCall(id=f"{name}{number}", name=name, arguments={"number": number})
    return [
        Turn(side="agent", message=Message(role="assistant", tool_calls=(call,))),
        Turn(side="agent", message=Message(role="tool", content="{}", tool_call_id=call.id)),
    ]


def talk(*texts: str | list[Turn]) -> list[Turn]:
    """Turns of both sides, one after the other, the user first; a list is calls of the agent."""
    turns: list[Turn] = []
    side = "user"
    for text in texts:
        if isinstance(text, str):
            turns.append(say(side, text))
            side = "agent" if side == "user" else "user"
        else:
            turns += text
    return turns


def blame(turns: list[Turn]) -> str | None:
    """Who is blamed at the last turn; nobody may be before it."""
    for end in range(1, len(turns)):
        assert find_stuck(turns[:end]) is None, turns[end - 1].message.content
    stuck = find_stuck(turns)
    return stuck.blame if stuck is not None else None


WISH = "I want to cancel my order."


def test_the_same_question_to_the_same_wish_is_the_users_fault() -> None:
    asks = "What is your order number?"
    assert blame(talk(WISH, asks, WISH, asks, WISH, asks, WISH)) == "user"


def test_the_same_question_to_its_answer_is_the_agents_fault() -> None:
    asks, answer = "What is your order number?", "It is W1234."
    assert blame(talk(WISH, asks, answer, asks, answer, asks, answer)) == "agent"
    unknown = "I do not remember that."
    assert blame(talk(WISH, asks, unknown, asks, unknown, asks, unknown)) == "agent"


def test_an_agent_that_says_it_is_done_and_did_nothing_is_to_blame() -> None:
    done = "It is done. Anything else?"
    assert blame(talk(WISH, done, WISH, done, WISH, done, WISH)) == "agent"


def test_a_wish_that_was_granted_and_comes_again_is_the_users_fault() -> None:
    done = "Your order has been cancelled."
    assert blame(talk(WISH, act("cancel"), done, WISH, done, WISH, done, WISH)) == "user"


def test_thanks_without_end_are_the_users_fault() -> None:
    turns = talk(WISH, act("cancel"), "Order W1 has been cancelled. Anything else?", "Thank you so much!")
    turns += [say("agent", "You are welcome. Anything else?"), say("user", "You too, have a nice day!")]
    assert blame([*turns, say("agent", "Bye."), say("user", "Goodbye and thanks again.")]) == "user"


def test_thanks_for_work_are_no_fault() -> None:
    turns = talk(WISH, "One moment, please.", "Thank you.", act("find", 1), "Still looking.", "Thanks!")
    assert (
        blame([*turns, *act("find", 2), say("agent", "Nearly there."), say("user", "Great, thanks.")]) is None
    )


def test_promises_without_deeds_are_the_agents_fault() -> None:
    wait = "One moment, please."
    assert blame(talk(WISH, wait, "Thanks.", wait, "Thank you!", wait, "Okay.")) == "agent"


def test_the_role_of_the_agent_is_the_users_fault() -> None:
    lines = [
        "How can I help you?",
        "Could you please provide your order number?",
        "I can help. May I have your e-mail?",
    ]
    assert blame(talk(lines[0], "I am the shop.", lines[1], "I am the shop, really.", lines[2])) == "user"


def test_the_same_yes_to_new_deeds_is_no_loop() -> None:
    turns = talk("Cancel all my orders.")
    for number in range(5):
        turns += [say("agent", "Shall I go on?"), say("user", "Yes, please."), *act("cancel", number)]
    assert blame(turns) is None
    asks = ["Is it order 1?", "Is it the red one?", "Are you sure?", "Shall I cancel it?"]
    assert blame(talk(WISH, *[text for each in asks for text in (each, "Yes, please.")])) is None


def test_a_user_with_patience_is_left_to_itself() -> None:
    turns = [turn.model_copy(update={"has_patience": True}) for turn in talk(*["Again."] * 20)]
    assert find_stuck(turns[:19]) is None
    assert find_stuck([turn.model_copy(update={"has_patience": False}) for turn in turns[:19]]) is not None


# -- whole conversations ------------------------------------------------------------------------------------


@cache
def hold(fault: str) -> tuple[list[Trajectory], dict[str, int]]:
    """Conversations of the shop with the oracle, and how many faulty messages each user wrote."""
    tasks = SHOP.tasks("test", 25, 0)
    users: dict[str, FaultyUser] = {}
    oracle = find_model("oracle", "agent", SHOP)

    def make_user(task: Task, seed: int) -> FaultyUser:
        users[task.id] = FaultyUser(task, seed, fault)
        return users[task.id]

    user: ModelSource = PatientUser if fault == "agent" else make_user
    agent: ModelSource = (
        (lambda task, seed: LoopingAgent(oracle(task, seed), task, seed)) if fault == "agent" else oracle
    )
    settings = RolloutSettings(redraws=0, grade=grade, audit=lambda item: audit(SHOP, item))

    async def collect() -> list[Trajectory]:
        return [
            item async for group in rollout(SHOP, tasks, agent, user, settings) for item in group.everything
        ]

    held = asyncio.run(collect())
    return held, {key: user.faulty for key, user in users.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_users_that_do_not_move_on_are_stopped_and_blamed(fault: str) -> None:
    held, faulty = hold(fault)
    spoilt = [item for item in held if faulty[item.task.id] and item.end != "agent_stop"]
    assert len(spoilt) >= 18
    assert sum(item.blame == "user" for item in spoilt) >= 0.95 * len(spoilt)
    assert sum(faulty[item.task.id] <= 3 for item in spoilt) >= 0.9 * len(spoilt)
    assert all(faulty[item.task.id] <= 6 for item in spoilt)
    if fault != "stop":  # that one ends the conversation itself, and the audit finds it
        assert {(item.end, item.reward) for item in spoilt} == {("stuck", None)}
        assert all(item.error for item in spoilt)


def test_an_agent_that_does_not_move_on_gets_nothing() -> None:
    held, _ = hold("agent")
    stuck = [item for item in held if item.end == "stuck"]
    assert len(stuck) >= 18
    for item in stuck:
        assert (item.blame, item.value, item.is_failed) == ("agent", 0.0, False)
        assert item.reward is not None
        assert item.reward.why[0].startswith("ended by stuck: not graded: the agent said 3 times")


def test_honest_conversations_are_never_stopped() -> None:
    for name in ("oracle", "teacher"):

        async def collect(agent: ModelSource) -> list[Trajectory]:
            groups = rollout(SHOP, SHOP.tasks("test", 8, 1), agent, PatientUser, RolloutSettings(redraws=0))
            return [item async for group in groups for item in group.everything]

        ends = Counter(item.end for item in asyncio.run(collect(find_model(name, "agent", SHOP))))
        assert set(ends) <= {"user_stop", "agent_stop"}, ends


def test_the_oracle_changes_nothing_twice() -> None:
    held, _ = hold("loop")
    for item in held:
        made = [
            (call.name, repr(call.arguments))
            for turn in item.turns
            for call in turn.message.tool_calls
            if not call.name.startswith(("get_", "find_"))
        ]
        assert len(made) == len(set(made))


def test_both_figures_are_told() -> None:
    failed = [item for item in hold("thanks")[0] if item.is_failed]
    result = summarize([item for item in hold("agent")[0] if item.end == "user_stop"], failed)
    assert result["stuck"] == {"user": len(failed)}
    assert result["audit"]["success"]["all"]["pass^1"] < result["audit"]["success"]["clean"]["pass^1"]
    told = tell_user_faults(result)
    assert f"{len(failed)} because of the user" in told
    assert "success in all conversations" in told


def test_training_leaves_out_the_faults_of_a_language_model() -> None:
    def settle(model: str) -> str | None:
        return settle_audit(TrainConfig(user=Speaker(model=model))).policy

    assert settle("openai:gpt-4.1") == settle("local:model") == settle("replay:file") == "exclude"
    assert settle("agenda") == settle("examples/user.py:HastyUser") == "report"
    assert settle_audit(EvalConfig(user=Speaker(model="openai:gpt-4.1"))).policy == "report"
    mixed = Speaker(mix=[{"model": "agenda"}, {"model": "openai:gpt-4.1"}])  # pyright: ignore[reportArgumentType]
    assert settle_audit(TrainConfig(user=mixed)).policy == "exclude"


def test_why_it_is_stuck_is_told() -> None:
    asks = "What is your order number?"
    stuck = find_stuck(talk(WISH, asks, WISH, asks, WISH, asks, WISH))
    assert stuck == Stuck("user", f"the user said 3 times without answering: '{WISH}'")
