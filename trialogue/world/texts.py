"""What policy rules read from a text: its sentences, words, values and numbers.

Each is worked out when a rule first asks for it, then kept for the others. Agents repeat themselves, order
numbers and amounts aside: what does not depend on which digits a text has is kept for all texts of one form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

from trialogue.world.speech import PARTS_OF_REPORTS, REPORTS, is_proposal, is_yes, split_sentences

T = TypeVar("T")
LONGEST_FORM = 1_000
"""Characters of the longest text that is kept for others of its form."""
FORMS = 4_096
"""How many forms are kept."""
_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_SIGNS = bytes(code for code in range(128) if not chr(code).isalnum())
_LETTERS = bytes(code if chr(code).isalpha() else ord(" ") for code in range(128)) + b" " * 128
_DIGIT = re.compile(r"\d")
_WORD = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_VALUE = re.compile(r"(?<!\S)[\w#@$€£('\"+.:/-]*\d[\w#@.,:/%-]*")
_AROUND = "#$€£('\"+.,:/-%"
_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
SMALL = {word: float(number) for number, word in enumerate(_SMALL)}


class lazy(Generic[T]):  # noqa: N801
    """An attribute worked out when it is first read. `functools.cached_property` takes a lock before 3.12."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self.work = work
        self.name = work.__name__
        self.__doc__ = work.__doc__

    def __get__(self, owner: Any, kind: type | None = None) -> T:
        value = self.work(owner)
        setattr(owner, self.name, value)  # from now on this is found first
        return value


class Text:
    """A text and what can be read from it."""

    def __init__(self, text: str) -> None:
        self.text = text

    @lazy
    def lowered(self) -> str:
        """The text in small letters, with plain apostrophes."""
        return self.text.lower().replace("\u2019", "'")

    @lazy
    def squashed(self) -> str:
        """The text without anything but small letters and digits."""
        return _squash(self.text)

    @lazy
    def statements(self) -> list[str]:
        """The sentences that are no questions, in small letters."""
        return [part for part in split_sentences(self.lowered) if not part.endswith("?")]

    @lazy
    def reports(self) -> list[str]:
        """The statements that report what was done."""
        places = self.form.places_of_reports
        return [self.statements[place] for place in places] if places else []

    @lazy
    def values(self) -> list[str]:
        """The ids, amounts and other values with a digit."""
        return [self.text[begin:end] for begin, end in self.form.places_of_values]

    @lazy
    def numbers(self) -> set[float]:
        """The numbers that the text gives, as digits or small ones as words."""
        return find_numbers(self.text)

    # -- the same in all texts of one form ------------------------------------------------------------

    @lazy
    def form(self) -> Form:
        """What is read from this text and from any other that differs from it in digits alone."""
        key = self.text.encode("utf-8", "surrogatepass").translate(_ALIKE)
        return _find_form(key) if len(key) <= LONGEST_FORM else Form(_to_text(key))

    @property
    def vocabulary(self) -> frozenset[str]:
        """The words of the text in small letters."""
        return self.form.words

    @property
    def is_proposal(self) -> bool:
        """Whether the text asks for a yes."""
        return self.form.proposes

    @property
    def is_yes(self) -> bool:
        """Whether the text says yes."""
        return self.form.agrees


class Form(Text):
    """A text with 0 for every digit."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.known: dict[Any, Any] = {}
        """What rules have found in it."""

    @lazy
    def words(self) -> frozenset[str]:
        if self.lowered.isascii():
            return frozenset(self.lowered.encode().translate(_LETTERS).decode().split())
        return frozenset(_WORD.findall(self.lowered))

    @lazy
    def proposes(self) -> bool:
        return is_proposal(self.text)

    @lazy
    def agrees(self) -> bool:
        return is_yes(self.text)

    @lazy
    def places_of_reports(self) -> tuple[int, ...]:
        if not any(part in self.lowered for part in PARTS_OF_REPORTS):
            return ()
        return tuple(place for place, part in enumerate(self.statements) if REPORTS.search(part))

    @lazy
    def places_of_values(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each value, without the signs around it."""
        if not _DIGIT.search(self.text):
            return ()
        places: list[tuple[int, int]] = []
        for found in _VALUE.finditer(self.text):
            begin = found.end() - len(found.group().lstrip(_AROUND))
            end = begin + len(found.group().strip(_AROUND))
            if len(_squash(self.text[begin:end])) > 2:
                places.append((begin, end))
        return tuple(places)


def _to_text(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


@lru_cache(maxsize=FORMS)
def _find_form(key: bytes) -> Form:
    return Form(_to_text(key))


def forget_texts() -> None:
    """Drop what is kept of texts, so that a measurement begins like a new process."""
    _find_form.cache_clear()
    squash.cache_clear()


def by_form(work: Callable[[Text], T], *patterns: str) -> Callable[[Text], T]:
    """The same work, done once for all texts of a form if it uses no pattern that tells digits apart."""
    if not all(map(is_blind_to_digits, patterns)):
        return work

    def look(text: Text) -> T:
        known = text.form.known
        if work not in known:
            known[work] = work(text.form)
        return known[work]

    return look


def is_blind_to_digits(pattern: str) -> bool:
    """Whether a pattern treats all digits alike: it names none and refers back to nothing."""
    return not re.search(r"[0-9]|\(\?P=", re.sub(r"\{\d*,?\d*\}", "", pattern))


def _squash(text: str) -> str:
    if text.isascii():
        return text.lower().encode().translate(None, _SIGNS).decode()
    return "".join(filter(str.isalnum, text.lower()))


@lru_cache(maxsize=2048)
def squash(value: str) -> str:
    """A value, or a policy, without anything but small letters and digits: "Ann-Lee" is "ann lee"."""
    return _squash(value)


def find_numbers(text: str) -> set[float]:
    """The numbers that a text gives, as digits or small ones as words."""
    plain = _THOUSANDS.sub("", text)
    numbers = {float(number) for number in _NUMBER.findall(plain)}
    return numbers | {SMALL[word] for word in plain.lower().split() if word in SMALL}
