"""What an agent still does wrong: one reason for each conversation that it loses, and what would help."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trialogue.config import Synthesis
from trialogue.talk.evidence import find_ungrounded
from trialogue.talk.teacher.search import is_change
from trialogue.talk.teacher.work import is_refusal
from trialogue.trajectory import Trajectory
from trialogue.world.domain import Domain, Environment

Kind = Literal[
    "failed", "malformed", "copied", "rule", "lost", "refused", "tool", "value", "missing", "allowed", "said",
    "other",
]  # fmt: skip
WHAT: dict[Kind, str] = {
    "failed": "the conversation failed and has no score",
    "malformed": "a call without such a tool or without readable arguments",
    "copied": "a value in a call that nobody had said: copied wrongly, or made up",
    "rule": "a rule of the policy broken",
    "lost": "no end found: it went on until a limit",
    "refused": "refused what is allowed",
    "tool": "another change than the one that was wanted",
    "value": "the right tool with a wrong value",
    "missing": "did not do all that was wanted",
    "allowed": "did what had to be refused",
    "said": "never said what had to be said",
    "other": "something else",
}
HELP: dict[Kind, str] = {
    "failed": "look at the errors: `trialogue report` lists them",
    "malformed": "learn longer (--minutes), or begin with a larger model (--model)",
    "copied": "learn longer (--minutes), or begin with a larger model (--model): a small one copies best "
    "what is made of letters that it has met; let tools search by short values",
    "rule": "the teacher keeps the rules: learn longer (--minutes), or give train more tasks that depend "
    "on them",
    "lost": "learn longer (--minutes); if the teacher's replies are long, let tools return less",
    "refused": "give train fewer tasks that are refused, or more that look alike and are not",
    "tool": "write more phrasings per wish: the wish was taken for another one",
    "value": "write more tasks in which several records are alike, so that looking them up pays",
    "missing": "write more tasks with several wishes or steps",
    "allowed": "give train more tasks that are refused for this reason",
    "said": "write more tasks that ask for something; name the field in the wish as in the record",
    "other": "look at the conversations",
}
FREE_TEXT = frozenset(Synthesis().free_text)
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Mistake:
    """Why a conversation was lost."""

    kind: Kind
    detail: str
    trajectory: str
    family: str


def find_mistakes(trajectories: Iterable[Trajectory], domain: Domain) -> list[Mistake]:
    """One mistake for each conversation that is no success: the first that explains the others."""
    found: list[Mistake] = []
    for item in trajectories:
        if item.is_success:
            continue
        kind, detail = find_reason(item, domain.open(item.task))
        found.append(Mistake(kind, detail, item.id, item.task.family))
    return found


def find_reason(item: Trajectory, environment: Environment) -> tuple[Kind, str]:
    """The kind of the mistake that lost a conversation, and where it shows."""
    if item.is_failed:
        return "failed", item.error or ""
    made = list_made(item)
    for name, arguments, _ in made:
        if name not in environment.tools:
            return "malformed", f"there is no tool {name}"
        if not isinstance(arguments, dict):
            return "malformed", f"{name} {arguments}"
    if ungrounded := find_ungrounded(item.turns, environment, FREE_TEXT):
        return "copied", ungrounded[0]
    if item.reward is not None and item.reward.breaches:
        return "rule", item.reward.breaches[0].rule
    if item.end in ("too_long", "max_turns", "stuck"):
        return "lost", item.end
    wrong = _compare_changes(item, environment, made)
    if wrong is not None:
        return wrong
    why = item.reward.why if item.reward is not None else ()
    said = next((text for text in why if text.startswith("said:")), None)
    return ("said", said.removeprefix("said: ")) if said is not None else ("other", why[0] if why else "")


def list_made(item: Trajectory) -> list[tuple[str, Any, bool]]:
    """The agent's calls in their order, each with whether it was refused. Messages may use the same ids."""
    made: list[tuple[str, Any, bool]] = []
    waiting: dict[str | None, int] = {}
    for turn in item.turns:
        if turn.side != "agent":
            continue
        for call in turn.message.tool_calls:
            waiting[call.id] = len(made)
            made.append((call.name, call.arguments, False))
        if turn.message.role == "tool" and turn.failed:
            place = waiting.get(turn.message.tool_call_id)
            if place is not None:
                made[place] = (*made[place][:2], True)
    return made


def _compare_changes(
    item: Trajectory, environment: Environment, made: Sequence[tuple[str, Any, bool]]
) -> tuple[Kind, str] | None:
    """How the changes that were made differ from those of the gold calls."""

    def changes(name: str) -> bool:
        tool = environment.tools.get(name)
        return tool is not None and (is_change(tool) or tool.ends)

    gold = [call for call in item.task.expected.calls if call.side == "agent" and changes(call.name)]
    wanted = {(call.name, _to_key(call.arguments)) for call in gold}
    names = {call.name for call in gold}
    done = [(name, arguments) for name, arguments, failed in made if changes(name) and not failed]
    for name, arguments in done:
        if (name, _to_key(arguments)) in wanted:
            continue
        shown = f"{name} {json.dumps(arguments, ensure_ascii=False)}"
        if not gold:
            return "allowed", shown
        return ("value" if name in names else "tool"), shown
    missing = names - {name for name, _ in done}
    if not missing:
        return None
    said = [turn.message.content for turn in item.turns if turn.side == "agent" and turn.message.content]
    return ("refused" if is_refusal([(text,) for text in said]) else "missing"), ", ".join(sorted(missing))


def _to_key(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)


def count_mistakes(mistakes: Sequence[Mistake]) -> list[dict[str, Any]]:
    """The kinds by how often they occur, each with its families and some conversations."""
    by_kind: dict[Kind, list[Mistake]] = defaultdict(list)
    for mistake in mistakes:
        by_kind[mistake.kind].append(mistake)
    return [
        {
            "kind": kind,
            "what": WHAT[kind],
            "helps": HELP[kind],
            "conversations": len(each),
            "families": dict(Counter(mistake.family or "(no family)" for mistake in each).most_common()),
            "examples": [[mistake.trajectory, mistake.detail] for mistake in each[:SHOWN]],
        }
        for kind, each in sorted(by_kind.items(), key=lambda pair: -len(pair[1]))
    ]
