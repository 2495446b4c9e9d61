"""The teacher: it solves the tasks of any domain with nothing but what it was told and looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trialogue import (
    Call,
    ConfigError,
    Database,
    Domain,
    Expected,
    Record,
    Reply,
    RolloutSettings,
    Rule,
    Table,
    Task,
    Tool,
    ToolCall,
    Trajectory,
    Turn,
    find_domain,
    find_model,
    rollout,
    tool,
)
from trialogue.corpus.verify import verify
from trialogue.score.check import play_teacher
from trialogue.score.compliance import RuleUsage
from trialogue.score.reward import grade
from trialogue.talk.evidence import find_ungrounded
from trialogue.talk.teacher.knowledge import Knowledge
from trialogue.talk.teacher.teacher import make_teacher
from trialogue.talk.teacher.words import list_names, sample, to_participle
from trialogue.world.domain import from_list
from trialogue.world.events import Event, Events
from trialogue.world.scaffold import write_domain

EXAMPLES = Path(__file__).parents[2] / "examples"
DOMAINS = Path(__file__).parents[1] / "domains"
LOOKS = ("find_", "get_", "list_")


async def hold(domain: Domain, tasks: list[Task], seed: int = 0) -> list[Trajectory]:
    """One conversation of the teacher for each task, failed ones included."""
    settings = RolloutSettings(grade=grade, redraws=0, seed=seed)
    agent, other = find_model("teacher", "agent", domain), find_model("agenda", "user", domain)
    return [
        item async for group in rollout(domain, tasks, agent, other, settings) for item in group.everything
    ]


@pytest.fixture(scope="module")
def starters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Domain]:
    folder = tmp_path_factory.mktemp("starters")
    write_domain(folder / "bakery")
    write_domain(folder / "pastry", generated=True)
    names = [folder / "bakery", folder / "pastry", EXAMPLES / "library", EXAMPLES / "car_rental"]
    names += [DOMAINS / "bank_card", DOMAINS / "telecom"]
    endless = {"endless library": find_domain(str(EXAMPLES / "library" / "generated.py"))}
    return {path.name: find_domain(str(path)) for path in names} | endless | {"shop": find_domain("shop")}


def choose(domain: Domain) -> list[Task]:
    if not domain.endless:
        return domain.tasks("all")
    return [task for split in ("train", "dev", "test") for task in domain.tasks(split, 20, 5)]


@pytest.mark.parametrize(
    "name", ["bakery", "pastry", "library", "car_rental", "bank_card", "telecom", "endless library", "shop"]
)
async def test_every_task_is_solved_and_nothing_is_made_up(name: str, starters: dict[str, Domain]) -> None:
    domain = starters[name]
    held = await hold(domain, choose(domain))
    lost = {
        item.task.id: item.error or item.reward for item in held if not item.reward or item.reward.value < 1
    }
    assert lost == {}
    assert {item.task.id: verify(item, domain) for item in held if verify(item, domain)} == {}
    assert [found for item in held for found in find_ungrounded(item.turns, domain.open(item.task), ())] == []


def say_what(item: Trajectory) -> list[str]:
    return [
        turn.message.content
        for turn in item.turns
        if turn.side == "agent" and turn.message.role == "assistant" and turn.message.content
    ]


async def test_the_seed_draws_the_words_and_nothing_is_said_twice(starters: dict[str, Domain]) -> None:
    domain = starters["shop"]
    tasks = domain.tasks("train", 25, 2)
    first, again, other = [await hold(domain, tasks, seed) for seed in (0, 0, 1)]
    assert [item.to_json() for item in first] == [item.to_json() for item in again]
    assert [say_what(item) for item in first] != [say_what(item) for item in other]
    for item in first:
        said = say_what(item)
        assert len(said) == len(set(said))
    openings = {say_what(item)[0].split("?")[0] for item in [*first, *other]}
    assert len(openings) >= 8


async def test_it_identifies_looks_up_and_asks_with_the_values_before_it_writes(
    starters: dict[str, Domain],
) -> None:
    checked = 0
    for name in ("bakery", "car_rental", "shop"):
        domain = starters[name]
        for item in await hold(domain, choose(domain)[:20]):
            seen, said = "", ""
            for turn in item.turns:
                if turn.side != "agent":
                    continue
                if turn.message.role == "tool":
                    seen += turn.message.content
                elif turn.message.content:
                    said = turn.message.content
                for call in turn.message.tool_calls:
                    tool_called = domain.database.tools[call.name]
                    if not tool_called.writes or tool_called.ends or call.name.startswith(LOOKS):
                        continue
                    assert isinstance(call.arguments, dict)
                    (key,) = [value for value in call.arguments.values() if str(value) in seen][:1]
                    assert said.endswith("?")
                    assert str(key) in said or str(key[0]) in said, said
                    checked += 1
    assert checked > 20


async def test_a_value_that_nobody_says_is_named(starters: dict[str, Domain]) -> None:
    task = next(task for task in starters["bakery"].tasks("all") if task.id == "cancel-1")
    wrong = task.model_copy(
        update={"expected": Expected(calls=(Call(name="cancel_order", arguments={"order_id": "A999"}),))}
    )
    (item,) = await hold(starters["bakery"], [wrong])
    assert item.reward is None
    assert "nobody could know order_id = 'A999' of cancel_order" in str(item.error)


class Lesson(Record):
    lesson_id: str
    name: str
    places: int


class Gym(Database):
    lessons: Table[Lesson]
    booked: list[str]

    @tool
    def find_lesson(self, name: str) -> Lesson:
        """Look a lesson up by its name."""
        return next(iter(self.lessons.where(name=name)))

    @tool(writes=True)
    def book_lesson(self, lesson_id: str) -> str:
        """Book a lesson."""
        self.booked.append(lesson_id)
        return "booked"


def make_gym(says: str, facts: dict[str, Any]) -> Domain:
    """A gym with one task: to refuse a lesson that is full."""
    lessons = {
        "G1": {"lesson_id": "G1", "name": "yoga", "places": 3},
        "G2": {"lesson_id": "G2", "name": "boxing", "places": 0},
    }
    agenda = {"wishes": [{"says": [says], "done": "book", "facts": facts}]}
    expected = Expected(say=(("cannot", "can't", "unable", "not possible"), "full"))
    task = Task(id="full", domain="gym", instructions=says, expected=expected, meta={"agenda": agenda})
    return Domain(
        name="gym",
        policy="Look a lesson up first.\nA full lesson cannot be booked.",
        database=Gym.load({"lessons": lessons, "booked": []}),
        tasks=from_list("gym", [task]),
    )


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_reason_is_looked_up_before_it_is_said(is_asked: bool) -> None:
    facts = {"lesson": {"value": "boxing", "asked": "which lesson"}} if is_asked else {}
    domain = make_gym("I want to book something." if is_asked else "I want to book boxing.", facts)
    (item,) = await hold(domain, domain.tasks("all"))
    assert item.value == 1, item.error
    turns = [turn.message for turn in item.turns if turn.side == "agent"]
    looked = next(place for place, message in enumerate(turns) if message.role == "tool")
    assert '"places":0' in turns[looked].content
    assert next(place for place, message in enumerate(turns) if "full" in message.content) > looked


async def test_a_reason_that_nothing_leads_to_is_not_said_and_check_lists_it() -> None:
    domain = make_gym("I want to book something.", {})
    (item,) = await hold(domain, domain.tasks("all"))
    assert item.reward is None
    assert not any("full" in text for text in say_what(item))
    assert "nothing leads to a record that says why: full" in str(item.error)
    problems = (await play_teacher(domain, domain.tasks("all"), 0, RuleUsage())).unknowable
    assert [found.task for found in problems if "nothing leads to" in found.problem] == ["full"]


async def test_what_the_user_forgot_is_asked_for_once_and_then_looked_for(
    starters: dict[str, Domain],
) -> None:
    domain = starters["shop"]
    tasks = domain.tasks("train", 10, 1, families=["forgetful"])
    for item in await hold(domain, tasks):
        asked = [text for text in say_what(item) if "order" in text and text.endswith(("?", "."))]
        calls = [call.name for turn in item.turns for call in turn.message.tool_calls]
        assert item.value == 1
        assert asked
        assert "get_order" in calls


class Line(Database):
    blocked: bool

    @tool(writes=True)
    def unblock(self) -> str:
        """Unblock the customer's line."""
        self.blocked = False
        return "unblocked"


