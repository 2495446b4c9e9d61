"""Whether a conversation goes nowhere, and which side did not move on: pure functions over its turns.

An exchange is what the agent said and the user's answer. A conversation is stuck when, in three exchanges in
which nothing new was done (no successful call that was not made before),

- the same was said by both sides, or
- the user said the same without answering what the agent asked for, or
- the user only thanked or took leave, without ending the conversation,

or when the user spoke as the agent in three exchanges on end.

The agent is to blame unless one of these rules finds the user's fault: it spoke as the agent; it only
thanked, and the agent had not just asked it to wait; it left open what the agent asked for; it said the same
whatever the agent did; or it wanted again, in the same words, what the agent had dealt with. Where the user
leaves by itself when its patience is at an end (rule-based users, people), nothing is judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trialogue.trajectory import Turn
from trialogue.world.speech import (
    ASKS,
    ELSE,
    OFFERS_HELP,
    OPEN,
    PROPOSES,
    REFUSES,
    REPORTS,
    ROLE,
    TAKES_A_STAND,
    UNKNOWN,
    WAITS,
    YES_OR_NO,
    is_courtesy,
    is_proposal,
    is_yes,
    split_sentences,
)

TIMES = 3
"""So often the same exchange ends a conversation."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """Who did not move on, and how it shows."""

    blame: Literal["agent", "user"]
    why: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the agent said since the user's last text, and the user's answer."""

    heard: str
    said: str
    acts: int
    """Calls of either side that succeeded and had not been made before."""
    agent_acts: int
    """Those of the agent."""


def find_stuck(turns: Sequence[Turn]) -> Stuck | None:
    """Who is to blame if the conversation has just got stuck; None if it goes on. Asked after each text of
    the user."""
    if not turns or turns[-1].side != "user" or turns[-1].has_patience:
        return None
    exchanges = list(_list_exchanges(turns))
    latest = exchanges[-TIMES:]
    if len(latest) < TIMES:
        return None
    last = latest[-1]
    if all(_is_role(each) for each in latest):
        return Stuck("user", f"the user spoke as the agent {TIMES} times, at last: {_quote(last.said)}")
    if all(_is_only_courteous(each) for each in latest):
        if all(WAITS.search(each.heard) for each in latest):
            return Stuck("agent", f"the agent asked {TIMES} times to wait and did nothing")
        return Stuck("user", f"the user only thanked {TIMES} times and did not end the conversation")
    start = max((place for place, each in enumerate(exchanges) if each.acts), default=0)
    idle = [each for each in exchanges[start:] if _flat(each.said) == _flat(last.said)]
    for same in (latest, idle[-TIMES:]):
        is_said_again = len(same) == TIMES and all(_flat(each.said) == _flat(last.said) for each in same)
        if is_said_again and all(_is_left_open(each, exchanges) for each in same):
            return Stuck("user", f"the user said {TIMES} times without answering: {_quote(last.said)}")
    if _is_deaf(exchanges[-TIMES - 1 :]):
        return Stuck(
            "user", f"whatever the agent said, the user said again {TIMES} times: {_quote(last.said)}"
        )
    if sum(_flat(each.heard) == _flat(last.heard) for each in idle) < TIMES:
        return None
    if _is_served(last, exchanges):
        return Stuck("user", f"the user wanted {TIMES} times more what was dealt with: {_quote(last.said)}")
    return Stuck("agent", f"the agent said {TIMES} times, to the same answer: {_quote(last.heard)}")


def _list_exchanges(turns: Sequence[Turn]) -> Iterator[Exchange]:
    heard: list[str] = []
    calls: dict[str, str] = {}
    made: set[str] = set()
    acts = agent_acts = 0
    for turn in turns:
        message = turn.message
        for call in message.tool_calls:
            calls[f"{turn.side}/{call.id}"] = f"{turn.side}/{call.name}/{call.arguments!r}"
        if message.role == "tool":
            call = calls.get(f"{turn.side}/{message.tool_call_id}", "")
            if not turn.failed and call not in made:
                made.add(call)
                acts += 1
                agent_acts += turn.side == "agent"
        elif message.tool_calls:
            continue
        elif turn.side == "agent":
            heard.append(message.content)
        else:
            yield Exchange("\n".join(heard), message.content, acts, agent_acts)
            heard, acts, agent_acts = [], 0, 0


