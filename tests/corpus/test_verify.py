"""Verification by program: faults planted into conversations are found, the oracle's own are left alone.

`pytest -s` prints the figures. The conversations are of the test split, people, products and wordings that
are in no other, under a seed that nothing else uses. TRIALOGUE_VERIFY=400 takes more of them.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from trialogue import Message, RolloutSettings, ToolCall, Trajectory, Turn, find_domain, rollout
from trialogue.config import Limits, Speaker
from trialogue.corpus.verify import verify
from trialogue.score.reward import grade
from trialogue.talk.evidence import Evidence
from trialogue.talk.find import find_model
from trialogue.world.speech import PROPOSES

SHOP = find_domain("shop")
COUNT = int(os.environ.get("TRIALOGUE_VERIFY", "80"))


@pytest.fixture(scope="module")
def talks() -> list[Trajectory]:
    agent = find_model(Speaker(model="oracle"), "agent", SHOP, Limits())
    user = find_model(Speaker(model="agenda"), "user", SHOP, Limits())

    async def hold() -> list[Trajectory]:
        groups = rollout(SHOP, SHOP.tasks("test", COUNT, 977), agent, user, RolloutSettings(grade=grade))
        return [item async for group in groups for item in group.trajectories]

    return sorted(asyncio.run(hold()), key=lambda item: item.id)


Plant = Callable[[Trajectory, Random], Trajectory | None]
"""Puts one fault into a conversation; None where there is no room for it."""


def with_turns(trajectory: Trajectory, turns: list[Turn]) -> Trajectory:
    return trajectory.model_copy(update={"turns": tuple(turns)})


def with_message(turn: Turn, **fields: Any) -> Turn:
    return turn.model_copy(update={"message": turn.message.model_copy(update=fields)})


def find_calls(trajectory: Trajectory, writes: bool | None = None) -> list[tuple[int, ToolCall]]:
    tools = SHOP.database.tools
    return [
        (number, call)
        for number, turn in enumerate(trajectory.turns)
        for call in turn.message.tool_calls
        if writes is None or (tools[call.name].writes and not call.name.startswith("find_")) is writes
    ]


def change_argument(trajectory: Trajectory, number: int, name: str, value: Any) -> Trajectory:
    """Another value in a call. The record is left as it is: what the tool answered does not give it away."""
    turns = list(trajectory.turns)
    call = turns[number].message.tool_calls[0]
    assert isinstance(call.arguments, dict)
    changed = call.model_copy(update={"arguments": {**call.arguments, name: value}})
    turns[number] = with_message(turns[number], tool_calls=(changed,))
    return with_turns(trajectory, turns)


def plant_invented_id(trajectory: Trajectory, random: Random) -> Trajectory | None:
    ids = [
        (number, name)
        for number, call in find_calls(trajectory)
        for name in call.arguments
        if name in ("order_id", "customer_id")
    ]
    if not ids:
        return None
    number, name = random.choice(ids)
    return change_argument(
        trajectory, number, name, f"{'WC'[name == 'customer_id']}{random.randrange(10**5, 10**6)}"
    )


def plant_ungrounded_argument(trajectory: Trajectory, random: Random) -> Trajectory | None:
    wrong = {
        "address": "4 Nowhere Crescent",
        "payment_method": "cash on delivery",
        "name": "Quentin Halloway",
        "total": 1234.56,
    }
    found = [
        (number, name) for number, call in find_calls(trajectory) for name in call.arguments if name in wrong
    ]
    if not found:
        return None
    number, name = random.choice(found)
    return change_argument(trajectory, number, name, wrong[name])


def plant_contradiction(trajectory: Trajectory, random: Random) -> Trajectory | None:
    """The agent tells another number, address or status than the tool did, or reports what was refused."""
    turns = list(trajectory.turns)
    choices: list[tuple[int, Turn]] = []
    for number, turn in enumerate(turns):
        text = turn.message.content
        if turn.side != "agent" or turn.message.role != "assistant" or not text:
            continue
        told = [
            (" is ", " is 9"),
            ("status of order", "?"),
            ("has been", "?"),
        ]
        if text.startswith(("The price", "The total")):
            choices.append((number, with_message(turn, content=text.replace(told[0][0], told[0][1]))))
        elif text.startswith("The address of order") and " is " in text:
            before, _, after = text.partition(" is ")
            choices.append(
                (number, with_message(turn, content=f"{before} is 12 Imaginary Way. {after[-14:]}"))
            )
        elif text.startswith("The status of order"):
            before, _, after = text.partition(" is ")
            known = after.split(".")[0]
            other = random.choice(sorted({"pending", "shipped", "delivered", "cancelled"} - {known}))
            choices.append((number, with_message(turn, content=f"{before} is {other}. Anything else?")))
    for number, call in find_calls(trajectory, writes=True):
        if number + 2 < len(turns) and not SHOP.database.tools[call.name].ends:
            refused = with_message(turns[number + 1], content="Error: the system is down")
            choices.append((number + 1, refused.model_copy(update={"failed": True})))
    if not choices:
        return None
    number, turn = random.choice(choices)
    turns[number] = turn
    return with_turns(trajectory, turns)


def plant_missing_confirmation(trajectory: Trajectory, random: Random) -> Trajectory | None:
    """The question and the yes before a write are gone."""
    turns = list(trajectory.turns)
    found = [
        number
        for number, _ in find_calls(trajectory, writes=True)
        if number >= 2 and PROPOSES.search(turns[number - 2].message.content)
    ]
    if not found:
        return None
    number = random.choice(found)
    return with_turns(trajectory, turns[: number - 2] + turns[number:])


def plant_premature_stop(trajectory: Trajectory, random: Random) -> Trajectory | None:
    """The user leaves before anything was settled, or with wishes left."""
    turns = list(trajectory.turns)
    places = [
        number
        for number, turn in enumerate(turns[:-2])
        if turn.side == "agent" and turn.message.role == "assistant" and turn.message.content
    ]
    if not places:
        return None
    place = random.choice(places)
    bye = Turn(side="user", message=Message(role="user", content="Thanks, bye. ###STOP###"))
    return with_turns(trajectory, [*turns[: place + 1], bye]).model_copy(update={"end": "user_stop"})


def plant_repeated_call(trajectory: Trajectory, random: Random) -> Trajectory | None:
    number, call = random.choice(find_calls(trajectory))
    turns = list(trajectory.turns)
    again = call.model_copy(update={"id": "again"})
    repeated = [
        with_message(turns[number], tool_calls=(again,)),
        with_message(turns[number + 1], tool_call_id="again"),
    ]
    return with_turns(trajectory, turns[: number + 2] + repeated + turns[number + 2 :])


def plant_malformed_call(trajectory: Trajectory, random: Random) -> Trajectory | None:
    number, call = random.choice(find_calls(trajectory))
    assert isinstance(call.arguments, dict)
    name = random.choice(list(call.arguments))
    return change_argument(trajectory, number, name, {"value": call.arguments[name]})


PLANTS: dict[str, tuple[Plant, set[str]]] = {
    "invented id": (plant_invented_id, {"invented id"}),
    "ungrounded argument": (plant_ungrounded_argument, {"ungrounded argument", "invented id"}),
    "contradiction": (plant_contradiction, {"contradiction"}),
    "missing confirmation": (plant_missing_confirmation, {"confirmation"}),
    "premature stop": (plant_premature_stop, {"premature stop", "outcome"}),
    "repeated call": (plant_repeated_call, {"repeated call"}),
    "malformed call": (plant_malformed_call, {"schema"}),
}


def test_the_oracle_is_left_alone(talks: list[Trajectory]) -> None:
    found = {item.id: verify(item, SHOP) for item in talks}
    alarms = {identity: flaws for identity, flaws in found.items() if flaws}
    kinds = Counter(flaw.check for flaws in alarms.values() for flaw in flaws)
    print(f"\nfalse alarms: {len(alarms)} of {len(talks)} ({len(alarms) / len(talks):.1%}) {dict(kinds)}")
    assert len(talks) == COUNT
    assert len(alarms) <= 0.02 * len(talks), alarms


@pytest.mark.parametrize("name", PLANTS)
def test_planted_faults_are_found(name: str, talks: list[Trajectory]) -> None:
    plant, expected = PLANTS[name]
    random = Random(name)
    planted = [changed for item in talks if (changed := plant(item, random)) is not None]
    missed = [item for item in planted if not any(flaw.check in expected for flaw in verify(item, SHOP))]
    recall = 1 - len(missed) / len(planted)
    print(f"\n{name}: {recall:.1%} of {len(planted)} found by {', '.join(sorted(expected))}")
    assert len(planted) >= 40
    assert recall >= 0.95, [turn.message.model_dump(exclude_defaults=True) for turn in missed[0].turns]


def test_most_premature_stops_show_in_the_words_alone(talks: list[Trajectory]) -> None:
    """Without the outcome: only a user who leaves between two wishes is not noticed."""
    random = Random(1)
    planted = [changed for item in talks if (changed := plant_premature_stop(item, random)) is not None]
    seen = [item for item in planted if any(found.check == "premature stop" for found in verify(item, SHOP))]
    print(f"\npremature stop, by the words alone: {len(seen) / len(planted):.1%} of {len(planted)}")
    assert len(seen) >= 0.6 * len(planted)


def test_values_are_looked_up_as_people_write_them() -> None:
    evidence = Evidence()
    evidence.add_text("I'm Mira Olsen (mira.olsen@mail.net), order #W-1234, two lamps for 1,250.50 in total.")
    for known in ("mira.olsen@mail.net", "Mira Olsen", "W-1234", 1250.5, 2, "1250.50", "mira olsen"):
        assert evidence.holds(known), known
    for unknown in ("mira@mail.com", "Mira Jensen", "W-1235", 1250.51, "250"):
        assert not evidence.holds(unknown), unknown
    assert evidence.find_unknown_values("1. The total of W-1234 is 1,250.50.") == []
    assert evidence.find_unknown_values("The total of W-9999 is 99.") == ["W-9999", "99"]
