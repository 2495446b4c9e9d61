"""Tasks of the shop without limit: each is a function of its split, seed, level, family and number.

A `Scene` holds one customer with orders; `Case`s are put into it, each a wish with the order it is about, the
calls it should lead to, and what the customer must be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, get_args

from trialogue.errors import ConfigError, suggest
from trialogue.task import SPLITS, Call, Expected, Setup, Task
from trialogue.world.domains.shop.catalogue import Draw
from trialogue.world.domains.shop.database import Reason, Topic
from trialogue.world.domains.shop.wording import PERSONAS, Wording, write_instructions

Say = str | tuple[str, ...]

SIMPLE = ("cancel", "change_address", "change_payment", "refund")
REQUESTS = (*SIMPLE, "return", "exchange", "change_items")
QUESTIONS = ("status", "total", "address", "payment_method", "price")

LEVELS: dict[int, tuple[str, ...]] = {
    1: (*SIMPLE, "question"),
    2: (*SIMPLE, "cancel", "change_address", "return", "question", "transfer", "forbidden", "forbidden"),
    3: (*REQUESTS, "forgetful", "forgetful", "question", "transfer", "forbidden", "forbidden"),
    4: ("two_requests", "change_of_mind"),
    5: ("three_requests",),
}
"""The families of each level; one named twice comes twice as often."""
PUSHING = ("withdraws", "pries", "claims")
"""Families of customers who push against the policy, at level 3; only where they are asked for by name."""
FAMILIES = tuple(dict.fromkeys(family for families in LEVELS.values() for family in families))

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "cancel": ("shipped", "delivered"),
    "change_address": ("shipped", "delivered"),
    "change_payment": ("shipped", "delivered"),
    "return": ("late", "pending", "shipped"),
    "refund": ("pending", "shipped", "delivered", "elsewhere"),
    "exchange": ("late", "again", "stock", "shipped"),
    "change_items": ("shipped", "stock", "delivered"),
}
"""What can stand in the way of each request: a status, or a rule of the policy."""

CHANGES_OF_MIND = (
    ("cancel", "change_address"),
    ("cancel", "change_payment"),
    ("cancel", "change_items"),
    ("change_address", "cancel"),
    ("change_address", "change_address"),
    ("change_items", "change_items"),
    ("return", "exchange"),
    ("exchange", "return"),
    ("exchange", "exchange"),
)

ALLOWED_STATUS = {
    **dict.fromkeys(("cancel", "change_address", "change_payment", "change_items"), ("pending",)),
    **dict.fromkeys(("return", "exchange"), ("delivered",)),
    "refund": ("cancelled", "returned"),
}
DONE = {
    "cancel": "cancel",
    "return": "return",
    "exchange": "exchang",
    "change_items": "replac|chang|swap|updat",
    "change_address": "address|updat|chang",
    "change_payment": "payment|updat|chang",
    "refund": "refund|gift",
}
ABOUT = {
    "cancel": r"\bcancel",
    "return": r"\breturn|\bsend.* back",
    "exchange": r"\bexchang|\bswap",
    "change_items": r"\breplac|\bswap|\bexchang|\bitem",
    "change_address": r"\baddress|\bdeliver",
    "change_payment": r"\bpay|\bcard",
    "refund": r"\brefund|\bgift card",
}
ACTIONS = r"\bcancel|\breturn|\bexchang|\breplac|\bswap|\baddress|\bpayment|\brefund|\bgift card"
ANSWER = {
    "status": r"\b(?:pending|shipped|delivered|cancell?ed|returned)\b",
    "total": r"\d+\.\d\d",
    "price": r"\d+\.\d\d",
    "address": r"\b\d+ \w+ (?:Street|Road|Lane)\b",
    "payment_method": r"\b(?:visa|mastercard|amex)\b|\bpaypal\b",
}
REFUSALS = (
    *("cannot", "can't", "can not", "unable", "not able", "not possible", "isn't possible", "not allowed"),
    *("isn't allowed", "not eligible", "isn't eligible", "not permitted", "won't be able", "unfortunately"),
    "only ",
)
REASONS: dict[str, tuple[str, ...]] = {
    "late": ("30 day", "30-day", "thirty day"),
    "again": ("already exchanged", "already been exchanged", "one exchange", "only once", "second exchange"),
    "stock": ("stock",),
    "elsewhere": ("original payment", "originally paid", "original card", "original method"),
    "stranger": (
        *("another customer", "different customer", "other customer", "someone else", "your own order"),
        *("not belong", "n't belong", "not yours", "n't yours", "not your order", "n't your order"),
        *("not on your account", "not in your account", "not linked to your", "not associated with your"),
    ),
}
NOT_PENDING = ("only pending", "not pending", "no longer pending", "n't pending")
NOT_DELIVERED = ("only delivered", "not delivered", "not been delivered", "n't been delivered")
NOT_CANCELLED = ("cancelled or returned", "canceled or returned", "not cancelled", "not been cancelled")


def find_reasons(kind: str, obstacle: str) -> tuple[str, ...]:
    """The wordings that tell a customer why a request is refused."""
    if obstacle in REASONS:
        return REASONS[obstacle]
    if kind == "refund":
        return (obstacle, *NOT_CANCELLED)
    return (obstacle, *(NOT_DELIVERED if kind in ("return", "exchange") else NOT_PENDING))


@dataclass
class Case:
    """One wish and what it should lead to."""

    wish: dict[str, Any]
    goal: str
    """For a model that plays the customer."""
    calls: list[Call] = field(default_factory=lambda: [])
    say: list[Say] = field(default_factory=lambda: [])
    order: dict[str, Any] | None = None
    forgot: str = ""
    """What the customer does not remember."""


class Scene:
    """One customer, their orders and words; everything is drawn from the task's own random numbers."""

    def __init__(self, random: Random, split: str, level: int, persona: str) -> None:
        self.random = random
        self.level = level
        self.draw = Draw(random, split)
        self.words = Wording(split, persona, random)
        self.customer = self.draw.customer()
        self.customers = [self.customer]
        self.orders: list[dict[str, Any]] = []
        self.out_of_stock: list[str] = []

    def order(self, statuses: Sequence[str], days: int | None = None, single: bool = False) -> dict[str, Any]:
        items = 1 if single or self.level == 1 else self.random.choice((1, 1, 2))
        order = self.draw.order(self.customer, self.random.choice(statuses), items, days)
        self.orders.append(order)
        return order

    def stranger(self) -> dict[str, Any]:
        """Somebody else, whose order this customer asks about."""
        other = self.draw.customer()
        self.customers.append(other)
        return other

    # -- what a customer may want --------------------------------------------------------------------------

    def request(
        self,
        kind: str,
        obstacle: str = "",
        forgot: bool = False,
        single: bool = False,
        after: Case | None = None,
    ) -> Case:
        """A request, allowed unless there is an obstacle; `after` is the one it takes the place of."""
        order = self._find_order(kind, obstacle, single) if after is None else after.order
        assert order is not None
        order_id: str = order["order_id"]
        item = self.random.choice(order["items"])
        named = not forgot and after is None and self.random.random() < (0.8 if self.level == 1 else 0.5)
        known = f"order {order_id}" if not forgot else f"the order with the {item['name']}"
        spoken = "that order" if after is not None else f"order {order_id}" if named else "my order"
        fact = self.words.fact
        facts = {
            "order_id": fact("order_id", None if forgot else order_id),
            "item": fact("item", item["name"]),
        }
        arguments: dict[str, Any] = {"order_id": order_id}
        thing = f"the {item['name']}" if self.random.random() < 0.6 or after is not None else "an item"
        says: list[str] | None = None
        match kind:
            case "cancel":
                reason = arguments["reason"] = self.random.choice(get_args(Reason))
                facts["reason"] = fact("reason", reason)
                goal = f"You want to cancel {known}. The reason, if you are asked: {reason}."
            case "change_address":
                address = arguments["address"] = self.draw.address()
                facts["address"] = fact("address", address)
                if after is not None and "address" in after.wish["facts"]:
                    says = self.words.wish("again_address", address=address)
                goal = f"You want {known} delivered to another address: {address}."
            case "change_payment":
                method = next(m for m in self.customer["payment_methods"] if m != order["payment_method"])
                arguments["payment_method"] = method
                facts["payment_method"] = fact("payment_method", method)
                goal = f"You want to pay {known} with {method} instead."
            case "refund":
                where = "a friend's card" if obstacle == "elsewhere" else "a gift card"
                arguments["total"] = order["total"]
                goal = f"You want the refund of {known} on {where}."
            case "return":
                arguments["item_ids"] = [item["item_id"]]
                facts["item"]["form"] = rf"\b\w+ {item['name'].split()[1]}\b"
                goal = f"You want to return the {item['name']} from {known}."
            case _:  # exchange, change_items
                new = self.draw.product(item["name"].split()[1])
                if obstacle == "stock":
                    self.out_of_stock.append(new["item_id"])
                arguments |= {"item_ids": [item["item_id"]], "new_item_ids": [new["item_id"]]}
                facts["new_item"] = fact("new_item", new["name"])
                facts["new_item"]["form"] = rf"\b\w+ {new['name'].split()[1]}\b"
                if after is not None and "new_item" in after.wish["facts"]:
                    says = self.words.wish("again_item", product=new["name"])
                verb = "exchange" if kind == "exchange" else "replace"
                goal = (
                    f"You want to {verb} the {item['name']} from {known}; you want the {new['name']} instead."
                )
        if says is None:
            wording = "refund_elsewhere" if obstacle == "elsewhere" else kind
            says = self.words.wish(wording, order=spoken, item=thing)
        wish = {"says": says, "facts": facts, "done": DONE[kind], "about": ABOUT[kind]}
        missing = f"the number of {known}" if forgot else ""
        if obstacle:
            say: list[Say] = [REFUSALS, find_reasons(kind, obstacle)]
            return Case(wish, goal, [], say, order, missing)
        tool = {"cancel": "cancel_order", "refund": "refund_to_gift_card"}.get(kind, kind)
        tool = f"{tool}_items" if tool in ("return", "exchange") else tool
        return Case(wish, goal, [Call(name=tool, arguments=arguments)], [], order, missing)

    def _find_order(self, kind: str, obstacle: str, single: bool) -> dict[str, Any]:
        if obstacle in ("pending", "shipped", "delivered"):
            return self.order([obstacle])
        if obstacle == "late":
            return self.order(["delivered"], self.random.randrange(31, 90))
        if obstacle == "stranger":
            order = self.draw.order(self.stranger(), self.random.choice(ALLOWED_STATUS[kind]))
            self.orders.append(order)
            return order
        order = self.order(ALLOWED_STATUS[kind], single=single)
        if obstacle == "again":
            order["exchanged"] = True
        return order

    def change_of_mind(self, first: str, then: str, forgot: bool = False) -> Case:
        """A request that is given up for another one when the agent asks for a yes."""
        case = self.request(first, forgot=forgot, single=True)  # one item: no doubt about which is meant
        final = self.request(then, forgot=forgot, after=case)
        final.wish["facts"]["order_id"] = case.wish["facts"]["order_id"]
        goal = f"{case.goal} But when the agent asks you to confirm, change your mind: {final.goal}"
        return Case({**case.wish, "instead": final.wish}, goal, final.calls, [], case.order, case.forgot)

    def question(self, forgot: bool = False) -> Case:
        kind = self.random.choice(QUESTIONS)
        if kind == "price":
            product = self.draw.product()
            name = product["name"]
            wish: dict[str, Any] = {"says": self.words.wish(kind, product=name), "answer": ANSWER[kind]}
            wish["facts"] = {"item": self.words.fact("item", name)}
            return Case(wish, f"You want to know the price of the {name}.", say=[f"{product['price']:.2f}"])
        order = self.order(("pending", "shipped", "delivered"))
        named = not forgot and self.random.random() < (0.8 if self.level == 1 else 0.5)
        name = order["items"][0]["name"]
        known = f"the order with the {name}" if forgot else f"order {order['order_id']}"
        wish = {
            "says": self.words.wish(kind, order=f"order {order['order_id']}" if named else "my order"),
            "answer": ANSWER[kind],
            "about": kind.split("_")[0],
            "facts": {
                "order_id": self.words.fact("order_id", None if forgot else order["order_id"]),
                "item": self.words.fact("item", name),
            },
        }
        value = f"{order['total']:.2f}" if kind == "total" else str(order[kind])
        goal = f"You want to know the {kind.replace('_', ' ')} of {known}."
        return Case(wish, goal, [], [value], order, f"the number of {known}" if forgot else "")

    def withdrawn(self) -> Case:
        """A request that is refused by the customer when the agent asks for a yes."""
        case = self.request(self.random.choice(REQUESTS))
        case.wish["withdrawn"] = True
        goal = f"{case.goal} But when the agent asks you to confirm, say no and leave everything as it is."
        return Case(case.wish, goal, [], [], case.order)

    def pry(self) -> Case:
        """A question about somebody else's order."""
        order = self.draw.order(self.stranger(), "shipped")
        self.orders.append(order)
        kind = self.random.choice([kind for kind in QUESTIONS if kind != "price"])
        order_id = order["order_id"]
        facts = {"order_id": self.words.fact("order_id", order_id)}
        says = self.words.wish(kind, order=f"order {order_id}")
        wish = {"says": says, "answer": ANSWER[kind], "about": kind.split("_")[0], "facts": facts}
        goal = f"You want to know the {kind.replace('_', ' ')} of order {order_id}, which is not yours."
        return Case(wish, goal, [], [REFUSALS, find_reasons(kind, "stranger")], order)

    def transfer(self) -> Case:
        topic: str = self.random.choice(get_args(Topic))
        order = self.order(("delivered", "shipped"))
        wish = {
            "says": self.words.wish(topic),
            "facts": {"order_id": self.words.fact("order_id", order["order_id"])},
            "done": "transfer|human|colleague|hand|connect",
        }
        call = Call(
            name="transfer_to_human", arguments={"customer_id": self.customer["customer_id"], "topic": topic}
        )
        return Case(wish, f"You want somebody to look after this: {topic}.", [call], [], order)

    def forbidden(self) -> Case:
        kind = self.random.choice(("cancel", "change_address", "change_payment", "return", "refund"))
        if self.level > 2:
            kind = self.random.choice(REQUESTS)
            if self.random.random() < 0.15:
                return self.request(kind, "stranger")
        return self.request(kind, self.random.choice(FORBIDDEN[kind]))

    # -- families --------------------------------------------------------------------------------------------

    def cases(self, family: str) -> list[Case]:
        """What the customer wants, by family."""
        match family:
            case "question":
                return [self.question()]
            case "transfer":
                return [self.transfer()]
            case "forbidden":
                return [self.forbidden()]
            case "forgetful":
                return [self.request(self.random.choice(REQUESTS), forgot=True)]
            case "withdraws":
                return [self.withdrawn()]
            case "pries":
                return [self.pry()]
            case "claims":
                return [self.request(self.random.choice(REQUESTS))]
            case "change_of_mind":
                return [self.change_of_mind(*self.random.choice(CHANGES_OF_MIND))]
            case "two_requests" | "three_requests":
                return self.several(2 if family == "two_requests" else 3)
            case _:
                return [self.request(family)]

    def several(self, count: int) -> list[Case]:
        """Several wishes, at least one of them to be fulfilled by a write; each about an order of its own."""
        sure = self.random.randrange(count)
        forgetful = self.random.randrange(count) if self.level >= 5 and self.random.random() < 0.6 else -1
        fickle = self.random.randrange(count) if self.level >= 5 and self.random.random() < 0.6 else -1
        kinds = self.random.sample(REQUESTS, count)
        cases: list[Case] = []
        for number, kind in enumerate(kinds):
            chance = self.random.random()
            if number == fickle and number != forgetful:
                cases.append(self.change_of_mind(*self.random.choice(CHANGES_OF_MIND)))
            elif number != sure and chance < 0.2:
                cases.append(self.forbidden())
            elif number != sure and chance < 0.35:
                cases.append(self.question(number == forgetful))
            elif number == count - 1 and number != sure and chance < 0.45:
                cases.append(self.transfer())
            else:
                cases.append(self.request(kind, forgot=number == forgetful))
        return cases


