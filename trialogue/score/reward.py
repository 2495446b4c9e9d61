"""The reward of a conversation: the outcome in the database, what had to be said, what had to hold.

By end: the two stops are graded; `max_turns`, `too_long` and `stuck` get 0 without grading, so that an
untouched database is never paid for by running out of turns, save where a benchmark does so; a failed
conversation, or one that got stuck by the user's fault, gets no reward at all.

`reward.name` puts a reward of the caller's own in the place of the domain's.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable, iscoroutine
from typing import Any, NoReturn, cast

from pydantic import ValidationError

from trialogue.errors import ConfigError, GradeError, ToolError
from trialogue.messages import ToolCall
from trialogue.reading import describe, locate
from trialogue.score.compliance import find_breaches, hold_to_rules
from trialogue.seams import check_signature, describe_type, describe_value, load_seam, raise_bug
from trialogue.task import Assertion, Task
from trialogue.trajectory import Difference, Reward, Trajectory
from trialogue.world.domain import REWARD_ARGUMENTS, Domain, Environment, RewardFunction, RuleUse
from trialogue.world.tools import ToolResult, shorten

_SHOWN = 8
"""How many differences a reward lists as evidence."""


def grade(task: Task, trajectory: Trajectory, environment: Environment) -> Reward | PendingReward | None:
    """Grade a finished conversation: how it ended, the reward of its domain, the rules of its policy."""
    if trajectory.is_failed:
        return None
    found = grade_outcome(task, trajectory, environment)
    domain = environment.domain
    if not domain.policy_rules or domain.rule_use == "off":
        return found
    breaches = find_breaches(domain.policy_rules, trajectory.turns, domain.policy)
    if isinstance(found, PendingReward):
        return replace(found, finish=partial(hold_to_rules, domain=domain, breaches=breaches))
    return hold_to_rules(found, domain, breaches)


def grade_outcome(task: Task, trajectory: Trajectory, environment: Environment) -> Reward | PendingReward:
    """Grade what came of a conversation, however it came about."""
    is_capped = trajectory.end == "max_turns" and not environment.domain.rules.grade_at_cap
    if is_capped or trajectory.end in ("too_long", "stuck"):
        why = f": {trajectory.error}" if trajectory.error else ""
        return Reward(value=0.0, why=(f"ended by {trajectory.end}: not graded{why}",))
    usual = checked_outcome if task.expected.checks else outcome
    return call_reward(environment.domain.reward or usual, task, trajectory, environment)


def with_reward(domain: Domain, name: str = "", rules: RuleUse = "required") -> Domain:
    """The domain with the reward that `reward.name` names in place of its own (empty: its own), and its
    policy's rules used as `reward.rules` says."""
    if rules != domain.rule_use:
        domain = replace(domain, rule_use=rules)
    if not name:
        return domain
    if name == "outcome":
        return replace(domain, reward=None)
    function: Any = load_seam(name, "reward")
    check_signature(function, REWARD_ARGUMENTS, "reward")
    return replace(domain, reward=function)


def call_reward(
    function: RewardFunction, task: Task, trajectory: Trajectory, environment: Environment
) -> Reward | PendingReward:
    """The reward that a function gives. A mistake in the function is raised as one, with file and line: it is
    no failure of the conversation."""
    try:
        found: Any = function(task, trajectory, environment)
    except Exception as error:  # noqa: BLE001 - the caller's code may raise anything
        _raise(error, function)
    return PendingReward(found, function) if isawaitable(found) else _to_reward(found, function)


@dataclass(frozen=True, slots=True)
class PendingReward:
    """A reward that has to be awaited, for a judge or a tool is asked. Where nobody asks, it is closed."""

    found: Awaitable[Any]
    function: RewardFunction
    finish: Callable[[Reward], Reward] | None = None
    """What is made of the reward once it is there."""

    def __await__(self) -> Generator[Any, Any, Reward]:
        return self.ask().__await__()

    async def ask(self) -> Reward:
        try:
            awaited = await self.found
        except Exception as error:  # noqa: BLE001 - the caller's code may raise anything
            _raise(error, self.function)
        reward = _to_reward(awaited, self.function)
        return reward if self.finish is None else self.finish(reward)

    def close(self) -> None:
        if iscoroutine(self.found):
            self.found.close()


def _to_reward(found: Any, function: RewardFunction) -> Reward:
    if not isinstance(found, Reward):
        raise ConfigError(
            f"reward {describe_value(function)} returned {describe_type(found)}; it must return "
            "Reward(value=…)"
        )
    return found


def _raise(error: Exception, function: RewardFunction) -> NoReturn:
    what = f"reward {describe_value(function)}"
    if isinstance(error, ValidationError) and error.title == "Reward":
        raise ConfigError(f"{what}: {describe(error)} ({locate(error)[1]})") from error
    raise_bug(error, what)
    raise error


