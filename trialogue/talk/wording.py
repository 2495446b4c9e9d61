"""Whether words that a language model wrote for a rule-based user say what they must, and nothing else.

Pure functions. `Line` is what is to be said; `find_faults` names what is wrong with a wording of it. A
wording has to keep every value, every word that means something in a wish, and a clear yes or no. It may
add no other value, no other thing that the domain's tools are about, no question, no words of the agent, no
farewell.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from trialogue.talk.agenda import Act
from trialogue.world.database import Database
from trialogue.world.speech import NO, REFUSES, ROLE, UNKNOWN, split_sentences

_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
_VALUE = re.compile(r"[^\s,;:!?()\"]*[\d@][^\s,;:!?()\"]*")
_NAMED = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+")
_YES = re.compile(
    r"\b(?:yes|yeah|yep|yup|sure|ok|okay|go ahead|do it|absolutely|of course|definitely)\b", re.IGNORECASE
)
_FAREWELL = re.compile(
    r"\b(?:good)?bye\b|\bthat(?:'s| is| was) (?:all|it|everything)\b|\bfarewell\b|###", re.IGNORECASE
)
_OWNED = re.compile(
    r"\byour (?!help|time|service|support|assistance|reply|website|shop|answer|patience)\w+", re.IGNORECASE
)
_ABOUT = re.compile(
    r"\b(?:rewrit\w+|rephras\w+|own words|the customer|a customer|the agent|as an ai|voice|the line)\b|"
    r"\b(?:customer|agent|line|desk)\s*:|[<>{}\[\]*]",
    re.IGNORECASE,
)
_DESK = re.compile(
    r"\b(?:inconvenience|update you|assist you|help you|serve you|let you know|get back to you|try again)\b|"
    r"\b(?:i'll|i will|we'll|we will) (?:take care|handle|process|check|look|arrange|update|do|make)\b|"
    r"\b(?:no worries|you're welcome|you are welcome)\b|\bwe (?:can|have|are|offer|need)\b|"
    r"\byou (?:can|may|will|should|need|have|must)\b",
    re.IGNORECASE,
)
"""What a service desk says."""
_ACTS_WITH_YES = ("yes",)
_ACTS_WITHOUT_YES = ("change", "correct", "withdraw", "doubt")
_PLAIN_KINDS = frozenset(("wish", "fact", "yes", "next", "opening", "nudge"))
"""A customer who does these refuses nothing."""
_LONGEST = 60
"""Characters that a wording may have besides three times those of the line."""

_PLAIN = """
a able about after again all also although always am an and any anybody anything are as ask at be because
been before best better bit by called came can cannot could dear decided did do does don't done everything
favour finally find first for from get give glad go going good got great had happy has have having he hello
help helping her here hey hi him his hope hoping how i i'd i'll i'm i've if in is it it's its just kind
kindly know let let's like listen little look looking love made make makes maybe me mine moment morning most
much must my need needs no not now of oh ok okay on one only or our out over perhaps plan please possible
put quick quickly quite rather really right said say see she should so some somebody someone something sorry
such sure take tell than thank thanks that that's the their them then there there's these they thing think
this those time to today told too trust try under until up us very wait want wanted wants was we we'd we'll
we're we've well went were what when where which while who why will wish with wonder wondering would write
writing yes you you'd you're your yours
"""
EMPTY = frozenset(_PLAIN.split())
"""Words that a wording may leave out or add."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a rule-based user is about to say."""

    acts: tuple[Act, ...]
    hidden: tuple[str, ...] = ()
    """Values of facts that are not told now."""

    @property
    def text(self) -> str:
        """The plain words, without manner; what a change of mind or a correction says, last."""
        told = [act.words for act in self.acts]
        return " ".join(words for place, words in enumerate(told) if not _is_within(words, told[place + 1 :]))


def _is_within(words: str, others: Sequence[str]) -> bool:
    return any(words in other for other in others)


