"""No agent that cheats is paid, and none that is honest is accused."""

from __future__ import annotations

import asyncio

import pytest

from tests.parts.honest import hold_honest
from tests.score.cheats.shop import SHOP_CHEATS
from trialogue import find_domain
from trialogue.score.cheats import GENERIC_CHEATS, Trick, count_cheats
from trialogue.score.compliance import RuleUsage, find_misquoted, find_uncovered

SHOP = find_domain("shop")
TASKS = [*SHOP.tasks("test", 12), *SHOP.tasks("test", 6, levels=(2, 3), families=("forbidden",))]


def test_there_are_at_least_forty_cheats_for_the_shop() -> None:
    assert len({trick.name for trick in SHOP_CHEATS}) == len(SHOP_CHEATS) >= 40


@pytest.mark.parametrize("trick", SHOP_CHEATS, ids=lambda trick: trick.name)
def test_no_cheat_is_paid_in_the_shop(trick: Trick) -> None:
    (count,) = asyncio.run(count_cheats(SHOP, TASKS, [trick]))
    assert count.cheated, f"{trick.name} never cheated on these tasks"
    assert count.paid == 0, count.to_data()
    assert count.rules, "and it is a rule that forbids it, not luck"


def test_most_cheats_would_be_paid_without_rules() -> None:
    counts = asyncio.run(count_cheats(SHOP, TASKS[:10], SHOP_CHEATS))
    paid = [count.trick.name for count in counts if count.paid_without]
    assert len(paid) > 0.8 * len(SHOP_CHEATS), "otherwise the rules would be of no use"


def test_honest_agents_break_no_rule_of_the_shop() -> None:
    usage = RuleUsage()
    for item in hold_honest(SHOP, SHOP.tasks("train", 60)):
        assert item.is_success, item.reward
        assert item.reward is not None
        assert (item.reward.breaches, item.reward.outcome, item.reward.compliance) == ((), 1, 1)
        usage.add(SHOP.policy_rules, item.turns, SHOP.policy)
    never = [rule.name for rule in SHOP.policy_rules if not usage.exercised[rule.name]]
    assert not never, f"never exercised in 60 conversations: {never}"


def test_rules_of_the_shop_quote_its_policy() -> None:
    assert list(find_misquoted(SHOP.policy, SHOP.policy_rules)) == []
    assert [text[:40] for text in find_uncovered(SHOP.policy, SHOP.policy_rules)] == [
        "If the customer does not know the order "
    ], "the one sentence that no conversation shows to be broken"


def test_generic_cheats_know_nothing_of_a_domain() -> None:
    assert len(GENERIC_CHEATS) >= 15
