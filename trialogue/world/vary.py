"""Fresh values for a task: its names, numbers, e-mails and addresses replaced by others of the same shape.

A model that sees a few tasks again and again learns their values by heart. `vary` replaces them consistently:
in the database, the set-up, the instructions, the gold calls, the things to say and the agenda. It works word
by word, so that `Jana Conrad` and `jana.conrad@mail.net` still belong together. An amount is replaced where
the agent only has to tell it. Values that a schema lists, words of the policy and of the tools, and whatever
a pattern of the agenda spells out stay as they are; so do dates and other amounts, for something else may be
computed from them. Whether the new task is as sound as the old one is proven by `score.varied`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from random import Random
from typing import Any, cast
from weakref import WeakKeyDictionary

from trialogue.task import Task
from trialogue.world.domain import Domain
from trialogue.world.slots import Slots, find_owner

_TOKEN = re.compile(r"[#\w]+(?:-\w+)*")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}|(?:19|20)\d\d")
_NAME = re.compile(r"[A-Z][^\W\d_]*(?: (?:[A-Z][^\W\d_]*|and|of|the|in|de|von|van))+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_PATTERNS = {"asked", "form", "done", "answer", "about", "actions"}
"""Fields of an agenda that are regular expressions."""
_FREE = {"the", "and", "for", "with", "from", "our", "new", "van", "von", "del", "los", "las"}
"""Words that are part of a title or name and not a name themselves."""
_TRIES = 200


def vary(domain: Domain, task: Task, seed: int) -> Task | None:
    """The task with fresh values, None where it has none that could be replaced."""
    words = choose_words(domain, task, Random(f"vary/{task.id}/{seed}"))
    if not words:
        return None
    change = Change(words)
    laid = change.apply(task.setup.data)
    data: dict[str, Any] = dict(laid)
    for name, records in _find_records(domain, words).items():
        below = {change.text(key): change.apply(record) for key, record in records.items()}
        data[name] = {**below, **_merge(below, laid.get(name, {}))}
    amounts = choose_amounts(task, data, Random(f"amounts/{task.id}/{seed}"))
    expected = change.apply(task.expected.model_dump())
    setup = change.apply(task.setup.model_dump())
    return Task.model_validate(
        {
            **task.model_dump(),
            "instructions": change.text(task.instructions),
            "setup": {**setup, "data": replace_amounts(data, amounts)},
            "expected": {**expected, "say": replace_texts(expected["say"], amounts)},
            "meta": change.apply(task.meta),
        }
    )


def choose_amounts(task: Task, data: Mapping[str, Any], random: Random) -> dict[float, float]:
    """Amounts that the agent has to tell and that stand in one place only, with what replaces each."""
    texts = [text for item in task.expected.say for text in ([item] if isinstance(item, str) else item)]
    told = {float(text) for text in texts if re.fullmatch(r"\d+\.\d+", text)}
    given = {leaf for call in task.expected.calls for leaf in _list_numbers(call.arguments)}
    found = list(_list_numbers(data))
    return {
        amount: round(amount * random.uniform(0.6, 1.7), 2) or amount
        for amount in sorted(told - given)
        if found.count(amount) == 1
    }


def _list_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for inner in _list_inside(value):
        yield from _list_numbers(inner)


def _list_inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else []


def replace_amounts(value: Any, amounts: Mapping[float, float]) -> Any:
    if isinstance(value, float):
        return amounts.get(value, value)
    if isinstance(value, dict):
        return {key: replace_amounts(inner, amounts) for key, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [replace_amounts(inner, amounts) for inner in cast("list[Any]", value)]
    return value


def replace_texts(value: Any, amounts: Mapping[float, float]) -> Any:
    """Things to say with other amounts."""
    if isinstance(value, str):
        number = float(value) if re.fullmatch(r"\d+\.\d+", value) else None
        return f"{amounts[number]:.2f}" if number is not None and number in amounts else value
    return [replace_texts(item, amounts) for item in value]


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Records laid over those of the database, field by field."""
    return {
        key: {**below[key], **record}
        if isinstance(record, dict) and isinstance(below.get(key), dict)
        else record
        for key, record in above.items()
    }


