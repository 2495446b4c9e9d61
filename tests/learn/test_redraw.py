"""Replacements of groups without signal come from the distribution of the step's own tasks."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from trialogue.config import TrainConfig
from trialogue.learn.collect import Collector
from trialogue.score.parties import Parties
from trialogue.talk.scripted import ScriptedModel
from trialogue.task import Task
from trialogue.trajectory import Group, Reward, Trajectory
from trialogue.world.domain import Environment
from trialogue.world.find import find_domain

Configure = Callable[..., TrainConfig]
LEVELS = (1, 2, 3, 4, 5)
DRAWS = 1000


def has_no_signal(task: Task) -> bool:
    """Three groups in ten, whatever their level."""
    return zlib.crc32(task.id.encode()) % 10 < 3


def score(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    return Reward(value=0.0 if has_no_signal(task) else float(trajectory.trial % 2))


async def hold_step(step: int, config: TrainConfig) -> tuple[list[Group], list[Group]]:
    """A step of the shop in which the user leaves at once, so that a thousand draws take seconds."""
    shop = replace(find_domain("shop"), reward=score)
    leave = ScriptedModel(["###STOP###"])
    parties = Parties(lambda *_: leave)
    collector = Collector(config, shop, lambda *_: leave, parties)
    return await collector.next_groups(step), collector.replaced


@pytest.mark.load
@pytest.mark.timeout(180)
async def test_every_level_is_redrawn_as_often_as_it_is_drawn(train_config: Configure) -> None:
    config = train_config(
        domain="shop",
        tasks__levels=LEVELS,
        training__tasks_per_step=10,
        training__group_size=2,
        training__redraw_no_signal=1,
    )
    levels: Counter[int] = Counter()
    step = 0
    while levels.total() < DRAWS:
        kept, replaced = await hold_step(step, config)
        levels.update(group.task.level for group in kept[10 - len(replaced) :])
        step += 1
    print(f"{levels.total()} replacements by level: {sorted(levels.items())}")
    expected = levels.total() / len(LEVELS)
    # Four degrees of freedom: over 18.5 once in a thousand.
    assert sum((levels[level] - expected) ** 2 / expected for level in LEVELS) < 18.5, levels


async def test_replacements_are_the_same_for_the_same_seed_and_step(train_config: Configure) -> None:
    config = train_config(
        domain="shop",
        tasks__levels=LEVELS,
        training__tasks_per_step=10,
        training__group_size=2,
        training__redraw_no_signal=2,
    )

    async def draw(step: int) -> list[str]:
        kept, replaced = await hold_step(step, config)
        return [group.task.id for group in [*kept, *replaced]]

    found = [await draw(step) for step in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    assert len(set(found[0])) == len(found[0])  # no task is held twice
