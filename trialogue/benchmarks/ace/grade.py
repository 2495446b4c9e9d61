"""The two accuracies of ACEBench: whether the end state is right, and the share of passed milestones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from trialogue.benchmarks.ace.execute import write_calls
from trialogue.benchmarks.ace.world import EXECUTE, AceEnvironment
from trialogue.benchmarks.toolkit import Plain
from trialogue.task import Call, Task
from trialogue.trajectory import Reward, Trajectory, Turn
from trialogue.world.domain import Environment

COUNT_WRONG = "wrong number of class"


@dataclass(frozen=True, slots=True)
class AceVerdict:
    """Both accuracies of one conversation. If the end state is right, milestones are not checked."""

    end_to_end: bool
    process: float
    why: tuple[str, ...]


def judge(environment: AceEnvironment, process: Sequence[str]) -> AceVerdict:
    """Grade an environment by its end state and the texts of the calls."""
    meta = environment.task.meta
    quirks = environment.domain.quirks
    wrong = find_wrong(environment.to_state(), meta["ground_truth"], quirks)
    share = find_share(process, meta["mile_stone"]) if wrong else 1.0
    return AceVerdict(not wrong, share, tuple(wrong))


def find_wrong(state: Sequence[Plain], expected: Any, quirks: bool = True) -> list[str]:
    """Differences from the expected end state. With `quirks`, as in the benchmark, unknown class names and
    unexpected entries are ignored."""
    classes: list[Plain] = cast("list[Plain]", expected) if isinstance(expected, list) else [expected]
    if len(classes) != len(state):
        return [COUNT_WRONG]
    known = {name: found for item in state for name, found in item.items()}
    wrong: list[str] = []
    for item in classes:
        for name, attributes in item.items():
            if name not in known and not quirks:
                name = next(iter(get_close_matches(name, known, 1, 0.0)), name)
            if name in known:
                wrong += _compare(name, known[name], attributes, quirks)
    return wrong


def _compare(name: str, found: Plain, expected: Plain, quirks: bool) -> list[str]:
    wrong: list[str] = []
    for attribute, value in found.items():
        where = f"{name}.{attribute}"
        if attribute not in expected:
            wrong.append(f"{where} is not expected")
            continue
        wanted = expected[attribute]
        if isinstance(wanted, dict):
            for key, inner in cast("Plain", wanted).items():
                if key not in value:
                    wrong.append(f"{where}.{key} should be {inner!r}, is missing")
                elif inner != value[key]:
                    wrong.append(f"{where}.{key} should be {inner!r}, is {value[key]!r}")
            if not quirks:
                wrong += [f"{where}.{key} should not be there" for key in value if key not in wanted]
        elif wanted != value:
            wrong.append(f"{where} should be {wanted!r}, is {value!r}")
    return wrong


def find_share(process: Sequence[str], milestones: Sequence[Any]) -> float:
    """The share of milestones passed in order. Of several solutions the best one counts, rounded as in the
    benchmark."""
    if not milestones or not isinstance(milestones[0], list):
        return _follow(process, milestones)
    return max(round(_follow(process, way), 3) for way in milestones)


def _follow(process: Sequence[str], way: Sequence[str]) -> float:
    """Match greedily: after a milestone that never occurs, no other one matches."""
    left = iter(process)
    passed = sum(any(text.strip() == stone.strip() for text in left) for stone in way)
    return passed / len(way) if way else 1.0


def to_process(turns: Sequence[Turn]) -> list[str]:
    """The agent's messages with calls, in the benchmark's notation."""
    process: list[str] = []
    for turn in turns:
        calls = turn.message.tool_calls
        if turn.side != "agent" or not calls:
            continue
        first = calls[0].arguments
        if calls[0].name == EXECUTE and isinstance(first, dict):
            process.append(str(first.get("text", "")))
        else:
            read = [
                Call(name=call.name, arguments=call.arguments)
                for call in calls
                if isinstance(call.arguments, dict)
            ]
            process.append(write_calls(read))
    return process


def grade_ace(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    """The reward of a finished conversation: 1 if the end state is right."""
    verdict = judge(cast("AceEnvironment", environment), to_process(trajectory.turns))
    return Reward(
        value=float(verdict.end_to_end),
        parts={"END_TO_END": float(verdict.end_to_end), "PROCESS": verdict.process},
        why=verdict.why[:8] or ("everything as expected",),
    )
