"""Values and wordings shared out over the splits, and tasks made by a function."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from trialogue import (
    ConfigError,
    Domain,
    DomainError,
    Expected,
    Phrases,
    Slots,
    Task,
    find_domain,
    generate_with,
)
from trialogue.score.check import check
from trialogue.world.scaffold import write_domain
from trialogue.world.slots import share

CAR_RENTAL = Path(__file__).parents[2] / "examples" / "car_rental"


def draw_all(split: str) -> set[str]:
    values: set[str] = set()
    for seed in range(200):
        slots = Slots(split, Random(seed))
        values |= {slots.name(), slots.word(), slots.draw("K-####"), slots.draw("@@##")}
    return values


def test_no_value_of_one_split_is_in_another() -> None:
    train, dev, test = map(draw_all, ("train", "dev", "test"))
    assert len(train) > 700
    assert not train & dev
    assert not train & test
    assert not dev & test


def test_lists_and_phrases_are_shared_out() -> None:
    items = [str(number) for number in range(17)]
    parts = {split: share(items, split) for split in ("train", "dev", "test")}
    assert sorted(parts["train"] + parts["dev"] + parts["test"]) == sorted(items)
    assert parts["dev"] == ["3", "11"]
    assert parts["test"] == ["7", "15"]
    assert share(["a", "b"], "train") == share(["a", "b"], "test") == ["a", "b"]
    phrases = Phrases("{x} please", "I want {x}", "{x}!", "Give me {x}")
    assert Slots("test", Random(0)).phrases(phrases, x="tea") == ["Give me tea"]
    assert set(Slots("train", Random(0)).phrases(phrases, x="tea")) == {"tea please", "I want tea"}


def test_nothing_is_drawn_twice_for_a_task_and_a_shape_may_be_too_short() -> None:
    slots = Slots("test", Random(0))
    drawn = [slots.draw("###") for _ in range(40)]
    assert len(set(drawn)) == 40
    with pytest.raises(DomainError, match="not enough values of the shape #"):
        [Slots("test", Random(0)).draw("#") for _ in range(1)] and [slots.draw("#") for _ in range(10)]
    with pytest.raises(ConfigError, match="did you mean test"):
        Slots("tets", Random(0))


def test_generated_tasks_are_the_same_for_the_same_seed() -> None:
    def make(slots: Slots, family: str) -> Task:
        said = slots.draw("####")
        return Task(id="", domain="d", instructions=f"{family} {said}", expected=Expected(say=(said,)))

    source = generate_with(make, {"one": 1, "two things": 2})
    assert source("train", 6, 3) == source("train", 6, 3) != source("train", 6, 4)
    assert [task.family for task in source("dev", 3)] == ["one", "two things", "one"]
    assert {task.level for task in source("test", 5, levels=[2])} == {2}
    assert {task.split for task in source("test", 5)} == {"test"}
    assert len({task.id for task in source("train", 30)}) == 30
    with pytest.raises(ConfigError, match="the families are one, two things"):
        source("train", 1, families=["three"])


@pytest.mark.parametrize("name", ["pastry", "car_rental"])
def test_a_domain_with_generated_tasks_needs_no_file_of_them(name: str, tmp_path: Path) -> None:
    folder = CAR_RENTAL
    if name == "pastry":
        folder = tmp_path / name
        write_domain(folder, generated=True)
    assert not (folder / "tasks.jsonl").exists()
    domain: Domain = find_domain(str(folder))
    assert domain.endless
    assert check(domain, count=40).problems == []


@pytest.mark.parametrize("name", ["bank_card", "telecom"])
def test_a_whole_domain_of_generated_tasks_holds(name: str) -> None:
    domain = find_domain(str(Path(__file__).parents[1] / "domains" / name))
    assert check(domain, count=60).problems == []
    assert [task.split for task in domain.tasks("all", 6)] == ["train", "train", "dev", "dev", "test", "test"]
