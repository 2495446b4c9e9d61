"""One random service desk: its people, things, rules and tools, and its database as a module's source."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

_IDS = ("@-####", "@@-###", "@####", "######", "@@@-##", "#####-@", "@@####", "##-@##", "@##-##")
_CODES = ("@@-###", "##-####", "@@@###", "###-###", "@#@#@#", "########")
_FREE = ("amount", "count", "date", "code", "title", "person", "email", "phone", "address")


@cache
def read_words() -> dict[str, Any]:
    """The lists of worlds.toml."""
    return tomllib.loads((Path(__file__).parent / "worlds.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Action:
    """Something that is done to a thing on a wish."""

    tool: str
    past: str
    says: str
    """The wish after "I want to"; `{thing}` is the thing."""
    allowed: tuple[str, ...]
    """Statuses in which it may be done."""
    sets: str = ""
    """The field that gets the value of this name."""
    kind: str = ""
    """The kind of that value."""
    looked_up: bool = False
    """Whether the value is a code that belongs to a title the user names."""


@dataclass(slots=True)
class World:
    """One service desk."""

    seed: int
    random: Random = field(init=False)
    person: str = field(init=False)
    thing: str = field(init=False)
    known_by: list[str] = field(init=False)
    fields: dict[str, str] = field(init=False)
    choices: dict[str, tuple[str, ...]] = field(init=False)
    statuses: list[str] = field(init=False)
    flag: str = field(init=False)
    actions: list[Action] = field(init=False)
    topics: list[str] = field(init=False)
    shapes: dict[str, str] = field(init=False)
    place: str = field(init=False)
    thing_id: str = field(init=False)
    """The field that holds the key of a thing."""
    is_direct: bool = field(init=False)
    """Whether the user's data leads to the things at once, without a record of the person."""
    answers_in_words: bool = field(init=False)
    """Whether changes return a sentence instead of the record."""
    other: str = field(init=False)
    """A list of things with codes that some action looks up; empty if there is none."""

    def __post_init__(self) -> None:
        words, random = read_words(), Random(f"world/{self.seed}")
        self.random = random
        self.person, self.thing = random.choice(words["people"]), random.choice(words["things"])
        self.place = f"{self.thing} {random.choice(words['places'])}"
        self.thing_id = f"{self.thing}_{random.choice(('id', 'id', 'id', 'number', 'code', 'ref'))}"
        self.is_direct, self.answers_in_words = random.random() < 0.25, random.random() < 0.25
        self.known_by = random.sample(list(words["identity"]), random.choice((1, 2, 2)))
        if self.known_by == ["pin"]:
            self.known_by.append("name")
        heard = {"number", self.thing, *self.known_by}
        kinds = random.sample(_FREE, random.randint(2, 4))
        drawn = {random.choice(words["kinds"][kind]): kind for kind in kinds}
        self.fields = {name: kind for name, kind in drawn.items() if heard.isdisjoint(name.split("_"))}
        names = random.sample(list(words["choices"]), random.randint(0, 2))
        self.choices = {name: tuple(words["choices"][name]) for name in names}
        self.statuses = random.sample(words["statuses"], random.randint(3, 4))
        self.flag = random.choice(words["flags"]) if random.random() < 0.5 else ""
        self.topics = random.sample(words["topics"], random.randint(2, 4))
        self.shapes = {
            "id": random.choice(_IDS),
            "person": random.choice(_IDS),
            "code": random.choice(_CODES),
            "phone": random.choice(("555-####", "0### ######", "+## ### ####")),
            "postcode": random.choice(("####", "#####", "@@# #@@", "@-####")),
            "pin": random.choice(("####", "######")),
            "number": random.choice(("L######", "#######", "@@#####")),
        }
        self.other = ""
        self.actions = [self._draw_plain() for _ in range(random.randint(1, 2))]
        self.actions += [self._draw_setting() for _ in range(random.randint(1, 3))]
        self.actions = list({action.tool: action for action in self.actions}.values())

    def _draw_allowed(self) -> tuple[str, ...]:
        return tuple(self.random.sample(self.statuses, self.random.randint(1, 2)))

    def _draw_plain(self) -> Action:
        verb, past = self.random.choice(list(read_words()["actions"].items()))
        says = f"{verb.replace('_', ' ')} {{thing}}"
        return Action(f"{verb}_{self.thing}", past, says, self._draw_allowed())

    def _draw_setting(self) -> Action:
        verb = self.random.choice(("change", "set", "update", "correct"))
        named = {name: kind for name, kind in self.fields.items() if kind != "amount"}
        named |= dict.fromkeys(self.choices, "choice")
        if not named:
            return self._draw_plain()
        name = self.random.choice(list(named))
        looked_up = named[name] == "code" and not self.other and self.random.random() < 0.7
        if looked_up:
            self.other = self.random.choice(("car", "bed", "desk", "engine", "lamp", "tool", "coach", "box"))
        shown = name.replace("_", " ")
        says = f"{verb} the {shown} of {{thing}}"
        past = {"set": "set", "change": "changed", "update": "updated", "correct": "corrected"}[verb]
        return Action(f"{verb}_{name}", past, says, self._draw_allowed(), name, named[name], looked_up)

    # -- the database, as the source of a module ----------------------------------------------------------

    def to_source(self) -> str:
        """The records and tools as Python."""
        person, thing = _to_class(self.person), _to_class(self.thing)
        types = {name: _TYPES.get(kind, "str") for name, kind in self.fields.items()}
        types |= {name: f"Literal{list(values)!r}" for name, values in self.choices.items()}
        identity = [f"    {name}: str" for name in self.known_by]
        asked = ", ".join(f"{name}: str" for name in self.known_by)
        where = ", ".join(f"{name}={name}" for name in self.known_by)
        known = " and ".join(self.known_by)
        noted = self.thing_id if self.is_direct else f"{self.person}_id"
        lines = [
            "from typing import Literal",
            "from trialogue import Database, Record, Table, ToolError, tool",
            f"class {person}(Record):",
            f"    {self.person}_id: str",
            *identity,
            f"    {self.thing}_ids: list[str]",
            f"class {thing}(Record):",
            f"    {self.thing_id}: str",
            *(identity if self.is_direct else [f"    {self.person}_id: str"]),
            f"    status: Literal{self.statuses!r}",
            *(f"    {name}: {of}" for name, of in types.items()),
            *([f"    {self.flag}: bool = False"] if self.flag else []),
            "class Note(Record):",
            f"    {noted}: str",
            f"    topic: Literal{self.topics!r}",
            *(
                [f"class {_to_class(self.other)}(Record):", "    name: str", "    code: str"]
                if self.other
                else []
            ),
            "class Desk(Database):",
            f"    people: Table[{person}]",
            f"    things: Table[{thing}]",
            "    notes: Table[Note]",
            *([f"    others: Table[{_to_class(self.other)}]"] if self.other else []),
            *(self._to_direct(asked, where, known, thing) if self.is_direct else []),
            *([] if self.is_direct else self._to_person(asked, where, known, person, thing)),
            "    @tool(writes=True, ends=True)",
            f"    def hand_over(self, {noted}: str, topic: Literal{self.topics!r}) -> str:",
            f'        """Hand the {self.person} over to a colleague. This ends the conversation."""',
            f"        self.notes[{noted}] = Note({noted}={noted}, topic=topic)",
            "        return 'A colleague takes over.'",
        ]
        if self.other:
            lines += [
                "    @tool",
                f"    def find_{self.other}(self, name: str) -> {_to_class(self.other)}:",
                f'        """Find a {self.other} and its code by name."""',
                "        found = self.others.where(name=name)",
                "        if not found:",
                "            raise ToolError('there is none of this name')",
                "        return found[0]",
            ]
        result = "str" if self.answers_in_words else thing
        returned = "'done'" if self.answers_in_words else f"self.things[{self.thing_id}]"
        for action in self.actions:
            extra = f", {action.sets}: {types[action.sets]}" if action.sets else ""
            change = (
                f"{action.sets} = {action.sets}" if action.sets else f"status = {self._find_result(action)!r}"
            )
            lines += [
                "    @tool(writes=True)",
                f"    def {action.tool}(self, {self.thing_id}: str{extra}) -> {result}:",
                f'        """{action.tool.replace("_", " ").capitalize()}."""',
                f"        self.things[{self.thing_id}].{change}",
                f"        return {returned}",
            ]
        return "\n".join(lines) + "\n"

    def _to_person(self, asked: str, where: str, known: str, person: str, thing: str) -> list[str]:
        """Tools that find the person, then a thing."""
        return [
            "    @tool",
            f"    def find_{self.person}(self, {asked}) -> {person}:",
            f'        """Find a {self.person} by {known}."""',
            f"        found = self.people.where({where})",
            "        if not found:",
            f"            raise ToolError('there is no such {self.person}')",
            "        return found[0]",
            "    @tool",
            f"    def get_{self.thing}(self, {self.thing_id}: str) -> {thing}:",
            f'        """Look a {self.thing} up."""',
            f"        return self.things[{self.thing_id}]",
        ]

    def _to_direct(self, asked: str, where: str, known: str, thing: str) -> list[str]:
        """A tool that finds all things of a person."""
        return [
            "    @tool",
            f"    def find_{self.thing}s(self, {asked}) -> list[{thing}]:",
            f'        """Find all {self.thing}s of a {self.person} by {known}."""',
            f"        return self.things.where({where})",
        ]

    def _find_result(self, action: Action) -> str:
        """The status that an action leaves: one in which it is not allowed, where there is one."""
        others = [status for status in self.statuses if status not in action.allowed]
        return others[0]

    def to_policy(self) -> str:
        """The rules in words."""
        known = " and ".join(f"the {name}" for name in self.known_by)
        rules = [
            f"Ask for {known} and find the {self.person} first.",
            f"Look a {self.thing} up before you decide about it.",
            "Say what you will do and wait for a clear yes before each change. Then say what was done.",
            *(
                f"{action.tool.replace('_', ' ').capitalize()}: only while {' or '.join(action.allowed)}."
                for action in self.actions
            ),
            *([f"Change nothing that is {self.flag}."] if self.flag else []),
            f"For {', '.join(self.topics)}: hand over to a colleague.",
        ]
        numbered = "\n".join(f"{number}. {rule}" for number, rule in enumerate(rules, 1))
        return f"# {self.place[:1].upper()}{self.place[1:]}\n\n{numbered}\n"


_TYPES = {"amount": "float", "count": "int"}


def _to_class(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