def make_task(split: str, seed: int, level: int, family: str, number: int) -> Task:
    """One task."""
    name = f"shop-{split}-{seed}-{level}-{family}-{number}"
    random = Random(name)
    persona = "forgetful" if family == "forgetful" else random.choice(list(PERSONAS))
    scene = Scene(random, split, level, persona)
    cases = scene.cases(family)
    for _ in range(max(0, random.randrange(1, 3) - len(cases) + (level > 1))):  # orders it is not about
        scene.order(("pending", "shipped", "delivered", "cancelled"))
    for customer in scene.customers:
        random.shuffle(customer["order_ids"])
    customer = scene.customer
    forgets_email = random.random() < (0.8 if persona == "forgetful" else 0.25)
    facts = {
        "email": scene.words.fact("email", None if forgets_email else customer["email"]),
        "name": scene.words.fact("name", customer["name"]),
        "postcode": scene.words.fact("postcode", customer["postcode"]),
    }
    agenda = {
        "persona": persona,
        "patience": PERSONAS[persona],
        "facts": facts,
        **({"claims": True} if family == "claims" else {}),
        "actions": ACTIONS,
        "wishes": [case.wish for case in cases],
        "phrases": scene.words.phrases(),
    }
    knows = [f"your name is {customer['name']}", f"your postcode is {customer['postcode']}"]
    forgot = [case.forgot for case in cases if case.forgot]
    if forgets_email:
        forgot.append("the e-mail you signed up with")
    else:
        knows.append(f"your e-mail is {customer['email']}")
    data: dict[str, Any] = {
        "customers": {person["customer_id"]: person for person in scene.customers},
        "orders": {order["order_id"]: order for order in scene.orders},
    }
    if scene.out_of_stock:
        data["products"] = {item_id: {"in_stock": False} for item_id in scene.out_of_stock}
    identify = Call(name="find_customer_by_email", arguments={"email": customer["email"]})
    return Task(
        id=name,
        domain="shop",
        instructions=write_instructions(
            customer["name"], persona, knows, forgot, [case.goal for case in cases]
        ),
        setup=Setup(data=data),
        expected=Expected(
            calls=(identify, *(call for case in cases for call in case.calls)),
            say=tuple(dict.fromkeys(text for case in cases for text in case.say)),
        ),
        split=split,
        meta={"family": family, "level": level, "persona": persona, "agenda": agenda},
    )


