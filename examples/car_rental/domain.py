"""The counter of a car rental: drivers, rentals and cars, with tasks made by program."""

from __future__ import annotations

from typing import Any, Literal

from trialogue import (
    Call,
    Database,
    Domain,
    Expected,
    Phrases,
    Record,
    Setup,
    Slots,
    Table,
    Task,
    ToolError,
    generate_with,
    tool,
)

Topic = Literal["damage", "accident", "fine"]
TODAY = 100


class Driver(Record):
    driver_id: str
    name: str
    licence: str
    rental_ids: list[str]


class Rental(Record):
    rental_id: str
    driver_id: str
    model: str
    plate: str
    status: Literal["booked", "running", "returned", "cancelled"]
    first_day: int
    last_day: int
    price: float
    promised: bool = False
    """Whether somebody else has the car right after."""
    second_driver: str = ""


class Car(Record):
    plate: str
    model: str
    free: bool


class Note(Record):
    driver_id: str
    topic: Topic


class Counter(Database):
    drivers: Table[Driver]
    rentals: Table[Rental]
    cars: Table[Car]
    notes: Table[Note]

    @tool
    def find_driver(self, name: str, licence: str) -> Driver:
        """Find a driver by last name and licence number."""
        for driver in self.drivers.where(licence=licence):
            if driver.name.split()[-1].lower() == name.split()[-1].lower():
                return driver
        raise ToolError(f"no driver {name} with licence {licence}")

    @tool
    def get_rental(self, rental_id: str) -> Rental:
        """Look a rental up: car, status, days, price."""
        return self.rentals[rental_id]

    @tool
    def find_car(self, model: str) -> Car:
        """Look a car up by its model: plate, and whether it is free."""
        found = self.cars.where(model=model)
        if not found:
            raise ToolError(f"there is no {model}")
        return found[0]

    @tool(writes=True)
    def cancel_rental(self, rental_id: str) -> Rental:
        """Cancel a rental that has not begun."""
        rental = self.rentals[rental_id]
        rental.status = "cancelled"
        return rental

    @tool(writes=True)
    def extend_rental(self, rental_id: str, days: int) -> Rental:
        """Make a rental longer by some days."""
        rental = self.rentals[rental_id]
        rental.last_day += days
        return rental

    @tool(writes=True)
    def change_car(self, rental_id: str, plate: str) -> Rental:
        """Give a rental another car."""
        rental = self.rentals[rental_id]
        rental.plate, rental.model = plate, self.cars[plate].model
        return rental

    @tool(writes=True)
    def add_driver(self, rental_id: str, second_driver: str) -> Rental:
        """Let a second person drive."""
        rental = self.rentals[rental_id]
        rental.second_driver = second_driver
        return rental

    @tool(writes=True, ends=True)
    def hand_over(self, driver_id: str, topic: Topic) -> str:
        """Hand the driver over to a colleague. This ends the conversation."""
        self.notes[driver_id] = Note(driver_id=driver_id, topic=topic)
        return "A colleague takes over."


