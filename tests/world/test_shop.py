"""The built-in domain: its tools, its tasks without limit, its oracle and what naive agents get."""

import re
import time
from collections import Counter
from typing import Any, get_args

import pytest
from shop_agents import make_says_done, make_transfers_all

from trialogue.errors import ConfigError
from trialogue.score.reward import grade
from trialogue.talk.agenda import make_agenda_user
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.task import Task
from trialogue.trajectory import Trajectory
from trialogue.world.domains.shop import domain
from trialogue.world.domains.shop.catalogue import COLOURS, KINDS, make_database
from trialogue.world.domains.shop.database import Reason, Topic
from trialogue.world.domains.shop.generate import FAMILIES, LEVELS
from trialogue.world.domains.shop.oracle import make_oracle
from trialogue.world.domains.shop.wording import collect_texts, list_texts, read_wording


async def hold(tasks: list[Task], agent: Any, trials: int = 1, seed: int = 0) -> list[Trajectory]:
    groups = rollout(
        domain, tasks, agent, make_agenda_user, RolloutSettings(group_size=trials, seed=seed, grade=grade)
    )
    held = [trajectory async for group in groups for trajectory in group.trajectories + group.failed]
    return sorted(held, key=lambda trajectory: trajectory.id)


def count_observations(trajectory: Trajectory) -> int:
    return sum(turn.message.role == "tool" or turn.side == "user" for turn in trajectory.turns)


# -- tools and policy ---------------------------------------------------------------------------------------


def open_shop():
    """A task's environment with one pending order of one item."""
    task = domain.tasks("train", 1, families=("cancel",), levels=(1,))[0]
    order_id = task.expected.calls[-1].arguments["order_id"]
    return domain.open(task), order_id, task.setup.data["orders"][order_id]


def test_tools_and_policy():
    assert len(domain.policy.split()) <= 350
    for word in (*get_args(Reason), *get_args(Topic)):
        assert word in domain.policy
    assert len(domain.database.tools) == 14
    assert domain.database.tools["transfer_to_human"].ends


def test_lookups_and_what_cannot_be_done():
    shop, order_id, order = open_shop()
    customer = shop.database.customers[order["customer_id"]]
    assert customer.email in shop.call("find_customer_by_email", {"email": f" {customer.email.upper()}"}).text
    by_name = {"name": customer.name.lower(), "postcode": customer.postcode}
    assert customer.customer_id in shop.call("find_customer_by_name", by_name).text
    assert shop.call("get_order", {"order_id": order_id}).text.count("null") == 0
    item_id = order["items"][0]["item_id"]
    before = shop.digest()
    for name, arguments in [
        ("find_customer_by_email", {"email": "nobody@mail.net"}),
        ("find_customer_by_name", {"name": customer.name, "postcode": "0000"}),
        ("get_customer", {"customer_id": "C0000"}),
        ("get_order", {"order_id": "W0000"}),
        ("get_product", {"name": "red elephant"}),
        ("cancel_order", {"order_id": order_id, "reason": "bored"}),
        ("return_items", {"order_id": order_id, "item_ids": []}),
        ("return_items", {"order_id": order_id, "item_ids": [item_id, item_id]}),
        ("exchange_items", {"order_id": order_id, "item_ids": [item_id], "new_item_ids": ["I0000"]}),
        ("change_items", {"order_id": order_id, "item_ids": [item_id], "new_item_ids": []}),
        ("change_payment", {"order_id": order_id, "payment_method": "cash"}),
        ("refund_to_gift_card", {"order_id": order_id, "total": -1}),
        ("transfer_to_human", {"customer_id": "C0000", "topic": "invoice"}),
        ("transfer_to_human", {"customer_id": customer.customer_id, "topic": "weather"}),
    ]:
        result = shop.call(name, arguments)
        assert result.failed, name
        assert shop.digest() == before


def test_policy_is_left_to_the_agent():
    shop, order_id, order = open_shop()
    shop.database.orders[order_id].status = "shipped"
    assert not shop.call("cancel_order", {"order_id": order_id, "reason": "found cheaper"}).failed
    assert shop.call("cancel_order", {"order_id": order_id, "reason": "found cheaper"}).failed
    assert shop.call("change_address", {"order_id": order_id, "address": "1 Oakfield Lane"}).failed
    assert not shop.call("refund_to_gift_card", {"order_id": order_id, "total": order["total"]}).failed


