"""A store behind a strict endpoint: one order, an agent that cancels it, and the real client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from endpoint import Answer, Endpoint, calling, completion

from trialogue import Call, Database, Domain, Expected, Record, RolloutSettings, Table, Task, rollout, tool
from trialogue.config import Speaker
from trialogue.score.reward import grade
from trialogue.talk.openai import OpenAIModel
from trialogue.world.domain import STOP, from_list

KEY = "sk-secret-0123456789"


class Order(Record):
    status: str = "pending"


class Orders(Database):
    orders: Table[Order]

    @tool(writes=True)
    def cancel(self, order_id: str) -> Order:
        """Cancel an order."""
        self.orders[order_id].status = "cancelled"
        return self.orders[order_id]


TASK = Task(
    id="t",
    domain="store",
    instructions="Have W1 cancelled.",
    expected=Expected(calls=(Call(name="cancel", arguments={"order_id": "W1"}),)),
)
domain = Domain("store", "Help.", Orders.load({"orders": {"W1": {}}}), from_list("store", [TASK]))


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """The script: an agent that cancels, a user that asks and then stops."""
    last = request["messages"][-1]
    if request["model"] == "user":
        return completion("Please cancel W1." if len(request["messages"]) <= 2 else f"Thank you. {STOP}")
    return (
        completion("It is cancelled.") if last["role"] == "tool" else calling("cancel", '{"order_id": "W1"}')
    )


def find_broken(messages: list[dict[str, Any]]) -> str | None:
    """What a strict endpoint has against a history."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return "a tool result without its call"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return "a call without its result"
        for call in message.get("tool_calls", ()):
            if not re.fullmatch("[A-Za-z0-9_-]{1,64}", call["function"]["name"]):
                return "a tool's name is letters, digits, _ or -"
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                return "arguments are no JSON"
            if not isinstance(arguments, dict):
                return "arguments are no object"
            waiting.append(call["id"])
    return "a call without its result" if waiting else None


class Store(Endpoint):
    """A strict endpoint of the script; requests to the agent's model meet the scheduled faults first."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        self.faults: Iterator[Answer | None] = iter(())

    def answer(self, request: dict[str, Any], asked: int) -> Answer:
        fault = next(self.faults, None) if request["model"] != "user" else None
        broken = find_broken(request["messages"])
        if broken is not None:
            return 400, {"error": {"message": broken}}
        return fault or respond(request)


def make(
    server: Store, side: Any = "agent", name: str = "agent", **settings: Any
) -> tuple[OpenAIModel, list[float]]:
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        waits.append(seconds)

    speaker = Speaker(base_url=server.url, **{"timeout": 5.0, "retries": 3, **settings})
    return OpenAIModel(name, side, speaker, 256, pause=pause), waits


async def hold(server: Store, *faults: Any, **settings: Any) -> tuple[Any, list[float], OpenAIModel]:
    """One conversation whose agent meets faults; returns it, the waits and the agent's model."""
    server.faults = iter(faults)
    agent, waits = make(server, **settings)
    user, _ = make(server, "user", "user")
    try:
        once = RolloutSettings(grade=grade, redraws=0)
        groups = [group async for group in rollout(domain, [TASK], agent, user, once)]
    finally:
        await agent.close()
        await user.close()
    [trajectory] = [*groups[0].trajectories, *groups[0].failed]
    assert KEY not in trajectory.to_json()
    return trajectory, waits, agent