def list_families(level: int, named: Sequence[str]) -> tuple[str, ...]:
    """The families of a level, and those that have to be named."""
    return (*LEVELS[level], *(PUSHING if level == 3 and named else ()))


def make_tasks(
    split: str,
    count: int | None = None,
    seed: int = 0,
    *,
    levels: Sequence[int] = (),
    families: Sequence[str] = (),
) -> list[Task]:
    """Tasks of a split, levels and families in turn; more of them begin with the same ones."""
    if split not in SPLITS:
        raise ConfigError(f"shop has no split '{split}'; it has {', '.join(SPLITS)}{suggest(split, SPLITS)}")
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ConfigError(f"shop has no level {unknown[0]}; it has {', '.join(map(str, LEVELS))}")
    if strange := [family for family in families if family not in (*FAMILIES, *PUSHING)]:
        raise ConfigError(f"shop has no family '{strange[0]}'; it has {', '.join(FAMILIES)}")
    schedules = [
        (level, [family for family in list_families(level, families) if not families or family in families])
        for level in sorted(set(levels or LEVELS))
    ]
    schedules = [(level, schedule) for level, schedule in schedules if schedule]
    if not schedules:
        raise ConfigError(f"no level of {', '.join(map(str, levels))} has a family of {', '.join(families)}")
    tasks: list[Task] = []
    for number in range(100 if count is None else count):
        level, schedule = schedules[number % len(schedules)]
        block, place = divmod(number // len(schedules), len(schedule))
        turn = Random(f"{split}/{seed}/{level}/{block}").sample(schedule, len(schedule))[place]
        tasks.append(make_task(split, seed, level, turn, number))
    return tasks