def find_faults(wording: str, line: Line, heard: str, things: Collection[str]) -> list[str]:
    """What is wrong with a wording of a line, after the agent's last words; nothing if it can be said.
    `things` are stems of words that the domain's tools are about."""
    text, own = wording.strip(), line.text
    found: list[str] = []
    kinds = {act.kind for act in line.acts}
    if not text or "\n" in text or len(text) > 3 * len(own) + _LONGEST:
        found.append("form")
    cores = " ".join(act.core for act in line.acts)
    values = [*(act.value for act in line.acts if act.value), *map(_strip, _VALUE.findall(cores))]
    if any(value not in text for value in values):
        found.append("value")
    known = {_strip(value) for value in _VALUE.findall(own)}
    if any(_strip(value) not in known for value in _VALUE.findall(text)) or any(
        name not in own for name in _NAMED.findall(text)
    ):
        found.append("invention")
    elif any(_holds(text, value) and not _holds(own, value) for value in line.hidden):
        found.append("other fact")
    said = _to_stems(text)
    if not _to_stems(cores) <= said:
        found.append("meaning")
    if any(stem in things for stem in said - _to_stems(own)):
        found.append("other thing")
    asks = "?" in text and "?" not in own and "wish" not in kinds
    refuses = kinds <= _PLAIN_KINDS and REFUSES.search(text) and not REFUSES.search(own)
    if asks or refuses or _speaks_as_agent(text, own, heard):
        found.append("role")
    has_yes = _YES.search(text) is not None
    if (
        (kinds & {*_ACTS_WITH_YES} and (not has_yes or NO.search(text)))
        or (kinds & {*_ACTS_WITHOUT_YES} and (has_yes or not NO.search(text)))
        or ("unknown" in kinds and not UNKNOWN.search(text))
    ):
        found.append("stand")
    if not kinds & {"stop", "give_up"} and _FAREWELL.search(text):
        found.append("stop")
    return found


def _speaks_as_agent(text: str, own: str, heard: str) -> bool:
    lines = [" ".join(_WORD.findall(part.lower())) for part in split_sentences(heard)]
    flat = " ".join(_WORD.findall(text.lower()))
    return any(
        pattern.search(text) and not pattern.search(own) for pattern in (ROLE, _OWNED, _ABOUT, _DESK)
    ) or any(part.count(" ") >= 5 and part in flat for part in lines)


def _to_stems(text: str) -> set[str]:
    """The words that mean something, cut so that "cancel" and "cancelled" are one."""
    return {_cut(word) for word in _WORD.findall(text.lower().replace("’", "'")) if word not in EMPTY}


def _cut(word: str) -> str:
    return word[:5]


def _strip(value: str) -> str:
    return value.strip(".'")


def _holds(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


def list_things(database: Database) -> frozenset[str]:
    """Stems of what a domain's tools do and its records tell: words in the names of tools that change
    something or end the conversation, in the values such a tool chooses from, and in the fields of records;
    without those in the names of tools that only look up."""
    tools = list(database.tools.values())
    texts = [
        text
        for tool in tools
        if tool.writes or tool.ends
        for text in (tool.name, *_list_enums(tool.parameters))
    ]
    texts += _list_fields(database.to_data())
    usual = {stem for tool in tools if not (tool.writes or tool.ends) for stem in _split(tool.name)}
    return frozenset(stem for text in texts for stem in _split(text) if stem not in usual)


def _split(name: str) -> Iterable[str]:
    return _to_stems(name.replace("_", " "))


def _list_enums(schema: Any) -> Iterable[str]:
    if isinstance(schema, Mapping):
        for key, value in cast("Mapping[str, Any]", schema).items():
            if key == "enum" and isinstance(value, list):
                yield from (str(item) for item in cast("list[Any]", value))
            else:
                yield from _list_enums(value)
    elif isinstance(schema, list):
        for value in cast("list[Any]", schema):
            yield from _list_enums(value)


def _list_fields(data: Mapping[str, Any]) -> Iterable[str]:
    """The names of the fields of each table's first record."""
    for table in data.values():
        records = cast("dict[str, Any]", table) if isinstance(table, dict) else {}
        first = next(iter(records.values()), None)
        if isinstance(first, dict):
            yield from cast("dict[str, Any]", first)
