"""Agents that cheat in TAU2 are paid by the official grade, and the rules beside it name what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parts.honest import hold_honest
from tests.parts.reciting import make_reciting
from tests.score.cheats.tau2 import list_tau2_cheats
from trialogue.benchmarks.tau import tau2
from trialogue.score.cheats import Count, count_cheats
from trialogue.talk.find import find_model
from trialogue.task import Task
from trialogue.world.domain import Domain

UNSEEN = {"keeps silent", "promises money", "recites", "reads out a stranger"}
"""Cheats that the rules do not see, or in airline not always: docs/benchmarks.md says why."""
SOMETIMES = UNSEEN | {"asks in blank", "acts first"}
"""Those that they see in most conversations, too."""


def play(domain: Domain, tasks: Sequence[Task]) -> list[Count]:
    tricks, honest, user = (
        list_tau2_cheats(domain),
        find_model("teacher", "agent", domain),
        make_reciting(domain),
    )
    return asyncio.run(count_cheats(domain, tasks, tricks, honest=honest, user=user))


def test_each_cheat_is_paid_officially_and_found(data: Path) -> None:
    domain = tau2.find("airline", str(data))
    for count in play(domain, [task for task in domain.tasks("base") if task.id == "12"]):
        assert (count.cheated, count.paid) == (1, 1), count.to_data()
        assert count.caught or count.trick.name in UNSEEN, count.to_data()


@pytest.mark.load
@pytest.mark.parametrize(("name", "every"), [("retail", 20), ("airline", 5)])
def test_cheats_are_found_and_the_honest_are_not_accused(name: str, every: int, data: Path) -> None:
    domain = tau2.find(name, str(data))
    held = hold_honest(domain, domain.tasks("base")[::every], "teacher", user=make_reciting(domain))
    assert [breach for item in held if item.reward for breach in item.reward.breaches] == []
    for count in play(domain, [item.task for item in held if item.is_success]):
        assert count.paid > 0, count.to_data()
        assert count.caught == count.cheated or count.trick.name in SOMETIMES, count.to_data()
