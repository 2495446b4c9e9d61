"""Words for what the teacher asks, proposes, reports, answers and refuses: many phrasings, drawn from a seed.

A phrasing is a candidate only. The `Listener` tells whether the user understands it, and the next one is
tried if not.
"""

# The parser of regular expressions has no public name; it is read, never changed.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from random import Random
from re import _constants as codes
from re import _parser as parser
from typing import Any, NamedTuple

from trialogue.talk.teacher.search import match_names
from trialogue.world.tools import Tool

_ASK_OWN = (
    "Could I have your {x}?",
    "What is your {x}?",
    "May I have your {x}, please?",
    "Please tell me your {x}.",
    "To begin with, I need your {x}.",
    "Would you give me your {x}?",
    "First, what is your {x}?",
)
_ASK_WISH = (
    "What is the {x}?",
    "Could you tell me the {x}?",
    "Please tell me the {x}.",
    "May I have the {x}?",
    "I need the {x} for that. What is it?",
    "Would you give me the {x}, please?",
    "Which {x} is it?",
)
_PROPOSE_ONE = (
    "Shall I {act}?",
    "Do you want me to {act}?",
    "Should I {act} now?",
    "May I {act}?",
    "Would you like me to {act}?",
)
_PROPOSE_TWO = (
    "I will {act}. Shall I go ahead?",
    "I would now {act}. Do you want me to proceed?",
    "I am ready to {act}. Should I do that?",
    "Next I would {act}. Is that right?",
)
_REPORT = (
    "I have {did}.",
    "Done: I have {did}.",
    "I have now {did}.",
    "All right, I have {did}.",
    "It is done, I have {did}.",
)
_PASSIVE = ("{Thing} has been {done}.", "{Thing} has now been {done}.", "Done. {Thing} has been {done}.")
_REFUSE = (
    "Sorry, I cannot {act}.",
    "I am sorry, but I cannot {act}.",
    "Unfortunately I cannot {act}.",
    "I'm afraid I cannot {act}.",
)
_ELSE = (
    "Anything else?",
    "Is there anything else?",
    "Can I do anything else for you?",
    "Is there anything else I can do?",
    "",
)
_ASK_USER = (
    "Please {act} and tell me what happens.",
    "Could you please {act} now?",
    "Now please {act}.",
    "I need you to {act}, please.",
)
_SOLVED = (
    "Thank you, the {x} is now in order.",
    "Good, then the {x} is now all right.",
    "With that the {x} is now as it should be.",
    "That was all that was missing: the {x} is now fine.",
)
_IRREGULAR = """
send-sent put-put make-made give-given take-taken hold-held pay-paid set-set write-written buy-bought let-let
withdraw-withdrawn sell-sold lend-lent cut-cut bring-brought get-got leave-left reset-reset undo-undone
redo-redone begin-begun run-run swap-swapped cancel-cancelled transfer-transferred refer-referred do-done
stop-stopped submit-submitted drop-dropped plan-planned ship-shipped permit-permitted choose-chosen
split-split freeze-frozen unfreeze-unfrozen find-found
"""
_VERBS: dict[str, str] = {
    verb: participle for verb, _, participle in (pair.partition("-") for pair in _IRREGULAR.split())
}
_PARTICLES = {"on", "off", "up", "out", "down", "back"}
_PREPOSITIONS = {"to", "for", "from", "with", "in", "on", "by", "of", "at"}


def to_participle(verb: str) -> str:
    """The past participle of an English verb.

    >>> [to_participle(verb) for verb in ("cancel", "move", "apply", "send", "switch on")]
    ['cancelled', 'moved', 'applied', 'sent', 'switched on']
    """
    verb, _, particle = verb.partition(" ")
    if particle:
        return f"{to_participle(verb)} {particle}"
    if verb in _VERBS:
        return _VERBS[verb]
    if verb.endswith("e"):
        return f"{verb}d"
    if re.search(r"[^aeiou]y$", verb):
        return f"{verb[:-1]}ied"
    return f"{verb}ed"


def to_phrase(name: str) -> str:
    """An identifier as words."""
    words = name.replace("_", " ").lower()
    return re.sub(r"\bids?\b", lambda match: "number" if match[0] == "id" else "numbers", words)


@lru_cache(maxsize=4096)
def sample(pattern: str, count: int = 12) -> tuple[str, ...]:
    """Texts that a pattern matches, the plainest of each of its alternatives.

    >>> sample("order (?:number|id)|which order")
    ('order number', 'order id', 'which order')
    """
    try:
        found = list(islice(_expand(parser.parse(pattern, re.IGNORECASE)), 4 * count))
    except (re.error, RecursionError, AttributeError):
        return ()
    plain = [" ".join(text.split()) for text in found]
    return tuple(dict.fromkeys(filter(_is_plain, plain)))[:count]


def _is_plain(text: str) -> bool:
    """Whether a text is words, with at least one letter."""
    return not re.search(r"[^\w' -]", text) and any(char.isascii() and char.isalpha() for char in text)


