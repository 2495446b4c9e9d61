"""The reward of a conversation: the outcome in the database, what had to be said, what had to hold.

By end: the two stops are graded; `max_turns` and `too_long` get 0 without grading, so that an untouched
database is never paid for by running out of turns; a failed conversation gets no reward at all.
"""

from __future__ import annotations

from collections.abc import Awaitable

from trialogue.errors import GradeError
from trialogue.messages import ToolCall
from trialogue.task import Task
from trialogue.trajectory import Reward, Trajectory
from trialogue.world.domain import Environment

_SHOWN = 8
"""How many differences a reward lists as evidence."""


def grade(task: Task, trajectory: Trajectory, environment: Environment) -> Reward | Awaitable[Reward] | None:
    """Grade a finished conversation by the rule of its end and the reward of its domain."""
    if trajectory.end == "error":
        return None
    if trajectory.end in ("max_turns", "too_long"):
        return Reward(value=0.0, why=(f"ended by {trajectory.end}: not graded",))
    return (environment.domain.reward or outcome)(task, trajectory, environment)


def outcome(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    """1 if the databases are as the gold calls leave them, everything was said and every assertion holds."""
    parts: dict[str, float] = {}
    why: list[str] = []
    expected = task.expected
    if expected.calls or not expected.assertions:
        gold = reach_gold(environment)
        parts["database"] = float(environment.digest() == gold.digest())
        if not parts["database"]:
            differences = environment.difference(gold)
            why += [
                f"database: {change.path} should be {change.before!r}, is {change.after!r}"
                for change in differences[:_SHOWN]
            ]
            if len(differences) > _SHOWN:
                why.append(f"database: and {len(differences) - _SHOWN} more differences")
    if expected.say:
        missing = find_unsaid(task, trajectory)
        parts["said"] = float(not missing)
        why += [f"said: the agent never said {text!r}" for text in missing]
    if expected.assertions:
        failed = [
            assertion
            for assertion in expected.assertions
            if bool(environment.do(assertion)) != assertion.value
        ]
        parts["assertions"] = float(not failed)
        why += [f"assertion: {item.name} {item.arguments} is not {item.value}" for item in failed]
    if not why:
        why.append("everything as expected")
    value = 1.0
    for part in parts.values():
        value *= part
    return Reward(value=value, parts=parts, why=tuple(why))


def reach_gold(environment: Environment) -> Environment:
    """A fresh environment of the task with its gold calls carried out."""
    gold = environment.reopen()
    for call in environment.task.expected.calls:
        result = gold.call(call.name, call.arguments, call.side)
        if result.failed:
            raise GradeError(
                f"task {environment.task.id}: the gold call {call.name} was refused: {result.text}"
            )
    return gold


def find_unsaid(task: Task, trajectory: Trajectory) -> list[str]:
    """What had to be said and was not, in any text of the agent to the user."""
    texts = [
        _plain(turn.message.content)
        for turn in trajectory.turns
        if turn.side == "agent" and turn.message.role == "assistant" and not turn.message.tool_calls
    ]
    missing: list[str] = []
    for item in task.expected.say:
        wordings = (item,) if isinstance(item, str) else item
        if not any(_plain(wording) in text for wording in wordings for text in texts):
            missing.append(wordings[0])
    return missing


def _plain(text: str) -> str:
    return text.lower().replace(",", "").replace("\u2019", "'")


def regrade(
    trajectory: Trajectory, environment: Environment
) -> tuple[Reward | Awaitable[Reward] | None, list[str]]:
    """Grade a recorded conversation again: its calls are carried out on a fresh environment.

    Returns the reward and every tool result that came out different from the record.
    """
    mismatches: list[str] = []
    calls: dict[tuple[str, str | None], ToolCall] = {}
    for turn in trajectory.turns:
        for call in turn.message.tool_calls:
            calls[turn.side, call.id] = call
        if turn.message.role != "tool":
            continue
        call = calls.get((turn.side, turn.message.tool_call_id))
        if call is None:
            raise GradeError(f"conversation {trajectory.id}: a tool result without its call")
        result = environment.call(call.name, call.arguments, turn.side)
        if result.text != turn.message.content:
            mismatches.append(f"{call.name}: recorded {turn.message.content!r}, now {result.text!r}")
    return grade(trajectory.task, trajectory, environment), mismatches
