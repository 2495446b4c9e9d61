"""A rule-based user who speaks in more ways than its author wrote."""

import re

from trialogue import RolloutSettings, find_domain, find_model, rollout
from trialogue.score.reward import grade
from trialogue.talk.agenda import Agenda
from trialogue.talk.rewording import reword
from trialogue.task import Task


def read(task: Task) -> Agenda:
    return Agenda.model_validate(task.meta["agenda"])


def test_only_the_words_change_and_the_seed_draws_them() -> None:
    task = find_domain("examples/car_rental").tasks("train", 10, 3, families=["change of mind"])[0]
    one, again, other = reword(task, 1), reword(task, 1), reword(task, 2)
    assert one == again
    assert one != other
    before, after = read(task), read(one)
    assert one.expected == task.expected
    assert one.setup == task.setup
    assert after.phrases.opening[: len(before.phrases.opening)] == before.phrases.opening
    assert len(after.phrases.opening) > len(before.phrases.opening)
    for old, new in zip(before.wishes, after.wishes, strict=True):
        assert (old.done, old.answer) == (new.done, new.answer)
        assert (old.instead is None) == (new.instead is None)
        assert {name: fact.value for name, fact in old.facts.items()} == {
            name: fact.value for name, fact in new.facts.items()
        }


def test_values_are_told_in_many_ways() -> None:
    tasks = find_domain("examples/car_rental").tasks("train", 120, 3)
    told = {text for task in tasks for text in read(task).facts["name"].says}
    more = {text for task in tasks for text in read(reword(task, 0)).facts["name"].says}
    assert len(told) <= 6
    assert len(more) > 30
    assert all("{value}" in text for text in more)


async def test_the_teacher_solves_reworded_tasks() -> None:
    domain = find_domain("examples/car_rental")
    tasks = [reword(task, 7) for task in domain.tasks("train", 40, 5)]
    agent, user = find_model("teacher", "agent", domain), find_model("agenda", "user", domain)
    settings = RolloutSettings(grade=grade, redraws=0)
    groups = [group async for group in rollout(domain, tasks, agent, user, settings)]
    held = [item for group in groups for item in group.everything]
    assert len(held) == 40
    assert [(item.task.id, item.error, item.reward) for item in held if not item.is_success] == []


def test_a_task_without_agenda_keeps_its_words() -> None:
    task = Task(id="plain", domain="shop", instructions="Cancel my order.")
    assert reword(task, 1) is task


def test_no_wish_says_something_else() -> None:
    """Neither a negation nor a value is lost."""
    seen = 0
    for task in find_domain("examples/car_rental").tasks("train", 300, 5):
        for old, new in zip(read(task).wishes, read(reword(task, 1)).wishes, strict=True):
            for before, after in zip(old.says, new.says, strict=True):
                kept = re.findall(r"\b(?:not|no|never)\b|n't\b|\bR-\d{4}\b", before)
                seen += len(kept)
                assert all(word in after for word in kept), (before, after)
    assert seen > 100
