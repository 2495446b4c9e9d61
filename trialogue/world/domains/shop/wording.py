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
def read_wording() -> dict[str, dict[str, Any]]:
    """Everything in the file: part, key."""
    return tomllib.loads((Path(__file__).parent / "wording.toml").read_text(encoding="utf-8"))


@cache
def list_texts(split: str, part: str, key: str) -> tuple[str, ...]:
    """What this split has of a list: of every eight texts the fourth is for dev, the eighth for test; where
    there are fewer than eight, the last but one and the last."""
    texts = read_wording()[part].get(key, ())
    owners = [
        "test" if place % 8 == 7 else "dev" if place % 8 == 3 else "train" for place in range(len(texts))
    ]
    if 0 < len(texts) < 8:
        owners = ["train"] * (len(texts) - 2) + ["dev", "test"]
    return tuple(text for text, owner in zip(texts, owners, strict=True) if owner == split)


def collect_texts(split: str) -> set[str]:
    """Every text a split has, frames that are still to be filled in among them."""
    return {
        text
        for part, lists in read_wording().items()
        for key, texts in lists.items()
        if not isinstance(texts, str)  # said in every split
        for text in list_texts(split, part, key)
    }


class Wording:
    """The words of one customer: of a split and a persona, drawn from a task's random numbers."""

    def __init__(self, split: str, persona: str, random: Random) -> None:
        self.split = split
        self.persona = persona
        self.random = random

    def phrases(self) -> dict[str, list[str]]:
        """The phrases of an agenda."""
        phrases = {act: self._few(self._list("phrases", act)) for act in read_wording()["phrases"]}
        leads = self._list(self.persona, "lead")
        return {
            **phrases,
            "opening": self._few(self._list(self.persona, "opening")),
            "lead": ["", *([self.random.choice(leads)] if leads else [])],
        }

    def wish(self, kind: str, **values: str) -> list[str]:
        """Ways to put a wish."""
        wording = read_wording()
        texts = self._list("wishes", kind)
        if kind in wording["do"]:
            values["do"] = wording["do"][kind].format(**values)
            texts = [*texts, *self._list("wishes", "request")]
        elif kind in wording["topic"]:
            values["topic"] = wording["topic"][kind].format(**values)
            values["thing"] = values["order"] if "order" in values else f"the {values['product']}"
            values["field"] = kind.replace("_", " ")
            texts = self._list("wishes", "question")
        texts = [text.format(**values) for text in self._few(texts)]
        return [text[0].upper() + text[1:] for text in texts]

    def fact(self, name: str, value: str | None) -> dict[str, Any]:
        """A fact of an agenda; without a value the customer does not remember it."""
        fact: dict[str, Any] = {"value": value, "asked": ASKED[name]}
        if value is not None:
            fact["says"] = self._reasons(value) if name == "reason" else self._facts(name)
            if name in FORM:
                fact["form"] = FORM[name]
        return fact

    def _facts(self, name: str) -> list[str]:
        texts = self._few([*self._list("facts", name), *self._list("facts", "any")])
        shown = "the {value}" if name in ("item", "new_item") else "{value}"
        texts = [text.replace("{value}", shown) for text in texts]
        return [text[0].upper() + text[1:] for text in texts]

    def _reasons(self, reason: str) -> list[str]:
        frames, clauses = self._few(self._list("reasons", "frames")), self._few(self._list("reasons", reason))
        texts = [frame.format(clause=clause) for frame, clause in zip(frames, clauses, strict=True)]
        return [text[0].upper() + text[1:] for text in texts]

    def _list(self, part: str, key: str) -> tuple[str, ...]:
        return list_texts(self.split, part, key)

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
