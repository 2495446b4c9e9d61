"""A domain's policy as rules over the events of a conversation, written beside its tools.

A `Rule` has a name, the sentence of the policy it stands for, and a check. Checks read like the policy:
`before(calls("cancel_order"), confirmed())`, `never(insults)`, `at_most(1, calls("cancel_order"))`. A check
yields the events it looked at, with evidence where the rule is broken, so that it is known what is exercised.
What is wrong with a text of the agent is in `trialogue.world.policy_speech`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from trialogue.world.events import Event, Events, Record, find_leaves, is_stated
from trialogue.world.texts import find_numbers, squash
from trialogue.world.tools import shorten

Select = Callable[[Events], Iterable[Event]]
"""Which events a rule looks at."""
Condition = Callable[[Events, Event], str]
"""What is wrong with an event, as evidence; empty where nothing is."""
Looked = tuple[Event, str]
Check = Callable[[Events], Iterable[Looked]]
"""What a rule looks at. It may stop at the first event that is wrong."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a policy, checked in every conversation."""

    name: str
    policy: str
    """The words of the policy it stands for. Several passages are separated by a line break."""
    check: Check
    required: bool = True
    """A conversation that breaks a required rule earns nothing; another rule is only reported."""


# -- which events ------------------------------------------------------------------------------------------


def calls(*names: str) -> Select:
    """Successful calls of these tools."""
    wanted = frozenset(names)

    def find(events: Events) -> Sequence[Event]:
        if wanted.isdisjoint(events.done):
            return ()
        return [call for call in events.called if call.name in wanted and not call.failed]

    return find


def words(pattern: str = "") -> Select:
    """What the agent said to the user; with a pattern, only texts that it matches."""
    if not pattern:
        return lambda events: events.said
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda events: [said for said in events.said if compiled.search(said.text)]


def after(select: Select) -> Select:
    """The agent's first text after each of these events."""

    def find(events: Events) -> Iterator[Event]:
        for event in select(events):
            said = next((item for item in events.said if item.place > event.place), None)
            if said is not None:
                yield said

    return find


# -- what must hold ----------------------------------------------------------------------------------------


def before(select: Select, *conditions: Condition) -> Check:
    """At each of these events every condition holds, by what had happened until then."""

    def check(events: Events) -> Iterable[Looked]:
        looked: list[Looked] = []
        for event in select(events):
            for test in conditions:
                if wrong := test(events, event):
                    return [(event, wrong)]
            looked.append((event, ""))
        return looked

    return check


@dataclass(frozen=True, slots=True, eq=False)
class Sifted:
    """A condition on what the agent says that finds something wrong in some texts only, and knows which."""

    sift: Callable[[Events], Sequence[Event]]
    test: Condition

    def __call__(self, events: Events, said: Event) -> str:
        return self.test(events, said) if said in self.sift(events) else ""


def only_in(sift: Callable[[Events], Sequence[Event]]) -> Callable[[Condition], Sifted]:
    """Try a condition only on the texts that a function picks."""
    return lambda test: Sifted(sift, test)


def only_with(*words: str) -> Callable[[Condition], Sifted]:
    """Try a condition only on texts with one of these words, in small letters."""
    wanted = frozenset(words)

    def sift(events: Events) -> Sequence[Event]:
        if wanted.isdisjoint(events.vocabulary):
            return ()
        return [said for said in events.said if not wanted.isdisjoint(said.form.words)]

    return only_in(sift)


def both(*checks: Check) -> Check:
    """Several checks of one rule."""
    return lambda events: (looked for check in checks for looked in check(events))


def never(*conditions: Condition) -> Check:
    """No text of the agent to the user is wrong in one of these ways."""
    sifted = [(test.test, test.sift) if isinstance(test, Sifted) else (test, words()) for test in conditions]

    def check(events: Events) -> Iterable[Looked]:
        first: list[Looked] = []
        for test, sift in sifted:
            for said in sift(events):
                if first and said.place >= first[0][0].place:
                    break  # another condition found this text wrong, or an earlier one
                if wrong := test(events, said):
                    first = [(said, wrong)]
                    break
        return first or events.faultless

    return check


