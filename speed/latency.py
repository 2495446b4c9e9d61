"""256 conversations with a user who takes 200 ms, now and then seconds, to answer.

Nothing can be faster than the conversation whose own user takes longest in all: the critical path. One user
call after the other, as a loop over tools does, takes the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from time import perf_counter

from speed.measure import Figure, Options, compare
from speed.world import make_domain
from trialogue.score.reward import grade
from trialogue.talk.rollout import rollout
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.tools import Tool

TYPICAL, SPREAD = 0.2, 0.8  # seconds; log-normal, one in fifty takes more than a second


class SlowUser:
    """Says what a scripted user says, after a while."""

    def __init__(self, script: ScriptedModel, chance: Random, pace: float) -> None:
        self.script, self.chance, self.pace, self.waited = script, chance, pace, 0.0

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        seconds = TYPICAL * self.pace * self.chance.lognormvariate(0.0, SPREAD)
        self.waited += seconds
        await asyncio.sleep(seconds)
        return await self.script.reply(turns, tools)


async def hold(conversations: int, seed: int, pace: float) -> tuple[float, float, float]:
    """Seconds taken, seconds of the critical path, and of all users' answers one after the other."""
    domain, tasks = make_domain()
    users: list[SlowUser] = []

    def agent(task: Task, seed: int) -> ScriptedModel:
        order = "W" + task.id[1:]
        cancel = call("cancel_order", order_id=order, reason="late")
        return ScriptedModel(["Which?", call("get_order", order_id=order), cancel, "Cancelled.", "Bye."])

    def user(task: Task, number: int) -> SlowUser:
        script = ScriptedModel(["Cancel my order.", "W" + task.id[1:], "Thanks.", "###STOP###"])
        users.append(SlowUser(script, Random(f"{seed}/{len(users)}"), pace))
        return users[-1]

    chosen = [tasks[number % len(tasks)] for number in range(min(conversations, len(tasks)))]
    size = -(-conversations // len(chosen))
    started = perf_counter()
    groups = rollout(
        domain, chosen, agent, user, group_size=size, concurrency=conversations, grade=grade, redraws=0
    )
    held = [item async for group in groups for item in group.trajectories]
    seconds = perf_counter() - started
    assert len(held) == len(users)
    assert all(item.value == 1 for item in held)
    return seconds, max(user.waited for user in users), sum(user.waited for user in users)


def measure(options: Options) -> list[Figure]:
    conversations, pace = (16, 0.1) if options.quick else (256, 1.0)
    found = [asyncio.run(hold(conversations, seed, pace)) for seed in range(options.repetitions)]
    name = f"{conversations} conversations, user latency {TYPICAL * pace * 1000:.0f} ms with a long tail"
    critical = sum(path for _, path, _ in found) / len(found)
    return [
        compare(
            name,
            "s",
            [(seconds, path) for seconds, path, _ in found],
            "critical path (1 is the bound)",
            bound=critical,
            bounded_by="the conversation whose user takes longest",
        ),
        compare(
            name,
            "s",
            [(seconds, every) for seconds, _, every in found],
            "one user call after the other (sum of the waits)",
            bound=critical,
            bounded_by="the conversation whose user takes longest",
        ),
    ]
