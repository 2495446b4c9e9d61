"""Keeping test tasks out of what is learned: learning from them takes a word and leaves a mark on the run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trialogue.config import Tasks
from trialogue.errors import ConfigError
from trialogue.run import read_marks
from trialogue.task import Task

HELD_OUT = "test"


def find_marks(tasks: Iterable[Task], settings: Tasks, domain: str, model: str) -> list[str]:
    """What every result of the run has to say: that it learns from test tasks, or began with a model that
    has. Without `tasks.allow_test_split` the former is refused."""
    chosen = {task.id: task for task in tasks}
    tested = sum(task.split == HELD_OUT for task in chosen.values())
    marks = read_marks(Path(model))
    if not tested:
        return marks
    if not settings.allow_test_split:
        raise ConfigError(
            f"{tested} of {len(chosen)} tasks to learn from are test tasks of {domain}; choose another split "
            "with tasks.split, or set tasks.allow_test_split=true, which marks the run and all its results"
        )
    return [*marks, f"learned from {tested} test tasks of {domain}"]
