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
from typing import Any, cast

from trialogue.world.events import Event, Events, Record, find_leaves, find_numbers, is_stated, squash
from trialogue.world.speech import is_proposal, is_yes
from trialogue.world.tools import shorten

Select = Callable[[Events], Iterable[Event]]
"""Which events a rule looks at."""
Condition = Callable[[Events, Event], str]
"""What is wrong with an event, as evidence; empty where nothing is."""
Looked = tuple[Event, str]
Check = Callable[[Events], Iterable[Looked]]


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
    return lambda events: [call for call in events.called if call.name in wanted and not call.failed]


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

    def check(events: Events) -> Iterator[Looked]:
        for event in select(events):
            yield event, next((wrong for test in conditions if (wrong := test(events, event))), "")

    return check


def both(*checks: Check) -> Check:
    """Several checks of one rule."""
    return lambda events: (looked for check in checks for looked in check(events))


def never(*conditions: Condition) -> Check:
    """No text of the agent to the user is wrong in one of these ways."""
    return before(words(), *conditions)


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
            if not is_yes(heard.text):
                what = f"the user's last words before {call.name} are no yes: {shorten(heard.text)!r}"
                return f"{call.name} without a yes: {missing[0]}" if missing else what
            said = events.find_last_said(heard)
            if said is None:
                break
            act = patterns.get(call.name)
            if not is_proposal(said.text):
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
            if any(is_stated(leaf, item) for item in stated):
                continue
            record = events.find_record(leaf, stated[0]) or {}
            called = [part for name in names for part in find_leaves(record.get(name)) if part is not None]
            if not any(is_stated(part, item) for part in called for item in stated):
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
                any(pattern.search(heard.text) for heard in events.heard if heard.place < call.place)
                if pattern is not None
                else events.was_heard(leaf, call)
            )
            if not given:
                return f"the user never said {shorten(str(leaf))!r}, the {call.name} does"
        return ""

    return check


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


@dataclass(frozen=True)
class Caller:
    """Who is served: the person a tool has identified by what they said themselves."""

    tools: tuple[str, ...]
    """Tools that identify."""
    owner: str
    """The field that says whose a record is."""

    def find(self, events: Events, event: Event) -> str:
        """Who had been identified before an event; empty where nobody was."""
        known: list[tuple[int, str]] | None = events.findings.get(self)
        if known is None:
            known = events.findings[self] = [
                (call.place, owner)
                for call in calls(*self.tools)(events)
                if (owner := self._find_owner(call)) and not said_by_user()(events, call)
            ]
        return next((owner for place, owner in reversed(known) if place < event.place), "")

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

    def told_too_early(self, events: Events, said: Event) -> str:
        """Wrong: the text gives away what a tool has shown, before anybody was identified."""
        if self.find(events, said):
            return ""
        for identity, record in events.find_records(said):
            if value := _find_told(events, said, record, is_named=identity in said.lowered):
                return f"{value!r} was told before anybody was identified"
        return ""

    def told_of_others(self, events: Events, said: Event) -> str:
        """Wrong: the text gives away what belongs to somebody else."""
        caller = self.find(events, said)
        if not caller:
            return ""
        own: str | None = None
        for identity, record in events.find_records(said):
            owner = record.get(self.owner)
            if owner is None or str(owner) == caller:
                continue
            if own is None:
                own = " ".join(
                    str(leaf).lower()
                    for _, mine in events.find_records(said)
                    if str(mine.get(self.owner, caller)) == caller
                    for leaf in find_leaves(mine)
                )
            if value := _find_told(events, said, record, own, is_named=identity in said.lowered):
                return f"{value!r} of {owner} was told to {caller}"
        return ""


def _find_told(events: Events, said: Event, record: Record, own: str = "", is_named: bool = False) -> str:
    """The first value of a record that a text tells and the user did not say, nor anything of their own; of a
    record that the text names by its id, single words count too."""
    for leaf in find_leaves(record):
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
    lowered = text.lower()
    given = [item for item in events.all[: event.place] if item.kind != "said"]
    if any(lowered in item.lowered for item in given) or lowered in events.policy.lower():
        return True
    plain = squash(text)
    if any(plain in item.squashed for item in given) or plain in squash(events.policy):
        return True
    numbers = find_numbers(text)
    if not numbers:
        return False
    known = {number for item in given for number in find_numbers(item.text)}
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