class Change:
    """Replaces words in texts and in whatever holds texts."""

    def __init__(self, words: Mapping[str, str]) -> None:
        lowered = {old.lower(): new.lower() for old, new in words.items() if old.isalpha()}
        self.words = {**lowered, **words}
        known = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
        small = "|".join(sorted(map(re.escape, lowered), key=len, reverse=True))
        in_address = rf"|(?<![#\w])(?:{small})(?=[.@])" if small else ""  # in small letters only in an e-mail
        self._pattern = re.compile(rf"(?<![#\w])(?:{known})(?!\w){in_address}")

    def text(self, text: str) -> str:
        return self._pattern.sub(lambda match: self.words[match[0]], text)

    def apply(self, value: Any) -> Any:
        """The same value with its words replaced; patterns are left alone."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.apply(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {
                self.text(key): inner if key in _PATTERNS else self.apply(inner)
                for key, inner in cast("dict[str, Any]", value).items()
            }
        return value


def choose_words(domain: Domain, task: Task, random: Random) -> dict[str, str]:
    """The words of a task that may be replaced, with what replaces each."""
    split = task.split if task.split in ("train", "dev", "test") else "train"
    slots = Slots(split, random)
    agenda = cast("dict[str, Any]", task.meta.get("agenda") or {})
    kept = _find_kept(domain) | {
        word.lower() for text in _list_patterns(agenda) for word in _TOKEN.findall(text)
    }
    patterns = " ".join(_list_patterns(agenda))
    known = _index(domain)
    chosen: dict[str, str] = {}
    named = [name for name in _list_names(domain) if name in task.instructions]
    for value in dict.fromkeys([*_list_values(task), *named]):
        for token in _TOKEN.findall(value):
            if token in chosen or token.lower() in kept or token.lower() in _FREE or _DATE.fullmatch(token):
                continue
            if re.search(rf"\b{re.escape(token)}\b", patterns):
                continue
            new = next(
                (new for new in _draw(token, value, slots, known) if _fits(agenda, value, token, new)), None
            )
            if new is not None:
                chosen[token] = new
    return _without_twins(domain, task, chosen)


def _without_twins(domain: Domain, task: Task, chosen: dict[str, str]) -> dict[str, str]:
    """The words without new keys of records that the user can still name by something else: the old record
    stays in the database, and both would be found."""
    index, change = _index(domain), Change(chosen)
    named = [value for value in _list_told(task) if change.text(value) == value]
    left = dict(chosen)
    for word in chosen:
        for table, key in index.get(word, ()):
            record = _DATA[domain][table][key]
            if key == word and any(text in named for text in _list_texts(record)):
                left.pop(word, None)
    return left


def _list_told(task: Task) -> Iterator[str]:
    """What the user can say of the records."""
    for fact in _list_facts(task.meta.get("agenda") or {}):
        if isinstance(fact.get("value"), str):
            yield fact["value"]


def _draw(token: str, value: str, slots: Slots, taken: Container[str]) -> Iterator[str]:
    """Other words of the same shape; none where this one stays."""
    if any(sign.isdigit() for sign in token):
        is_amount = token.isdigit() and re.search(r"\d\.\d|[a-z]{3,} \d|\d [a-z]{3,}", value) is not None
        if len(token) < 3 or is_amount:
            return
        last = re.search(r"\d+\D*$", token)
        for number in range(_TRIES):  # some forms spell out the first digits
            begin = 0 if number < _TRIES // 2 or last is None else last.start()
            tail = "".join(
                str(slots.random.randrange(10)) if sign.isdigit() else sign for sign in token[begin:]
            )
            new = _keep_first(token, token[:begin] + tail)
            if new not in taken and new != token and find_owner(new) == slots.split:
                yield new
        return
    names = [word for word in re.findall(r"[^\W\d_]+", value) if word.lower() not in _FREE]
    is_name = len(value) < 40 and all(word[:1].isupper() for word in names)
    if _WORD.fullmatch(token) and is_name and token[:1].isupper() and token[1:].islower():
        yield slots.word()


def _keep_first(old: str, new: str) -> str:
    """A number does not begin with 0 unless it did."""
    place = next(number for number, sign in enumerate(old) if sign.isdigit())
    return new[:place] + "1" + new[place + 1 :] if old[place] != "0" and new[place] == "0" else new


def _fits(agenda: Mapping[str, Any], value: str, token: str, new: str) -> bool:
    """Whether the user still takes the value for one of its kind."""
    changed = re.sub(rf"(?<![#\w]){re.escape(token)}(?!\w)", new, value)
    for fact in _list_facts(agenda):
        form = fact.get("form")
        if not form or not fact.get("value") or str(fact["value"]) != value:
            continue
        fits = [re.search(form, text, re.IGNORECASE) is not None for text in (value, changed)]
        if fits[0] != fits[1]:
            return False
    return True


def _list_facts(agenda: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (agenda.get("facts") or {}).values()
    for wish in agenda.get("wishes", ()):
        each = wish
        while each:
            yield from (each.get("facts") or {}).values()
            each = each.get("instead")


def _list_patterns(value: Any) -> Iterator[str]:
    """Everything in an agenda that is a regular expression."""
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            if key in _PATTERNS:
                yield str(inner)
            else:
                yield from _list_patterns(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("list[Any]", value):
            yield from _list_patterns(inner)


def _list_values(task: Task) -> Iterator[str]:
    """The texts that a task is about: facts, arguments, and the records it lays in."""
    for fact in _list_facts(task.meta.get("agenda") or {}):
        if isinstance(fact.get("value"), str):
            yield fact["value"]
    for call in (*task.expected.calls, *task.expected.assertions, *task.setup.calls):
        yield from _list_texts(call.arguments, with_keys=False)
    yield from _list_texts(task.setup.data)
    yield from _list_texts(task.setup.user_data)


def _list_texts(value: Any, with_keys: bool = True) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    if isinstance(value, dict) and with_keys:
        yield from (key for key in cast("dict[str, Any]", value) if any(sign.isdigit() for sign in key))
    for inner in _list_inside(value):
        yield from _list_texts(inner, with_keys)


# -- what stays, and the records of the domain ---------------------------------------------------------------

_KEPT: WeakKeyDictionary[Domain, set[str]] = WeakKeyDictionary()
_INDEX: WeakKeyDictionary[Domain, dict[str, list[tuple[str, str]]]] = WeakKeyDictionary()
_NAMES: WeakKeyDictionary[Domain, list[str]] = WeakKeyDictionary()
_DATA: WeakKeyDictionary[Domain, dict[str, Any]] = WeakKeyDictionary()


def _find_kept(domain: Domain) -> set[str]:
    """Words that mean something by themselves: of the policy, the tools and the lists of their schemas."""
    known = _KEPT.get(domain)
    if known is None:
        texts = [domain.policy]
        sides = [side for side in (domain.database, domain.user_database) if side is not None]
        for side in sides:
            texts += [f"{tool.name} {tool.description} {tool.parameters}" for tool in side.tools.values()]
            texts += [str(shape) for shape in type(side).schemas().values()]
        known = _KEPT[domain] = {word.lower() for text in texts for word in _TOKEN.findall(text)}
    return known


def _index(domain: Domain) -> dict[str, list[tuple[str, str]]]:
    """Where in the domain's database each word stands: table and key."""
    known = _INDEX.get(domain)
    if known is None:
        data = _DATA[domain] = domain.database.to_data()
        known = _INDEX[domain] = {}
        for table, records in data.items():
            for key, record in cast("dict[str, Any]", records).items() if isinstance(records, dict) else ():
                for text in (key, *_list_texts(record)):
                    for token in _TOKEN.findall(text):
                        places = known.setdefault(token, [])
                        if (table, key) not in places:
                            places.append((table, key))
    return known


def _list_names(domain: Domain) -> list[str]:
    """Names of several words in the domain's database, such as titles."""
    known = _NAMES.get(domain)
    if known is None:
        _index(domain)
        texts = dict.fromkeys(_list_texts(_DATA[domain]))
        known = _NAMES[domain] = [text for text in texts if _NAME.fullmatch(text)]
    return known


def _find_records(domain: Domain, words: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The records of the domain's database that hold one of the words."""
    index = _index(domain)
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        for table, key in index.get(word, ()):
            found.setdefault(table, {})[key] = _DATA[domain][table][key]
    return found
