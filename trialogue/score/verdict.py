"""Who audits the user in a run: the rules, a judge model that reads the conversation besides, or nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

from trialogue.config import AuditSettings, Speaker
from trialogue.errors import GradeError
from trialogue.messages import Message
from trialogue.reading import describe, find_fenced, from_json
from trialogue.score.audit import audit
from trialogue.talk.model import ModelSource
from trialogue.talk.rollout import Audit
from trialogue.talk.users import user_prompt
from trialogue.trajectory import Fault, Finding, Trajectory, Turn
from trialogue.world.domain import Domain

QUESTION = """\
You check whether a simulated customer kept to its role in a conversation with a service agent. You are \
given what the customer was told and what was said, each message with its number. Judge the customer alone.

Name each of these faults you find, and nothing else:
- contradiction: states something that contradicts what it was told
- invention: states a fact that it was neither told nor could have learned in the conversation
- dump: gives details away in its first message that nobody asked for
- early_stop: ends the conversation although a wish is neither fulfilled nor refused
- never_stops: goes on although every wish is settled
- role: speaks as the service agent
- quote: reads its instructions out, or speaks of them
- ignored_question: leaves a direct question unanswered twice

Answer with a JSON object and nothing else:
{"faults": [{"kind": "one of the above", "message": the message's number, "evidence": "why, in a sentence"}]}
"""


def find_audit(
    settings: AuditSettings, user: Speaker, domain: Domain, judge: ModelSource | None
) -> Audit | None:
    """The audit a run asks for. The rule-based user keeps to its agenda by construction, so looking at it is
    left out unless conversations may be excluded."""
    rule_based = user.model == "agenda" and not user.mix
    if settings.policy == "keep" or (settings.policy in (None, "report") and rule_based and judge is None):
        return None
    if judge is None:
        return lambda trajectory: audit(domain, trajectory)

    async def both(trajectory: Trajectory) -> Sequence[Finding]:
        return [*audit(domain, trajectory), *await ask_judge(judge, domain, trajectory)]

    return both


async def ask_judge(source: ModelSource, domain: Domain, trajectory: Trajectory) -> list[Finding]:
    """What a judge finds wrong with the user. Whatever the judge itself does wrong is a `GradeError`."""
    lines = [
        f"[{place}] {'customer' if turn.side == 'user' else 'agent'}: {turn.message.content}"
        for place, turn in enumerate(trajectory.turns)
        if turn.message.role != "tool" and turn.message.content.strip()
    ]
    told = user_prompt(domain, trajectory.task)
    question = f"What the customer was told:\n{told}\n\nThe conversation:\n" + "\n".join(lines)
    asked = [
        Turn(side="agent", message=Message(role="system", content=QUESTION)),
        Turn(side="user", message=Message(role="user", content=question)),
    ]
    try:
        reply = await source(trajectory.task, trajectory.seed).reply(asked, [])
    except Exception as error:
        raise GradeError(f"the judge of the user gave no answer: {describe(error)}") from error
    return read_verdict(reply.content, trajectory)


def read_verdict(text: str, trajectory: Trajectory) -> list[Finding]:
    """The findings in a judge's answer; fenced JSON is JSON too."""
    try:
        faults = cast("list[dict[str, Any]]", from_json(find_fenced(text))["faults"])
        findings = [
            Finding(kind=item["kind"], turn=int(item["message"]), evidence=str(item["evidence"]), by="judge")
            for item in faults
        ]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        allowed = ", ".join(get_args(Fault))
        raise GradeError(
            f"the verdict on the user cannot be read ({error}): {text[:200]!r}; kinds are {allowed}"
        ) from None
    places = range(len(trajectory.turns))
    return [item for item in findings if item.turn in places and trajectory.turns[item.turn].side == "user"]
