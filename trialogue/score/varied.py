"""Tasks with fresh values, each proven as sound as the task it was made of: the gold calls earn the whole
reward and doing nothing earns none. Else the task stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trialogue.errors import TrialogueError
from trialogue.score.check import find_task_problems
from trialogue.score.reward import reach_gold
from trialogue.task import Task
from trialogue.world.domain import Domain
from trialogue.world.vary import vary


@dataclass(slots=True)
class Varied:
    """Tasks of which those that allow it have fresh values."""

    tasks: list[Task] = field(default_factory=lambda: [])
    kept: list[str] = field(default_factory=lambda: [])
    """Ids of the tasks that stay as they are."""


def vary_tasks(domain: Domain, tasks: Sequence[Task], seed: int) -> Varied:
    """Give tasks fresh values, each with its proof."""
    varied = Varied()
    for task in tasks:
        changed = vary_soundly(domain, task, seed)
        varied.tasks.append(task if changed is None else changed)
        if changed is None:
            varied.kept.append(task.id)
    return varied


def vary_soundly(domain: Domain, task: Task, seed: int) -> Task | None:
    """The task with fresh values, None where it would not be as sound."""
    if domain.open(task).remote:
        return None
    changed = vary(domain, task, seed)
    if changed is None:
        return None
    try:
        if any(find_task_problems(domain, changed)):
            return None
        if not task.expected.calls:
            return changed
        before, after = reach_gold(domain.open(task)), reach_gold(domain.open(changed))
        return changed if len(before.difference()) == len(after.difference()) else None
    except TrialogueError:
        return None
