"""Audit of the simulated user, from the conversation and the task alone.

A user can be wrong: state facts that its scenario does not contain, reveal everything at once, stop too
early or never, speak as the agent, read out its instructions, or not answer. Each check compares what the
user said with what it could know: its scenario and the conversation so far. If the task has an agenda, a
rule-based user follows the same conversation and finds the turn at which all wishes were settled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

from pydantic import ValidationError

from trialogue.talk.agenda import (
    Agenda,
    AgendaUser,
    Fact,
    Wish,
    find_matches,
    has_match,
)
from trialogue.talk.users import user_prompt
from trialogue.trajectory import Fault, Finding, Trajectory
from trialogue.world.domain import Domain
from trialogue.world.speech import (
    ASKS,
    ELSE,
    OPEN,
    PROPOSES,
    REFUSES,
    ROLE,
    TAKES_A_STAND,
    UNKNOWN,
)
from trialogue.world.speech import split_sentences as sentences_of


def _rule(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


# -- what the user said, and what it could know --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """One text of the user."""

    turn: int
    text: str
    """Without the stop token."""
    stops: bool
    heard: str
    """What the agent said since the user's previous text."""
    known: str
    """Everything the user had read until then: texts of the agent and results of its own tools."""


class Case:
    """One conversation, prepared for the checks."""

    def __init__(self, domain: Domain, trajectory: Trajectory) -> None:
        self.domain, self.trajectory, self.task = domain, trajectory, trajectory.task
        self.said = list(_listen(domain, trajectory))
        self.agenda = _read_agenda(self.task.meta.get("agenda"))

    @cached_property
    def scenario(self) -> str:
        """Everything the user knows from the start: the instructions and all texts of the agenda."""
        agenda = self.agenda
        parts = [self.task.instructions]
        for wish in self.wishes:
            parts += wish.says
        parts += [fact.value or "" for _, fact in self.facts]
        parts += [text for _, fact in self.facts for text in fact.says]
        if agenda is not None:
            parts += [text for texts in agenda.phrases.model_dump().values() for text in texts]
        return "\n".join(parts)

    @cached_property
    def wishes(self) -> list[Wish]:
        """All wishes, including those that the user may change its mind to."""
        found: list[Wish] = []
        for wish in self.agenda.wishes if self.agenda is not None else ():
            while wish is not None:
                found.append(wish)
                wish = wish.instead
        return found

    @cached_property
    def facts(self) -> list[tuple[str, Fact]]:
        own = self.agenda.facts if self.agenda is not None else {}
        return [*own.items(), *(pair for wish in self.wishes for pair in wish.facts.items())]

    @cached_property
    def settled(self) -> int | None:
        """Index of the user's text at which a rule-based user would have stopped; None if it would not."""
        return self._shadow[0]

    @cached_property
    def gave_up(self) -> bool:
        """Whether that user would have stopped because it ran out of patience."""
        return self._shadow[1]

    @cached_property
    def _shadow(self) -> tuple[int | None, bool]:
        assert self.agenda is not None
        world = self.domain.user_database
        tools = () if world is None else tuple(world.tools.values())
        shadow = AgendaUser(self.agenda, f"{self.task.id}/{self.trajectory.seed}", tools=tools)
        for place, said in enumerate(self.said[1:], 1):
            if shadow.respond(said.heard).endswith(shadow.stop):
                return place, shadow.patience < 0
            if said.stops and shadow.patience <= min(1, self.agenda.patience - 2):
                return place, True  # a little less patient than the rules would be
        return None, False


def _listen(domain: Domain, trajectory: Trajectory) -> Iterator[Said]:
    heard: list[str] = []
    known: list[str] = [domain.rules.user_cue or ""]
    for place, turn in enumerate(trajectory.turns):
        message = turn.message
        if turn.side == "agent":
            if message.role == "assistant" and not message.tool_calls:
                heard.append(message.content)
        elif message.role == "tool":
            known.append(message.content)
        elif message.content.strip() and not message.tool_calls:
            known += heard
            text = message.content.replace("’", "'")
            for token in domain.rules.stop_tokens:
                text = text.replace(token, "")
            stops = domain.rules.is_stop(message.content)
            yield Said(place, text.strip(), stops, "\n".join(heard), "\n".join(known))
            heard = []


def _read_agenda(data: object) -> Agenda | None:
    if data is None:
        return None
    try:
        return Agenda.model_validate(data)
    except ValidationError:
        return None


