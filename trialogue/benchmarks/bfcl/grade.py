"""The official grade of a BFCL multi-turn entry: state and results must be right after every turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from trialogue.benchmarks.bfcl.execute import Instances

Step = Sequence[Callable[[Instances], str]]
"""The calls of one message."""


class GoldTurn(NamedTuple):
    """Results of the gold calls of one turn and the state after it. An empty turn is not checked."""

    results: Counter[str]
    state: dict[str, dict[str, Any]]
    is_empty: bool


def reach_gold_turns(instances: Instances, truth: Sequence[Sequence[str]]) -> list[GoldTurn]:
    """Execute the gold calls, turn by turn."""
    turns: list[GoldTurn] = []
    for calls in truth:
        results = Counter(instances.run_text(call) for call in calls)
        turns.append(GoldTurn(results, deepcopy(instances.to_state()) if calls else {}, not calls))
    return turns


def find_fault(gold: Sequence[GoldTurn], turns: Sequence[Sequence[Step]], instances: Instances) -> str | None:
    """Execute an agent's calls on fresh instances and return the first fault, if any.

    `turns` has the messages with calls of each user turn. Calls in an empty turn are executed and not
    checked.
    """
    if len(turns) != len(gold):
        return f"there were {len(turns)} turns instead of {len(gold)}"
    results: Counter[str] = Counter()
    for number, (expected, steps) in enumerate(zip(gold, turns, strict=True)):
        for step in steps:
            results.update(call(instances) for call in step)
        if expected.is_empty:
            continue
        if not steps or (len(steps) == 1 and not steps[0]):
            return f"turn {number}: no function was called"
        wrong = find_difference(instances.classes, expected.state)
        if wrong is not None:
            return f"turn {number}: {wrong}"
        missing = expected.results - results
        if missing:
            return f"turn {number}: no call gave {next(iter(missing))[:200]}"
    return None


def find_difference(classes: Mapping[str, Any], expected: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first public attribute that differs from the expected state."""
    for name, attributes in expected.items():
        instance = classes[name]
        for key, value in attributes.items():
            found = getattr(instance, key)
            if found != value:
                return f"{name}.{key} should be {str(value)[:200]}, is {str(found)[:200]}"
    return None


def to_step(texts: Sequence[str]) -> Step:
    """Calls written as text, as one message."""

    def bind(text: str) -> Callable[[Instances], str]:
        return lambda instances: instances.run_text(text)

    return [bind(text) for text in texts]