def outcome(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    """1 if the databases are as the gold calls leave them, everything was said and every assertion holds."""
    parts: dict[str, float] = {}
    why: list[str] = []
    wrong: tuple[Difference, ...] = ()
    expected = task.expected
    known = (expected.calls, expected.say, expected.assertions, expected.checks, expected.nothing)
    if not any(known):
        raise GradeError(
            f"task {task.id} expects nothing: give it gold calls, things to say, assertions or checks, or "
            "say that nothing is to be done with expected.nothing = true"
        )
    if environment.remote and expected.calls:
        raise GradeError(f"task {task.id}: gold calls cannot be carried out outside; write expected.checks")
    if not environment.remote and (expected.calls or not expected.assertions):
        gold = reach_gold(environment)
        parts["database"] = float(environment.digest() == gold.digest())
        if not parts["database"]:
            differences = environment.difference(gold)
            wrong = tuple(
                Difference(path=change.path, expected=change.before, actual=change.after)
                for change in differences[:_SHOWN]
            )
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
        broken = find_broken(environment, expected.assertions)
        parts["assertions"] = float(not broken)
        why += broken
    if not why:
        why.append("everything as expected")
    value = 1.0
    for part in parts.values():
        value *= part
    return Reward(value=value, parts=parts, why=tuple(why), differences=wrong)


async def checked_outcome(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    """The outcome, and besides that every check of the task finds what it looks for."""
    reward = outcome(task, trajectory, environment)
    wrong: list[str] = []
    for check in task.expected.checks:
        asked: Any = environment.call(check.name, check.arguments, check.side)
        result = cast("ToolResult", await asked if isawaitable(asked) else asked)
        if result.failed or not re.search(check.matches, result.text):
            wrong.append(f"check: {check.name} should match {check.matches!r}, is {shorten(result.text)!r}")
    parts = {**reward.parts, "checks": float(not wrong)}
    why = tuple(wrong) if reward.is_success and wrong else (*reward.why, *wrong)
    return reward.model_copy(update={"value": reward.value * (not wrong), "parts": parts, "why": why})


def reach_gold(environment: Environment) -> Environment:
    """The task's environment with its gold calls carried out: once for all its conversations, for looking."""
    prepared = environment.prepared
    if prepared.gold is None:
        gold = environment.reopen()
        for call in environment.task.expected.calls:
            result = gold.call(call.name, call.arguments, call.side)
            if result.failed:
                raise GradeError(f"task {prepared.task.id}: gold call {call.name} was refused: {result.text}")
        prepared.gold = gold
    return prepared.gold


def find_broken(environment: Environment, assertions: Iterable[Assertion]) -> list[str]:
    """Which assertions do not hold. One that is refused an answer does not."""
    broken: list[str] = []
    for item in assertions:
        shown = f"assertion: {item.name} {item.arguments}"
        try:
            if bool(environment.do(item)) != item.value:
                broken.append(f"{shown} is not {item.value}")
        except ToolError as error:
            broken.append(f"{shown} has no answer: {error}")
    return broken


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
        if not any(is_said(wording, text) for wording in wordings for text in texts):
            missing.append(" or ".join(wordings))
    return missing


def is_said(wording: str, text: str) -> bool:
    """Whether a plain text holds a wording, as whole words and numbers: no "no" in "know", no 5 in 15 or
    5.20. An "s" behind a word, and zeros behind a decimal point, make no difference."""
    plain = _plain(wording)
    parts = re.split(r"(\d+(?:\.\d+)?)", plain)
    wanted = "".join(_to_number(part) if place % 2 else re.escape(part) for place, part in enumerate(parts))
    first, last = plain[:1], plain[-1:]
    before = r"(?<!\d)(?<!\d\.)" if first.isdigit() else rf"(?<!{_LETTER})" if _is_letter(first) else ""
    after = r"(?!\d)(?!\.\d)" if last.isdigit() else rf"(?:'?s|es)?(?!{_LETTER})" if _is_letter(last) else ""
    return re.search(before + wanted + after, text) is not None


_LETTER = r"[^\W\u2e80-\uffff]"
"""A letter of a script that puts spaces between words."""


def _is_letter(char: str) -> bool:
    return char.isalpha() and re.match(_LETTER, char) is not None


def _to_number(text: str) -> str:
    """A pattern for a number however many zeros stand behind its decimals."""
    whole, _, decimals = text.partition(".")
    decimals = decimals.rstrip("0")
    return rf"{whole}\.{decimals}0*" if decimals else rf"{whole}(?:\.0+)?"


def _plain(text: str) -> str:
    """Without what people write differently: case, thousands separators, curled quotes, line breaks."""
    return " ".join(re.sub(r"(?<=\d),(?=\d{3})", "", text.lower().replace("\u2019", "'")).split())


def regrade(
    trajectory: Trajectory, environment: Environment
) -> tuple[Reward | PendingReward | None, list[str]]:
    """Grade a recorded conversation again: its calls are carried out on a fresh environment.

    Returns the reward and every tool result that came out different from the record.
    """
    if trajectory.is_failed:
        return None, []
    mismatches = repeat_calls(trajectory, environment)
    return grade(trajectory.task, trajectory, environment), mismatches


def repeat_calls(trajectory: Trajectory, environment: Environment) -> list[str]:
    """Carry out the recorded calls, and return every result that came out different from the record."""
    if environment.remote:
        raise GradeError(
            f"the tools of {environment.domain.name} answer from outside; nothing can be repeated"
        )
    mismatches: list[str] = []
    waiting: list[ToolCall] = []
    for turn in trajectory.turns[len(environment.history) :]:  # a history is already carried out
        waiting += turn.message.tool_calls
        if turn.message.role != "tool":
            continue
        call = waiting.pop(0) if waiting else None
        if call is None or call.id != turn.message.tool_call_id:
            raise GradeError(f"conversation {trajectory.id}: a tool result without its call")
        result = environment.call(call.name, call.arguments, turn.side)
        if (result.text, result.failed) != (turn.message.content, turn.failed):
            mismatches.append(f"{call.name}: recorded {turn.message.content!r}, now {result.text!r}")
    return mismatches
