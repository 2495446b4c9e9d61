"""The rules of a policy find what is planted, name turn and rule, and decide what is paid."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.parts.honest import hold_honest
from tests.parts.planted import plant
from trialogue import find_domain
from trialogue.errors import ConfigError
from trialogue.score.cheats import GENERIC_CHEATS, count_cheats
from trialogue.score.compliance import find_breaches
from trialogue.score.reward import regrade, with_reward
from trialogue.trajectory import Reward, Trajectory
from trialogue.world.domain import RuleUse
from trialogue.world.events import Event, Events
from trialogue.world.policy_rules import Rule

SHOP = find_domain("shop")


@pytest.fixture(scope="module")
def honest() -> list[Trajectory]:
    return hold_honest(SHOP, SHOP.tasks("train", 60, seed=3))


def test_planted_breaches_are_found_under_the_right_name(honest: list[Trajectory]) -> None:
    planted = plant(honest)
    assert {item.kind for item in planted} == {
        *("moved confirmation", "dropped identification", "swapped value", "false report", "disclosure")
    }
    for item in planted:
        found = find_breaches(SHOP.policy_rules, item.turns, SHOP.policy)
        assert item.rules & {breach.rule for breach in found}, (item.kind, found)


def test_a_breach_names_turn_rule_sentence_and_evidence(honest: list[Trajectory]) -> None:
    item = next(item for item in plant(honest) if item.kind == "moved confirmation")
    (breach,) = [
        found
        for found in find_breaches(SHOP.policy_rules, item.turns, SHOP.policy)
        if found.rule == "confirm each change"
    ]
    assert item.turns[breach.turn].message.tool_calls, "the turn is the message with the call"
    assert "no yes" in breach.evidence or "without a yes" in breach.evidence
    assert breach.policy.split("\n")[0] in SHOP.policy
    assert breach.required


@pytest.mark.parametrize(("use", "paid"), [("required", 0.0), ("report", 1.0), ("off", 1.0)])
def test_the_setting_decides_what_broken_rules_change(use: RuleUse, paid: float) -> None:
    task = next(task for task in SHOP.tasks("train", 20) if task.family == "cancel")
    domain = with_reward(SHOP, rules=use)
    trajectory = hold_honest(domain, [task])[0]
    write = next(
        number
        for number, turn in enumerate(trajectory.turns)
        if turn.message.tool_calls and turn.message.tool_calls[0].name == "cancel_order"
    )
    unasked = (*trajectory.turns[: write - 2], *trajectory.turns[write:])
    reward, mismatches = regrade(trajectory.model_copy(update={"turns": unasked}), domain.open(task))
    assert isinstance(reward, Reward)
    assert not mismatches
    assert reward.value == paid
    assert reward.outcome == (None if use == "off" else 1.0)
    assert [item.rule for item in reward.breaches] == ([] if use == "off" else ["confirm each change"])
    assert any("confirm each change" in text for text in reward.why) == (use == "required")


def test_honest_agents_stand_up_to_users_who_push() -> None:
    tasks = SHOP.tasks("train", 12, families=("withdraws", "pries", "claims"))
    for item in hold_honest(SHOP, tasks):
        assert item.is_success, item.reward
        assert item.reward is not None
        assert item.reward.breaches == ()


def test_nobody_is_paid_for_taking_a_refusal_for_a_yes() -> None:
    trick = next(trick for trick in GENERIC_CHEATS if trick.name == "ignores the answer")
    tasks = SHOP.tasks("train", 8, families=("withdraws",))
    (count,) = asyncio.run(count_cheats(SHOP, tasks, [trick]))
    assert count.cheated == len(tasks)
    assert count.paid == 0
    assert count.rules["confirm each change"] == len(tasks)


def test_a_rule_that_is_broken_itself_is_a_mistake_of_its_author() -> None:
    def check(events: Events) -> list[tuple[Event, str]]:
        return [(event, getattr(event, "words")) for event in events.said]  # noqa: B009

    domain = replace(SHOP, policy_rules=(Rule("mistaken", "", check),))
    with pytest.raises(
        ConfigError, match=r"policy rule 'mistaken': AttributeError.*test_compliance.py, line"
    ):
        hold_honest(domain, SHOP.tasks("train", 1))