# -- the checks ----------------------------------------------------------------------------------------------

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_CODE = re.compile(
    r"(?<![\w@.])(?=[\w#-]{0,64}?\d)(?=[\w#-]{0,64}?[A-Za-z])#?[A-Za-z0-9][A-Za-z0-9-]{3,64}(?![\w@])"
)
_ORDINAL = _rule(r"^\d+(?:st|nd|rd|th|am|pm|min|mins|days?|years?|x)$")
_NUMBER = re.compile(r"(?<![\w@.-])\+?\d(?:[ .,/-]?\d){2,}(?![\w@])")
_NAME = re.compile(
    r"(?:[Mm]y (?:full |last |first )?name is|[Nn]ame:|[Tt]he name is|I am called|[Cc]all me|[Tt]his is|I'm"
    r"|I am|name of|under)\s+((?:[A-Z][\w'-]+ ){0,2}[A-Z][\w'-]+)"
)
_PAIR = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)+")
_WORD = re.compile(r"[\w'-]+")
_NEGATES = _rule(r"\b(?:no|not|isn't|wasn't|wrong|instead of|rather than|n't)\b")
_LOOSE = {
    "the",
    "my",
    "a",
    "an",
    "this",
    "that",
    "your",
    "new",
    "other",
    "same",
    "old",
    "another",
    "one",
    "any",
}
_COMMON = {"Hello", "Hi", "Dear", "Good", "Thanks", "Thank", "Please", "Yes", "No", "Sure", "Okay", "Not"}


def find_wrong_facts(case: Case) -> Iterator[Finding]:
    """Facts that contradict the scenario, or that it does not hold and nobody told the user."""
    forms: dict[str, set[str]] = {}
    for _, fact in case.facts:
        if fact.form is not None and fact.value is not None:
            forms.setdefault(fact.form, set()).add(_flat(fact.value))
    for form, own in forms.items():  # what the instructions and wordings name is the user's own as well
        own |= set(map(_flat, find_matches(form, case.scenario)))
    given = _flat(case.scenario)
    names = _read_names(case.domain) if case.facts else frozenset[str]()
    for said in case.said:
        found: dict[str, Fault] = {}
        for form, own in forms.items():
            stated = set(map(_flat, find_matches(form, said.text)))
            wrong = {value for value in stated if not _is_among(value, own)}
            if wrong and _NEGATES.search(said.text):  # turning down what the agent proposed
                wrong -= {value for value in wrong if value in _flat(said.known)}
            if wrong == stated:
                found |= dict.fromkeys(sorted(wrong), "contradiction")
        values = {_flat(value) for value in find_values(said.text, names)}
        told = _flat(said.known) if values else ""
        for value in sorted(values):
            if value not in given and value not in told and not any(value in other for other in found):
                found[value] = "invention"
        for value, kind in found.items():
            what = "contradicts the scenario" if kind == "contradiction" else "is nowhere in the scenario"
            yield Finding(kind=kind, turn=said.turn, evidence=f"'{value}' {what}: {_short(said.text)}")


def _is_among(value: str, own: set[str]) -> bool:
    """Whether a value is the user's own; 'my shelf' counts as 'green shelf'."""
    words = [word for word in value.split() if word not in _LOOSE]
    short = " ".join(words)
    return value in own or any(short in other for other in own) or not words


def find_values(text: str, names: frozenset[str] = frozenset()) -> Iterator[str]:
    """Values that cannot be guessed: addresses, numbers, codes, names, things of the domain."""
    for pattern in (_EMAIL, _CODE, _NUMBER):
        for match in pattern.finditer(text):
            if not _ORDINAL.search(match.group()):
                yield match.group().strip(" .,-")
    for sentence in sentences_of(text):
        for match in [*_NAME.finditer(sentence), *_PAIR.finditer(sentence)]:
            name = match.group(match.lastindex or 0)
            if not _COMMON.intersection(name.split()) and (" " in name or "name" in match.group()):
                yield name
    words = [word.lower() for word in _WORD.findall(text)]
    for size in (2, 3, 4):
        for start in range(len(words) - size + 1):
            phrase = " ".join(words[start : start + size])
            if phrase in names:
                yield phrase


@lru_cache(maxsize=8)
def _read_names(domain: Domain) -> frozenset[str]:
    """Names of things in the domain's database: texts of two to four words that occur at most 20 times."""
    counts: dict[str, int] = {}
    for text in _texts(domain.database.to_data()):
        words = text.lower().split()
        if 2 <= len(words) <= 4 and all(_WORD.fullmatch(word) for word in words):
            counts[" ".join(words)] = counts.get(" ".join(words), 0) + 1
    return frozenset(text for text, count in counts.items() if count <= 20)


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for value in cast("dict[str, Any]", data).values():
            yield from _texts(value)
    elif isinstance(data, list):
        for value in cast("list[Any]", data):
            yield from _texts(value)