def _is_role(exchange: Exchange) -> bool:
    """Whether the user speaks as the agent: in an agent's typical words, or in the agent's very sentence."""
    said = _flat(exchange.said)
    lines = [line for line in map(_flat, split_sentences(exchange.heard)) if line.count(" ") >= 5]
    return ROLE.search(exchange.said) is not None or any(line in said for line in lines)


# What an answer to a question for such a thing holds.
_KINDS = (
    (re.compile(r"\be-?mail", re.IGNORECASE), re.compile(r"@")),
    (
        re.compile(
            r"\b(?:phone|numbers?|ids?|zip|post ?code|digits|dates?|birth|how many|how much|when)\b",
            re.IGNORECASE,
        ),
        re.compile(r"\d"),
    ),
    (re.compile(r"\bnames?\b", re.IGNORECASE), re.compile(r"\b[A-Z][\w'-]+ [A-Z][\w'-]+|\bname\b")),
)


_STAND = re.compile(
    r"^\W*(?:yes|yeah|yep|yup|sure|ok|okay|no|nope|not|don't|do not|go ahead|please do|do it|correct|right|"
    r"exactly|absolutely|of course|certainly|i confirm|i agree|confirmed|agreed|fine)\b",
    re.IGNORECASE,
)


def _is_only_courteous(exchange: Exchange) -> bool:
    """Whether the user thanks or takes leave, and this is neither a yes to a proposal nor thanks for work."""
    is_yes_to_it = is_proposal(exchange.heard) and is_yes(exchange.said)
    return is_courtesy(exchange.said) and not is_yes_to_it and (_asks(exchange.heard) or not exchange.acts)


def _asks(text: str) -> bool:
    return any(ASKS.search(line) for line in split_sentences(text))


def _is_left_open(exchange: Exchange, exchanges: Sequence[Exchange]) -> bool:
    """Whether the agent asks for something and the user's words are no answer to it."""
    asked = [line for line in split_sentences(exchange.heard) if ASKS.search(line)]
    if not asked:
        return False
    is_older = _is_older(exchange, exchanges)
    for line in asked:
        if OFFERS_HELP.search(line) or ELSE.search(line):
            if not is_older or _flat(exchange.said) == _flat(exchanges[0].said):
                return False
        elif UNKNOWN.search(exchange.said):
            return False
        elif (PROPOSES.search(line) and not OPEN.search(line)) or YES_OR_NO.search(line):
            if _STAND.search(exchange.said) or (TAKES_A_STAND.search(exchange.said) and not is_older):
                return False
        elif not is_older:
            kinds = [answer for kind, answer in _KINDS if kind.search(line)]
            if not kinds or any(answer.search(exchange.said) for answer in kinds):
                return False
    return True


def _is_deaf(run: Sequence[Exchange]) -> bool:
    """Whether the user says again and again the same, and no yes, no or "I don't know", while the agent asks
    and does different things."""
    said = run[-1].said
    if len(run) <= TIMES or _STAND.search(said) or UNKNOWN.search(said):
        return False
    answers = run[1:]
    return (
        all(_flat(each.said) == _flat(said) for each in run)
        and all(_asks(each.heard) or each.agent_acts for each in answers)
        and len({_flat(each.heard) for each in answers}) > 1
    )


def _is_served(exchange: Exchange, exchanges: Sequence[Exchange]) -> bool:
    """Whether the agent reports or refuses what the user said before, after it has done or looked up
    something for it."""
    said = [_flat(each.said) for each in exchanges]
    first = said.index(_flat(exchange.said))
    has_acted = any(each.agent_acts for each in exchanges[first + 1 :])
    lines = split_sentences(exchange.heard)
    return has_acted and any(REPORTS.search(line) or REFUSES.search(line) for line in lines)


def _is_older(exchange: Exchange, exchanges: Sequence[Exchange]) -> bool:
    """Whether the user said the same before the agent first said what it says here."""
    said = [_flat(each.said) for each in exchanges].index(_flat(exchange.said))
    heard = [_flat(each.heard) for each in exchanges].index(_flat(exchange.heard))
    return said < heard


def _flat(text: str) -> str:
    """A text in lower case, its words alone."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _quote(text: str, limit: int = 100) -> str:
    text = " ".join(text.split())
    return f"'{text}'" if len(text) <= limit else f"'{text[: limit - 1]}…'"