def at_most(most: int, select: Select) -> Check:
    """At most so many of these events between two texts of the user."""

    def check(events: Events) -> Iterator[Looked]:
        counts: dict[int, int] = {}
        for event in select(events):
            heard = events.find_last_heard(event)
            key = -1 if heard is None else heard.place
            counts[key] = counts.get(key, 0) + 1
            many = f"{counts[key]} without a word of the user between them, at most {most} are allowed"
            yield event, many if counts[key] > most else ""

    return check


def once_per(argument: str, select: Select) -> Check:
    """One of these events at most for each value of an argument."""

    def check(events: Events) -> Iterator[Looked]:
        seen: set[str] = set()
        for event in select(events):
            value = str(event.arguments.get(argument))
            yield event, f"{event.name} on {value}, the second of its kind" if value in seen else ""
            seen.add(value)

    return check


def says(pattern: str) -> Condition:
    """The words of the event match."""
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda events, event: "" if compiled.search(event.text) else f"{shorten(event.text)!r} does not"


def one_call_at_a_time(events: Events) -> Iterator[Looked]:
    """A message of the agent holds one call and no words, or words and no call."""
    for message in events.messages:
        wrong = ""
        if message.calls > 1:
            wrong = f"{message.calls} calls in one message"
        elif message.has_words:
            wrong = "a call and words in one message"
        yield Event(0, message.turn, "called", ""), wrong


# -- conditions on a call ----------------------------------------------------------------------------------


def confirmed(
    acts: Mapping[str, str] | None = None,
    names: tuple[str, ...] = ("name", "title", "item"),
    told: tuple[str, ...] | None = None,
    untold: tuple[str, ...] = (),
    *,
    earlier: bool = False,
) -> Condition:
    """The agent said what it is about to do, with the values of the call, and the user said yes after that.

    `acts` gives words of which the proposal of a tool must have one. A record may be stated by one of the
    fields `names` instead of its id. `told` are the arguments that have to be stated (None: all) but for the
    `untold`. With `earlier` they may also be stated in texts before the one that asks for the yes.
    """
    patterns = {tool: re.compile(text, re.IGNORECASE) for tool, text in (acts or {}).items()}

    def given(call: Event) -> dict[str, Any]:
        fields = call.arguments if told is None else told
        return {field: call.arguments.get(field) for field in fields if field not in untold}

    def check(events: Events, call: Event) -> str:
        missing: list[str] = []
        heard = events.find_last_heard(call)
        while heard is not None:
            if not heard.is_yes:
                what = f"the user's last words before {call.name} are no yes: {shorten(heard.text)!r}"
                return f"{call.name} without a yes: {missing[0]}" if missing else what
            said = events.find_last_said(heard)
            if said is None:
                break
            act = patterns.get(call.name)
            if not said.is_proposal:
                missing.append(f"{shorten(said.text)!r} asks for no yes")
            elif act is not None and not act.search(said.text):
                missing.append(f"{call.name} was not proposed")
            else:
                stated = [said, heard, *_find_earlier(events, said, earlier)]
                unstated = find_unstated(events, given(call), stated, names)
                if not unstated:
                    return ""
                missing.append(unstated)
            heard = events.find_last_heard(said)
        return f"{call.name} without a yes: {missing[0] if missing else 'nothing was proposed'}"

    return check


def _find_earlier(events: Events, said: Event, earlier: bool) -> list[Event]:
    return [item for item in events.said if item.place < said.place] if earlier else []


def find_unstated(
    events: Events, values: Mapping[str, Any], stated: Sequence[Event], names: tuple[str, ...]
) -> str:
    """The first of some values that none of these texts gives."""
    for field, value in values.items():
        for leaf in find_leaves(value):
            if is_stated(leaf, *stated):
                continue
            record = events.find_record(leaf, stated[0]) or {}
            called = [part for name in names for part in find_leaves(record.get(name)) if part is not None]
            if not any(is_stated(part, *stated) for part in called):
                return f"the proposal does not give {field} {shorten(str(leaf))}"
    return ""


