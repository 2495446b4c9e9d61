"""Whether what one set of tasks teaches is what another one tests: equal gold writes give the game away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trialogue.errors import ConfigError
from trialogue.task import Call, Task
from trialogue.world.database import canonical
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain

Writes = frozenset[str]


@dataclass(frozen=True, slots=True)
class Contamination:
    """Tasks of the second set whose gold writes equal those of a task in the first."""

    train: str
    test: str
    tasks: int
    pairs: dict[str, list[str]] = field(default_factory=lambda: {})
    """Task of the second set → tasks of the first with the same writes."""

    def to_data(self) -> dict[str, Any]:
        return {
            "train": self.train,
            "test": self.test,
            "tasks": self.tasks,
            "shared": len(self.pairs),
            "pairs": self.pairs,
        }

    def to_line(self) -> str:
        shared = f"{len(self.pairs)} of {self.tasks} tasks of {self.test}"
        return f"{shared} have the same gold writes as a task of {self.train}"


def find_contamination(train: str, test: str, data: str | None = None) -> Contamination:
    """Compare two sets, each `DOMAIN/SPLIT` such as `tau:retail/test` or `tau2:retail/base`."""
    taught: dict[Writes, list[str]] = {}
    domain, tasks = _find_set(train, data)
    for task in tasks:
        taught.setdefault(find_writes(domain, task), []).append(task.id)
    domain, tasks = _find_set(test, data)
    pairs = {task.id: taught[writes] for task in tasks if (writes := find_writes(domain, task)) in taught}
    return Contamination(train, test, len(tasks), pairs)


def _find_set(reference: str, data: str | None) -> tuple[Domain, list[Task]]:
    name, _, split = reference.rpartition("/")
    if not name:
        raise ConfigError(f"'{reference}' names no split; write DOMAIN/SPLIT, such as tau2:retail/base")
    domain = find_domain(name, data)
    return domain, domain.tasks(split)


def find_writes(domain: Domain, task: Task) -> Writes:
    """The gold calls of a task that write, in any order."""
    environment = domain.open(task)
    return frozenset(_to_texts(task.expected.calls, {**environment.user_tools, **environment.tools}))


def _to_texts(calls: Iterable[Call], tools: dict[str, Any]) -> Iterable[str]:
    for call in calls:
        tool = tools.get(call.name)
        if tool is not None and tool.writes:
            yield canonical([call.name, call.arguments])
