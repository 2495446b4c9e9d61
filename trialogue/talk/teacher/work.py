"""What each wish needs: the gold calls, answers and refusals of a task, shared out among its wishes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trialogue.talk.agenda import Agenda, Wish, has_match
from trialogue.talk.evidence import find_leaves
from trialogue.talk.teacher.knowledge import to_text
from trialogue.talk.teacher.search import is_change, is_lookup, match_names, to_words
from trialogue.task import Call, Task
from trialogue.world.domain import Environment
from trialogue.world.tools import Tool

Kind = Literal["do", "answer", "refuse", "propose"]
Say = tuple[str, ...]


@dataclass(slots=True)
class Work:
    """What one wish needs."""

    wish: Wish
    kind: Kind
    """propose: the user will change their mind when asked for the final yes."""
    calls: list[Call] = field(default_factory=lambda: [])
    say: list[Say] = field(default_factory=lambda: [])


def share_out(task: Task, agenda: Agenda, environment: Environment) -> list[Work]:
    """The work of each wish, those that are given up among them."""
    finals: list[Work] = []
    works: list[Work] = []
    for wish in agenda.wishes:
        while wish.instead is not None:
            works.append(Work(wish, "propose"))
            wish = wish.instead
        works.append(Work(wish, "do"))
        finals.append(works[-1])
    for number, call in zip(
        _assign(task.expected.calls, finals, environment), task.expected.calls, strict=True
    ):
        finals[number].calls.append(call)
    left: list[Say] = []
    for item in task.expected.say:
        say = (item,) if isinstance(item, str) else tuple(item)
        fit = [
            work
            for work in finals
            if work.wish.answer is not None and any(has_match(work.wish.answer, each) for each in say)
        ]
        free = [work for work in fit if not work.say]
        if fit:
            (free or fit)[0].say.append(say)
        else:
            left.append(say)
    for work in finals:
        if work.wish.answer is not None and work.say:
            work.kind = "answer"
        elif not any(is_change_call(call, environment) for call in work.calls):
            work.kind = "refuse"
    refusing = [work for work in finals if work.kind == "refuse"]
    if not refusing and left:
        finals[-1].say += left
    for work in refusing:
        work.say += left
    if len(finals) == 1 and finals[0].kind == "refuse" and not is_refusal(left) and left:
        finals[0].kind = "answer"
    return works


_REFUSALS = re.compile(
    r"\b(?:can ?not|can't|unable|unfortunately|sorry|won't|refus\w*|declin\w*|no longer|only $)"
    r"|(?:\bnot|n't) (?:be )?(?:able|allowed|possible|eligible|permitted)\b",
    re.IGNORECASE,
)


def is_refusal(say: Sequence[Say]) -> bool:
    """Whether one of the things to say turns somebody down."""
    return any(sum(_REFUSALS.search(each) is not None for each in item) * 2 >= len(item) for item in say)


def is_change_call(call: Call, environment: Environment) -> bool:
    if call.side == "user":
        return True
    tool = environment.tools.get(call.name)
    return tool is not None and (is_change(tool) or tool.ends)


def _assign(calls: Sequence[Call], works: Sequence[Work], environment: Environment) -> list[int]:
    """The wish each call is for: calls and wishes come in the same order."""
    none: list[int] = []
    best = [(float("-inf") if number else 0.0, none) for number in range(len(works))]
    for call in calls:
        scores = [score(call, work.wish, environment) for work in works]
        following: list[tuple[float, list[int]]] = []
        for number in range(len(works)):
            value, path = max(best[: number + 1], key=lambda each: each[0])
            following.append((value + scores[number], [*path, number]))
        best = following
    return max(best, key=lambda each: each[0])[1]


def score(call: Call, wish: Wish, environment: Environment) -> float:
    """How well a call fits a wish."""
    tools = environment.tools if call.side == "agent" else environment.user_tools
    tool = tools.get(call.name)
    values = {to_text(leaf) for leaf in find_leaves(call.arguments)}
    known = {to_text(fact.value) for fact in wish.facts.values() if fact.value is not None}
    said = " ".join(wish.says).lower()
    total = 2.0 * len(values & known) + sum(len(value) > 2 and value in said for value in values)
    total -= 0.5 * sum(
        fact.form is not None
        and fact.value is not None
        and any(
            re.fullmatch(fact.form, value, re.IGNORECASE) and value != to_text(fact.value) for value in values
        )
        for fact in wish.facts.values()
    )
    if tool is None or not (is_change(tool) or tool.ends):
        return total
    return total + score_tool(tool, wish) - (3 if wish.answer is not None else 0)


def score_tool(tool: Tool, wish: Wish) -> float:
    """How well a tool fits a wish."""
    words = f"{tool.name.replace('_', ' ')}. {tool.description}"
    total = 0.0
    for pattern in (wish.done, wish.about):
        total += 1.5 * bool(pattern and re.search(pattern, words, re.IGNORECASE))
    said = " ".join(wish.says).lower()
    total += sum(0.5 for word in to_words(tool.name) if len(word) > 3 and word[:5] in said)
    parameters = tool.parameters.get("properties", {})
    return total + sum(0.3 for name in wish.facts if any(match_names(name, each) > 1 for each in parameters))


def guess_call(wish: Wish, environment: Environment) -> Call | None:
    """The call a wish seems to ask for, with the facts as arguments: it is never made."""
    tools = [tool for tool in environment.tools.values() if is_change(tool)]
    if not tools:
        return None
    tool = max(tools, key=lambda each: score_tool(each, wish))
    return None if score_tool(tool, wish) < 1 else Call(name=tool.name, arguments=dict(_fill(tool, wish)))


def _fill(tool: Tool, wish: Wish) -> Iterator[tuple[str, Any]]:
    for name in tool.parameters.get("properties", {}):
        fit = max(wish.facts, key=lambda each: fit_names(name, each), default=None)
        if fit is not None and match_names(name, fit) > 1 and wish.facts[fit].value is not None:
            yield name, wish.facts[fit].value


def fit_names(one: str, other: str) -> tuple[int, int]:
    """How well two identifiers fit, then how many words they share."""
    return match_names(one, other), len(set(to_words(one)) & set(to_words(other)))


def find_leading(task: Task, environment: Environment) -> Iterator[Call]:
    """The gold calls that identify the user: the look-ups before any change that leave something behind."""
    for call in task.expected.calls:
        tool = environment.tools.get(call.name)
        if call.side != "agent" or tool is None or not is_lookup(tool):
            return
        if tool.writes:
            yield call
