# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false
"""TAU2 episodes and the memory of open environments, beside tau2-bench.

An episode opens a task's environment with its set-up, makes the gold calls and grades the result. No side
asks a judge. The peer's code runs from a checkout (`--tau2-checkout`) in a Python with its requirements
(`--tau2-python`). Without one, previously recorded figures are used and marked. Without data (`--data`,
TRIALOGUE_DATA or the checkout's own) the measurement is skipped.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from speed.measure import Figure, Options, Part, alternate, compare, find_versions, join_versions

RECORDED_MEGABYTES = 12.8
"""KB of one open retail environment of tau2-bench 1.0.1."""
ROUNDS = 20  # repetitions of all tasks by ours, to take long enough
OPEN_OURS, OPEN_THEIRS = 1000, 50


def play_ours(domain: str, data: str | None, count: int) -> Callable[[], dict[str, Any]]:
    from speed.benchmarks import play, to_trajectory
    from trialogue.benchmarks.tau import tau2

    world = tau2.find(domain, data)
    pairs = [(task, to_trajectory(task)) for task in world.tasks("test", count)]
    for task, trajectory in pairs:  # fills the caches of tasks
        play(world, task, trajectory)

    def run() -> dict[str, Any]:
        started = time.process_time()
        for _ in range(ROUNDS):
            for task, trajectory in pairs:
                play(world, task, trajectory)
        whole = time.process_time() - started
        opened = [(task, world.open(task)) for _ in range(ROUNDS) for task, _ in pairs]
        started = time.process_time()
        for task, environment in opened:
            for call in task.expected.calls:
                environment.call(call.name, call.arguments, call.side)
        calls = time.process_time() - started
        return {"rate": len(opened) / whole, "calls": len(opened) / calls, "episodes": len(pairs)}

    return run


def open_ours(domain: str, data: str | None, count: int) -> Callable[[], dict[str, Any]]:
    import tracemalloc

    from speed.benchmarks import play, to_trajectory
    from trialogue.benchmarks.tau import tau2

    world = tau2.find(domain, data)
    pairs = [(task, to_trajectory(task)) for task in world.tasks("test")]
    for task, trajectory in pairs:
        play(world, task, trajectory)

    def run() -> dict[str, Any]:
        gc.collect()
        tracemalloc.start()
        held = [play(world, *pairs[number % len(pairs)]) for number in range(count)]
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        changed = sum(len(str(environment.difference())) for environment in held)
        return {"kilobytes": grown / 1024 / count, "changed": changed / 1024 / count}

    return run


def prepare_theirs(checkout: str) -> str:
    """Make tau2-bench of a checkout importable. Returns its version."""
    import tomllib

    os.environ["TAU2_DATA_DIR"] = str(Path(checkout) / "data")
    sys.path.insert(0, str(Path(checkout) / "src"))
    from loguru import logger

    logger.remove()  # otherwise it prints every call
    with (Path(checkout) / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["version"]


def play_theirs(domain: str, checkout: str, count: int) -> Callable[[], dict[str, Any]]:
    version = prepare_theirs(checkout)
    from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
    from tau2.data_model.simulation import SimulationRun, TerminationReason
    from tau2.data_model.tasks import RewardType
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
    from tau2.registry import registry

    make = registry.get_env_constructor(domain)
    tasks = registry.get_tasks_loader(domain)("test")[:count]
    for task in tasks:
        basis = task.evaluation_criteria.reward_basis
        task.evaluation_criteria.reward_basis = [one for one in basis if one != RewardType.NL_ASSERTION]

    def play(task: Any) -> None:
        environment, state, criteria = make(), task.initial_state, task.evaluation_criteria
        environment.set_state(
            initialization_data=state.initialization_data if state else None,
            initialization_actions=state.initialization_actions if state else None,
            message_history=(state.message_history if state else None) or [],
        )
        said = ". ".join(criteria.communicate_info or ["Hello"])
        messages: list[Any] = [AssistantMessage(role="assistant", content=said)]
        for number, action in enumerate(criteria.actions or []):
            call = ToolCall(
                id=str(number), name=action.name, arguments=action.arguments, requestor=action.requestor
            )
            speaks = AssistantMessage if action.requestor == "assistant" else UserMessage
            messages.append(speaks(role=action.requestor, tool_calls=[call]))
            messages.append(environment.get_response(call))
        run = SimulationRun(
            id=task.id,
            task_id=task.id,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason=TerminationReason.USER_STOP,
            messages=messages,
        )
        found = evaluate_simulation(run, task, EvaluationType.ALL, solo_mode=False, domain=domain)
        assert found.reward == 1.0, (task.id, found)

    def run() -> dict[str, Any]:
        started = time.process_time()
        for task in tasks:
            play(task)
        rate = len(tasks) / (time.process_time() - started)
        return {"rate": rate, "episodes": len(tasks), "versions": {**find_versions(), "tau2": version}}

    return run


def open_theirs(domain: str, checkout: str, count: int) -> Callable[[], dict[str, Any]]:
    version = prepare_theirs(checkout)
    from tau2.registry import registry

    make = registry.get_env_constructor(domain)
    make()

    def find_kilobytes() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024

    def run() -> dict[str, Any]:
        before = find_kilobytes()
        held = [make() for _ in range(count)]
        grown = find_kilobytes() - before
        return {"kilobytes": grown / len(held), "versions": {**find_versions(), "tau2": version}}

    return run


PARTS = {
    "ours": play_ours,
    "ours, open": open_ours,
    "tau2-bench": play_theirs,
    "tau2-bench, open": open_theirs,
}


def measure(options: Options) -> Iterator[Figure]:
    from speed.benchmarks import OFFICIAL
    from trialogue.benchmarks.tau import tau2
    from trialogue.errors import TrialogueError

    data = options.data or options.tau2
    if options.tau2 is None or options.tau2_python is None:
        print(
            "episodes: tau2-bench itself left out, recorded figures stand in its place; name a checkout by "
            "--tau2-checkout and a Python that has what it needs by --tau2-python"
        )
    for domain in ("retail", "airline", "telecom"):
        try:
            tau2.find(domain, data)
        except TrialogueError as error:
            print(f"episodes: {domain} left out: {error}")
            continue
        known = {"rate": OFFICIAL[f"tau2:{domain}"]}
        for ours, theirs, against in pair(options, domain, "", 2 if options.quick else 40, known):
            yield compare(
                f"tau2 {domain}: open, gold calls, grade",
                "episodes/s",
                [(one["rate"], other["rate"]) for one, other in zip(ours, theirs, strict=True)],
                against,
                more_is_better=True,
                bound=max(one["calls"] for one in ours),
                bounded_by="the gold calls alone",
                versions=join_versions(ours[0], theirs[0], "tau2-bench"),
            )
        if domain != "retail":
            continue
        many = 20 if options.quick else OPEN_OURS
        known = {"kilobytes": RECORDED_MEGABYTES * 1024}
        for ours, theirs, against in pair(options, domain, ", open", 20 if options.quick else None, known):
            yield compare(
                f"{many:,} open retail environments, ours after their gold calls, each",
                "KB",
                [(one["kilobytes"], other["kilobytes"]) for one, other in zip(ours, theirs, strict=True)],
                against,
                bound=ours[0]["changed"],
                bounded_by="what the gold calls changed, written down",
                versions=join_versions(ours[0], theirs[0], "tau2-bench"),
            )


def pair(
    options: Options, domain: str, work: str, count: int | None, recorded: dict[str, Any]
) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]], str]]:
    """Alternating runs of both sides, or of ours beside recorded figures, and the name of the other side."""
    data = options.data or options.tau2
    ours = partial(Part, "episodes", f"ours{work}", domain=domain, data=data, count=count or OPEN_OURS)
    if options.tau2 is None or options.tau2_python is None:
        other = {"versions": {"tau2": "1.0.1"}, **recorded}
        for (found,) in alternate([ours], options.repetitions):
            yield found, [other] * len(found), "tau2-bench, recorded on such a core"
        return
    settings = {"domain": domain, "checkout": options.tau2, "count": count or OPEN_THEIRS}
    theirs = partial(Part, "episodes", f"tau2-bench{work}", options.tau2_python, **settings)
    for found, others in alternate([ours, theirs], options.repetitions, anew=bool(work)):
        yield found, others, "tau2-bench"