MODELS = [
    f"{make} {kind}"
    for make in ("Astra", "Beluga", "Corvo", "Dune", "Elba")
    for kind in ("One", "Two", "Van", "Sun")
]
SAYS = {
    "cancel": Phrases(
        "I need to cancel {rental}.",
        "Please cancel {rental}.",
        "We are not travelling, so cancel {rental}.",
        "I won't need {rental} any more, cancel it.",
        "Can you cancel {rental}?",
        "Could {rental} be cancelled?",
        "{rental} has to be cancelled.",
        "Take {rental} off the books, I cancel.",
        "I want to cancel {rental}.",
    ),
    "extend": Phrases(
        "I want to keep the car of {rental} longer.",
        "Can I extend {rental}?",
        "Please make {rental} longer.",
        "We would like {rental} to last longer.",
        "I'd like to extend {rental}.",
        "Could you extend {rental}?",
        "{rental} should be longer.",
        "Is it possible to extend {rental}?",
        "Our trip takes longer, extend {rental}.",
    ),
    "swap": Phrases(
        "I'd rather have another car for {rental}.",
        "Can I change the car of {rental}?",
        "Please swap the car of {rental}.",
        "I want a different car for {rental}.",
        "Change the car of {rental}, please.",
        "Could {rental} get another car?",
        "The car of {rental} does not suit us, change it.",
        "Give {rental} another car.",
    ),
    "second": Phrases(
        "My partner should drive too, for {rental}.",
        "Please add a second driver to {rental}.",
        "Add a driver to {rental}.",
        "Can somebody else drive in {rental}, too?",
        "I need another driver on {rental}.",
        "Could you add a driver to {rental}?",
        "One more person will drive in {rental}.",
        "Put a second driver on {rental}.",
    ),
    "price": Phrases(
        "What is the price of {rental}?",
        "How much is {rental}?",
        "I forgot the price of {rental}.",
        "Tell me the price of {rental}.",
        "Can you look up the price of {rental}?",
        "What do I pay for {rental}, what is the price?",
        "The price of {rental}, please.",
        "I'd like to know the price of {rental}.",
    ),
}
HAND_OVER = {
    "damage": Phrases(
        "The car has a damage.", "There is a dent, I report a damage.", "I have to report a damage."
    ),
    "accident": Phrases(
        "I had an accident with the car.", "There was an accident.", "We had a small accident."
    ),
    "fine": Phrases("I got a fine and it is not mine.", "A fine came by post.", "You sent me a fine."),
}
ASKED = {
    "name": ("last name|surname", None),
    "licence": ("licen[cs]e", r"L\d{6}"),
    "rental_id": (r"rental (?:number|id)|which rental", r"R-\d{4}"),
    "model": (r"which car|what car|model of the car|\bcar is it", None),
    "new_model": (r"new (?:car|model)|car would you like|instead", None),
    "days": (r"how many days|\bdays\b", None),
    "second_driver": (r"second driver|name of the driver|driver's name", None),
}
TELL = Phrases(
    "It is {v}.", "{v}.", "That is {v}.", "I have {v} here.", "It should be {v}.", "My answer: {v}."
)
REFUSED = ("cannot", "can't", "not possible", "unable", "not allowed")


