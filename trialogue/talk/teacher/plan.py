"""The next thing to do for a value: ask for it, look it up, or say that nobody could know it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trialogue.config import Synthesis
from trialogue.talk.agenda import Fact, Wish
from trialogue.talk.evidence import find_leaves, is_permitted, to_pieces
from trialogue.talk.teacher.knowledge import KEY, Knowledge, read_records, to_text
from trialogue.talk.teacher.search import (
    Candidate,
    Path,
    Search,
    add_value,
    is_lookup,
    list_arguments,
    list_values,
    match_names,
    to_words,
)
from trialogue.task import Call
from trialogue.world.database import Table, canonical
from trialogue.world.domain import Environment

FREE_TEXT = frozenset(Synthesis().free_text)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do."""

    kind: Literal["ask", "look", "unknown"]
    names: tuple[str, ...] = ()
    """Facts to ask for."""
    call: Call | None = None
    problem: str = ""


class Planner:
    """Decides what is missing, from what is known."""

    def __init__(self, environment: Environment, is_strict: bool = True) -> None:
        """With `is_strict` a value from a tool has to be told apart from others of its kind. Where the user's
        facts are not listed, nothing can tell it, and it is enough that a tool has shown it."""
        self.environment = environment
        self.is_strict = is_strict
        self.knowledge = Knowledge(environment)
        self.search = Search(environment, self.knowledge, {}, set())
        self.facts: Mapping[str, Fact] = {}
        self.own: set[str] = set()
        """Facts of the present wish, which tell what it is about."""

    def take_up(self, facts: Mapping[str, Fact], own: set[str]) -> None:
        """Go on with another wish: its facts have not been told yet."""
        self.facts, self.own = facts, own
        self.search.facts = {name: fact.value for name, fact in facts.items()}
        self.search.told -= own

    def note_call(self, name: str, arguments: dict[str, Any], text: str, failed: bool) -> None:
        """Take in the result of a call that was made."""
        tool = self.environment.tools.get(name)
        if tool is not None and tool.writes and not failed:
            self.search.made.clear()
            self.search.results.clear()
        self.search.made.add(canonical([name, arguments]))
        self.environment.call(name, arguments)
        self.search.replayed.append((name, arguments))
        if not failed:
            self.knowledge.see(text)

    def apply_user_call(self, call: Call) -> None:
        """Keep in step with what the user has done."""
        self.environment.call(call.name, call.arguments, "user")
        self.search.made.clear()
        self.search.results.clear()

    # -- one call -----------------------------------------------------------------------------------------

    def find_first_step(self, call: Call) -> Step | None:
        """What is to be done before a call that identifies the user: its values come from the user alone."""
        for name, value in call.arguments.items():
            if self.knowledge.names(value):
                continue
            forgotten = self._find_forgotten(name)
            if forgotten is not None:
                return Step("ask", (forgotten,))
            fact = self._find_fact(value) or self._find_inside(to_text(value))
            if fact is None:
                equal = self.search.find_equal(call.name, call.arguments)
                if equal is None:
                    return self._give_up(call, name, value)
                return self._first(equal)
            if fact not in self.search.told:
                return Step("ask", (fact,))
        return None

    def find_step(self, call: Call, *, looks_up: bool = True) -> Step | None:
        """What is to be done before a call can be made, None where it can. A record that is known is looked
        up before anything else is asked: it may stand in the way."""
        properties = self._find_schemas(call)
        leaves = [(name, leaf) for name, value in call.arguments.items() for leaf in find_leaves(value)]
        known: list[Any] = []
        for _ in range(2):  # what is known of one value may tell another
            known = [
                leaf for name, leaf in leaves if self.is_known(name, leaf, properties.get(name, {}), known)
            ]
        missing = [(name, leaf) for name, leaf in leaves if leaf not in known]
        for name, leaf in leaves:
            if leaf in known:
                step = self._find_look_up(name, leaf) if looks_up else None
            else:
                step = self._find_out(call, name, leaf, missing)
            if step is not None:
                return step
        return None

    def _find_schemas(self, call: Call) -> Mapping[str, Any]:
        """The schema of each parameter of a tool."""
        tool = self.environment.tools.get(call.name)
        return {} if tool is None else tool.parameters.get("properties", {})

    def _find_look_up(self, name: str, leaf: Any) -> Step | None:
        """The look-up of a record that no tool has shown yet."""
        if not isinstance(leaf, str) or not self.is_key(leaf) or self.knowledge.is_looked_up(leaf):
            return None
        found = self._find_call_with(name, leaf)
        return None if found is None else Step("look", call=found)

    def is_key(self, text: str) -> bool:
        """Whether a record of the agent's side is called this."""
        database = self.environment.database
        for name in type(database).schemas():
            table: Any = getattr(database, name)
            if isinstance(table, Table) and text in table:
                return True
        return False

    def _find_call_with(self, name: str, value: str) -> Call | None:
        """A read-only call with this value as its one argument that shows its record."""
        best: tuple[int, Call] | None = None
        for tool in self.environment.tools.values():
            required = tool.parameters.get("required", [])
            if tool.writes or not is_lookup(tool) or len(required) != 1:
                continue
            arguments = {required[0]: value}
            if canonical([tool.name, arguments]) in self.search.made:
                continue
            text = self.search.try_call(tool, arguments)
            fit = match_names(required[0], name)
            if text is None or (best is not None and best[0] >= fit):
                continue
            if fit > 1 or any(seen.identity == to_text(value) for seen in read_records(text)):
                best = fit, Call(name=tool.name, arguments=arguments)
        return None if best is None else best[1]

    def is_known(self, name: str, leaf: Any, schema: Any, given: list[Any]) -> bool:
        """Whether an honest agent can fill a parameter with this value now."""
        if leaf is None or leaf == "" or leaf == []:
            return True
        fact = self._find_fact(leaf, own=not isinstance(leaf, bool))
        if fact is not None and (fact in self.search.told or is_choice(schema)):
            return fact in self.search.told
        if self.knowledge.is_determined(leaf, given):
            return True
        if not self.is_strict and self._is_in_sight(leaf):
            return True
        if fact is not None:
            return False
        return is_permitted(leaf, schema) or (name in FREE_TEXT and isinstance(leaf, str))

    def _find_fact(self, value: Any, own: bool = True) -> str | None:
        """The fact with this value."""
        if not own:
            return None
        text = to_text(value)
        names = [
            name
            for name, fact in self.facts.items()
            if fact.value is not None and to_text(fact.value) == text
        ]
        return names[0] if names else None

    def _find_out(self, call: Call, name: str, leaf: Any, others: list[tuple[str, Any]]) -> Step | None:
        """How to learn a value; None where it is known but nothing tells why it is the one."""
        knowledge = self.knowledge
        forgotten = self._find_forgotten(name)
        if forgotten is not None:
            return Step("ask", (forgotten,))
        given = [
            value for values in call.arguments.values() for value in find_leaves(values) if value != leaf
        ]
        meant = [value for value in given if knowledge.is_determined(value)]
        text = to_text(leaf)

        def shows(result: str) -> bool:
            return self._shows(text, result)

        in_sight = bool(knowledge.find_leaves(lambda value: value == text))

        def determines(result: str) -> bool:
            if not (in_sight or shows(result)):
                return False
            return not self.is_strict or knowledge.preview(result).is_determined(leaf, meant)

        fact = self._find_fact(leaf)
        is_asked = fact is not None and is_choice(self._find_schemas(call).get(name, {}))
        path = None if is_asked else self.search.find_path(determines, asks=False)
        if path is not None:
            return self._first(path)
        meant += [self.facts[each].value for each in self.own if self.facts[each].value is not None]
        if fact is not None:
            also = [] if self.is_key(str(leaf)) else [self._find_fact(each[1]) for each in others]
            names = [
                each
                for each in also
                if each and each not in self.search.told and not self.is_key(str(self.facts[each].value))
            ]
            return Step("ask", tuple(dict.fromkeys([fact, *names])))
        telling = self.find_telling()
        path = None if telling and knowledge.is_determined(leaf, meant) else self.search.find_path(determines)
        if path is not None and (path.asks or telling is None):
            return self._first(path)
        if telling is not None:
            return Step("ask", (telling,))
        if self._is_in_sight(leaf):
            return None
        path = self.search.find_path(shows)
        if path is not None:
            return self._first(path)
        inside = self._find_inside(text)
        if inside is not None:
            return Step("ask", (inside,))
        equal = (
            self.search.find_equal(call.name, call.arguments) if call.name in self.environment.tools else None
        )
        if equal is not None:
            return self._first(equal)
        return self._give_up(call, name, leaf)

    @staticmethod
    def _give_up(call: Call, name: str, value: Any) -> Step:
        who = "neither the user nor a tool that can be called says it"
        return Step("unknown", problem=f"nobody could know {name} = {value!r} of {call.name}: {who}")

    def _is_in_sight(self, leaf: Any) -> bool:
        return self.knowledge.evidence.holds(leaf)

    @staticmethod
    def _shows(text: str, result: str) -> bool:
        pieces = " ".join(to_pieces(text))
        return text in result.lower() and f" {pieces} " in f" {' '.join(to_pieces(result))} "

    def _first(self, path: Path) -> Step:
        """The first thing to do on a path. Records that stand in a list are looked at in their order."""
        asks = [name for name in path.asks if name not in self.search.told]
        name, arguments = path.calls[0]
        if asks:
            return Step("ask", tuple(asks))
        for parameter, value in arguments.items():
            if isinstance(value, str) and len(arguments) == 1 and not self.knowledge.is_determined(value):
                for sibling in self.knowledge.find_siblings(value):
                    tried = {parameter: str(sibling)}
                    if canonical([name, tried]) not in self.search.made:
                        return Step("look", call=Call(name=name, arguments=tried))
        return Step("look", call=Call(name=name, arguments=arguments))

    def _find_forgotten(self, name: str) -> str | None:
        """A fact that the user would be asked for here and does not remember."""
        for fact in self.facts:
            if (
                self.facts[fact].value is None
                and fact not in self.search.told
                and match_names(fact, name) > 1
            ):
                return fact
        return None

    def find_telling(self) -> str | None:
        """A fact of the present wish that may tell which record is meant."""
        for name in self.facts:
            fact = self.facts[name]
            if name not in self.own or name in self.search.told or fact.value is None:
                continue
            if not self.knowledge.names(fact.value):
                return name
        return None

    def _find_inside(self, text: str) -> str | None:
        """A fact whose value holds this text."""
        for name, fact in self.facts.items():
            if (
                fact.value is not None
                and name not in self.search.told
                and f" {text} " in f" {to_text(fact.value)} "
            ):
                return name
        return None

    def is_made(self, call: Call) -> bool:
        """Whether a call was made since anything changed."""
        return canonical([call.name, dict(call.arguments)]) in self.search.made

    def is_telling(self, name: str, value: Any) -> bool:
        """Whether a value leads to a record that says what may be done."""
        return isinstance(value, str) and (
            self.is_key(value) or self._find_call_with(name, value) is not None
        )

    def find_record(self, told: list[str]) -> Step | None:
        """The next look-up on the way to a record that holds everything that was told."""
        if not told or any(
            all(text in seen.find_around() for text in told) for seen in self.knowledge.records
        ):
            return None
        path = self.search.find_path(
            lambda result: all(self._shows(text, result) for text in told), asks=False
        )
        return None if path is None else self._first(path)

    def find_named(self, wish: Wish) -> list[str]:
        """What the user has named of a wish: facts that were told, and values of records in its words. A
        wish without facts of its own is about whoever has been identified."""
        told = [
            to_text(fact.value)
            for name, fact in (wish.facts or self.facts).items()
            if fact.value is not None and (name in self.search.told or self.knowledge.names(fact.value))
        ]
        spoken = f" {' '.join(piece for text in wish.says for piece in to_pieces(text))} "
        values = list_values(self.environment.domain, self.environment)
        return told + [
            text
            for text, (value, _) in values.items()
            if f" {' '.join(to_pieces(text))} " in spoken and self.knowledge.names(value)
        ]

    def is_seen(self, texts: Sequence[str]) -> bool:
        """Whether a tool has shown a record with one of these values."""
        return any(text in seen.find_around() for seen in self.knowledge.records for text in texts)

    def find_source(self, is_meant: Callable[[str], bool]) -> Step | None:
        """The next thing to do on the way to a record that the user means and that shows what is meant; None
        where such a record is known, or cannot be found."""
        meant = [self.facts[name].value for name in self.own if self.facts[name].value is not None]

        def determines(result: str) -> bool:
            preview = self.knowledge.preview(result)
            return any(preview.is_determined(leaf, meant) for leaf in preview.find_leaves(is_meant))

        if any(self.knowledge.is_determined(leaf, meant) for leaf in self.knowledge.find_leaves(is_meant)):
            return None
        path = self.search.find_path(determines)
        return None if path is None else self._first(path)

    def find_around(self) -> dict[str, list[str]]:
        """The fields of the records that the present wish is about."""
        told = {to_text(self.facts[name].value) for name in self.own if self.facts[name].value is not None}
        about = [seen for seen in self.knowledge.records if seen.identity in told] or [
            seen for seen in self.knowledge.records if told & seen.find_around() and seen.above is None
        ]
        about = about or self.knowledge.records[-1:]
        return {
            name: [to_text(value) for value in values]
            for seen in about
            for name, values in seen.fields.items()
            if name != KEY
        }

    def find_name(self, key: str) -> str | None:
        """What a record is called besides its key."""
        text = to_text(key)
        for seen in self.knowledge.records:
            if seen.identity == text:
                for field in ("name", "title"):
                    if seen.fields.get(field) and to_text(seen.fields[field][0]) != text:
                        return str(seen.fields[field][0])
        return None

    # -- what is to be said -------------------------------------------------------------------------------

    def find_answer(self, is_meant: Callable[[str], bool]) -> tuple[Any, Step | None]:
        """A value to tell the user, or what is to be done first."""
        knowledge = self.knowledge
        leaves = knowledge.find_leaves(is_meant)
        for leaf in leaves:
            if knowledge.is_determined(leaf):
                return leaf, None
        for name in self.own:
            if self.facts[name].value is None and name not in self.search.told:
                return None, Step("ask", (name,))

        def determines(result: str) -> bool:
            found = [
                value for seen in read_records(result) for values in seen.fields.values() for value in values
            ]
            fit = [*leaves, *(value for value in found if is_meant(to_text(value)))]
            preview = knowledge.preview(result) if fit else knowledge
            return any(preview.is_determined(value) for value in fit)

        def shows(result: str) -> bool:
            return is_meant(result.lower())

        path = self.search.find_path(determines, asks=False)
        if path is None and (telling := self.find_telling()) is not None:
            return None, Step("ask", (telling,))
        path = path or self.search.find_path(determines)
        if path is None and leaves:
            return leaves[0], None
        path = path or self.search.find_path(shows)
        return None, self._first(path) if path is not None else None

    def find_identification(self, names: set[str]) -> Path | None:
        """The look-up that takes only what users know about themselves, None where there is none. The first
        tool is the usual one: another is used where the user does not remember what that takes."""
        pool: dict[str, Candidate] = {}
        tools = [tool for tool in self.environment.tools.values() if is_lookup(tool)]
        parameters = {name for tool in tools for name in tool.parameters.get("required", ())}
        for name in names:
            value = self.facts[name].value
            if value is not None:
                known = name in self.search.told or self.knowledge.names(value)
                for field in {name, *(each for each in parameters if self._fits(name, each))}:
                    add_value(pool, value, field, asks="" if known else name)
        for tool in tools:
            required = tool.parameters.get("required", [])
            asked = [[name for name in sorted(names) if self._fits(name, each)] for each in required]
            usual = [name for found in asked for name in found[:1]]
            if len(usual) < len(required) or not required:
                continue
            if any(self.facts[name].value is None and name not in self.search.told for name in usual):
                return Path([], [name for name in usual if name not in self.search.told])
            for arguments, used in list_arguments(tool, pool):
                if not used or any(
                    max(match_names(each, field) for field in item.fields) < 1
                    for each, item in zip(arguments, used, strict=False)
                ):
                    continue
                if self.search.try_plainly(tool, arguments) is not None:
                    return Path([(tool.name, arguments)], [item.asks for item in used if item.asks])
        return None

    def _fits(self, name: str, parameter: str) -> bool:
        """Whether a fact is what a parameter takes, by its name or by the words that ask for it."""
        if match_names(name, parameter) > 1:
            return True
        phrases = " ".join(to_words(parameter)), re.sub(r"\bid\b", "number", " ".join(to_words(parameter)))
        return any(re.search(self.facts[name].asked, text, re.IGNORECASE) for text in phrases)


def is_choice(schema: Mapping[str, Any]) -> bool:
    """Whether a parameter takes one of a few values. Which of them is meant, only the user can tell: a
    record that has the same value is about something else."""
    return "enum" in schema