def said_by_user(argument: str = "", words: Mapping[str, str] | None = None) -> Condition:
    """The user gave the values of the call: of one argument, or of all. `words` are other words for a value,
    as patterns."""
    patterns = {value: re.compile(text, re.IGNORECASE) for value, text in (words or {}).items()}

    def check(events: Events, call: Event) -> str:
        values = call.arguments.get(argument) if argument else call.arguments
        for leaf in find_leaves(values):
            pattern = patterns.get(str(leaf))
            given = (
                any(pattern.search(heard.text) for heard in events.find_heard(call))
                if pattern is not None
                else events.was_heard(leaf, call)
            )
            if not given:
                return f"the user never said {shorten(str(leaf))!r}, the {call.name} does"
        return ""

    return check


_all_said_by_user = said_by_user()


def looked_up(argument: str) -> Condition:
    """The record that an argument names was shown by a tool before."""

    def check(events: Events, call: Event) -> str:
        for leaf in find_leaves(call.arguments.get(argument)):
            if events.find_record(leaf, call) is None:
                return f"{call.name} on {shorten(str(leaf))}, which was not looked up"
        return ""

    return check


def on_record(argument: str, test: Callable[[Record, Event], bool], otherwise: str) -> Condition:
    """A test holds of the record that an argument names, as it was last shown. Unseen records are another
    rule's business."""

    def check(events: Events, call: Event) -> str:
        for leaf in find_leaves(call.arguments.get(argument)):
            record = events.find_record(leaf, call)
            if record is not None and not test(record, call):
                return f"{call.name} on {shorten(str(leaf))}: {otherwise}"
        return ""

    return check


def has(argument: str, field: str, *allowed: Any) -> Condition:
    """A field of the record that an argument names has one of these values."""
    return on_record(
        argument,
        lambda record, call: record.get(field) in allowed,
        f"its {field} is not {' or '.join(map(str, allowed))}",
    )


def grounded(events: Events, call: Event) -> str:
    """Every value of the call with a digit in it was said by the user or shown by a tool."""
    for field, value in call.arguments.items():
        for leaf in find_leaves(value):
            text = str(leaf)
            if isinstance(leaf, bool) or not any(map(str.isdigit, text)) or len(text) < 3:
                continue
            if not is_known(text, events, call):
                return f"{call.name}: {field} {shorten(text)} was mentioned by nobody"
    return ""