class Scene:
    """One driver with rentals."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.name = slots.name()
        self.driver_id, self.licence = slots.draw("D-####"), slots.draw("L######")
        self.models = slots.random.sample(MODELS, 5)
        self.rentals: dict[str, dict[str, Any]] = {}

    def fact(self, name: str, value: str | None) -> dict[str, Any]:
        asked, form = ASKED[name]
        fact: dict[str, Any] = {"value": value, "asked": asked}
        if value is not None:
            fact["says"] = self.slots.phrases(TELL, v="{value}")
        return fact | ({"form": form} if form else {})

    def rental(self, status: str, **more: Any) -> dict[str, Any]:
        model = self.models.pop()
        first = TODAY + {"booked": 5, "running": -3, "returned": -20}[status] + self.slots.number(0, 2)
        rental_id = self.slots.draw("R-####")
        self.rentals[rental_id] = {
            "rental_id": rental_id,
            "driver_id": self.driver_id,
            "model": model,
            "plate": self.slots.draw("@@-###"),
            "status": status,
            "first_day": first,
            "last_day": first + self.slots.number(4, 12),
            "price": self.slots.amount(80, 900),
            **more,
        }
        return self.rentals[rental_id]

    def wish(self, kind: str, rental: dict[str, Any], forgot: bool = False) -> dict[str, Any]:
        named = self.slots.random.random() < 0.5 and not forgot
        spoken = f"rental {rental['rental_id']}" if named else "my rental"
        facts = {
            "rental_id": self.fact("rental_id", None if forgot else rental["rental_id"]),
            "model": self.fact("model", rental["model"]),
        }
        return {
            "says": [text[:1].upper() + text[1:] for text in self.slots.phrases(SAYS[kind], rental=spoken)],
            "facts": facts,
        }

    def request(
        self, kind: str, refused: bool = False, forgot: bool = False
    ) -> tuple[dict[str, Any], list[Call], list[Any]]:
        """A wish, its calls, and what has to be said."""
        status, reason = (
            self.slots.pick({"cancel": ("booked",), "swap": ("booked",)}.get(kind, ("booked", "running"))),
            "",
        )
        promised = False
        if refused and kind == "extend":
            promised, reason = True, "promised"
        elif refused:
            status = reason = self.slots.pick(("returned",) if kind == "second" else ("running", "returned"))
        rental = self.rental(status, promised=promised)
        wish = self.wish(kind, rental, forgot)
        arguments: dict[str, Any] = {"rental_id": rental["rental_id"]}
        match kind:
            case "cancel":
                name, wish["done"] = "cancel_rental", "cancel"
            case "extend":
                name, wish["done"] = "extend_rental", "extend|longer"
                arguments["days"] = self.slots.number(2, 9)
                wish["facts"]["days"] = self.fact("days", str(arguments["days"]))
            case "swap":
                name, wish["done"] = "change_car", "chang|car"
                model = self.models.pop()
                plate = arguments["plate"] = self.slots.draw("@@-###")
                self.cars = {plate: {"plate": plate, "model": model, "free": True}}
                wish["facts"]["new_model"] = self.fact("new_model", model)
            case _:
                name, wish["done"] = "add_driver", "driver|add"
                arguments["second_driver"] = self.slots.name()
                wish["facts"]["second_driver"] = self.fact("second_driver", arguments["second_driver"])
        if refused:
            return wish, [], [REFUSED, (reason,)]
        return wish, [Call(name=name, arguments=arguments)], []

    cars: dict[str, dict[str, Any]] = {}


def make_task(slots: Slots, family: str) -> Task:
    """One task of a family."""
    scene = Scene(slots)
    kinds = ("cancel", "extend", "swap", "second")
    wishes: list[dict[str, Any]] = []
    calls: list[Call] = []
    say: list[Any] = []

    def add(wish: dict[str, Any], made: list[Call], said: list[Any]) -> None:
        wishes.append(wish)
        calls.extend(made)
        say.extend(said)

    match family:
        case "price":
            rental = scene.rental(slots.pick(("booked", "running", "returned")))
            add(
                {**scene.wish("price", rental), "answer": r"\d+\.\d\d|\d+\.\d"},
                [],
                [f"{rental['price']:.2f}"],
            )
        case "hand over":
            topic = slots.pick(("damage", "accident", "fine"))
            call = Call(name="hand_over", arguments={"driver_id": scene.driver_id, "topic": topic})
            add({"says": slots.phrases(HAND_OVER[topic]), "done": "colleague|hand"}, [call], [])
        case "refused":
            add(*scene.request(slots.pick(("cancel", "extend", "second")), refused=True))
        case "forgetful":
            add(*scene.request(slots.pick(kinds), forgot=True))
        case "two wishes":
            for kind in slots.random.sample(kinds, 2):
                add(*scene.request(kind))
        case "change of mind":
            before, instead = scene.request("cancel"), scene.request("extend")
            add({**before[0], "instead": instead[0]}, *instead[1:])
        case kind:
            add(*scene.request(kind))
    if len(wishes) == 1 and slots.random.random() < 0.7:
        scene.rental(slots.pick(("booked", "returned")))
    ids = slots.random.sample(list(scene.rentals), len(scene.rentals))
    driver = {"driver_id": scene.driver_id, "name": scene.name, "licence": scene.licence, "rental_ids": ids}
    last = scene.name.split()[-1]
    agenda = {
        "facts": {"name": scene.fact("name", last), "licence": scene.fact("licence", scene.licence)},
        "wishes": wishes,
    }
    wanted = (
        family if family in ("price", "hand over") else ", ".join(call.name for call in calls) or "a change"
    )
    told = ", ".join(
        f"{name}: {fact['value']}" for wish in wishes for name, fact in wish.get("facts", {}).items()
    )
    return Task(
        id="task",
        domain="car_rental",
        instructions=f"You are {scene.name}, your licence is {scene.licence}. You want: {wanted}. {told}",
        setup=Setup(
            data={"drivers": {scene.driver_id: driver}, "rentals": scene.rentals, "cars": scene.cars}
        ),
        expected=Expected(calls=tuple(calls), say=tuple(say)),
        meta={"agenda": agenda},
    )


ONE_WISH = {"cancel": 1, "extend": 1, "swap": 2, "second": 1, "price": 1, "hand over": 1, "refused": 2}
FAMILIES = {**ONE_WISH, "forgetful": 2, "two wishes": 3, "change of mind": 3}
domain = Domain.load(__file__, Counter, tasks=generate_with(make_task, FAMILIES), endless=True)