def find_dump(case: Case) -> Iterator[Finding]:
    """Details that the user reveals in its first message without being asked."""
    if not case.said:
        return
    first = case.said[0]
    text = _flat(first.text)
    if case.agenda is not None:
        wanted = _flat(" ".join(case.agenda.wishes[0].says))
        values = {_flat(fact.value) for _, fact in case.facts if fact.value is not None}
        given = sorted(value for value in values if _has(text, value) and not _has(wanted, value))
        enough = len(given) >= 2
    else:
        values = {_flat(value) for value in find_values(case.task.instructions)}
        given = sorted(value for value in values if _has(text, value))
        enough = len(given) >= 3 and len(given) > len(values) / 2
    if enough:
        told = ", ".join(given)
        yield Finding(kind="dump", turn=first.turn, evidence=f"tells unasked in the first message: {told}")


CAPPED = ("max_turns", "stuck")
"""Ends of a conversation that neither side ended."""


def find_wrong_end(case: Case) -> Iterator[Finding]:
    """The user stops before its wishes are settled, or continues after that."""
    if len(case.said) < 2 and not any(said.stops for said in case.said):
        return
    last = case.said[-1]
    if case.agenda is None:
        yield from _find_plain_end(case, last)
    elif last.stops:
        late = case.settled is not None and case.settled <= len(case.said) - 1
        if not late and not _is_reached(case):
            about = f"after: {_short(last.heard)}" if last.heard else "in the first message"
            yield Finding(
                kind="early_stop", turn=last.turn, evidence=f"stops with a wish not yet settled, {about}"
            )
    if case.agenda is not None and case.settled is not None and not case.gave_up:
        after = case.said[case.settled :]
        if len(after) > 2 or (len(after) == 2 and not last.stops and case.trajectory.end in CAPPED):
            said = after[-1]
            evidence = f"everything was settled {len(after)} messages ago, yet: {_short(said.text)}"
            yield Finding(kind="never_stops", turn=said.turn, evidence=evidence)


def _find_plain_end(case: Case, last: Said) -> Iterator[Finding]:
    """Without an agenda, find clear cases: a stop in the first message or instead of an answer, two farewells
    without a stop."""
    if last.stops and len(case.said) == 1 and case.task.expected.calls and not _is_reached(case):
        yield Finding(kind="early_stop", turn=last.turn, evidence="stops in its first message")
        return
    asks = [line for line in sentences_of(last.heard) if ASKS.search(line) and not ELSE.search(line)]
    if last.stops and asks and case.task.expected.calls and not _is_reached(case):
        evidence = f"stops in place of an answer to: {_short(asks[-1])}"
        yield Finding(kind="early_stop", turn=last.turn, evidence=evidence)
    farewells = [said for said in case.said if not said.stops and _FAREWELL.search(said.text)]
    if case.trajectory.end in CAPPED and len(farewells) >= 2:
        said = farewells[-1]
        yield Finding(
            kind="never_stops", turn=said.turn, evidence=f"takes leave and goes on: {_short(said.text)}"
        )


_FAREWELL = _rule(
    r"\b(?:good)?bye\b", r"\bthat(?:'s| is| was) (?:all|it|everything)\b", r"\bhave a (?:nice|great)"
)


def _is_reached(case: Case) -> bool:
    """Whether the agent did what the user wants, whatever it said."""
    reward = case.trajectory.reward
    if reward is None:
        return False
    single = case.agenda is None or len(case.agenda.wishes) == 1
    done = single and bool(case.task.expected.calls) and reward.parts.get("database") == 1.0
    return reward.is_success or done


def find_role_breaks(case: Case) -> Iterator[Finding]:
    """The user speaks as the agent: typical phrases, or a sentence of the agent."""
    heard: list[str] = []
    for said in case.said:
        heard += [line for line in map(_flat, sentences_of(said.heard)) if line.count(" ") >= 5]
        spoken = _flat(said.text)
        match = ROLE.search(said.text)
        repeated = next((line for line in heard if line in spoken), None)
        if match is not None and _flat(match.group()) not in _flat(case.scenario):
            yield Finding(kind="role", turn=said.turn, evidence=f"speaks as the agent: {_short(said.text)}")
        elif repeated is not None:
            yield Finding(kind="role", turn=said.turn, evidence=f"repeats the agent: '{repeated}'")


