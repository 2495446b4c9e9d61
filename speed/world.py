"""Cost of the environment and of a conversation: python speed/world.py [--json]

The database has 10,000 records. Times are CPU time of one core, best of several rounds, so that other work on
the machine has little influence.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable

from trialogue import Call, Database, Domain, Environment, Expected, Record, Table, Task, tool
from trialogue.score.reward import grade
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.world.domain import from_list

RECORDS = 10_000
CONVERSATIONS = 2_000
CONCURRENCY = 256
TARGETS = {
    "open an environment, µs": ("at most", 30),
    "digest after 3 writes, µs": ("at most", 100),
    "one open environment after 3 writes, KB": ("at most", 20),
    "ten-turn conversations per second": ("at least", 1000),
}


class Line(Record):
    product: str
    price: float


class Order(Record):
    customer: str
    status: str = "pending"
    address: dict[str, str]
    lines: list[Line]


class Store(Database):
    orders: Table[Order]

    @tool
    def get_order(self, order_id: str) -> Order:
        """Look an order up."""
        return self.orders[order_id]

    @tool
    def find_orders(self, customer: str) -> list[Order]:
        """Look up the orders of a customer."""
        return self.orders.where(customer=customer)

    @tool(writes=True)
    def cancel_order(self, order_id: str, reason: str) -> Order:
        """Cancel an order."""
        order = self.orders[order_id]
        order.status = f"cancelled: {reason}"
        return order


def make_domain() -> tuple[Domain, list[Task]]:
    orders = {
        f"W{number}": {
            "customer": f"C{number // 4}",
            "address": {"street": f"{number} High Street", "city": "London", "postcode": f"N{number % 20}"},
            "lines": [
                {"product": f"P{item}", "price": item + 0.5} for item in range(number % 3, number % 3 + 3)
            ],
        }
        for number in range(RECORDS)
    }
    tasks = [
        Task(
            id=f"t{number}",
            domain="store",
            instructions="Have the order cancelled.",
            expected=Expected(
                calls=(Call(name="cancel_order", arguments={"order_id": f"W{number}", "reason": "late"}),)
            ),
        )
        for number in range(200)
    ]
    database = Store.load({"orders": orders})
    return Domain("store", "Help with orders.", database, from_list("store", tasks)), tasks


def best(action: Callable[[], object], times: int, rounds: int = 7) -> float:
    """CPU microseconds of one action in the best round."""
    found: list[float] = []
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(times):
            action()
        found.append((time.process_time() - started) / times)
    return min(found) * 1e6


def write_three(environment: Environment) -> Environment:
    for number in range(3):
        environment.call("cancel_order", {"order_id": f"W{number}", "reason": "late"})
    return environment


def measure_memory(domain: Domain, task: Task, count: int = 1000) -> float:
    """KB of Python memory per open environment, for many that have each written 3 records."""
    write_three(domain.open(task))  # caches of the domain
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [write_three(domain.open(task)) for _ in range(count)]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / len(kept) / 1024


def measure_conversations(domain: Domain, tasks: list[Task], rounds: int = 3) -> tuple[float, float]:
    """Conversations per CPU second, sampled and graded, and the turns of one of them."""

    def agent(task: Task, seed: int) -> ScriptedModel:
        order = "W" + task.id[1:]
        cancel = call("cancel_order", order_id=order, reason="late")
        return ScriptedModel(
            ["Which order?", call("get_order", order_id=order), cancel, "Cancelled.", "Bye."]
        )

    def user(task: Task, seed: int) -> ScriptedModel:
        return ScriptedModel(["Cancel my order.", "W" + task.id[1:], "Thanks.", "###STOP###"])

    async def hold() -> list[int]:
        size = CONVERSATIONS // len(tasks)
        groups = rollout(
            domain, tasks, agent, user, RolloutSettings(group_size=size, concurrency=CONCURRENCY, grade=grade)
        )
        held = [item async for group in groups for item in group.trajectories]
        assert all(item.value == 1 for item in held)
        return [len(item.turns) for item in held]

    speeds: list[float] = []
    turns: list[int] = []
    for _ in range(rounds):
        started = time.process_time()
        turns = asyncio.run(hold())
        speeds.append(len(turns) / (time.process_time() - started))
    return max(speeds), sum(turns) / len(turns)


def measure() -> dict[str, float]:
    domain, tasks = make_domain()
    task = tasks[0]
    environment = domain.open(task)
    written = write_three(domain.open(task))
    written.digest()  # computes the digest of the shared base
    written.call("find_orders", {"customer": "C1"})  # and its index
    numbers = iter(range(10**9))

    def write() -> object:
        order = f"W{next(numbers) % RECORDS}"
        return environment.call("cancel_order", {"order_id": order, "reason": "late"})

    speed, turns = measure_conversations(domain, tasks)
    return {
        "open an environment, µs": best(lambda: domain.open(task), 5000),
        "read tool call, µs": best(lambda: written.call("get_order", {"order_id": "W9"}), 2000),
        "lookup by field tool call, µs": best(lambda: written.call("find_orders", {"customer": "C9"}), 1000),
        "write tool call, µs": best(write, 2000),
        "digest after 3 writes, µs": best(written.digest, 2000),
        "difference after 3 writes, µs": best(written.difference, 2000),
        "one open environment after 3 writes, KB": measure_memory(domain, task),
        "ten-turn conversations per second": speed,
        "turns in each of them": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the world and the conversation cost.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object only")
    figures = (
        {name: round(value, 2) for name, value in measure().items()} if parser.parse_args().json else None
    )
    if figures is not None:
        print(json.dumps(figures, ensure_ascii=False))
        return
    print(f"database of {RECORDS:,} records, {CONCURRENCY} conversations at once")
    for name, value in measure().items():
        word, bound = TARGETS.get(name, ("", 0))
        target = f"target: {word} {bound:,}" if word else ""
        print(f"{name:<42}{value:>10,.1f}   {target}")


if __name__ == "__main__":
    main()
