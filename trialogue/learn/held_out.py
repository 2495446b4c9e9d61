"""Keep test tasks out of training: learning from them has to be allowed by a setting, and marks the run."""

from __future__ import annotations

from collections.abc import Iterable

from trialogue.config import SftConfig, TrainConfig
from trialogue.errors import ConfigError
from trialogue.run import collect_marks
from trialogue.task import Task

HELD_OUT = "test"


def find_marks(
    tasks: Iterable[Task], config: TrainConfig | SftConfig, domain: str, *origins: str
) -> list[str]:
    """The marks that every result of the run carries: that it learns from test tasks (refused without
    `tasks.allow_test_split`), starts from a model or examples of a run that did, or reads calls
    leniently."""
    chosen = {task.id: task for task in tasks}
    tested = sum(task.split == HELD_OUT for task in chosen.values())
    marks = collect_marks(origins, config.renderer)
    if not tested:
        return marks
    if not config.tasks.allow_test_split:
        raise ConfigError(
            f"{tested} of {len(chosen)} tasks to learn from are test tasks of {domain}; choose another split "
            "with tasks.split, or set tasks.allow_test_split=true, which marks the run and all its results"
        )
    return [*marks, f"learned from {tested} test tasks of {domain}"]
