"""Random service desks: domains that nobody wrote, for a base to meet before it meets anybody's own.

`make_world(7)` draws people, records, tools, rules and wishes, and returns a `Domain` with tasks without end.
The built-in teacher solves them. Worlds of other seeds have other words, tools and shapes of values.

    python -m tools.tiny_base.worlds SEED    # show a world: its tools, its policy, a task, a conversation
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable, Sequence
from string import ascii_lowercase
from types import ModuleType
from typing import Any

from tools.tiny_base.desk import Action, World, read_words
from trialogue import (
    Call,
    Database,
    Domain,
    Expected,
    Phrases,
    Setup,
    Slots,
    Task,
    find_model,
    generate_with,
    rollout,
)
from trialogue.output import echo

FOREIGN = "àáâäãåæçčćđèéêëęğíîïıłñńňóôöõøőřśšșşțţúûüůűýžźżß"
SCRIPTS = "".join(map(chr, (*range(0x3B1, 0x3CA), *range(0x430, 0x450))))
"""Greek and Cyrillic letters."""
_REFUSAL = ("cannot", "can't", "not possible", "unable", "not allowed")


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


def to_task_maker(world: World) -> Callable[[Slots, str], Task]:
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
        tasks=generate_with(to_task_maker(world), families),
        endless=True,
    )


async def show(seed: int) -> None:
    """Print a world and a conversation in it."""
    domain = make_world(seed)
    for line in f"{World(seed).to_source()}\n{domain.policy}".splitlines():
        echo(line)
    agent, user = find_model("teacher", "agent", domain), find_model("agenda", "user", domain)
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