class Phone(Database):
    airplane_mode: bool

    @tool(writes=True)
    def set_airplane_mode(self, on: bool) -> str:
        """Switch airplane mode."""
        self.airplane_mode = on
        return "on" if on else "off"


async def test_what_the_user_forgot_is_asked_for_and_a_look_up_that_a_rule_wants_is_made(
    starters: dict[str, Domain],
) -> None:
    domain = starters["bank_card"]
    (item, *_) = await hold(domain, domain.tasks("test", 1, 3, families=("forgetful",)))
    said = " ".join(turn.message.content for turn in item.turns if turn.message.role == "user")
    assert "don't" in said  # it asked for the date of birth first, like of everybody
    called = [call.name for turn in item.turns for call in turn.message.tool_calls]
    assert called[:2] == [
        "get_customer",
        "list_cards",
    ]  # the cards need the number alone, the rule the customer


async def test_a_user_with_tools_is_asked_to_use_them() -> None:
    calls = (
        Call(name="unblock"),
        Call(name="set_airplane_mode", arguments={"on": False}, side="user"),
    )
    task = Task(id="signal", domain="line", instructions="No signal.", expected=Expected(calls=calls))
    domain = Domain(
        name="line",
        policy="Find out why the phone has no signal.",
        database=Line.load({"blocked": True}),
        user_database=Phone.load({"airplane_mode": True}),
        tasks=from_list("line", [task]),
    )

    class Owner:
        """Switches what the agent asks to be switched, agrees, and leaves after a report."""

        async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
            last = turns[-1].message
            if last.role == "user" and re.search(
                "(?:turn|switch) (?:off )?airplane mode(?: off)?", last.content
            ):
                call = ToolCall(id="call", name="set_airplane_mode", arguments={"on": False})
                return Reply(tool_calls=(call,))
            if last.role == "tool":
                return Reply(f"It is {last.content}.")
            if len(turns) == 1:
                return Reply("I have no signal.")
            return Reply("Yes, please." if last.content.endswith("?") else "Thanks. ###STOP###")

    agent = find_model("teacher", "agent", domain)
    settings = RolloutSettings(grade=grade, redraws=0)
    groups = [group async for group in rollout(domain, [task], agent, lambda task, seed: Owner(), settings)]
    (item,) = groups[0].everything
    assert item.value == 1
    assert any("airplane mode off" in text or "off airplane mode" in text for text in say_what(item))


