"""Fresh values for the tasks of a list: everywhere the same, and as sound as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trialogue import Domain, find_domain
from trialogue.learn.collect import is_varied
from trialogue.score.check import find_task_problems
from trialogue.score.varied import vary_soundly, vary_tasks
from trialogue.world.scaffold import write_domain
from trialogue.world.vary import Change, vary

LIBRARY = Path(__file__).parents[2] / "examples" / "library"


@pytest.fixture(scope="module")
def bakery(tmp_path_factory: pytest.TempPathFactory) -> Domain:
    folder = tmp_path_factory.mktemp("domains") / "bakery"
    write_domain(folder)
    return find_domain(str(folder))


def test_a_value_is_replaced_wherever_it_stands(bakery: Domain) -> None:
    task = next(task for task in bakery.tasks("all") if task.id == "cancel-1")
    changed = vary(bakery, task, 1)
    assert changed is not None
    text = changed.model_dump_json()
    assert "555-0101" not in text
    assert '"A101"' not in text
    (call,) = changed.expected.calls
    order_id = call.arguments["order_id"]
    phone = changed.meta["agenda"]["facts"]["phone"]["value"]
    assert phone.startswith("555-")  # the form of the fact spells it out
    assert changed.setup.data["orders"][order_id]["phone"] == phone
    assert order_id in changed.instructions
    assert phone in changed.instructions
    assert changed.setup.data["orders"][order_id]["item"] == "rye bread"
    assert changed.meta["agenda"]["facts"]["phone"]["asked"] == "phone"
    found = json.loads(bakery.open(changed).call("find_orders", {"phone": phone}).text)
    assert [order["item"] for order in found] == ["cinnamon rolls", "rye bread"] or len(found) == 2


def test_each_seed_gives_other_values_and_the_same_seed_the_same(bakery: Domain) -> None:
    task = bakery.tasks("all")[0]
    assert vary(bakery, task, 1) == vary(bakery, task, 1) != vary(bakery, task, 2)


@pytest.mark.parametrize("name", ["bakery", "library"])
def test_every_varied_task_is_as_sound_as_before(name: str, bakery: Domain) -> None:
    domain = bakery if name == "bakery" else find_domain(str(LIBRARY))
    tasks = domain.tasks("all")
    for seed in range(6):
        varied = vary_tasks(domain, tasks, seed)
        assert varied.kept == []
        assert all(changed != task for changed, task in zip(varied.tasks, tasks, strict=True))
        assert [problem for task in varied.tasks for problem in find_task_problems(domain, task)] == []


def test_a_task_that_would_not_be_sound_stays_as_it_is(bakery: Domain) -> None:
    task = next(task for task in bakery.tasks("all") if task.id == "cancel-1")
    broken = task.model_copy(
        update={"setup": task.setup.model_copy(update={"data": {"orders": {"A101": {"status": "ready"}}}})}
    )
    assert vary_soundly(bakery, broken, 1) is None  # its gold call is refused
    varied = vary_tasks(bakery, [task, broken.model_copy(update={"id": "broken"})], 1)
    assert varied.kept == ["broken"]
    assert varied.tasks[1].setup == broken.setup


def test_names_stay_together_with_their_addresses_and_titles_change() -> None:
    change = Change({"Jana": "Mira", "Conrad": "Odell", "K-77": "K-12"})
    assert change.text("Jana Conrad, jana.conrad@mail.net, K-77") == "Mira Odell, mira.odell@mail.net, K-12"
    assert change.text("the conrad case, K-777") == "the conrad case, K-777"
    assert change.apply({"asked": "Jana", "K-77": {"value": ["Jana"]}}) == {
        "asked": "Jana",
        "K-12": {"value": ["Mira"]},
    }
    domain = find_domain(str(LIBRARY))
    task = domain.tasks("train")[0]
    changed = vary(domain, task, 3)
    assert changed is not None
    assert "Quiet Harbour" in json.dumps(task.meta)
    assert "Quiet Harbour" not in json.dumps(changed.meta)
    title = next(iter(changed.setup.data["books"].values()))["title"]
    assert title in changed.instructions


def test_lists_are_varied_and_generated_tasks_are_not(bakery: Domain) -> None:
    assert is_varied(bakery, None)
    assert not is_varied(find_domain("shop"), None)
    assert is_varied(find_domain("shop"), True)
    assert not is_varied(bakery, False)
