"""The official grade of a TAU2 conversation: the product of the criteria that the task names.

DB: both databases are as after the gold calls. ENV_ASSERTION: every assertion holds. ACTION: every gold call
was made. COMMUNICATE: all required information was given. NL_ASSERTION: a judge confirms every statement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from trialogue.benchmarks.tau.tau2.judge import ask_tau2_judge
from trialogue.benchmarks.tau.tau2.world import Tau2Domain, Tau2Environment
from trialogue.benchmarks.toolkit import kind_of
from trialogue.errors import GradeError
from trialogue.messages import ToolCall
from trialogue.task import Task
from trialogue.trajectory import Reward, Trajectory, Turn
from trialogue.world.domain import Environment

ENDS_GRADED = ("user_stop", "agent_stop")


@dataclass(slots=True)
class Tau2Verdict:
    """The report of the official grader under its own names. None: not checked."""

    reward: float
    reward_basis: list[str] | None = None
    reward_breakdown: dict[str, float] | None = None
    db_match: bool | None = None
    env_assertions: list[dict[str, Any]] | None = None
    action_checks: list[dict[str, Any]] | None = None
    communicate_checks: list[dict[str, Any]] | None = None
    nl_assertions: list[dict[str, Any]] | None = None
    note: str | None = None
    why: list[str] = field(default_factory=lambda: [])


def grade_tau2(task: Task, trajectory: Trajectory, environment: Environment) -> Reward | Awaitable[Reward]:
    """The reward of a finished conversation. It must be awaited if a judge is asked."""
    world = cast("Tau2Environment", environment)
    verdict = judge_state(world, trajectory.turns)
    domain = cast("Tau2Domain", environment.domain)
    criteria: dict[str, Any] = task.meta.get("criteria") or {}
    statements: list[str] = criteria.get("nl_assertions", [])
    if "NL_ASSERTION" in (verdict.reward_basis or ()) and statements:
        if domain.judge is not None:
            return _with_judge(domain, task, trajectory, verdict, statements)
        verdict.why.append(f"NL_ASSERTION: no judge was named; {len(statements)} statements left out")
    return to_reward(task, verdict)


async def _with_judge(
    domain: Tau2Domain, task: Task, trajectory: Trajectory, verdict: Tau2Verdict, statements: list[str]
) -> Reward:
    checks = await ask_tau2_judge(domain.judge, trajectory, statements)
    verdict.nl_assertions = checks
    is_met = float(all(check["met"] for check in checks))
    breakdown = verdict.reward_breakdown or {}
    verdict.reward_breakdown = {**breakdown, "NL_ASSERTION": is_met}
    verdict.reward *= is_met
    verdict.why += [f"NL_ASSERTION: not met: {check['info']}" for check in checks if not check["met"]]
    return to_reward(task, verdict)


def judge_state(environment: Tau2Environment, turns: Sequence[Turn]) -> Tau2Verdict:
    """The official verdict without the judge, from the environment after the conversation."""
    task = environment.task
    criteria: dict[str, Any] | None = task.meta.get("criteria")
    if criteria is None:
        return Tau2Verdict(1.0, note="No evaluation criteria")
    basis: list[str] = criteria["reward_basis"]
    verdict = Tau2Verdict(1.0, basis, {})
    if criteria["is_state_given"]:
        _check_state(environment, basis, verdict)
    else:
        verdict.db_match = True
    verdict.action_checks = check_actions(environment, turns)
    verdict.communicate_checks = check_said(task, turns)
    breakdown = cast("dict[str, float]", verdict.reward_breakdown)
    for name, checks, key in (
        ("ACTION", verdict.action_checks, "match"),
        ("COMMUNICATE", verdict.communicate_checks, "met"),
    ):
        if name in basis:
            breakdown[name] = float(all(check[key] for check in checks or ()))
            verdict.why += [
                f"{name}: missing {check.get('action_id', check.get('info'))}"
                for check in checks or ()
                if not check[key]
            ]
    for part in breakdown.values():
        verdict.reward *= part
    return verdict


def _check_state(environment: Tau2Environment, basis: list[str], verdict: Tau2Verdict) -> None:
    environment.settle()
    verdict.db_match = environment.digest() == environment.gold_digest()
    if not verdict.db_match and "DB" in basis:
        verdict.why += [
            f"DB: {change.path} should be {change.before!r}, is {change.after!r}"
            for change in environment.difference(environment.reach_gold())[:8]
        ]
    verdict.env_assertions = []
    for assertion in environment.task.expected.assertions:
        try:
            found = environment.do(assertion)
        except Exception as error:
            raise GradeError(f"task {environment.task.id}, assertion {assertion.name}: {error}") from error
        is_met = found == assertion.value
        verdict.env_assertions.append({"func_name": assertion.name, "met": is_met})
        if not is_met:
            verdict.why.append(
                f"ENV_ASSERTION: {assertion.name} {assertion.arguments} is not {assertion.value}"
            )
    breakdown = cast("dict[str, float]", verdict.reward_breakdown)
    if "DB" in basis:
        breakdown["DB"] = float(verdict.db_match)
    if "ENV_ASSERTION" in basis:
        breakdown["ENV_ASSERTION"] = float(all(check["met"] for check in verdict.env_assertions))


def check_actions(environment: Tau2Environment, turns: Sequence[Turn]) -> list[dict[str, Any]] | None:
    """Which gold calls were made by either side at any time."""
    task = environment.task
    gold = task.expected.calls
    if not gold:
        return None
    made = [call for turn in turns for call in turn.message.tool_calls]
    checks: list[dict[str, Any]] = []
    for call, about in zip(gold, task.meta["criteria"]["actions"], strict=True):
        is_made = any(_is_made(call.name, call.arguments, about["compare_args"], other) for other in made)
        kind = _kind(environment, call.name)
        checks.append({"action_id": about["action_id"], "match": is_made, "tool_type": kind})
    return checks


def _is_made(name: str, arguments: dict[str, Any], compared: list[str] | None, call: ToolCall) -> bool:
    """Without a list of arguments, those of the actual call are compared, so a missing argument is not
    noticed."""
    if name != call.name or isinstance(call.arguments, str):
        return False
    keys = call.arguments.keys() if compared is None else compared
    if not keys:
        return True
    given = {key: value for key, value in call.arguments.items() if key in keys}
    return given == {key: value for key, value in arguments.items() if key in keys}


def _kind(environment: Tau2Environment, name: str) -> str | None:
    for toolkit in (environment.user_side, environment.agent_side):
        if toolkit is not None and name in toolkit.tools:
            return kind_of(type(toolkit), name)
    return None


def check_said(task: Task, turns: Sequence[Turn]) -> list[dict[str, Any]] | None:
    """Which information the agent gave. Commas are removed from its words but not from the expected ones."""
    if not task.expected.say:
        return None
    said = [
        turn.message.content.lower().replace(",", "")
        for turn in turns
        if turn.message.role == "assistant" and turn.message.content.strip()
    ]
    wanted = cast("tuple[str, ...]", task.expected.say)
    return [{"info": text, "met": any(text.lower() in item for item in said)} for text in wanted]


def to_reward(task: Task, verdict: Tau2Verdict) -> Reward:
    """Our reward: the official value, its parts, and the share of met criteria (TCR)."""
    parts = dict(verdict.reward_breakdown or {})
    basis = verdict.reward_basis or []
    met: list[bool] = []
    if "DB" in basis and verdict.db_match is not None:
        met.append(verdict.db_match)
    for name, checks, key in (
        ("ENV_ASSERTION", verdict.env_assertions, "met"),
        ("ACTION", verdict.action_checks, "match"),
        ("COMMUNICATE", verdict.communicate_checks, "met"),
        ("NL_ASSERTION", verdict.nl_assertions, "met"),
    ):
        if name in basis:
            met += [bool(check[key]) for check in checks or ()]
    parts["TCR"] = sum(met) / len(met) if met else verdict.reward
    why = verdict.why or [verdict.note or "everything as expected"]
    return Reward(value=verdict.reward, parts=parts, why=tuple(why))


def premature(reason: str) -> Tau2Verdict:
    """The official verdict for a conversation that nobody ended."""
    return Tau2Verdict(0.0, note=f"Simulation terminated prematurely. Termination reason: {reason}")
