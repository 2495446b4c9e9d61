"""What the teacher tells: values that were looked up, reasons of a refusal, arguments in a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trialogue.talk.agenda import Wish
from trialogue.talk.evidence import to_pieces
from trialogue.talk.teacher import words
from trialogue.talk.teacher.knowledge import KEY, to_text
from trialogue.talk.teacher.plan import Planner
from trialogue.talk.teacher.search import to_words
from trialogue.talk.teacher.work import Say
from trialogue.task import Call

LONGEST_RULE = 120
"""Characters of a rule of the policy that is quoted."""


def find_said(say: Say, text: str) -> str | None:
    """The wording of several that a text holds, as whole words and numbers."""
    pieces = f" {' '.join(to_pieces(text))} "
    for wording in say:
        if f" {' '.join(to_pieces(wording))} " in pieces and (to_pieces(wording) or wording in text):
            return wording
        try:
            if float(wording.replace(",", "")) == float(text.replace(",", "")):
                return wording
        except ValueError:
            continue
    return None


def describe_value(planner: Planner, wish: Wish, leaf: Any, value: str) -> tuple[str, str, str]:
    """Field, value and owner of a value that was looked up."""
    text, asked = to_text(leaf), f"{' '.join(wish.says)} {wish.about}".lower()
    best: tuple[int, str, str] = -1, "", ""
    for seen in planner.knowledge.records:
        for name, values in seen.fields.items():
            fit = any(word[:4] in asked for word in to_words(name)) + (name in asked)
            if fit < best[0] or not any(to_text(item) == text for item in values):
                continue
            key = seen.identity
            named = [
                str(items[0]) if each == KEY else f"{words.to_noun(each)} {items[0]}"
                for each, items in seen.fields.items()
                if key is not None and to_text(items[0]) == key and each != name
            ]
            best = fit, "" if name == KEY else name, named[0] if named else ""
    return best[1], value, best[2]


def find_reasons(
    planner: Planner, says: Sequence[Say], is_looked_into: bool, is_shared: bool
) -> list[tuple[Say, str]]:
    """Why something cannot be done, for each thing to say: a fact of the record, the rule of the policy, or
    words for what the record shows; "" where nobody looked. With `is_shared` the things to say belong to
    several refusals, and only those that fit this one are said."""
    around = planner.find_around()
    if not says:
        return [((), words.state(*each)) for each in find_obstacle(planner)]
    found: list[tuple[Say, str]] = []
    for say in says:
        facts = [
            (field, wording)
            for wording in say
            for field, values in around.items()
            if any(find_said((wording,), value) is not None for value in values)
        ]
        clause = find_clause(say, planner.environment.policy) if is_looked_into else None
        if facts:
            text = words.state(*facts[0])
        elif clause:
            text = f"Our rule is: {clause}."
        else:
            text = f"This is why: {say[0]}." if is_looked_into and not is_shared else ""
        found.append((say, text))
    return found


def find_obstacle(planner: Planner) -> list[tuple[str, str]]:
    """The field of the present record that the policy speaks of, such as its status."""
    choices = {
        (name, str(value).lower())
        for schema in type(planner.environment.database).schemas().values()
        for name, shape in schema.get("properties", {}).items()
        for value in shape.get("enum", ())
    }
    policy = f" {' '.join(to_pieces(planner.environment.policy))} "
    return [
        (name, value)
        for name, values in planner.find_around().items()
        for value in values
        if (name, value) in choices and f" {' '.join(to_pieces(value))} " in policy
    ][:1]


def find_clause(say: Say, policy: str) -> str | None:
    """The part of the policy that holds one of several wordings."""
    for sentence in re.split(r"(?<=[.!?;:])\s+|\n+", policy):
        for wording in say:
            if re.search(rf"(?<!\w){re.escape(wording)}", sentence, re.IGNORECASE):
                plain = re.sub(r"[*_`#]+", "", sentence).strip(" -.:;0123456789")
                if len(plain) < LONGEST_RULE:
                    return plain[:1].lower() + plain[1:]
    return None


def list_shown(planner: Planner, call: Call, is_named: bool) -> list[words.Shown]:
    """The arguments of a call as they are told to the user."""
    return [
        words.Shown(name, text, isinstance(value, str) and planner.is_key(value), isinstance(value, list))
        for name, value in call.arguments.items()
        if (text := show_value(planner, value, is_named))
    ]


def show_value(planner: Planner, value: Any, is_named: bool) -> str:
    """A value in a sentence; with its name where it is an id that says nothing."""
    if isinstance(value, list):
        return ", ".join(show_value(planner, item, is_named) for item in cast("list[Any]", value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        inner = cast("Mapping[str, Any]", value)
        shown = [
            f"{words.to_phrase(key)} {show_value(planner, item, is_named)}" for key, item in inner.items()
        ]
        return ", ".join(shown) or json.dumps(value)
    name = planner.find_name(value) if is_named and isinstance(value, str) else None
    return f"{name} ({value})" if name else "" if value is None else str(value)
