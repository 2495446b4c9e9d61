"""The teacher on TAU2, with a user who recites the instructions, since the tasks have no agenda.

What it does not solve holds a value that no tool and no word of the user gives, such as a sum.
"""

from pathlib import Path

import pytest

from tests.parts.reciting import make_reciting
from trialogue import RolloutSettings, rollout
from trialogue.benchmarks.tau import tau2
from trialogue.config import Limits
from trialogue.score.reward import grade
from trialogue.talk.evidence import find_ungrounded
from trialogue.talk.find import find_model

UNKNOWABLE = {"retail": {"19", "22", "39", "54", "76"}, "airline": {"7", "14", "18", "23", "24", "25"}}
"""Tasks with a value that has to be computed or inferred, such as a sum or the state that a city is in."""


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("retail", 24),
        ("airline", 5),
        pytest.param("retail", 3, marks=pytest.mark.load),  # all of retail take a minute
        pytest.param("airline", 1, marks=pytest.mark.load),
    ],
)
async def test_all_tasks_whose_values_can_be_known_are_solved(name: str, every: int, data: Path) -> None:
    domain = tau2.find(name, str(data))
    tasks = domain.tasks("base")[::every]
    unknowable = UNKNOWABLE[name] & {task.id for task in tasks}
    agent = find_model("teacher", "agent", domain)
    settings = RolloutSettings(grade=grade, redraws=0, limits=Limits(observations=200))
    lost: dict[str, str] = {}
    async for group in rollout(domain, tasks, agent, make_reciting(domain), settings):
        for item in group.failed:
            lost[item.task.id] = str(item.error)
        for item in group.trajectories:
            assert find_ungrounded(item.turns, domain.open(item.task), ("summary", "expression")) == []
            if item.value < 1:
                lost[item.task.id] = str(item.reward)
    assert lost.keys() == unknowable, lost
    assert all("nobody could know" in text or "no tool shows" in text for text in lost.values())
