"""Lessons in copying for a model made from nothing: what a base has to know before it can learn any task.

A lesson is a made-up dialogue in the brief format in which values are named by keys, in a person's words or in a
record, and said again under the same key. Keys, values, tools and filler are drawn at random, so nothing about
any domain can be learned from it. Only the repeated values are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from trialogue.engine.api import Row


@dataclass(frozen=True, slots=True)
class Letters:
    """The ids lessons are written with."""

    words: Sequence[int]
    """Filler: any ids of words."""
    keys: Sequence[tuple[int, int]]
    """A key as a plain word and as the key of a record."""
    pieces: Sequence[int]
    """What values are made of."""
    user: int
    assistant: int
    tool: int
    call: int
    end: int
    bar: int
    """Stands between the parts of a record."""


def write_lesson(letters: Letters, random: Random, *, difficulty: float) -> Row:
    """One dialogue. `difficulty` from 0 to 1 widens the distances, the values and the number of keys."""
    most_keys = 2 + round(8 * difficulty)
    most_filler = 2 + round(14 * difficulty)
    keys = random.sample(list(letters.keys), random.randint(2, most_keys))
    lengths = (1, 6) if difficulty > 0.3 else (3, 8)
    known: dict[tuple[int, int], list[int]] = {}
    tokens: list[int] = []
    mask: list[int] = []

    def put(*ids: int, trained: int = 0) -> None:
        tokens.extend(ids)
        mask.extend([trained] * len(ids))

    def filler() -> None:
        put(*random.choices(letters.words, k=random.randint(0, most_filler)))

    def value() -> list[int]:
        return random.choices(letters.pieces, k=random.randint(*lengths))

    def repeat(key: tuple[int, int], in_record: bool) -> None:
        put(key[1] if in_record else key[0])
        put(*known[key], trained=1)

    while keys:
        told = [keys.pop() for _ in range(min(len(keys), random.randint(1, 3)))]
        put(letters.user)
        for key in told:
            known[key] = value()
            filler()
            put(key[0], *known[key])
        filler()
        put(letters.assistant, letters.call, random.choice(letters.words))
        for number, key in enumerate(random.sample(told, len(told))):
            if number:
                put(letters.bar)
            repeat(key, in_record=True)
        put(letters.end, letters.tool)
        listed = [keys.pop() for _ in range(min(len(keys), random.randint(1, 4)))]
        for number, key in enumerate(listed):
            known[key] = value()
            if number:
                put(letters.bar)
            put(key[1], *known[key])
        put(letters.assistant)
        for _ in range(random.randint(1, 2)):
            filler()
            repeat(random.choice(list(known)), in_record=random.random() < 0.3)
        put(letters.end)
    return Row(tokens, mask, [0.0] * len(tokens), [0.0] * len(tokens))
