"""People, products, ids and addresses of the shop, from regular pieces, and the base database.

Every name or id is two pieces, and the sum of their positions decides which split it belongs to. So no name,
id, street or product of one split occurs in another, yet each piece is seen in all: whoever learnt to copy in
training can copy in a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

from trialogue.task import SPLITS
from trialogue.world.domains.shop.database import Shop

RESIDUES = {"train": (0, 1, 2, 3, 4, 5), "dev": (6,), "test": (7, 8), "background": (9,)}
PRODUCT_RESIDUES = {
    "train": (0, 1, 2, 3, 4, 5),
    "dev": (6, 7),
    "test": (8, 9),
    "background": (0, 1, 2, 3, 4, 5),
}
"""Products need more room: an exchange is for another one of the same kind."""


def _words(text: str) -> list[str]:
    return text.split()


FIRST_NAMES = (
    _words("Mi To Sa Le Ka Ro Ni Be Da Fe Lu Jo Pa Vi Ha Zo Ge Wi Nu Ti"),
    _words("ra na la mo ta ri no ka li do sa ne va lo mi ro ni da ko re"),
)
LAST_NAMES = (
    _words("Tol Ben Mar Kar Hol Fen Lin Sor Ver Dal Wes Nor Gar Pel Ros Hav Bor Kel Jan Ost"),
    _words("en er is ov ini sen man ek ard old ley ton ik ano well by rup ami eno ust"),
)
STREETS = (
    _words(
        "Oak Elm Mill Hill Lake Park Rose Stone King Bridge Ash Birch Moor North South West Sand Fox Bay Hay"
    ),
    _words("field wood gate side view ford dale croft brook mead"),
)
STREET_TYPES = ("Street", "Road", "Lane")
COLOURS = _words(
    "red blue green black white grey yellow brown pink purple "
    "orange cream silver golden beige teal navy striped dotted plain"
)
KINDS = _words(
    "lamp chair desk mug kettle clock shelf rug bag scarf "
    "coat bike tent radio fan vase bowl towel pillow mirror"
)
CARDS = ("visa", "mastercard", "amex")
HOSTS = ("mail.net", "post.org", "inbox.com")
PAIRS = tuple(f"{number:02d}" for number in range(100))


@cache
def partners(split: str, position: int, count: int, of_products: bool = False) -> tuple[int, ...]:
    """The positions among `count` second pieces that make a name of this split with this first piece."""
    residues = (PRODUCT_RESIDUES if of_products else RESIDUES)[split]
    return tuple(other for other in range(count) if (position + other) % 10 in residues)


class Draw:
    """Draws names and ids of one split, no id twice."""

    def __init__(self, random: Random, split: str) -> None:
        self.random = random
        self.split = split
        self.used: set[str] = set()

    def pair(self, first: Sequence[str], second: Sequence[str]) -> tuple[str, str]:
        position = self.random.randrange(len(first))
        other = self.random.choice(partners(self.split, position, len(second)))
        return first[position], second[other]

    def number(self, letter: str = "") -> str:
        """Four digits that this split has to itself, new in this draw."""
        while True:
            text = letter + "".join(self.pair(PAIRS[10:], PAIRS))
            if text not in self.used:
                self.used.add(text)
                return text

    def address(self) -> str:
        while True:
            street = "".join(self.pair(*STREETS))
            text = f"{self.random.randrange(10, 100)} {street} {self.random.choice(STREET_TYPES)}"
            if text not in self.used:
                self.used.add(text)
                return text

    def product(self, kind: str | None = None) -> dict[str, Any]:
        """A product of this split, new in this draw; of a kind, where one is named and any is left."""
        fresh: list[str] = []
        while not fresh:
            chosen = self.random.randrange(len(KINDS)) if kind is None else KINDS.index(kind)
            colours = partners(self.split, chosen, len(COLOURS), True)
            names = [f"{COLOURS[colour]} {KINDS[chosen]}" for colour in colours]
            fresh = [name for name in names if name not in self.used]
            kind = None
        name = self.random.choice(fresh)
        self.used.add(name)
        return products()[name]

    def customer(self) -> dict[str, Any]:
        while True:
            first, last = "".join(self.pair(*FIRST_NAMES)), "".join(self.pair(*LAST_NAMES))
            if f"{first} {last}" not in self.used:
                self.used.add(f"{first} {last}")
                break
        cards = self.random.sample(CARDS, 2)
        methods = [f"{cards[0]} {self.number()}", f"{cards[1]} {self.number()}"]
        if self.random.random() < 0.3:
            methods[1] = "paypal"
        return {
            "customer_id": self.number("C"),
            "name": f"{first} {last}",
            "email": f"{first}.{last}@{self.random.choice(HOSTS)}".lower(),
            "postcode": self.number(),
            "payment_methods": methods,
            "order_ids": [],
        }

    def order(
        self, customer: dict[str, Any], status: str, items: int = 1, days: int | None = None
    ) -> dict[str, Any]:
        """An order of this customer, entered among the customer's order ids."""
        while True:
            chosen = [self.product() for _ in range(items)]
            cents = sum(round(product["price"] * 100) for product in chosen)
            if cents % 10:  # 91.94 is written like that by everyone; 91.9 is not
                break
            self.used.difference_update(product["name"] for product in chosen)
        if days is None and status in ("delivered", "returned"):
            days = self.random.randrange(2, 29)
        order = {
            "order_id": self.number("W"),
            "customer_id": customer["customer_id"],
            "status": status,
            "days_since_delivery": days,
            "address": self.address(),
            "payment_method": self.random.choice(customer["payment_methods"]),
            "items": [{key: product[key] for key in ("item_id", "name", "price")} for product in chosen],
            "total": cents / 100,
        }
        if status == "returned":
            order["returned"] = sorted(product["item_id"] for product in chosen)
        if status == "cancelled":
            order["reason"] = "no longer needed"
        customer["order_ids"].append(order["order_id"])
        return order


@cache
def products() -> dict[str, dict[str, Any]]:
    """The whole catalogue by name, the same for every seed."""
    random = Random("catalogue")
    draws = {residue: Draw(random, split) for split in SPLITS for residue in PRODUCT_RESIDUES[split]}
    for draw in draws.values():
        draw.used = draws[0].used
    found: dict[str, dict[str, Any]] = {}
    for position, kind in enumerate(KINDS):
        for other, colour in enumerate(COLOURS):
            name = f"{colour} {kind}"
            cents = random.randrange(10, 90) * 100 + random.choice((49, 95, 99))
            item_id = draws[(position + other) % 10].number("I")
            found[name] = {"item_id": item_id, "name": name, "price": cents / 100}
    return found


def make_database(customers: int = 150, seed: int = 0) -> Shop:
    """The base that all tasks share: the catalogue, and people and orders that no task is about."""
    draw = Draw(Random(f"background/{seed}"), "background")
    people: dict[str, Any] = {}
    orders: dict[str, Any] = {}
    for _ in range(customers):
        customer = draw.customer()
        people[customer["customer_id"]] = customer
        for _ in range(draw.random.randrange(1, 4)):
            draw.used -= products().keys()  # only within one order is a product new
            status = draw.random.choice(
                ("pending", "shipped", "delivered", "delivered", "cancelled", "returned")
            )
            order = draw.order(customer, status, draw.random.randrange(1, 3))
            orders[order["order_id"]] = order
    goods = {product["item_id"]: product for product in products().values()}
    return Shop.load({"customers": people, "orders": orders, "products": goods})
