"""The official reward of TAU-bench, 0 or 1: the data are right and every expected output was said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from trialogue.benchmarks.tau.tau1.world import Tau1Environment
from trialogue.task import Task
from trialogue.trajectory import Reward, Trajectory, Turn
from trialogue.world.domain import Environment


@dataclass(frozen=True, slots=True)
class Outcome:
    """The criteria of the official reward."""

    is_data_right: bool
    outputs: dict[str, bool]

    @property
    def parts(self) -> dict[str, float]:
        parts = {"DB": float(self.is_data_right)}
        return {**parts, "OUTPUT": float(all(self.outputs.values()))} if self.outputs else parts

    @property
    def reward(self) -> float:
        return float(self.is_data_right and all(self.outputs.values()))


def judge_outcome(environment: Tau1Environment, turns: Sequence[Turn]) -> Outcome:
    """Compare data and outputs. Commas are removed from the agent's words but not from the expected ones."""
    said = [
        turn.message.content.lower().replace(",", "")
        for turn in turns
        if turn.message.role == "assistant" and not turn.message.tool_calls
    ]
    wanted = cast("tuple[str, ...]", environment.task.expected.say)
    outputs = {text: any(text.lower() in item for item in said) for text in wanted}
    return Outcome(environment.digest() == environment.gold().digest, outputs)


def grade_tau1(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    """The reward of a finished conversation."""
    world = cast("Tau1Environment", environment)
    outcome = judge_outcome(world, trajectory.turns)
    why = [f"output: the agent never said {text!r}" for text, found in outcome.outputs.items() if not found]
    if not outcome.is_data_right:
        changes = world.difference(world.reach_gold())
        why += [f"DB: {item.path} should be {item.before!r}, is {item.after!r}" for item in changes[:8]]
    return Reward(value=outcome.reward, parts=outcome.parts, why=tuple(why or ["everything as expected"]))