def _expand(parts: Any) -> Iterator[str]:
    items = list(parts)
    if not items:
        yield ""
        return
    for head in _expand_one(*items[0]):
        for rest in _expand(items[1:]):
            yield head + rest


def _expand_one(code: Any, value: Any) -> Iterator[str]:
    if code is codes.LITERAL:
        yield chr(value)
    elif code is codes.BRANCH:
        for branch in value[1]:
            yield from _expand(branch)
    elif code is codes.SUBPATTERN:
        yield from _expand(value[3])
    elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        low, high, inner = value
        if low == 0 and high == 1:
            yield from islice(_expand(inner), 1)
            yield ""
        elif low == 0:
            yield ""
        else:
            for text in islice(_expand(inner), 2):
                yield text * low
    elif code is codes.ASSERT:
        yield from _expand(value[1]) if value[0] > 0 else iter([""])
    elif code is codes.IN:
        kind, inner = value[0]
        yield chr(inner) if kind is codes.LITERAL else " " if "SPACE" in str(inner) else ""
    elif code in (codes.AT, codes.ASSERT_NOT, codes.ANY):
        yield ""
    else:
        yield "?"  # no plain text: what holds it is dropped


_ODD = re.compile(
    r"^(?:it|them|that|this|for|with|by|to|of|instead|is|pay|my|the|where|how(?! m)|why|who)\b"
    r"|'s\b|\b(?:no|for|to|by|with)$|\b(?:would|do)\b",
    re.IGNORECASE,
)
"""Words that make no name in a question."""


def list_names(name: str, asked: str) -> tuple[list[str], list[str]]:
    """What a fact may be called in a question: its name and nouns that the user listens for; then, in case
    none of them is understood, other words the user listens for."""
    plain = to_phrase(name)
    found = [re.sub(r"_", " ", text).strip() for text in sample(asked)]
    found = [text for text in dict.fromkeys(found) if 1 < len(text) < 40 and text != plain]
    good = [
        text for text in found if not _ODD.search(text) and text.replace(" ", "") != plain.replace(" ", "")
    ]
    tight = {text.replace(" ", "") for text in good if " " in text}
    good = [text for text in good if text not in tight]
    return [plain, *good], [text for text in found if text not in good]


def list_questions(
    named: Sequence[tuple[Sequence[str], Sequence[str]]], is_own: bool, random: Random
) -> Iterator[str]:
    """Questions for one fact or several, each with its names."""
    frames = list(_ASK_OWN if is_own else _ASK_WISH)
    random.shuffle(frames)
    choices = [random.sample(list(good), len(good)) + list(odd) for good, odd in named]
    for number in range(max(len(names) for names in choices)):
        chosen = [names[number % len(names)] for names in choices]
        if len(chosen) == 1 and (opens := re.match(r"(?:what|which|where|when|how|why|who)\b", chosen[0])):
            text = chosen[0][:1].upper() + chosen[0][1:]
            yield f"{text} is it?" if opens[0] in ("what", "which") and " " in chosen[0] else f"{text}?"
            yield f"{text}?"
            yield f"Please tell me {chosen[0]}."
            continue
        joined = (" and your " if is_own else " and the ").join(chosen)
        is_plural = len(chosen) == 1 and joined.endswith("s") and not joined.endswith("ss")
        for frame in frames:
            if not (is_plural and " is " in frame):
                yield frame.format(x=joined)


def describe_tool(tool: Tool) -> tuple[str, str]:
    """The verb of a tool and its object, such as `cancel` and `order`, or `switch on` and `roaming`."""
    words = tool.name.replace("_", " ").lower().split()
    length = 2 if len(words) > 2 and words[1] in _PARTICLES else 1
    return " ".join(words[:length]), " ".join(words[length:])


class Shown(NamedTuple):
    """An argument in a sentence."""

    name: str
    value: str
    is_key: bool
    """Whether it names a record."""
    is_list: bool = False


def list_acts(tool: Tool, shown: Sequence[Shown], random: Random, past: bool = False) -> list[str]:
    """Ways to say what a call does: `cancel order A1, reason found cheaper`."""
    verb, thing = describe_tool(tool)
    verb = to_participle(verb) if past else verb
    before, after = (
        ("", f" {thing}") if thing.split()[:1] and thing.split()[0] in _PREPOSITIONS else (thing, "")
    )
    own = next(
        (item for item in shown if before and not item.is_key and match_names(before, item.name) > 1), None
    )
    key = next((item for item in shown if item.is_key and match_names(before or "", item.name) > 1), None)
    key = key or next((item for item in shown if item.is_key), None)
    target = f"{to_noun(key.name)} {key.value}" if key is not None else ""
    rest = [item for item in shown if item is not key]
    if key is not None and (not before or match_names(before, key.name) > 1):
        head = f"{verb} {target}{after}"
    elif own is not None and key is not None:
        head = f"{verb} the {before} of {target} to {own.value}"
        if own.is_list:
            head = f"{verb} {own.value} of {target}"
        rest = [item for item in rest if item is not own]
    elif key is not None:
        head = f"{verb} the {before} for {target}"
    elif own is not None:
        head = f"{verb} the {before} to {own.value}{after}"
        rest = [item for item in rest if item is not own]
    else:
        head = f"{verb} {before or 'this'}{after}"
    parts = [f"{to_noun(item.name)} {item.value}" for item in rest]
    if not parts:
        return [head, head]
    acts = [
        f"{head}, {', '.join(parts)}",
        f"{head} ({', '.join(parts)})",
        f"{head} with {' and '.join(parts)}",
    ]
    random.shuffle(acts)
    return acts


