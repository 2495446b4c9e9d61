"""How customers of the shop speak: phrasings from `wording.toml`, and instructions for a model that plays
one."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from trialogue.world.domain import STOP

PERSONAS = {"terse": 4, "chatty": 6, "impatient": 3, "forgetful": 5, "polite": 6}
"""How many useless turns each bears."""

MANNERS = {
    "terse": "You write as few words as possible.",
    "chatty": "You like to chat and add a remark about your day.",
    "impatient": "You are in a hurry and say so.",
    "forgetful": "You are a little scatterbrained.",
    "polite": "You are friendly and polite.",
}

_NEW = (
    r"\binstead\b|\bnew (?:item|product|one)|\bfor what\b|\b(?:it|them|that|this) (?:for|with|by|to)\b"
    r"|\bwould you like\b(?! to (?:return|exchange|replace|swap|change|send|give))"
)
# What an agent writes when it asks for a fact, and what such values look like.
ASKED = {
    "email": r"e-?mail",
    "name": r"(?<!product )(?<!item )\bname\b(?! of (?:the |your )?(?:item|product))",
    "postcode": r"post(?:al)? ?code|\bzip\b",
    "order_id": r"\border(?:'s)? (?:number|id|no\b|reference)|order_id|\b(?:which|what) order\b"
    r"|\b(?:number|id) of (?:the|your) order",
    "reason": r"\breason|\bwhy\b",
    "item": rf"(?=.*\b(?:item|product|article|thing)s?\b)(?!.*(?:{_NEW}))"
    r"|what(?:'s| is| was) in (?:the|your|that) order",
    "new_item": _NEW,
    "address": r"(?<!mail )(?<!mail)\baddress|\bwhere .*(?:deliver|sen[dt]|ship)",
    "payment_method": r"\bpayment|\b(?:which|what) (?:card|method)|\bpay (?:with|by)",
}
FORM = {
    "email": r"[\w.]+@[\w.]+\w",
    "postcode": r"(?<=postcode )\d{4}\b",
    "order_id": r"\bW\d{4}\b",
    "address": r"\b\d+ \w+ (?:Street|Road|Lane)\b",
    "payment_method": r"\b(?:visa|mastercard|amex) \d{4}\b|\bpaypal\b",
    "reason": r"no longer needed|ordered by mistake|found cheaper",
}


@cache
def read_wording() -> dict[str, dict[str, dict[str, list[str]]]]:
    """All phrasings: split, part, key."""
    return tomllib.loads((Path(__file__).parent / "wording.toml").read_text(encoding="utf-8"))


class Wording:
    """The words of one customer: of a split and a persona, drawn from a task's random numbers."""

    def __init__(self, split: str, persona: str, random: Random) -> None:
        self.texts = read_wording()[split]
        self.persona = persona
        self.random = random

    def phrases(self) -> dict[str, list[str]]:
        """The phrases of an agenda."""
        parts = {**self.texts["phrases"], **self.texts[self.persona]}
        return {act: self._few(texts) for act, texts in parts.items()}

    def wish(self, kind: str, **values: str) -> list[str]:
        """Ways to put a wish."""
        texts = [text.format(**values) for text in self._few(self.texts["wishes"][kind])]
        return [text[0].upper() + text[1:] for text in texts]

    def fact(self, name: str, value: str | None) -> dict[str, Any]:
        """A fact of an agenda; without a value the customer does not remember it."""
        fact: dict[str, Any] = {"value": value, "asked": ASKED[name]}
        if value is not None:
            texts = self.texts["facts"].get(value if name == "reason" else name)
            fact["says"] = self._few(texts or [])
            if name in FORM:
                fact["form"] = FORM[name]
        return fact

    def _few(self, texts: Sequence[str]) -> list[str]:
        """Two of the texts: a task carries its words with it and should stay small."""
        if len(texts) < 3:
            return list(texts)
        first = self.random.randrange(len(texts))
        return [texts[first], texts[(first + self.random.randrange(1, len(texts))) % len(texts)]]


def write_instructions(
    name: str, persona: str, knows: Sequence[str], forgot: Sequence[str], goals: Sequence[str]
) -> str:
    """What a language model is told that plays this customer."""
    wants = "\n".join(f"{number}. {goal}" for number, goal in enumerate(goals, 1))
    order = (
        ""
        if len(goals) == 1
        else " Bring these up one at a time, in this order; each after the one before is settled."
    )
    missing = f" You do not remember {' or '.join(forgot)}; say so if asked." if forgot else ""
    return INSTRUCTIONS.format(
        name=name,
        manner=MANNERS[persona],
        order=order,
        wants=wants,
        knows=", ".join(knows),
        missing=missing,
        stop=STOP,
    )


INSTRUCTIONS = """\
You are {name}, a customer of an online shop, and you write to its service desk. {manner}

What you want:{order}
{wants}

What you know about yourself: {knows}.{missing} You know nothing else; never make anything up.

How you behave: Begin with what you want, in one or two sentences, without giving details away. \
Tell a detail only when you are asked for it. When the agent asks whether to go ahead with what you want, \
say yes; when it proposes something else or gets a detail wrong, say no and correct it. \
If a request is refused, accept that and go on. \
Write one short message at a time and never quote these instructions.

When everything you want has been done, answered or refused, end the conversation with a message that \
closes with {stop}"""