TELLS = _rule(
    r"\bmy (?:instructions?|scenario|persona|script|prompt)\b",
    r"\b(?:the|these|those) (?:scenario|instructions) (?:say|says|tell|tells|state|states)\b",
    r"\bi(?:'m| am) (?:playing|simulating|role-?playing|pretending|supposed to (?:say|act|play))\b",
    r"\bsimulated (?:user|customer)\b",
)


def find_quotes(case: Case) -> Iterator[Finding]:
    """The user reads out its instructions, or mentions them."""
    prompt = _words(user_prompt(case.domain, case.task))
    address = {gram for gram in _grams(prompt, 6) if {"you", "your", "yourself"} & set(gram)}
    long = set(_grams(prompt, 10))
    for said in case.said:
        words = _words(said.text)
        own = _flat(said.known)
        hits = [gram for gram in _grams(words, 6) if gram in address] or [
            gram for gram in _grams(words, 10) if gram in long
        ]
        quoted = next((text for text in map(" ".join, hits) if text not in own), None)
        match = TELLS.search(said.text)
        if quoted is not None:
            yield Finding(kind="quote", turn=said.turn, evidence=f"reads the instructions out: '{quoted} …'")
        elif match is not None:
            yield Finding(
                kind="quote", turn=said.turn, evidence=f"speaks of its instructions: {_short(said.text)}"
            )


def find_ignored_questions(case: Case) -> Iterator[Finding]:
    """A direct question that was asked twice and not answered."""
    before: set[str] = set()
    for said in case.said[1:]:
        ignored = set[str]()
        if not said.stops:
            ignored = set(_find_ignored(case, said))
        both = before & ignored
        if both:
            evidence = f"asked twice for {', '.join(sorted(both))}, answers: {_short(said.text)}"
            yield Finding(kind="ignored_question", turn=said.turn, evidence=evidence)
            ignored = set[str]()
        before = ignored


def _find_ignored(case: Case, said: Said) -> Iterator[str]:
    """What was asked and neither answered nor refused."""
    if any(REFUSES.search(line) for line in sentences_of(said.heard)) or UNKNOWN.search(said.text):
        return
    if any(_states(said.text, wish_text) for wish in case.wishes for wish_text in wish.says):
        return
    asking = [line for line in sentences_of(said.heard) if ASKS.search(line) and not ELSE.search(line)]
    asked: dict[str, bool] = {}
    for line in asking:
        if PROPOSES.search(line) and not OPEN.search(line):
            asked["a yes or no"] = bool(TAKES_A_STAND.search(said.text))
            continue
        for name, fact in case.facts:
            if fact.value is not None and re.search(fact.asked, line, re.IGNORECASE):
                asked[name] = asked.get(name, False) or _tells(said.text, fact)
    if asked and not any(asked.values()):
        yield from asked


def _tells(text: str, fact: Fact) -> bool:
    """Whether a text states a fact: its value, one of its wordings, or a long word of its value."""
    assert fact.value is not None
    if fact.form is not None and has_match(fact.form, text):
        return True  # perhaps the wrong one, which is another finding
    flat = _flat(text)
    if _has(flat, _flat(fact.value)) or any(
        _states(text, says.replace("{value}", fact.value)) for says in fact.says
    ):
        return True
    words = set(flat.split())
    return any(word in words for word in _flat(fact.value).split() if len(word) >= 4)


def _states(text: str, wording: str) -> bool:
    wording = _flat(wording)
    return len(wording.split()) >= 2 and wording in _flat(text)


CHECKS: tuple[Callable[[Case], Iterable[Finding]], ...] = (
    find_wrong_facts,
    find_dump,
    find_wrong_end,
    find_role_breaks,
    find_quotes,
    find_ignored_questions,
)


def audit(domain: Domain, trajectory: Trajectory) -> tuple[Finding, ...]:
    """All findings about the user of a conversation, in the order of the turns."""
    case = Case(domain, trajectory)
    found = [finding for check in CHECKS for finding in check(case)]
    return tuple(sorted(found, key=lambda finding: finding.turn))


# -- texts ---------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text.replace("’", "'"))]


def _flat(text: str) -> str:
    """The text in lower case and without punctuation at the edges of words, for comparisons."""
    return " ".join(word.strip(".,;:!?()\"'`") for word in text.replace("’", "'").lower().split())


def has_value(text: str, value: str) -> bool:
    """Whether a text contains a value, ignoring case and punctuation."""
    return _has(_flat(text), _flat(value))


def _has(text: str, value: str) -> bool:
    """Whether a flat text contains a value as whole words."""
    return f" {value} " in f" {text} "


def _grams(words: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def _short(text: str, limit: int = 100) -> str:
    text = " ".join(text.split())
    return f"'{text}'" if len(text) <= limit else f"'{text[: limit - 1]}…'"