# -- whose records -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Caller:
    """Who is served: the person a tool has identified by what they said themselves."""

    tools: tuple[str, ...]
    """Tools that identify."""
    owner: str
    """The field that says whose a record is."""

    def find(self, events: Events, event: Event) -> str:
        """Who had been identified before an event; empty where nobody was."""
        found = ""
        for place, owner in self._find_all(events):
            if place >= event.place:
                break
            found = owner
        return found

    def _find_all(self, events: Events) -> list[tuple[int, str]]:
        """Who was identified, with the place of the call."""
        known: list[tuple[int, str]] | None = events.findings.get(self)
        if known is None:
            known = events.findings[self] = [
                (call.place, owner)
                for call in calls(*self.tools)(events)
                if (owner := self._find_owner(call)) and not _all_said_by_user(events, call)
            ]
        return known

    def _find_owner(self, call: Event) -> str:
        if self.owner in call.arguments:
            return str(call.arguments[self.owner])
        data: Any = call.data
        if isinstance(data, list) and data:
            data = cast("list[Any]", data)[0]
        if isinstance(data, dict):
            return str(cast("Record", data).get(self.owner, ""))
        return str(cast("object", data))

    def identified(self, events: Events, event: Event) -> str:
        """Condition: somebody was identified before."""
        if self.find(events, event):
            return ""
        return "nobody was identified by what they said themselves" + (
            f" before {event.name}" if event.name else ""
        )

    def owns(self, argument: str) -> Condition:
        """Condition: the record that an argument names is the caller's own."""

        def check(events: Events, call: Event) -> str:
            caller = self.find(events, call)
            for leaf in find_leaves(call.arguments.get(argument)):
                owner = (events.find_record(leaf, call) or {}).get(self.owner)
                if caller and owner is not None and str(owner) != caller:
                    return f"{call.name} on {shorten(str(leaf))}, which belongs to {owner}, not to {caller}"
            return ""

        return check

    @property
    def told_too_early(self) -> Condition:
        """Wrong: the text gives away what a tool has shown, before anybody was identified."""

        def sift(events: Events) -> Sequence[Event]:
            if not events.shown:
                return ()
            known, first = self._find_all(events), events.shown[0][0]
            last = known[0][0] if known else len(events.all)
            return [said for said in events.said if first < said.place < last] if first < last else ()

        @only_in(sift)
        def check(events: Events, said: Event) -> str:
            for _, identity, _, leaves in events.find_shown(said):
                if value := _find_told(events, said, leaves, is_named=identity in said.lowered):
                    return f"{value!r} was told before anybody was identified"
            return ""

        return check

    @property
    def told_of_others(self) -> Condition:
        """Wrong: the text gives away what belongs to somebody else."""

        def sift(events: Events) -> Sequence[Event]:
            known = self._find_all(events)
            return events.said if any(self._find_others(events, caller) for _, caller in known) else ()

        @only_in(sift)
        def check(events: Events, said: Event) -> str:
            caller = self.find(events, said)
            own: str | None = None
            for place, identity, owner, leaves in self._find_others(events, caller) if caller else ():
                if place >= said.place:
                    break
                if own is None:
                    own = self._list_own(events, said, caller)
                if value := _find_told(events, said, leaves, own, is_named=identity in said.lowered):
                    return f"{value!r} of {owner} was told to {caller}"
            return ""

        return check

    def _list_own(self, events: Events, said: Event, caller: str) -> str:
        """What had been shown of the caller's own before a text, or of nobody's."""
        return " ".join(
            str(leaf).lower()
            for _, _, record, leaves in events.find_shown(said)
            if str(record.get(self.owner, caller)) == caller
            for leaf in leaves
        )

    def _find_others(self, events: Events, caller: str) -> list[tuple[int, str, str, list[Any]]]:
        """The records shown that belong to anybody but the caller: place, id, owner and plain values."""
        others: list[tuple[int, str, str, list[Any]]] | None = events.findings.get((self, caller))
        if others is None:
            others = events.findings[self, caller] = [
                (place, identity, owner, leaves)
                for place, identity, record, leaves in events.shown
                if (owner := record.get(self.owner)) is not None and str(owner) != caller
            ]
        return others


def _find_told(
    events: Events, said: Event, leaves: Iterable[Any], own: str = "", is_named: bool = False
) -> str:
    """The first value of a record that a text tells and the user did not say, nor anything of their own; of a
    record that the text names by its id, single words count too."""
    for leaf in leaves:
        text = str(leaf)
        if isinstance(leaf, bool) or leaf is None or len(text) < 4 or text.lower() in own:
            continue
        if (text in events.policy and not text.isalpha()) or (text.isalpha() and not is_named):
            continue
        if is_stated(leaf, said) and not events.was_heard(leaf, said):
            return text
    return ""


def is_known(text: str, events: Events, event: Event) -> bool:
    """Whether a value stood in the policy, the user's words or a result before an event."""
    known_since: dict[str, int] = events.findings.setdefault(is_known, {})
    if event.place < known_since.get(text, event.place + 1):
        if not _was_given(text, events, event):
            return False
        known_since[text] = event.place
    return True


@lru_cache(maxsize=64)
def _lower(policy: str) -> str:
    return policy.lower()


def _was_given(text: str, events: Events, event: Event) -> bool:
    lowered = text.lower()
    for item in events.given:
        if item.place >= event.place:
            break
        if lowered in item.lowered:
            return True
    given = [item for item in events.given if item.place < event.place]
    plain = squash(text)
    if lowered in _lower(events.policy) or any(plain in item.squashed for item in given):
        return True
    if plain in squash(events.policy):
        return True
    numbers = find_numbers(text)
    if not numbers:
        return False
    known = {number for item in given for number in item.numbers}
    amounts = {round(one, 2) for one in known if not one.is_integer()}
    return all(
        number in known
        or number <= 31
        or any(round(number - one, 2) in amounts or round(number + one, 2) in amounts for one in amounts)
        for number in numbers
    )


def report_only(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The same rules, none of them required: for reporting beside a benchmark's own grade."""
    return tuple(Rule(rule.name, rule.policy, rule.check, required=False) for rule in rules)
