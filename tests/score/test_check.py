"""`check` finds each planted problem, and nothing in a sound domain."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trialogue.score.cheats import play_cheats
from trialogue.score.check import Checked, check, find_schema_problems, spread
from trialogue.talk.scripted import ScriptedModel
from trialogue.task import Assertion, Call, Expected, Setup, Task
from trialogue.trajectory import Reward
from trialogue.world import policy_rules, policy_speech
from trialogue.world.database import Database, Record, Table
from trialogue.world.domain import Domain, from_list
from trialogue.world.find import find_domain
from trialogue.world.policy_rules import Rule
from trialogue.world.scaffold import write_domain
from trialogue.world.tools import Tool, tool

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_domain(tmp_path / "bakery")
    return tmp_path / "bakery"


def change_task(folder: Path, identity: str, change: Change) -> Domain:
    """The starter with one task changed."""
    path = folder / "tasks.jsonl"
    tasks = [json.loads(line) for line in path.read_text().splitlines()]
    for task in tasks:
        if task["id"] == identity:
            change(task)
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return find_domain(str(folder))


def change_of(change: Change) -> dict[str, Any]:
    """Which parts of a task a change gives it."""
    task: dict[str, Any] = {"expected": {"calls": [{"arguments": {}}]}, "meta": {"agenda": {"wishes": []}}}
    change(task)
    return task


def only_problem(checked: Checked) -> tuple[str, str]:
    assert not checked.ok
    ((task, problem),) = checked.problems
    return task, problem


def test_the_starter_is_sound(folder: Path) -> None:
    checked = check(find_domain(str(folder)))
    told = checked.to_data()
    policy = told.pop("policy")
    assert told == {"domain": "bakery", "tasks": 9, "ok": True, "problems": []}
    assert policy["rules"] == 6
    assert policy["never_exercised"] == []
    assert "Today is Sunday." not in policy["without_rule"]
    assert any(text.startswith("Complaints") for text in policy["without_rule"])
    assert checked.played == 9


def test_split_and_count(folder: Path) -> None:
    domain = find_domain(str(folder))
    assert check(domain, "dev").tasks == 2
    assert check(domain, "train", 1).tasks == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda task: task["expected"].update(
                calls=[{"name": "find_orders", "arguments": {"phone": "555-0101"}}]
            ),
            "doing and saying nothing scores 1; expect a change or something to say",
        ),
        (
            lambda task: task["expected"].update(calls=[]),
            "expected.nothing",
        ),
        (
            lambda task: task["expected"].update(nothing=True),
            "expected.nothing is set, but doing nothing scores 0: database: orders.A101.status",
        ),
        (
            lambda task: task["expected"]["calls"][0]["arguments"].update(order_id="A999"),
            "was refused: Error: orders has no 'A999'",
        ),
        (
            lambda task: task["expected"]["calls"][0].update(name="cancel"),
            "was refused: Error: there is no tool 'cancel'",
        ),
        (
            lambda task: task.update(setup={"data": {"orders": {"A101": {"status": "lost"}}}}),
            "orders.A101.status: Input should be 'placed'",
        ),
        (
            lambda task: task.update(
                setup={"calls": [{"name": "cancel_order", "arguments": {"order_id": "A9"}}]}
            ),
            "orders has no 'A9'",
        ),
        (
            lambda task: task.update(setup={"calls": [{"name": "burn_down"}]}),
            "Desk has no method 'burn_down'",
        ),
        (
            lambda task: task.update(setup={"user_data": {"phone": {}}}),
            "the user has no database",
        ),
        (lambda task: task.update(instructions=" "), "the user's instructions are empty"),
        (
            lambda task: task["meta"]["agenda"].pop("wishes"),
            "the gold agent with the agenda user fails: DomainError: task cancel-1, agenda, wishes",
        ),
        (
            lambda task: task["expected"].update(assertions=[{"name": "is_open"}]),
            "Desk has no method 'is_open'",
        ),
    ],
)
def test_a_planted_problem_of_a_task_is_found(folder: Path, change: Change, expected: str) -> None:
    task, problem = only_problem(check(change_task(folder, "cancel-1", change)))
    assert task == "cancel-1"
    assert expected in problem
    assert problem.startswith("the set-up fails: ") == ("setup" in change_of(change))


class Item(Record):
    count: int = 0


class World(Database):
    items: Table[Item]

    @tool
    def look(self, name: str) -> Item:
        """Look at an item."""
        return self.items[name]

    @tool(writes=True)
    def add(self, name: str) -> Item:
        """Add one."""
        self.items[name].count += 1
        return self.items[name]

    def is_counted(self) -> bool:
        return any(item.count for item in self.items.values())


def make_domain(world: type[Database] = World, **more: Any) -> Domain:
    task = Task(
        id="one",
        domain="made",
        instructions="Add one.",
        expected=Expected(calls=(Call(name="add", arguments={"name": "nail"}),)),
    )
    database = world.load({"items": {"nail": {}}})
    return Domain(
        **{
            "name": "made",
            "policy": "Count.",
            "database": database,
            "tasks": from_list("made", [task]),
            **more,
        }
    )


def test_a_domain_without_agenda_is_not_played() -> None:
    checked = check(make_domain())
    assert checked.ok
    assert checked.played == 0


def test_an_empty_policy() -> None:
    assert only_problem(check(make_domain(policy=" \n"))) == ("", "the policy is empty")


def test_no_tools() -> None:
    class Bare(Database):
        items: Table[Item]

    domain = make_domain(
        Bare,
        tasks=from_list(
            "made", [Task(id="a", domain="made", instructions="x", expected=Expected(nothing=True))]
        ),
    )
    assert only_problem(check(domain)) == ("", "the agent has no tools")


def test_a_read_tool_that_writes_is_found_without_a_gold_call() -> None:
    class Sly(World):
        @tool
        def look(self, name: str) -> Item:
            """Look at an item."""
            self.items[name].count += 1
            return self.items[name]

    task, problem = only_problem(check(make_domain(Sly)))
    assert task == ""
    assert problem == "tool 'look' changed the database but is not marked writes=True"


def test_a_tool_that_changes_the_shared_base_is_found() -> None:
    class Rude(World):
        @tool
        def look(self, name: str) -> int:
            """Look at an item."""

            def spoil(item: Item) -> bool:
                item.count += 5
                return False

            return len(self.items.find(spoil))

    problems = [problem for _, problem in check(make_domain(Rude)).problems]
    assert any("changed what all conversations share" in problem for problem in problems)


def test_a_broken_tool_is_found() -> None:
    class Broken(World):
        @tool
        def look(self, name: str) -> int:
            """Look at an item."""
            return 1 // 0

    _, problem = only_problem(check(make_domain(Broken)))
    assert problem.startswith("tool look breaks on {'name': 'nail'}: ZeroDivisionError")


def test_what_a_tool_raises_is_told_with_its_name_and_line(folder: Path) -> None:
    source = (folder / "domain.py").read_text()
    broken = source.replace('order.status = "cancelled"', 'order.status = {}["cancelled"]')
    (folder / "domain.py").write_text(broken)
    line = next(place for place, text in enumerate(broken.splitlines(), 1) if "{}[" in text)
    problems = check(find_domain(str(folder))).problems
    assert {problem for _, problem in problems} == {
        f"KeyError: 'cancelled' (in cancel_order, domain.py, line {line})"
    }


def test_a_wrong_value_is_told_with_its_field(folder: Path) -> None:
    source = (folder / "domain.py").read_text()
    wrong = source.replace('order.status = "cancelled"', 'Order.model_validate({"quantity": "x"})')
    (folder / "domain.py").write_text(wrong)
    _, problem = check(find_domain(str(folder))).problems[0]
    assert problem.startswith("Order: order_id: Field required (in cancel_order, domain.py, line ")


def test_tasks_that_change_from_call_to_call() -> None:
    asked = 0

    def tasks(split: str, count: int | None = None, seed: int = 0, **_: Any) -> list[Task]:
        nonlocal asked
        asked += 1
        call = Call(name="add", arguments={"name": "nail"})
        return [Task(id=f"t{asked}", domain="made", instructions="x", expected=Expected(calls=(call,)))]

    _, problem = only_problem(check(make_domain(tasks=tasks), "test"))
    assert problem == "the same split, count and seed gave different tasks the second time"


def test_doubled_ids() -> None:
    (task,) = make_domain().tasks("test")
    other = task.model_copy(update={"instructions": "Another."})
    domain = make_domain(tasks=lambda *_, **__: [task, other])
    assert only_problem(check(domain)) == ("", "the task id 'one' stands for more than one task")


def test_no_tasks() -> None:
    assert only_problem(check(make_domain(tasks=lambda *_, **__: []))) == ("", "there are no tasks")


def test_a_reward_that_never_pays_or_always_pays() -> None:
    never = make_domain(reward=lambda *_: Reward(value=0.5, why=("half",)))
    assert "doing and saying nothing scores 0.5" in only_problem(check(never))[1]
    zero = make_domain(reward=lambda *_: Reward(value=0.0, why=("no",)))
    assert only_problem(check(zero)) == ("one", "the gold replay scores 0: no")


def test_a_reward_that_raises() -> None:
    def reward(*_: Any) -> Reward:
        raise KeyError("lost")

    task, problem = only_problem(check(make_domain(reward=reward)))
    assert task == "one"
    assert re.fullmatch(r"KeyError: 'lost' \(in reward, test_check.py, line \d+\)", problem)


def test_a_judge_is_not_asked() -> None:
    async def judge(*_: Any) -> Reward:
        raise AssertionError("never awaited")

    assert check(make_domain(reward=judge)).ok


def test_assertions_without_gold_calls() -> None:
    expected = Expected(assertions=(Assertion(name="is_counted"),))
    task = Task(id="a", domain="made", instructions="Add one.", expected=expected)
    assert check(make_domain(tasks=from_list("made", [task]))).ok
    counted = task.model_copy(update={"setup": Setup(data={"items": {"nail": {"count": 1}}})})
    assert "nothing scores 1" in only_problem(check(make_domain(tasks=from_list("made", [counted]))))[1]


def test_an_oracle_that_loses_is_found() -> None:
    domain = make_domain(
        oracle=lambda task, seed: ScriptedModel(["No."]),
        user=lambda task, seed: ScriptedModel(["Hi.", "Bye. ###STOP###"]),
    )
    task, problem = only_problem(check(domain))
    assert task == "one"
    assert problem.startswith("the oracle with the agenda user loses (user_stop): database: items.nail.count")


GOOD = Tool("look", "Look.", {"type": "object", "properties": {}}, lambda *_: None)


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (replace(GOOD, name="look at"), "a name is 1 to 64 letters"),
        (replace(GOOD, description=""), "no description"),
        (replace(GOOD, parameters={"type": "array"}), "no schema of type object"),
        (replace(GOOD, parameters={"type": "object", "required": ["a"]}), "requires 'a'"),
        (replace(GOOD, parameters={"type": "object", "properties": []}), "`properties` is no object"),
        (
            replace(GOOD, parameters={"type": "object", "properties": {"a": {"type": "text"}}}),
            "tool look, a: there is no type 'text'",
        ),
        (replace(GOOD, parameters={"type": "object", "properties": {"a": {"enum": []}}}), "lists no values"),
        (replace(GOOD, parameters={"type": "object", "properties": {"a": 3}}), "a schema is an object"),
        (
            replace(GOOD, parameters={"type": "object", "properties": {"a": {"$ref": "#/x"}}}),
            "schemas must stand by themselves",
        ),
        (
            replace(GOOD, parameters={"type": "object", "properties": {"a": {"anyOf": [{"type": "x"}]}}}),
            "a, anyOf: there is no type 'x'",
        ),
    ],
)
def test_each_fault_of_a_schema_is_found(tool: Tool, expected: str) -> None:
    assert not list(find_schema_problems(GOOD))
    assert any(expected in problem for problem in find_schema_problems(tool))


def test_spread() -> None:
    (task,) = make_domain().tasks("test")
    tasks = [task.model_copy(update={"id": str(number)}) for number in range(10)]
    assert [item.id for item in spread(tasks, 4)] == ["0", "2", "5", "7"]
    assert len(spread(tasks, 60)) == 10


def test_rules_that_the_honest_agent_breaks_or_nobody_exercises_are_found(folder: Path) -> None:
    domain = find_domain(str(folder))
    policy = "Answer within an hour. Never say cancel. Never cancel on a holiday."
    strict = replace(
        domain,
        policy=policy,
        policy_rules=(
            Rule(
                "say no cancel",
                "Never say cancel.",
                policy_rules.never(policy_speech.recites(0, "cancel", "words")),
            ),
            Rule(
                "no holidays",
                "Never cancel on a holiday.",
                policy_rules.before(policy_rules.calls("close_shop")),
            ),
            Rule("misquoted", "Always sing.", policy_rules.never()),
        ),
    )
    checked = check(strict)
    problems = {problem.problem for problem in checked.problems}
    assert any(
        "rule misquoted quotes what the policy does not say: 'Always sing.'" in text for text in problems
    )
    assert any("breaks say no cancel: it recites 1 words" in text for text in problems)
    assert checked.policy is not None
    assert checked.policy.never_exercised == ["no holidays"]
    assert checked.policy.without_rule == ["Answer within an hour."]


def test_cheats_are_counted_on_any_domain(folder: Path) -> None:
    counts = {one["cheat"]: one for one in play_cheats(find_domain(str(folder)), "all", None)}
    paid = [name for name, one in counts.items() if one["paid_with_rules"]]
    assert paid == ["recites"], "reading out their own records is forbidden by no sentence of this policy"
    assert sum(one["paid_without_rules"] > 0 for one in counts.values()) > 10