def test_items_are_replaced_and_the_total_follows():
    shop, order_id, order = open_shop()
    old = order["items"][0]["item_id"]
    new = next(product for product in shop.database.products.values() if product.item_id != old)
    arguments = {
        "order_id": order_id,
        "item_ids": [old],
        "new_item_ids": [new.item_id],
    }
    assert not shop.call("exchange_items", arguments).failed
    changed = shop.database.orders[order_id]
    assert (changed.items[0].name, changed.total, changed.exchanged) == (new.name, new.price, True)
    assert not shop.call("return_items", {"order_id": order_id, "item_ids": [new.item_id]}).failed
    assert shop.database.orders[order_id].status == "returned"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *[
            ("12.50 + 3 * 4", "24.50"),
            ("-(2 - 5) / 4", "0.75"),
            ("1 / 0", None),
            ("2 ** 9", None),
            ("x", None),
        ],
        *[
            ("__import__('os')", None),
            ("True", None),
            ("", None),
            ("(" * 150 + "1", None),
            ("1+" * 150, None),
        ],
    ],
)
def test_calculate(expression: str, value: str | None):
    shop, *_ = open_shop()
    result = shop.call("calculate", {"expression": expression})
    assert result.failed == (value is None)
    if value is not None:
        assert result.text == value


# -- tasks --------------------------------------------------------------------------------------------------


def test_the_base_is_quickly_made():
    started = time.process_time()
    database = make_database()
    assert time.process_time() - started < 0.3
    assert len(database.orders) > 250


def test_gold_replays_and_an_untouched_world_never_satisfies():
    for task in [task for split in ("train", "dev", "test") for task in domain.tasks(split, 340, seed=11)]:
        shop = domain.open(task)
        untouched = shop.digest()
        for call in task.expected.calls:
            result = shop.call(call.name, call.arguments)
            assert not result.failed, (task.id, call, result)
        assert task.expected.say or shop.digest() != untouched, task.id
        assert (shop.digest() != untouched) == bool(task.expected.calls), task.id


def test_levels_and_families():
    for level, families in LEVELS.items():
        tasks = domain.tasks("train", 300, levels=(level,))
        counts = Counter(task.family for task in tasks)
        assert {task.level for task in tasks} == {level}
        assert set(counts) == set(families)
        assert max(counts.values()) <= 3 * min(counts.values())
        assert sum(not task.expected.calls for task in tasks) <= 0.3 * len(tasks)
    only = domain.tasks("dev", 30, families=("exchange", "forgetful"))
    assert {task.family for task in only} == {"exchange", "forgetful"}
    assert {task.family for task in domain.tasks("test", 400)} == set(FAMILIES)


