# pyright: reportUnknownMemberType=false
"""Measure how time and memory grow with conversations, turns, records and concurrency.

Draws docs/images/growth.png. Times are CPU seconds of one core. The slope of log time over log size shows the
growth: 1 is linear.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path
from statistics import median

from speed.measure import ROOT, Figure, Options, alone
from speed.world import Store, make_domain, write_three
from trialogue import Call, Domain, Expected, Task
from trialogue.config import Limits
from trialogue.score.reward import grade
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.world.domain import from_list

PICTURE = ROOT / "docs" / "images" / "growth.png"


async def hold(domain: Domain, tasks: list[Task], count: int, turns: int, concurrency: int) -> None:
    """Conversations with a number of turns: lookups, then the order is cancelled."""

    def agent(task: Task, seed: int) -> ScriptedModel:
        order = "W" + task.id[1:]
        lookups = [call("get_order", order_id=order)] * max(0, (turns - 5) // 2)
        cancel = call("cancel_order", order_id=order, reason="late")
        return ScriptedModel([*lookups, cancel, "Cancelled.", "Bye."])

    def user(task: Task, seed: int) -> ScriptedModel:
        return ScriptedModel(["Cancel my order.", "###STOP###"])

    limits = Limits(observations=turns + 8)
    chosen = tasks[: min(count, len(tasks))]
    size = -(-count // len(chosen))
    groups = rollout(
        domain,
        chosen,
        agent,
        user,
        RolloutSettings(group_size=size, concurrency=concurrency, limits=limits, grade=grade),
    )
    async for group in groups:
        assert all(item.value == 1 for item in group.trajectories)


def make_large(records: int) -> tuple[Domain, Task]:
    line = {"product": "P1", "price": 1.5}
    orders = {
        f"W{number}": {"customer": f"C{number // 4}", "address": {"city": "London"}, "lines": [line]}
        for number in range(records)
    }
    expected = Expected(calls=(Call(name="cancel_order", arguments={"order_id": "W1", "reason": "late"}),))
    task = Task(id="t0", domain="store", instructions="", expected=expected)
    database = Store.load({"orders": orders})
    return Domain("store", "Help.", database, from_list("store", [task])), task


def time_it(action: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    action()
    return time.process_time() - started


def time_records(records: int) -> float:
    """Open, write and digest a thousand environments over a database with a number of records."""
    domain, task = make_large(records)
    write_three(domain.open(task)).digest()  # computes the digest of the shared base

    def use() -> None:
        for _ in range(1000):
            write_three(domain.open(task)).digest()

    return time_it(use)


def find_slope(points: list[tuple[int, float]]) -> float:
    """Fit log time over log size by least squares, without the smallest sizes, where constant costs
    dominate."""
    upper = [(log(size), log(seconds)) for size, seconds in points[len(points) // 2 - 1 :]]
    middle = sum(x for x, _ in upper) / len(upper), sum(y for _, y in upper) / len(upper)
    across = sum((x - middle[0]) * (y - middle[1]) for x, y in upper)
    return across / sum((x - middle[0]) ** 2 for x, _ in upper)


def measure(options: Options) -> Iterator[Figure]:
    domain, tasks = make_domain()

    def talk(count: int, turns: int, concurrency: int) -> float:
        return time_it(lambda: asyncio.run(hold(domain, tasks, count, turns, concurrency)))

    talk(50, 10, 16)  # warms up
    small = options.quick
    sizes = {
        "conversations": (50, 100, 200) if small else (100, 1000, 10_000, 100_000),
        "turns": (5, 10, 20) if small else (5, 10, 20, 50, 100),
        "records": (100, 1000, 10_000) if small else (1000, 10_000, 100_000, 1_000_000),
        "concurrency": (1, 4, 16) if small else (1, 4, 16, 64, 256, 1024, 4096),
    }
    count = 100 if small else 4096
    work: dict[str, Callable[[int], float]] = {
        "conversations": lambda size: talk(size, 10, 256),
        "turns": lambda size: talk(count // 8, size, 64),
        "records": time_records,
        "concurrency": lambda size: talk(count, 10, size),
    }
    rounds: list[dict[str, list[tuple[int, float]]]] = []
    for _ in range(options.repetitions):
        rounds.append({name: [(size, work[name](size)) for size in sizes[name]] for name in work})
        curves = {name: find_middle([curve[name] for curve in rounds]) for name in work}
        if not small:
            draw(curves, PICTURE)
        for name, points in curves.items():
            first, last = points[0], points[-1]
            limit = 1.0 if name in ("conversations", "turns") else 0.0
            yield alone(
                f"growth with {name}, {first[0]:,} → {last[0]:,}",
                "slope",
                [find_slope(curve[name]) for curve in rounds],
                bound=limit,
                bounded_by="linear" if limit else "constant: the same work",
                note=f"{first[1]:.3g} → {last[1]:.3g} s CPU",
            )


def find_middle(curves: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The median at each size."""
    return [(points[0][0], median(seconds for _, seconds in points)) for points in zip(*curves, strict=True)]


def draw(curves: dict[str, list[tuple[int, float]]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 4, figsize=(13, 3.2), dpi=110)
    for axes, (name, points) in zip(panels, curves.items(), strict=True):
        axes.loglog(*zip(*points, strict=True), marker="o", color="#1f5f8b")
        linear = name in ("conversations", "turns")
        first = points[-1]
        line = [first[1] * (size / first[0] if linear else 1) for size, _ in points]
        axes.loglog([size for size, _ in points], line, linestyle=":", color="#888888")
        axes.set(xlabel=name, title=f"slope {find_slope(points):.2f}")
        if not linear:
            axes.set_ylim(first[1] / 10, first[1] * 10)  # a constant must look constant
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("CPU seconds")
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
