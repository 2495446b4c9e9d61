"""The gold parties: what a task expects is done by both sides in its order, and said before the end."""

from __future__ import annotations

from typing import Any

import pytest

from trialogue import Call, Database, Domain, Expected, RolloutSettings, Task, ToolError, rollout, tool
from trialogue.config import Limits, Speaker
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.world.domain import from_list


class Desk(Database):
    steps: list[str]

    @tool(writes=True)
    def note(self, text: str) -> str:
        """Note something."""
        if text == "refused":
            raise ToolError("no")
        self.steps.append(text)
        return "noted"

    @tool(writes=True, ends=True)
    def leave(self) -> str:
        """End it."""
        self.steps.append("left")
        return "bye"


class Phone(Database):
    pressed: list[str]

    @tool(writes=True)
    def press(self, key: str) -> str:
        """Press a key."""
        self.pressed.append(key)
        return "ok"


def order(desk: Desk, phone: Phone) -> None:
    """Each side leaves its mark with the other, so that the order shows."""
    seen = len(desk.steps)
    phone.pressed[:] = [key if ":" in key else f"{seen}:{key}" for key in phone.pressed]


NOTE = {name: Call(name="note", arguments={"text": name}) for name in "abc"}
PRESS = {key: Call(name="press", arguments={"key": key}, side="user") for key in "xy"}
LEAVE = Call(name="leave")
CASES: dict[str, tuple[tuple[Call, ...], tuple[str, ...]]] = {
    "agent": ((NOTE["a"], NOTE["b"]), ("42",)),
    "agent first": ((NOTE["a"], PRESS["x"], NOTE["b"], NOTE["c"], PRESS["y"]), ("42",)),
    "user first": ((PRESS["x"], NOTE["a"], PRESS["y"], NOTE["b"]), ()),
    "user alone": ((PRESS["x"], PRESS["y"]), ("42",)),
    "said before the end": ((NOTE["a"], LEAVE), ("42",)),
    "only said and ended": ((LEAVE,), ("42",)),
    "ended by the agent after the user": ((NOTE["a"], PRESS["x"], LEAVE), ("42",)),
    "nothing but words": ((), ("42",)),
}


@pytest.mark.parametrize("name", CASES)
async def test_both_sides_do_their_part(name: str) -> None:
    calls, say = CASES[name]
    task = Task(id="t", domain="desk", instructions="Go.", expected=Expected(calls=calls, say=say))
    domain = Domain(
        "desk",
        "Help.",
        Desk.load({"steps": []}),
        from_list("desk", [task]),
        user_database=Phone.load({"pressed": []}),
        after_call=order,
    )
    gold: Any = {
        side: find_model(Speaker(model="gold"), side, domain, Limits()) for side in ("agent", "user")
    }
    [group] = [
        item
        async for item in rollout(domain, [task], gold["agent"], gold["user"], RolloutSettings(grade=grade))
    ]
    assert group.failed == ()
    [held] = group.trajectories
    assert held.value == 1.0, held.reward
    assert held.end == ("agent_stop" if LEAVE in calls else "user_stop")
    made = [(call.name, call.arguments) for turn in held.turns for call in turn.message.tool_calls]
    assert made == [(call.name, call.arguments) for call in calls]


async def test_a_refused_gold_call_is_told_unless_the_domain_has_a_rule_of_its_own() -> None:
    calls = (Call(name="note", arguments={"text": "refused"}),)
    task = Task(id="t", domain="desk", instructions="Go.", expected=Expected(calls=calls))
    domain = Domain("desk", "Help.", Desk.load({"steps": []}), from_list("desk", [task]))
    gold: Any = find_model(Speaker(model="gold"), "agent", domain, Limits())
    user: Any = find_model(Speaker(model="gold"), "user", domain, Limits())
    [group] = [
        item async for item in rollout(domain, [task], gold, user, RolloutSettings(grade=grade, redraws=0))
    ]
    assert "a gold call was refused: Error: no" in str(group.failed[0].error)