def test_wrong_wishes_for_tasks_are_explained():
    for arguments, complaint in [
        ({"split": "exam"}, "no split 'exam'; it has train, dev, test"),
        ({"split": "test", "levels": (6,)}, "no level 6; it has 1, 2, 3, 4, 5"),
        ({"split": "test", "families": ("riot",)}, "no family 'riot'; it has cancel"),
        (
            {"split": "test", "levels": (1,), "families": ("exchange",)},
            "no level of 1 has a family of exchange",
        ),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            domain.tasks(**arguments)


def test_a_seed_gives_the_same_tasks_and_more_of_them_begin_alike():
    first = domain.tasks("train", 40, seed=3)
    assert first == domain.tasks("train", 40, seed=3)
    assert first[:10] == domain.tasks("train", 10, seed=3)
    assert len(domain.tasks("train")) == 100
    assert len({task.id for task in first}) == 40
    assert not {task.instructions for task in first} & {
        task.instructions for task in domain.tasks("train", 40, 4)
    }


PRODUCT = re.compile(rf"\b(?:{'|'.join(COLOURS)}) (?:{'|'.join(KINDS)})\b")


def collect(tasks: list[Task]) -> dict[str, set[str]]:
    """Everything that must not be shared between splits."""
    found: dict[str, set[str]] = {}

    def add(kind: str, *values: str) -> None:
        found.setdefault(kind, set()).update(values)

    for task in tasks:
        for customer in task.setup.data["customers"].values():
            first, last = customer["name"].split()
            add("first name", first)
            add("last name", last)
            add("e-mail", customer["email"])
            add("postcode", customer["postcode"])
            add("customer", customer["customer_id"])
        for order in task.setup.data["orders"].values():
            add("order", order["order_id"])
            add("street", order["address"].split()[1])
            add("product", *(item["name"] for item in order["items"]))
            add("item", *(item["item_id"] for item in order["items"]))
        add("product", *PRODUCT.findall(task.instructions))
        add(
            "street",
            *(words.split()[1] for words in re.findall(r"\d+ \w+ (?:Street|Road|Lane)", task.instructions)),
        )
        agenda = task.meta["agenda"]
        add("phrase", *(text for act in agenda["phrases"].values() for text in act if text))
        wishes = [wish for first in agenda["wishes"] for wish in (first, first.get("instead")) if wish]
        for wish in wishes:
            add("wish", *(hide_values(text) for text in wish["says"]))
        for facts in (agenda["facts"], *(wish["facts"] for wish in wishes)):
            for name, fact in facts.items():
                add(f"words for {name}", *fact.get("says", ()))
    return found


def hide_values(text: str) -> str:
    text = re.sub(r"\d+ \w+ (?:Street|Road|Lane)|W\d{4}", "…", text)
    return PRODUCT.sub("…", text).replace("Order …", "…").replace("My order", "…").lower()


def test_splits_share_no_people_products_numbers_or_words():
    train, dev, test = (collect(domain.tasks(split, 1000)) for split in ("train", "dev", "test"))
    assert len(test) > 15
    for kind in test:
        for one, other in ((train, dev), (train, test), (dev, test)):
            assert not one[kind] & other[kind], kind
    pieces = {order_id[1:3] for order_id in train["order"]}, {order_id[3:] for order_id in train["order"]}
    assert all(order_id[1:3] in pieces[0] and order_id[3:] in pieces[1] for order_id in test["order"])


# -- agents -------------------------------------------------------------------------------------------------


def test_every_list_of_words_has_something_for_each_split_and_nothing_for_two():
    for part, lists in read_wording().items():
        for key, texts in lists.items():
            if isinstance(texts, str) or not texts:  # one way to put it, or nothing to be said
                continue
            shares = [list_texts(split, part, key) for split in ("train", "dev", "test")]
            assert all(shares), f"{part}.{key}"
            assert sum(map(len, shares)) == len(texts) == len(set(texts)), f"{part}.{key}"
    train, dev, test = (collect_texts(split) for split in ("train", "dev", "test"))
    assert len(train | dev | test) == len(train) + len(dev) + len(test) > 800  # across lists, too


@pytest.mark.load
async def test_the_oracle_solves_everything_in_time():
    held = await hold(domain.tasks("test", 500), make_oracle, trials=2)
    assert len(held) == 1000
    lost = [
        (item.id, item.end, item.error, item.reward) for item in held if not item.reward or not item.value
    ]
    assert len(lost) <= 10, lost
    assert {item.end for item in held} == {"user_stop", "agent_stop"}
    assert max(map(count_observations, held)) <= 30


@pytest.mark.parametrize("split", ["train", "dev", "test"])
async def test_the_oracle_understands_every_split(split: str):
    held = await hold(domain.tasks(split, 100, seed=9), make_oracle)
    assert sum(item.value for item in held) >= 99


async def test_the_same_seed_gives_the_same_bytes():
    once, again = [await hold(domain.tasks("test", 40), make_oracle, seed=5) for _ in range(2)]
    assert [item.to_json() for item in once] == [item.to_json() for item in again]
    other = await hold(domain.tasks("test", 40), make_oracle, seed=6)
    assert [item.to_json() for item in once] != [item.to_json() for item in other]


@pytest.mark.parametrize("agent", [make_says_done, make_transfers_all])
async def test_naive_agents_earn_next_to_nothing(agent: Any):
    held = await hold(domain.tasks("test", 250), agent)
    assert sum(item.value for item in held) <= 0.05 * len(held)
    transfers = {"transfer_to_human", "find_customer_by_email"}
    writes = [item for item in held if {call.name for call in item.task.expected.calls} - transfers]
    assert len(writes) > 100
    assert not any(item.value for item in writes)


async def test_a_careless_teacher_errs_in_every_family_but_is_right_now_and_then():
    held = await hold(
        domain.tasks("train", 220, levels=(1, 2)),
        lambda task, seed: make_oracle(task, seed, faults=0.25),
        trials=2,
    )
    assert not [item.error for item in held if item.error]
    outcomes = [item.reward.outcome for item in held]
    assert 0.4 < sum(outcomes) / len(held) < 0.85
    assert 0.2 < sum(item.value for item in held) / len(held) < sum(outcomes) / len(held), (
        "fewer keep the policy"
    )
    for family in ("cancel", "change_address", "change_payment", "refund", "return", "forbidden"):
        values = [item.value for item in held if item.task.family == family]
        assert 0 < sum(values) < len(values), family


async def test_customers_tell_only_what_was_asked():
    for item in await hold(domain.tasks("dev", 100, seed=2), make_oracle):
        agenda = item.task.meta["agenda"]
        wishes = [wish for first in agenda["wishes"] for wish in (first, first.get("instead")) if wish]
        facts = [*agenda["facts"].values(), *(fact for wish in wishes for fact in wish["facts"].values())]
        volunteered = " ".join(text for wish in wishes for text in wish["says"])
        question = ""
        for turn in item.turns:
            text = turn.message.content
            if turn.side == "agent" and turn.message.role == "assistant":
                question = text
            for fact in facts if turn.side == "user" else ():
                if fact["value"] and fact["value"] in text and fact["value"] not in volunteered:
                    asked = [other["asked"] for other in facts if other["value"] == fact["value"]]
                    assert any(re.search(pattern, question, re.IGNORECASE) for pattern in asked), (
                        item.id,
                        text,
                    )
