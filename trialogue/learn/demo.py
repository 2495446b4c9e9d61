"""The demonstration: the course of the built-in shop with fixed sizes and a careless teacher.

Before and after, the agent serves users it has never met: other people, products, order numbers and wording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from trialogue.activity import phase
from trialogue.config import SftConfig, TrainConfig, Training
from trialogue.errors import DomainError
from trialogue.learn.collect import Watch, choose_tasks
from trialogue.learn.course import Course, Sizes, cold_config, learn, warm_config
from trialogue.learn.sft import find_examples
from trialogue.learn.sizes import ColdStart, Reinforcement
from trialogue.task import Task
from trialogue.world.domains.shop.wording import collect_texts
from trialogue.world.find import find_domain

LEVELS = (1,)
"""Difficulty of the demonstration: one request or question per conversation, which the policy allows."""
TEST_TASKS = 256
MINUTES = 6.0
"""The time of the whole demonstration on two idle cores."""
COLD_START = ("sft.faults=0.22", "sft.only_successes=false")
"""The teacher makes mistakes. They are imitated too, which leaves something for reinforcement learning."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a demonstration."""

    examples: int = 6000
    steps: int = 36
    eval_every: int = 12
    dev_tasks: int = 100
    test_tasks: int = TEST_TASKS

    @classmethod
    def fit(cls, minutes: float) -> Size:
        """The size that takes about this many minutes, with enough test tasks for an interval."""
        share, whole = minutes / MINUTES, cls()
        if share >= 1:
            return whole
        steps = max(2, round(whole.steps * share))
        return cls(
            examples=max(120, round(whole.examples * share)),
            steps=steps,
            eval_every=min(whole.eval_every, steps),
            dev_tasks=max(16, round(whole.dev_tasks * share)),
            test_tasks=max(32, round(whole.test_tasks * share)),
        )

    def describe(self) -> str:
        """What to expect, in one line."""
        whole = Size()
        if self == whole:
            return (
                f"about {MINUTES:g} minutes on two quiet cores: the agent solves about 20 % of the test "
                "tasks as the policy wants it after the cold start, about 90 % after reinforcement learning "
                "(one seed of five: 78 %)"
            )
        return (
            f"shortened: {self.examples:,} examples in place of {whole.examples:,}, {self.steps} steps in "
            f"place of {whole.steps}, {self.test_tasks} test tasks in place of {whole.test_tasks}. Every "
            "part is real, but the agent stays weak and the intervals are wide; the whole demonstration "
            f"takes {MINUTES:g} minutes and gets to about 90 %"
        )


async def demonstrate(
    directory: Path, seed: int, tell: Tell, watch: Watch, size: Size | None = None
) -> dict[str, Any]:
    """Hold the course of the shop and return its summary."""
    size = size or Size()
    tell(size.describe())
    course = to_course(directory, seed, size)
    assert course.sizes is not None
    with phase("comparing train and test tasks"):
        test = find_domain("shop").tasks("test", size.test_tasks, seed, levels=LEVELS)
        cold, warm = cold_config(course, course.sizes), warm_config(course, course.sizes, Path("tiny"))
        overlap = find_overlap(find_learned(cold, warm), test)
        overlap |= collect_texts("train") & collect_texts("test")
    if overlap:
        raise DomainError(f"train and test tasks share {sorted(overlap)[:5]}")
    tell("train and test tasks share no person, product, order, address or wording")
    return await learn(course, tell, watch)


def to_course(directory: Path, seed: int, size: Size) -> Course:
    """The course of the demonstration: fixed sizes, the shop's own careless teacher, no early end."""
    return Course(
        domain="shop",
        model="tiny",
        directory=directory,
        minutes=MINUTES * size.steps / Size().steps,
        seed=seed,
        examples="oracle",
        words=(f"tasks.levels={list(LEVELS)}",),
        cold_words=(
            *COLD_START,
            "sft.patience=0",
            f"sft.checkpoint_every={SftConfig().sft.checkpoint_every}",
        ),
        warm_words=("training.patience=0", f"training.checkpoint_every={Training().checkpoint_every}"),
        sizes=Sizes(
            ColdStart(size.examples, 1.0, size.test_tasks, size.dev_tasks),
            warm=Reinforcement(size.steps, size.eval_every),
        ),
    )


def find_learned(cold: SftConfig, warm: TrainConfig) -> Iterable[Task]:
    """Every task that both parts will learn from."""
    domain = find_domain("shop")
    for item in find_examples(domain, cold):
        assert isinstance(item, Task)  # for the oracle to hold a conversation on
        yield item
    for step in range(warm.training.steps):
        yield from choose_tasks(domain, warm, step, 0, LEVELS)


def find_overlap(train_tasks: Iterable[Task], test_tasks: Iterable[Task]) -> set[str]:
    """What two sets of tasks have in common: records, people, addresses, or sentences of the user."""
    return set(_marks(train_tasks)) & set(_marks(test_tasks))


def _marks(tasks: Iterable[Task]) -> Iterable[str]:
    for task in tasks:
        for table in task.setup.data.values():
            for key, record in table.items():
                yield str(key)
                for field in ("name", "email", "postcode", "address"):
                    if field in record:
                        yield f"{field} {record[field]}"
                for item in record.get("items", ()):
                    yield f"product {item['name']}"
        agenda = task.meta.get("agenda", {})
        yield from filter(None, chain.from_iterable(agenda.get("phrases", {}).values()))
        facts = [agenda.get("facts", {})]
        for wish in agenda.get("wishes", ()):
            yield from wish["says"]
            facts.append(wish["facts"])
        for fact in chain.from_iterable(known.values() for known in facts):
            yield from fact.get("says", ())
