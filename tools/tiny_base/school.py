"""Lessons in copying for a model trained from scratch: what a base must know before it can learn a task.

A lesson is a generated dialogue in the brief format. A person mentions values among random words. Calls and
answers repeat them; they are found by their key or by their form (an e-mail has an @). Records are returned
and quoted. Tools, words and values are random, so no lesson contains anything about a task. Only the repeated
values are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from string import ascii_lowercase

from trialogue.engine.api import Row
from trialogue.talk.render.tiny import BriefRenderer

WORDS = tuple(
    """
    a able about above across act again ago ahead all almost alone along already also always am among an
    and another any anyway are area around as ask at away back bad be because been before began behind
    being believe below best better between big bit both bring brought busy but buy by call called
    calling came can care case certain check clear close come could couple course day days deal dear did
    different do does doing done down during each early easy either else end enough even evening ever
    every example fact far feel few figure find fine first follow for found free friend from full
    further gave get give glad go going gone good got great had half happen happy hard has have he hear
    heard hello help her here hey hi him his hold home hope hour how however i idea if in instead into
    is issue it its just keep kind knew know known last late later least leave left less let like line
    list little live long look looks lot made mail make man many matter may maybe me mean mention
    message might mind mine minute moment month more morning most much must my myself near need never
    new next nice no nobody none nor not note nothing now number of off often oh ok old on once one only
    open or other our out over own part past people perhaps person place please point possible question
    quick quite rather read ready real really reason right run said same saw say says second see seem
    seen send sent set several shall she short should show side since small so some somebody soon sorry
    sort sound speak speaking spell start state stay still stop such sure system take taken talk team
    tell than thank thanks that the their them then there these they thing think this those though
    thought through time to today together told tomorrow too took toward tried try two under understand
    until up upon us use used usual very wait want was way we week well went were what when where which
    while who whole why will wish with within without wonder word work would write wrong year yes
    yesterday yet you your that's it's
    i'm i've i'd don't can't won't you're there's here's what's let's isn't
    """.split()  # noqa: SIM905 - easier to read than a list of strings
)
"""Filler words of the lessons. The tokenizer is trained on them too, so that common words have tokens."""

PAIRS = tuple(first + second for first in ascii_lowercase for second in ascii_lowercase)
"""All pairs of letters, from which random names are made. The tokenizer has a token for each."""
SPOKEN = tuple(pair for pair in PAIRS if sum(letter in "aeiou" for letter in pair) == 1)
"""Pairs that can be pronounced."""
LETTERS = "ABCDEFGHIJKLMNOPRSTVWZ"


class Values:
    """Values to mention and repeat. They use all texts that the vocabulary can write in one token, so that
    each token is copied sometimes."""

    def __init__(self, vocabulary: Iterable[str], random: Random) -> None:
        """`vocabulary` are the texts of its tokens; whole words include the space before them."""
        texts = sorted(vocabulary)
        self.random = random
        self.words = [text[1:] for text in texts if text[0] == " " and text[1:].isalpha()]
        self.ends = [text for text in texts if text.isalpha() and text.islower() and 1 < len(text) < 6]
        self.kinds: dict[str, Callable[[], str]] = {
            "name": self.name,
            "email": self.email,
            "postcode": self.digits,
            "address": self.address,
            "total": self.price,
            "order_id": self.code,
            "item": self.item,
            "payment_method": self.card,
            "status": self.word,
        }
        """Kinds of values by the name of their key. A lesson may use any other key too."""

    def stem(self) -> str:
        """A random word: any letters, or one or two syllables, sometimes with the end of a word."""
        if self.random.random() < 0.3:
            return "".join(self.random.choices(ascii_lowercase, k=self.random.randint(2, 8)))
        syllables = [self.syllable() for _ in range(self.random.randint(1, 2))]
        return "".join(syllables) + (self.random.choice(self.ends) if self.random.random() < 0.3 else "")

    def syllable(self) -> str:
        """Two or three letters; between two syllables any pair of letters may occur."""
        return self.random.choice(SPOKEN) + self.random.choice(("", "", "", *"nrslkdtvmpgbxw"))

    def word(self) -> str:
        return self.random.choice(self.words)

    def name(self) -> str:
        return f"{self.stem().capitalize()} {self.stem().capitalize()}"

    def email(self) -> str:
        return f"{self.stem()}.{self.stem()}@{self.random.choice(self.ends)}.{self.random.choice(self.ends)}"

    def digits(self) -> str:
        return f"{self.random.randrange(10000):04d}"

    def code(self) -> str:
        return self.random.choice(LETTERS) + self.digits()

    def address(self) -> str:
        end = self.random.choice(("Street", "Road", "Lane"))
        return f"{self.random.randrange(1, 100)} {self.stem().capitalize()} {end}"

    def price(self) -> str:
        return f"{self.random.randrange(1, 100)}.{self.random.randrange(100):02d}"

    def item(self) -> str:
        return " ".join(self.random.choice((self.word(), self.stem())) for _ in range(2))

    def card(self) -> str:
        return self.word() if self.random.random() < 0.2 else f"{self.word()} {self.digits()}"


class School:
    """Writes lessons for one vocabulary. `difficulty` from 0 to 1 adds keys, filler words and forms."""

    def __init__(self, renderer: BriefRenderer, keys: list[str], seed: int = 0) -> None:
        self.renderer = renderer
        self.keys = keys
        self.random = Random(seed)
        self.values = Values(renderer.vocabulary.texts(), self.random)

    def lesson(self, difficulty: float) -> Row:
        return _Lesson(self, difficulty).write()


class _Lesson:
    def __init__(self, school: School, difficulty: float) -> None:
        self.random, self.difficulty, self.values = school.random, difficulty, school.values
        self.encode = school.renderer.vocabulary.encode
        self.roles = school.renderer.roles
        self.keys = self.random.sample(school.keys, min(len(school.keys), 2 + round(8 * difficulty)))
        self.known: dict[str, str] = {}
        self.tokens: list[int] = []
        self.mask: list[int] = []

    def write(self) -> Row:
        random = self.random
        while self.keys:
            self.tell_and_call([self.keys.pop() for _ in range(min(len(self.keys), random.randint(1, 3)))])
            self.put(self.roles["end"], self.roles["tool"])
            listed = [self.keys.pop() for _ in range(min(len(self.keys), random.randint(1, 4)))]
            for place, key in enumerate(listed):
                kind = random.choice(list(self.values.kinds))
                self.known[key] = self.values.kinds[kind]()
                mark = "=" if kind == "total" else ":"
                self.put(" |" if place else "", f" {key}{mark} {self.known[key]}")
            self.put(self.roles["assistant"])
            for _ in range(random.randint(1, 2)):
                self.filler()
                key = random.choice(listed if listed and random.random() < 0.7 else list(self.known))
                of = f" of {random.choice(WORDS)} {self.values.code()} is"
                self.put(f" {key}" + random.choice(["", ":", " is", of]))
                self.repeat(key)
            self.put(self.roles["end"])
        return Row(self.tokens, self.mask, [0.0] * len(self.tokens), [0.0] * len(self.tokens))

    def tell_and_call(self, keys: list[str]) -> None:
        """A person mentions values and a call repeats them. A key that is the name of its kind is found by
        the form of the value, any other key by the word before it."""
        random = self.random
        told: list[str] = []
        self.put(self.roles["user"])
        for key, kind in zip(keys, random.sample(list(self.values.kinds), len(keys)), strict=True):
            by_looks = kind not in ("item", "status") and random.random() < 0.6
            told.append(kind if by_looks else key)
            self.known[told[-1]] = self.values.kinds[kind]()
            self.filler()
            if not by_looks or random.random() < 0.2:
                self.put(f" {told[-1]}" + random.choice(["", "", " is", ":"]))
            self.put(f" {self.known[told[-1]]}" + random.choice(["", "", ".", ","]))
        self.filler()
        self.put(self.roles["assistant"], self.roles["call"], f" {random.choice(WORDS)}")
        if len(self.known) > len(told) and random.random() < 0.5:
            told.append(
                random.choice([key for key in self.known if key not in told])
            )  # mentioned long before
        for place, key in enumerate(random.sample(told, len(told))):
            self.put(" |" if place else "", f" {key}:")
            self.repeat(key)

    def put(self, *pieces: str | int, trained: int = 0) -> None:
        ids = self.encode(pieces)
        self.tokens += ids
        self.mask += [trained] * len(ids)

    def repeat(self, key: str) -> None:
        self.put(f" {self.known[key]}", trained=1)

    def filler(self) -> None:
        most = 1 + round(9 * self.difficulty)
        words = self.random.choices(WORDS, k=self.random.randint(0, most))
        if words:
            text = " ".join(words)
            text = text.capitalize() if self.random.random() < 0.4 else text
            self.put(f" {text}" + self.random.choice(["", "", ".", ",", "!", "?"]))
