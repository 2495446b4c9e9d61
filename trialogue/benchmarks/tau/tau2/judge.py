"""The judge of TAU2's natural-language statements: one question about all of them, answered in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from trialogue.errors import ConfigError, GradeError
from trialogue.messages import Message
from trialogue.reading import find_fenced, from_json
from trialogue.trajectory import Reply, Trajectory, Turn

QUESTION = """\
You grade one conversation between a service agent and a customer against a list of expected outcomes.
Decide for each outcome alone whether the agent has fulfilled it.

Answer with a JSON object and nothing else:
{"results": [{"expectedOutcome": "the outcome", "reasoning": "why", "metExpectation": true or false}, ...]}
"""


async def ask_tau2_judge(
    source: Any, trajectory: Trajectory, statements: Sequence[str]
) -> list[dict[str, Any]]:
    """Whether each statement holds. Any failure of the judge is a `GradeError`, never a grade."""
    told = "\n".join(f"{turn.message.role}: {turn.message.content or None}" for turn in trajectory.turns)
    question = (
        f"Conversation:\n{told}\n\nExpected outcomes:\n{json.dumps(list(statements), ensure_ascii=False)}"
    )
    asked = [
        Turn(side="agent", message=Message(role="system", content=QUESTION)),
        Turn(side="user", message=Message(role="user", content=question)),
    ]
    try:
        reply: Reply = await source(trajectory.task, trajectory.seed).reply(asked, [])
    except ConfigError:
        raise  # another attempt would not help
    except Exception as error:
        raise GradeError(f"the judge gave no answer: {type(error).__name__}: {error}") from error
    return read_statements(reply.content, len(statements))


def read_statements(text: str, count: int) -> list[dict[str, Any]]:
    """Read the judge's answer: JSON, fenced or not."""
    try:
        results: Any = from_json(find_fenced(text))["results"]
        checks = [
            {
                "info": str(item["expectedOutcome"]),
                "met": item["metExpectation"],
                "why": str(item["reasoning"]),
            }
            for item in cast("list[dict[str, Any]]", results)
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise GradeError(f"the judge's answer cannot be read ({error}): {text[:200]!r}") from None
    if len(checks) != count or not all(isinstance(check["met"], bool) for check in checks):
        raise GradeError(f"the judge was asked {count} things and answered {len(checks)}: {text[:200]!r}")
    return checks