def test_it_plays_the_agent_only(starters: dict[str, Domain]) -> None:
    with pytest.raises(ConfigError, match="teacher plays the agent"):
        find_model("teacher", "user", starters["shop"])


# -- its parts ---------------------------------------------------------------------------------------------


def test_names_for_a_question_come_from_what_the_user_listens_for() -> None:
    assert sample("order (?:number|id)|which order") == ("order number", "order id", "which order")
    assert sample(r"(?<!mail )\baddress|\bwhere .*(?:deliver|ship)")[0] == "address"
    assert sample("(") == ()
    good, odd = list_names("order_id", r"\border (?:number|id)|\bwhere is it|order_id")
    assert good[0] == "order number"
    assert "where is it" in odd
    assert [to_participle(verb) for verb in ("move", "apply", "extend", "send")] == [
        "moved",
        "applied",
        "extended",
        "sent",
    ]


def test_a_value_is_determined_by_what_the_user_said_of_its_record(starters: dict[str, Domain]) -> None:
    bakery = starters["bakery"]
    task = bakery.tasks("all")[0]
    knowledge = Knowledge(bakery.open(task))
    knowledge.hear("It is about my plum cake.")
    knowledge.see('[{"order_id": "A1", "item": "plum cake"}, {"order_id": "A2", "item": "bagels"}]')
    assert knowledge.is_determined("A1")
    assert not knowledge.is_determined("A2")
    assert not knowledge.is_determined("A3")
    alone = Knowledge(bakery.open(task))
    alone.see('{"customer_id": "C1", "order_ids": ["A1", "A2"]}')
    assert alone.is_determined("C1")
    assert not alone.is_determined("A1")
    alone.see('{"order_id": "A1", "item": "plum cake"}')
    assert not alone.is_determined("A1")  # the only one looked up is not the only one there is
    alone.hear("the plum cake")
    assert alone.is_determined("A1")


async def test_a_plain_teacher_says_one_thing_in_one_way(starters: dict[str, Domain]) -> None:
    domain = starters["car_rental"]
    tasks = domain.tasks("train", 30, 3)
    settings = RolloutSettings(grade=grade, redraws=0)
    openings: list[set[str]] = []
    for plain in (False, True):
        groups = rollout(
            domain, tasks, make_teacher(domain, plain), find_model("agenda", "user", domain), settings
        )
        held = [item async for group in groups for item in group.everything]
        assert all(item.is_success for item in held)
        openings.append({say_what(item)[0] for item in held})
    assert len(openings[0]) > 5
    assert len(openings[1]) == 1


async def test_a_mistake_in_a_rule_is_the_authors_and_is_raised(starters: dict[str, Domain]) -> None:
    def broken(events: Events) -> Iterator[tuple[Event, str]]:
        yield events.said[0], "" if len(events.said) < 2 else str(events.nothing)  # type: ignore[attr-defined]

    domain = replace(starters["bakery"], policy_rules=(Rule("mine", "", broken),))
    with pytest.raises(ConfigError, match=r"policy rule 'mine': AttributeError: .*test_teacher.py, line"):
        await hold(domain, domain.tasks("train", 1))
