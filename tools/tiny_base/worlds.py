"""Random service desks: domains that nobody wrote, for a base to meet before it meets anybody's own.

`make_world(7)` draws people, records, tools, rules and wishes, and returns a `Domain` with tasks without end. The
built-in teacher solves them. Worlds of other seeds have other words, tools and shapes of values.

    python -m tools.tiny_base.worlds SEED    # show a world: its tools, its policy, a task, a conversation
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_lowercase
from types import ModuleType
from typing import Any

from trialogue import Call, Database, Domain, Expected, Phrases, Setup, Slots, Task, generate_with
from trialogue.output import echo

FOREIGN = "àáâäãåæçčćđèéêëęğíîïıłñńňóôöõøőřśšșşțţúûüůűýžźżß"
SCRIPTS = "".join(map(chr, (*range(0x3B1, 0x3CA), *range(0x430, 0x450))))
"""Greek and Cyrillic letters."""
_IDS = ("@-####", "@@-###", "@####", "######", "@@@-##", "#####-@", "@@####", "##-@##", "@##-##")
_CODES = ("@@-###", "##-####", "@@@###", "###-###", "@#@#@#", "########")
_FREE = ("amount", "count", "date", "code", "title", "person", "email", "phone", "address")
_REFUSAL = ("cannot", "can't", "not possible", "unable", "not allowed")
_LOCKED = "the {flag} ones stay as they are"


@cache
def read_words() -> dict[str, Any]:
    """The lists of worlds.toml."""
    return tomllib.loads((Path(__file__).parent / "worlds.toml").read_text(encoding="utf-8"))


class Values(Slots):
    """Values for one task; names may have any letters."""

    def make(self, kind: str, shapes: dict[str, str]) -> Any:
        """A value of a kind."""
        match kind:
            case "amount":
                return self.amount(5, 900)
            case "count":
                return self.number(2, 30)
            case "date" | "birthday":
                return f"{self.number(1950, 2030)}-{self.number(1, 12):02d}-{self.number(1, 28):02d}"
            case "title":
                return " ".join(self.letters() for _ in range(self.number(1, 2)))
            case "person" | "name":
                return f"{self.letters()} {self.letters()}"
            case "email":
                host = self.letters().lower()
                return f"{self.letters().lower()}@{host}.{self.pick(('com', 'net', 'org', 'eu'))}"
            case "phone":
                return self.draw(shapes["phone"])
            case "address":
                return (
                    f"{self.letters()} {self.pick(('Street', 'Road', 'Lane', 'Way'))} {self.number(1, 199)}"
                )
            case _:
                return self.draw(shapes[kind])

    def letters(self) -> str:
        """A word for a name: mostly made of syllables, else of any letters, foreign ones too."""
        random = self.random
        if random.random() < 0.5:
            return self.word()
        length = random.randint(3, 8)
        while True:
            letters = SCRIPTS if random.random() < 0.08 else ascii_lowercase
            text = "".join(random.choices(letters, k=length))
            if random.random() < 0.4:
                place = random.randrange(length)
                text = text[:place] + random.choice(FOREIGN) + text[place + 1 :]
            text = text.capitalize()
            if random.random() < 0.08:
                text = f"{random.choice(('Mc', 'O', 'De'))}{chr(39) if random.random() < 0.5 else ''}{text}"
            elif random.random() < 0.08:
                text += f"-{''.join(random.choices(ascii_lowercase, k=random.randint(3, 5))).capitalize()}"
            if text not in self._drawn:
                self._drawn.add(text)
                return text


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
        returned = "'done'" if self.answers_in_words else f"self.things[{self.thing_id}]"
        for action in self.actions:
            extra = f", {action.sets}: {types[action.sets]}" if action.sets else ""
            change = (
                f"{action.sets} = {action.sets}" if action.sets else f"status = {self._find_result(action)!r}"
            )
            lines += [
                "    @tool(writes=True)",
                f"    def {action.tool}(self, {self.thing_id}: str{extra}) -> {'str' if self.answers_in_words else thing}:",
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
                f"{action.tool.replace('_', ' ').capitalize()}: only while it is {' or '.join(action.allowed)}."
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


# -- tasks -------------------------------------------------------------------------------------------------


class Scene:
    """A person with things, and the wishes of one task."""

    def __init__(self, world: World, slots: Slots) -> None:
        self.world, self.values = world, Values(slots.split, slots.random)
        words = read_words()
        self.phrases = {name: Phrases(*texts) for name, texts in words["phrases"].items()}
        self.identity: dict[str, str] = {
            name: self.values.make(name, world.shapes) for name in world.known_by
        }
        self.person_id = self.values.draw(world.shapes["person"])
        self.things: dict[str, dict[str, Any]] = {}
        self.others: dict[str, dict[str, str]] = {}
        self.calls: list[Call] = []
        self.say: list[Any] = []
        self.wishes: list[dict[str, Any]] = []

    def fact(self, value: Any, asked: str, form: str = "") -> dict[str, Any]:
        fact: dict[str, Any] = {"value": None if value is None else str(value), "asked": asked}
        if value is not None:
            fact["says"] = self.values.phrases(self.phrases["tell"], v="{value}")
        return fact | ({"form": form} if form else {})

    def add_thing(self, statuses: Sequence[str], locked: bool = False) -> dict[str, Any]:
        world, values = self.world, self.values
        thing_id = values.draw(world.shapes["id"])
        owner = self.identity if world.is_direct else {f"{world.person}_id": self.person_id}
        thing: dict[str, Any] = {world.thing_id: thing_id, **owner, "status": values.pick(list(statuses))}
        thing |= {name: values.make(kind, world.shapes) for name, kind in world.fields.items()}
        thing |= {name: values.pick(options) for name, options in world.choices.items()}
        self.things[thing_id] = thing | ({world.flag: locked} if world.flag else {})
        return self.things[thing_id]

    def wish(self, phrases: str, thing: dict[str, Any], forgot: str = "", **filled: str) -> dict[str, Any]:
        world, values = self.world, self.values
        thing_id = thing[world.thing_id]
        named = not forgot and values.random.random() < 0.5
        spoken = f"{world.thing} {thing_id}" if named else f"my {world.thing}"
        texts = values.phrases(
            self.phrases[phrases],
            **{key: text.format(thing=spoken) for key, text in filled.items()},
            thing=spoken,
        )
        shown = world.thing.replace("_", " ")
        form = "".join({"@": "[A-Z]", "#": r"\d"}.get(sign, sign) for sign in world.shapes["id"])
        suffix = world.thing_id.rpartition("_")[2]
        asked = rf"{shown} (?:number|{suffix})|number of the {shown}|which {shown}"
        facts = {
            world.thing_id: self.fact(None if forgot else thing_id, asked, "" if forgot else rf"\b{form}\b")
        }
        if forgot:
            facts[forgot] = self.fact(thing[forgot], rf"\b{forgot.replace('_', ' ')}\b")
        return {"says": texts, "facts": facts}

    def request(self, action: Action, refused: bool = False, forgot: str = "") -> dict[str, Any]:
        world, values = self.world, self.values
        forbidden = [status for status in world.statuses if status not in action.allowed]
        locked = refused and bool(world.flag) and values.random.random() < 0.5
        thing = self.add_thing(forbidden if refused and not locked else action.allowed, locked)
        wish = self.wish("do", thing, forgot, do=action.says)
        arguments: dict[str, Any] = {world.thing_id: thing[world.thing_id]}
        stem = action.past.split()[0][:5]
        wish["done"] = f"{stem}|{action.sets.replace('_', ' ')}" if action.sets else stem
        if action.sets:
            arguments[action.sets] = self._add_value(action, thing, wish)
        if refused:
            self.say += [_REFUSAL, (world.flag if locked else thing["status"],)]
        else:
            self.calls.append(Call(name=action.tool, arguments=arguments))
        return wish

    def _add_value(self, action: Action, thing: dict[str, Any], wish: dict[str, Any]) -> Any:
        """The value that an action sets, and where it is known from."""
        world, values = self.world, self.values
        shown = action.sets.replace("_", " ")
        if action.kind == "choice":
            options = [option for option in world.choices[action.sets] if option != thing[action.sets]]
            value: Any = values.pick(options)
        else:
            value = values.make(action.kind, world.shapes)
        if action.looked_up:
            name = values.make("title", world.shapes)
            self.others[value] = {"name": name, "code": value}
            wish["facts"][f"new_{world.other}"] = self.fact(name, rf"\b{world.other}\b|{shown}")
        else:
            wish["facts"][action.sets] = self.fact(value, rf"\b{shown}\b")
        return value

    def question(self) -> dict[str, Any]:
        world, values = self.world, self.values
        thing = self.add_thing(world.statuses)
        name = values.pick([*world.fields, "status", *world.choices])
        wish = self.wish("ask", thing, field=name.replace("_", " "))
        value = thing[name]
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
        self.say.append(text)
        is_free = name != "status" and not any(sign.isdigit() for sign in text)
        wish["answer"] = re.escape(text) if is_free and name not in world.choices else _to_form(world, name)
        return wish

    def to_task(self, wishes: list[dict[str, Any]]) -> Task:
        world = self.world
        if len(wishes) == 1 and self.values.random.random() < 0.5:
            self.add_thing(world.statuses)
        ids = self.values.random.sample(list(self.things), len(self.things))
        person = {f"{world.person}_id": self.person_id, **self.identity, f"{world.thing}_ids": ids}
        asked = read_words()["identity"]
        people = {} if world.is_direct else {self.person_id: person}
        data = {"people": people, "things": {name: self.things[name] for name in ids}}
        facts = {name: self.fact(value, asked[name]) for name, value in self.identity.items()}
        return Task(
            id="task",
            domain="world",
            instructions=f"You are {self.identity}. {wishes[0]['says'][0]}",
            setup=Setup(data=data | ({"others": self.others} if world.other else {})),
            expected=Expected(calls=tuple(self.calls), say=tuple(self.say)),
            meta={"agenda": {"facts": facts, "wishes": wishes}},
        )


def _to_form(world: World, name: str) -> str:
    """What an answer about a field looks like."""
    if name == "status" or name in world.choices:
        return "|".join(world.statuses if name == "status" else world.choices[name])
    return r"\d+\.\d\d?" if world.fields[name] == "amount" else r"\d"


def _make_task(world: World) -> Callable[[Slots, str], Task]:
    def make(slots: Slots, family: str) -> Task:
        scene = Scene(world, slots)
        by_name = {action.tool: action for action in world.actions}
        telling = [
            name for name, kind in world.fields.items() if kind in ("title", "date", "person", "address")
        ]
        match family:
            case "question":
                wishes = [scene.question()]
            case "hand over":
                topic = slots.pick(world.topics)
                noted = {f"{world.person}_id": scene.person_id}
                if world.is_direct:
                    noted = {world.thing_id: scene.add_thing(world.statuses)[world.thing_id]}
                scene.calls.append(Call(name="hand_over", arguments={**noted, "topic": topic}))
                says = scene.values.phrases(scene.phrases["topic"], topic=topic)
                wishes = [{"says": says, "done": "colleague|hand"}]
            case "refused":
                wishes = [scene.request(slots.pick(world.actions), refused=True)]
            case "two wishes":
                wishes = [scene.request(slots.pick(world.actions)), scene.question()]
            case "change of mind":
                before = scene.request(slots.pick(world.actions))
                scene.calls.clear()
                instead = scene.request(slots.pick(world.actions))
                wishes = [{**before, "instead": instead}]
            case "forgetful":
                names = {action.sets for action in world.actions}
                free = [name for name in telling if name not in names] or telling
                wishes = [scene.request(slots.pick(world.actions), forgot=slots.pick(free))]
                scene.add_thing(world.statuses)
            case name:
                wishes = [scene.request(by_name[name])]
        return scene.to_task(wishes)

    return make


def make_world(seed: int) -> Domain:
    """A random service desk. The same seed gives the same one."""
    world = World(seed)
    module = ModuleType(f"world_{seed}")
    source = compile(world.to_source(), f"world_{seed}.py", "exec", dont_inherit=True)
    exec(source, vars(module))  # written above
    desk: type[Database] = module.Desk
    tables = ["people", "things", "notes", *(["others"] if world.other else [])]
    families = {action.tool: 1 for action in world.actions} | {"question": 1, "hand over": 1, "refused": 2}
    families |= {"two wishes": 3, "change of mind": 3}
    if {"title", "date", "person", "address"} & set(world.fields.values()):
        families["forgetful"] = 2
    return Domain(
        name=f"world_{seed}",
        policy=world.to_policy(),
        database=desk.load({table: {} for table in tables}),
        tasks=generate_with(_make_task(world), families),
        endless=True,
    )


async def show(seed: int) -> None:
    """Print a world and a conversation in it."""
    from trialogue.config import Limits, Speaker
    from trialogue.talk.find import find_model
    from trialogue.talk.rollout import rollout

    domain = make_world(seed)
    for line in f"{World(seed).to_source()}\n{domain.policy}".splitlines():
        echo(line)
    agent = find_model(Speaker(model="teacher"), "agent", domain, Limits())
    user = find_model(Speaker(model="agenda"), "user", domain, Limits())
    tasks = domain.tasks("train", 9)
    async for group in rollout(domain, tasks, agent, user):
        for item in group.everything:
            value = item.reward.value if item.reward else None
            echo(f"{item.task.family}: {item.end}, reward {value} {item.error or ''}")
            for turn in item.turns:
                message = turn.message
                calls = " ".join(f"{call.name} {call.arguments}" for call in message.tool_calls)
                echo(f"  {turn.side:5} {message.role:9} {message.content} {calls}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seed", type=int)
    asyncio.run(show(parser.parse_args().seed))
