"""Gold replays of TAU2, TAU-bench and BFCL per second, and memory: python speed/benchmarks.py --data DIR

An episode opens a task's environment, makes its gold calls and grades the result. Times are CPU time of one
core, best of several rounds. Memory is that of a thousand environments after their gold calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from trialogue.benchmarks import bfcl
from trialogue.benchmarks.bfcl.grade import find_fault, to_step
from trialogue.benchmarks.bfcl.package import CATEGORIES
from trialogue.benchmarks.tau import tau1, tau2
from trialogue.errors import ConfigError
from trialogue.messages import Message, ToolCall
from trialogue.score.reward import grade
from trialogue.task import Task
from trialogue.trajectory import Trajectory, Turn

DOMAINS: dict[str, Callable[[str | None], Any]] = {
    "tau2:retail": lambda data: tau2.find("retail@v0.2", data),
    "tau2:airline": lambda data: tau2.find("airline@v0.2", data),
    "tau2:telecom": lambda data: tau2.find("telecom", data),
    "tau:retail": lambda data: tau1.find("retail", data),
    "tau:airline": lambda data: tau1.find("airline", data),
}
OFFICIAL = {
    "tau2:retail": 1.46,
    "tau2:airline": 0.59,
    "tau2:telecom": 17.0,
    "tau:retail": 2.8,
    "tau:airline": 1.3,
}
"""Episodes per second of the benchmarks' own code on a comparable core."""


def to_trajectory(task: Task) -> Trajectory:
    """A conversation in which all gold calls are made and all expected words are said."""
    turns = [
        Turn(side="agent", message=Message(role="assistant", content=". ".join(map(str, task.expected.say))))
    ]
    for number, call in enumerate(task.expected.calls):
        made = ToolCall(id=str(number), name=call.name, arguments=call.arguments)
        role = "assistant" if call.side == "agent" else "user"
        turns.append(Turn(side=call.side, message=Message(role=role, tool_calls=(made,))))
    return Trajectory(id=task.id, task=task, turns=tuple(turns), end="user_stop")


def play(domain: Any, task: Task, trajectory: Trajectory) -> Any:
    environment = domain.open(task)
    for call in task.expected.calls:
        environment.call(call.name, call.arguments, call.side)
    reward: Any = grade(task, trajectory, environment)
    assert reward.value == 1.0, (task.id, reward)
    return environment


def measure(domain: Any, split: str, rounds: int) -> tuple[float, float, float]:
    """Episodes per second, and KB of an environment before and after its calls."""
    pairs = [(task, to_trajectory(task)) for task in domain.tasks(split)]
    for task, trajectory in pairs:  # fills the caches of tasks
        play(domain, task, trajectory)
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for task, trajectory in pairs:
            play(domain, task, trajectory)
        best = min(best, time.process_time() - started)
    gc.collect()
    tracemalloc.start()
    opened = [domain.open(pairs[number % len(pairs)][0]) for number in range(1000)]
    before = tracemalloc.get_traced_memory()[0]
    del opened
    held = [play(domain, *pairs[number % len(pairs)]) for number in range(1000)]
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(held) == 1000
    return len(pairs) / best, before / 1024 / 1000, after / 1024 / 1000


def measure_bfcl(category: str, data: str | None, rounds: int) -> tuple[float, float]:
    """Entries per second, with gold calls executed as an agent's and graded, and KB of an environment after
    its gold calls."""
    domain = bfcl.find(category, data)
    cases = [
        (
            task,
            domain.find_gold(task),
            [[to_step([text]) for text in turn] for turn in task.meta["ground_truth"]],
        )
        for task in domain.tasks("all")
    ]
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for task, gold, turns in cases:
            assert find_fault(gold, turns, domain.make_instances(task)) is None, task.id
        best = min(best, time.process_time() - started)
    gc.collect()
    tracemalloc.start()
    held: list[Any] = []
    for number in range(1000):
        task = cases[number % len(cases)][0]
        held.append(domain.open(task))
        for text in (call for turn in task.meta["ground_truth"] for call in turn):
            held[-1].instances.run_text(text)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return len(cases) / best, memory / 1024 / 1000


OFFICIAL_BFCL = {"base": 508, "miss_func": 607, "miss_param": 614, "long_context": 402}
"""Entries per second of the package's own checker on a comparable core."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="Folder with the benchmarks' data. Default: TRIALOGUE_DATA")
    parser.add_argument("--bfcl", help="Folder with an unpacked bfcl-eval, if it is not installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for name, find in DOMAINS.items():
        split = "base" if name.startswith("tau2") else "test"
        speed, opened, played = measure(find(options.data), split, options.rounds)
        rows[name] = {
            "episodes_per_second": round(speed),
            "times_official": round(speed / OFFICIAL[name]),
            "kb_opened": round(opened, 1),
            "kb_played": round(played, 1),
        }
        if not options.json:
            row = rows[name]
            print(
                f"{name:13} {row['episodes_per_second']:6.0f} episodes/s, {row['times_official']:.0f}x theirs"
                f"  {row['kb_opened']:.1f} KB opened, {row['kb_played']:.1f} KB played"
            )
    for category in CATEGORIES:
        try:
            speed, played = measure_bfcl(category, options.bfcl, options.rounds)
        except ConfigError as error:
            if not options.json:
                print(f"bfcl: left out: {error}")
            break
        times = speed / OFFICIAL_BFCL[category]
        rows[f"bfcl:{category}"] = {
            "entries_per_second": round(speed),
            "times_official": round(times, 1),
            "kb_played": round(played, 1),
        }
        if not options.json:
            print(f"bfcl:{category:13} {speed:6.0f} entries/s, {times:.1f}x theirs  {played:.1f} KB played")
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