def list_things(tool: Tool, shown: Sequence[Shown]) -> list[tuple[str, str]]:
    """What a call changed, and the participle of how: `order A1`, `cancelled`."""
    verb, thing = describe_tool(tool)
    key = next((item for item in shown if item.is_key), None)
    is_object = bool(thing) and thing.split()[0] not in _PREPOSITIONS
    target = f"{to_noun(key.name)} {key.value}" if key is not None else ""
    if key is not None and (not is_object or match_names(thing, key.name) > 1):
        return [(target, to_participle(verb))]
    if not is_object or any(item.is_list for item in shown):
        return []  # what was done to which of them has to be said
    return [(f"the {thing} of {target}" if target else f"the {thing}", to_participle(verb))]


def to_noun(name: str) -> str:
    """What a parameter is called in a sentence: `order` for `order_id`."""
    return re.sub(r" (?:numbers?)$", "", to_phrase(name)) or to_phrase(name)


def list_proposals(acts: Sequence[str], random: Random) -> Iterator[str]:
    frames = [*_PROPOSE_ONE, *_PROPOSE_TWO]
    random.shuffle(frames)
    for act in acts:
        for frame in frames:
            yield frame.format(act=act)
    yield f"I could {acts[0]}. Shall I go ahead?"


def list_reports(
    acts: Sequence[str], things: Sequence[tuple[str, str]], done: str, random: Random
) -> Iterator[str]:
    """Reports of what was done; `things` are subjects with participles, `done` what the user listens for."""
    texts = [frame.format(did=act) for act in acts for frame in _REPORT]
    for thing, verb in things:
        is_plural = thing.startswith("the ") and thing.split()[1].endswith("s")
        for frame in _PASSIVE:
            text = frame.format(Thing=thing[:1].upper() + thing[1:], done=verb)
            texts.append(text.replace(" has ", " have ", 1) if is_plural else text)
    random.shuffle(texts)
    yield from texts
    for word in sample(done) if done else ():
        for act in acts:
            yield f"I have {act}: the {word} is done."
        yield f"It is done now ({word})."
    yield "It is done."


def list_answers(field: str, value: str, owner: str, random: Random) -> Iterator[str]:
    name = to_phrase(field).removeprefix("number ") if field else "answer"
    texts = [f"It is {value}.", f"The {name} is {value}.", f"I looked it up: the {name} is {value}."]
    if owner:
        texts += [f"The {name} of {owner} is {value}.", f"For {owner} the {name} is {value}."] * 2
    random.shuffle(texts)
    yield from texts
    yield f"Here is what I found: {value}."


def state(field: str, value: str) -> str:
    """A field of a record in a sentence."""
    return f"The {to_phrase(field)} is {value}." if field else f"It is {value}."


def list_refusals(act: str, random: Random) -> Iterator[str]:
    frames = list(_REFUSE)
    random.shuffle(frames)
    for frame in frames:
        yield frame.format(act=act)
    for frame in frames:
        yield frame.format(act="do that")


def list_requests(tool: Tool, arguments: Mapping[str, Any], random: Random) -> Iterator[str]:
    """Ways to ask the user to use a tool of theirs."""
    verb, thing = describe_tool(tool)
    first = re.split(r"(?<=[.!])\s", tool.description.strip())[0].rstrip(".!")
    plain = first[:1].lower() + first[1:]
    named = f"{verb} your {thing}" if thing else plain
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], bool):
        to = "on" if values[0] else "off"
        acts = [f"switch {thing} {to}", f"turn {to} {thing}", f"turn {thing} {to}"]
    elif values:
        told = " and ".join(
            f'"{value}"' if isinstance(value, str) else f"{to_phrase(name)} {value}"
            for name, value in arguments.items()
        )
        acts = [f"{named} to {told}", f"{named} with {told}", f"{plain}: {told}"]
    else:
        acts = [plain, named]
    frames = list(_ASK_USER)
    random.shuffle(acts)
    for act in acts:
        random.shuffle(frames)
        for frame in frames:
            yield frame.format(act=act)


def list_solved(done: str, spoken: str, random: Random) -> Iterator[str]:
    """Ways to say that what the user has done settles the wish; `done` is what the user listens for, of which
    whole words in what was `spoken` are taken."""
    named = [text for text in sample(done) if re.search(rf"\b{re.escape(text)}\b", spoken)]
    frames = list(_SOLVED)
    for word in [*named, "problem"]:
        random.shuffle(frames)
        for frame in frames:
            yield frame.format(x=word)
    yield "It is done."


def draw_else(random: Random) -> str:
    return random.choice(_ELSE)
