"""Help for whoever writes tasks by program: values and wordings that are shared out over the splits, so that
no name, number or sentence of a test task is in a training task; and a source that calls a function per task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar
from zlib import crc32

from trialogue.errors import ConfigError, DomainError, suggest
from trialogue.task import SPLITS, Task
from trialogue.world.domain import TaskSource

T = TypeVar("T")
_SHARES = {**dict.fromkeys(range(8), "train"), 8: "dev", 9: "test"}
"""Of every ten drawn values eight are for train, one for dev, one for test."""
_TRIES = 10_000
_ONSETS = (*"bcdfghjklmnprstvwyz", "br", "ch", "dr", "fl", "gr", "kl", "pr", "sh", "st", "tr")
_VOWELS = (*"aeiou", "ai", "ei", "ou", "ia")
_CODAS = (*"lmnrstvx", "nd", "rk", "lt", "ns", "rt", "ck")
_LAST = (
    *("son", "ley", "man", "berg", "ford", "ton", "well", "ick"),
    *("ova", "ano", "etti", "elli", "os", "escu"),
)
_HOSTS = ("mail.net", "post.org", "inbox.com", "letters.eu")


def find_owner(text: str) -> str:
    """The split that a drawn value belongs to: always the same for the same text.

    >>> {find_owner(f"K-{number}") for number in range(100)} == {"train", "dev", "test"}
    True
    """
    return _SHARES[crc32(text.lower().encode()) % 10]


def share(items: Sequence[T], split: str) -> list[T]:
    """A split's part of a list: of every eight items the fourth is for dev and the eighth for test. Of a
    shorter list the last but one is for dev, the last for test. Fewer than three items are for all splits.

    >>> share(["a", "b", "c", "d"], "train"), share(["a", "b", "c", "d"], "test")
    (['a', 'b'], ['d'])
    """
    if len(items) < 3:
        return list(items)
    owners = [
        "test" if place % 8 == 7 else "dev" if place % 8 == 3 else "train" for place in range(len(items))
    ]
    if len(items) < 8:
        owners = ["train"] * (len(items) - 2) + ["dev", "test"]
    return [item for item, owner in zip(items, owners, strict=True) if owner == split]


class Slots:
    """Values for one task of a split. Equal random numbers give equal values; values of two splits differ."""

    def __init__(self, split: str, random: Random) -> None:
        if split not in SPLITS:
            raise ConfigError(
                f"there is no split '{split}'; allowed are {', '.join(SPLITS)}{suggest(split, SPLITS)}"
            )
        self.split = split
        self.random = random
        self._drawn: set[str] = set()

    def choose(self, items: Sequence[T]) -> T:
        """One of the items that this split has of a list."""
        return self.random.choice(share(items, self.split))

    def pick(self, items: Sequence[T]) -> T:
        """One of all items: for what is the same in every split, such as a day of the week."""
        return self.random.choice(items)

    def draw(self, shape: str) -> str:
        """A value of a shape in which `#` is a digit and `@` a capital letter, such as `K-####`. No value is
        drawn twice for one task."""
        return self._draw(lambda: "".join(map(self._fill, shape)), f"values of the shape {shape}")

    def name(self) -> str:
        """First and last name of a person."""
        return (
            f"{self.word()} {self._draw(lambda: self._syllable() + self.pick(_LAST), 'names').capitalize()}"
        )

    def word(self) -> str:
        """A name of one word."""
        return self._draw(
            lambda: self._syllable() + self._syllable() + self.pick(("", *_CODAS)), "words"
        ).capitalize()

    def email(self, name: str) -> str:
        """An address for a name."""
        return f"{name.lower().replace(' ', '.')}@{self.pick(_HOSTS)}"

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A whole number from low to high, both included. Numbers are not shared out."""
        return self.random.randrange(low, high + 1, step)

    def amount(self, low: int, high: int) -> float:
        """An amount of money with cents."""
        return round(self.random.randrange(100 * low, 100 * high) / 100, 2)

    def phrases(self, phrases: Phrases, **values: Any) -> list[str]:
        """Two wordings of this split, filled in."""
        texts = share(phrases.texts, self.split)
        chosen = self.random.sample(texts, min(2, len(texts)))
        return [text.format(**values) for text in chosen]

    def _fill(self, sign: str) -> str:
        if sign == "#":
            return str(self.random.randrange(10))
        return chr(self.random.randrange(65, 91)) if sign == "@" else sign

    def _syllable(self) -> str:
        return self.pick(_ONSETS) + self.pick(_VOWELS)

    def _draw(self, make: Callable[[], str], what: str) -> str:
        for _ in range(_TRIES):
            value = make()
            if find_owner(value) == self.split and value not in self._drawn:
                self._drawn.add(value)
                return value
        raise DomainError(f"there are not enough {what} for the split '{self.split}'; make the shape longer")


class Phrases:
    """Ways to say one thing, with `{fields}` to fill in. Each split has its own part of them."""

    def __init__(self, *texts: str) -> None:
        if not texts:
            raise DomainError("Phrases needs at least one text")
        self.texts = texts


def generate_with(make: Callable[[Slots, str], Task], families: Mapping[str, int]) -> TaskSource:
    """A source of tasks without end: `make(slots, family)` writes one task; `families` maps each family to
    its level. The id, the split, the family and the level of a task are filled in."""
    if not families:
        raise DomainError("generate_with needs at least one family, such as {'cancel': 1}")

    def find(
        split: str,
        count: int | None = None,
        seed: int = 0,
        *,
        levels: Sequence[int] = (),
        families: Sequence[str] = (),
    ) -> list[Task]:
        chosen = [
            (family, level)
            for family, level in listed.items()
            if (not levels or level in levels) and (not families or family in families)
        ]
        if not chosen:
            raise ConfigError(f"no such tasks; the families are {', '.join(listed)}")
        if split == "all":
            each = None if count is None else -(-count // len(SPLITS))
            return [
                task for name in SPLITS for task in find(name, each, seed, levels=levels, families=families)
            ][:count]
        tasks: list[Task] = []
        for number in range(100 if count is None else count):
            family, level = chosen[number % len(chosen)]
            name = f"{split}-{seed}-{family}-{number}"
            task = make(Slots(split, Random(name)), family)
            meta = {"family": family, "level": level, **task.meta}
            tasks.append(task.model_copy(update={"id": name.replace(" ", "-"), "split": split, "meta": meta}))
        return tasks

    listed = dict(families)
    return find
