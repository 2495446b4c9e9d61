"""The same task in other words: what a rule-based user says, reworded for learning.

An author writes a few sentences per fact and wish, and a small model learns them by heart: it then fails to
copy a name out of "My answer: Paton." because it has only ever met "It is Paton.". These are more ways to
tell any value and to put any wish, whatever the domain. Tasks that are evaluated on keep their own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

from trialogue.talk.agenda import Agenda, Fact, Phrases, Wish
from trialogue.task import Task

_TELLS = (
    *("{value}.", "{value}", "It's {value}.", "It is {value}.", "That's {value}."),
    *("That would be {value}.", "This is it: {value}.", "Here you are: {value}.", "Here: {value}."),
    *("I think it's {value}.", "Sure: {value}.", "Well, {value}.", "Of course, {value}."),
    *("{value}, I believe.", "{value}, as far as I know.", "Let me see. {value}."),
    *("One moment. It says {value}.", "It says {value} here.", "It reads {value}."),
    *("The {name} is {value}.", "My {name} is {value}.", "The {name}? {value}."),
    *("The {name}: {value}.", "{name}: {value}.", "For the {name} I have {value}."),
    *("I was given {value}.", "Take {value}.", "I can tell you: {value}."),
    *("You can write {value}.", "Just put {value}.", "Please note {value}."),
    *("{value} is what I have.", "{value} it is.", "That should be {value}, please check."),
    *("I would say {value}.", "My note says {value}.", "You want the {name}? That is {value}."),
    *("The answer is {value}.",),
)  # fmt: skip
_BEFORE = (
    *("Hello.", "Hi.", "Hi there.", "Hey.", "Good morning.", "Good day.", "Good evening.", "Excuse me."),
    *("Hello, I hope you can help me.", "Quick question.", "I have a request.", "Listen.", "So,", "Well,"),
    *("I am writing because of this:", "My request:", "Here is what it is about:", "Just this:", "Right."),
)  # fmt: skip
_AFTER = (
    *("", "", "", "", "Thanks.", "Thank you.", "Please.", "Thanks in advance.", "That is all."),
    *("It's urgent.", "I hope that works.", "I'd be glad.", "As soon as you can.", "If you don't mind."),
)  # fmt: skip
_NEXT = ("Also: {wish}", "Another thing: {wish}", "And then: {wish}", "Next: {wish}", "There is more. {wish}")
_UNKNOWN = (
    *("I don't know.", "No idea, I'm afraid.", "I can't tell you that.", "I don't have that here."),
    *("I have forgotten it.", "That I don't know.", "I couldn't say."),
)  # fmt: skip
_NUDGE = ("I told you: {wish}", "Again: {wish}", "Once more: {wish}", "It is still this: {wish}")
_ALIKE = (
    ("I want to", "I'd like to", "I need to", "I would like to", "I have to", "I wish to"),
    ("Can you", "Could you", "Would you", "Will you"),
    ("Can I", "Could I", "May I", "Am I able to"),
)
"""Beginnings of a wish that mean the same and are followed by the same words."""
_WORD = re.compile(r"\w+")
_NO = re.compile(
    r"^(?:no|not|none|nothing|never|nobody|neither|nor|without|cannot)\b|n['’]t\b", re.IGNORECASE
)
_SHARE = 0.5
"""Share of a user's sentences that keep the author's words."""
_DROPPED = 0.2
"""Share of the words that a sentence lacks, where it lacks any."""


def reword(task: Task, seed: int) -> Task:
    """The task with a user who speaks in other words; one without an agenda is left as it is."""
    data = task.meta.get("agenda")
    if data is None:
        return task
    random = Random(f"reword/{task.id}/{seed}")
    agenda = Agenda.model_validate(data)
    phrases = agenda.phrases
    changed = agenda.model_copy(
        update={
            "facts": {name: _reword_fact(name, fact, random) for name, fact in agenda.facts.items()},
            "wishes": tuple(_reword_wish(wish, random, agenda.facts) for wish in agenda.wishes),
            "phrases": phrases.model_copy(update=_reword_phrases(phrases, random)),
        }
    )
    meta = {**task.meta, "agenda": changed.model_dump(mode="json")}
    return task.model_copy(update={"meta": meta})


def _reword_fact(name: str, fact: Fact, random: Random) -> Fact:
    if fact.value is None or random.random() < _SHARE:
        return fact
    says = [text.replace("{name}", name.replace("_", " ")) for text in random.sample(_TELLS, 2)]
    return fact.model_copy(update={"says": tuple(text[:1].upper() + text[1:] for text in says)})


def _reword_wish(wish: Wish, random: Random, facts: Mapping[str, Fact]) -> Wish:
    told = (fact.value for fact in (*facts.values(), *wish.facts.values()) if fact.value is not None)
    values = {word for value in told for word in _WORD.findall(value.lower())}
    changed = {
        "says": tuple(_reword_sentence(text, random, values) for text in wish.says),
        "facts": {name: _reword_fact(name, fact, random) for name, fact in wish.facts.items()},
        "instead": _reword_wish(wish.instead, random, facts) if wish.instead is not None else None,
    }
    return wish.model_copy(update=changed)


def _reword_sentence(text: str, random: Random, values: set[str]) -> str:
    """A wish that begins in another way, has its clauses in another order, lacks some words, or ends with a
    courtesy: no single word and no place in the sentence tells all."""
    for alike in _ALIKE:
        begin = next((each for each in alike if text.startswith(f"{each} ")), None)
        if begin is not None and random.random() < _SHARE:
            text = random.choice(alike) + text[len(begin) :]
    first, comma, second = text.rstrip(".").partition(", ")
    is_plain = not first.startswith("I") and not any(_is_kept(word, values) for word in text.split())
    if comma and is_plain and text.endswith(".") and random.random() < _SHARE:
        text = f"{second[:1].upper()}{second[1:]}, {first[:1].lower()}{first[1:]}."
    if random.random() < _SHARE:
        text = " ".join(word for word in text.split() if _is_kept(word, values) or random.random() > _DROPPED)
    return f"{text} {random.choice(_AFTER)}".strip()


def _is_kept(word: str, values: set[str]) -> bool:
    """Whether a word is part of a value, or says no: without it something else would be said."""
    pieces = _WORD.findall(word.lower())
    return (
        any(sign.isdigit() for sign in word) or _NO.search(word) is not None or not values.isdisjoint(pieces)
    )


def _reword_phrases(phrases: Phrases, random: Random) -> dict[str, tuple[str, ...]]:
    opening = [f"{text} {{wish}}" for text in random.sample(_BEFORE, 2)]
    more: dict[str, Sequence[str]] = {
        "opening": opening,
        "next": _NEXT,
        "unknown": _UNKNOWN,
        "nudge": _NUDGE,
    }
    return {name: (*getattr(phrases, name), *random.sample(list(texts), 2)) for name, texts in more.items()}
