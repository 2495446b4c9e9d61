"""The card desk of a bank: limits, PINs, lost and stolen cards, travel notices, disputes and fees."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from trialogue import (
    Call,
    Database,
    Domain,
    Expected,
    Phrases,
    Record,
    Rule,
    Setup,
    Slots,
    Table,
    Task,
    ToolError,
    generate_with,
    tool,
)
from trialogue import policy_rules as rules
from trialogue import policy_speech as speech

Kind = Literal["debit", "credit", "prepaid"]
Month = Literal[
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
]
FeeKind = Literal["late payment", "foreign currency", "cash", "replacement"]
Reason = Literal["not made by me", "charged twice", "wrong amount", "never delivered"]


class Customer(Record):
    customer_id: str
    name: str
    born: str
    fees_waived: int = 0


class Card(Record):
    card_id: str
    customer_id: str
    kind: Kind
    ending: str
    limit: int
    highest_limit: int
    expires: str
    status: Literal["active", "lost", "stolen"] = "active"
    travel: str = ""
    pin_letters: int = 0


class Charge(Record):
    charge_id: str
    card_id: str
    merchant: str
    amount: float
    status: Literal["booked", "pending", "disputed"] = "booked"
    reason: str = ""


class Fee(Record):
    fee_id: str
    card_id: str
    kind: FeeKind
    amount: float
    waived: bool = False


class Desk(Database):
    customers: Table[Customer]
    cards: Table[Card]
    charges: Table[Charge]
    fees: Table[Fee]

    @tool
    def find_customer(self, name: str, born: str) -> Customer:
        """Find a customer by name and date of birth.

        Args:
            name: First and last name.
            born: Date of birth, such as 1984-03-17.
        """
        for customer in self.customers.where(name=name):
            if customer.born == born:
                return customer
        raise ToolError("no customer has this name and date of birth")

    @tool
    def get_customer(self, customer_id: str) -> Customer:
        """Look a customer up by customer number."""
        return self.customers[customer_id]

    @tool
    def list_cards(self, customer_id: str) -> list[Card]:
        """List the cards of a customer."""
        return self.cards.where(customer_id=customer_id)

    @tool
    def list_charges(self, card_id: str) -> list[Charge]:
        """List the latest charges of a card."""
        return self.charges.where(card_id=card_id)

    @tool
    def list_fees(self, card_id: str) -> list[Fee]:
        """List the fees of a card."""
        return self.fees.where(card_id=card_id)

    @tool(writes=True)
    def set_limit(self, card_id: str, limit: int) -> Card:
        """Set the monthly limit of a card, up to its highest limit."""
        card = self._active(card_id)
        if limit > card.highest_limit:
            raise ToolError(f"the highest limit of this card is {card.highest_limit}")
        card.limit = limit
        return card

    @tool(writes=True)
    def block_card(self, card_id: str, reason: Literal["lost", "stolen"]) -> Card:
        """Block a lost or stolen card for good."""
        card = self._active(card_id)
        card.status = reason
        return card

    @tool(writes=True)
    def send_pin(self, card_id: str) -> Card:
        """Send a new PIN for a card by letter."""
        card = self._active(card_id)
        card.pin_letters += 1
        return card

    @tool(writes=True)
    def add_travel_notice(self, card_id: str, country: str, until: Month) -> Card:
        """Note that a card will be used in a country.

        Args:
            country: The country the customer travels to.
            until: The last month of the journey.
        """
        card = self._active(card_id)
        card.travel = f"{country} until {until}"
        return card

    @tool(writes=True)
    def dispute_charge(self, charge_id: str, reason: Reason) -> Charge:
        """Dispute a booked charge."""
        charge = self.charges[charge_id]
        if charge.status != "booked":
            raise ToolError(f"charge {charge_id} is {charge.status}; only booked charges can be disputed")
        charge.status, charge.reason = "disputed", reason
        return charge

    @tool(writes=True)
    def waive_fee(self, fee_id: str) -> Fee:
        """Waive a fee. One fee a year can be waived for a customer."""
        fee = self.fees[fee_id]
        customer = self.customers[self.cards[fee.card_id].customer_id]
        if customer.fees_waived:
            raise ToolError("one fee was already waived for this customer this year")
        customer.fees_waived, fee.waived = 1, True
        return fee

    def _active(self, card_id: str) -> Card:
        card = self.cards[card_id]
        if card.status != "active":
            raise ToolError(f"card {card_id} is {card.status}; only active cards can be changed")
        return card


WORDINGS = json.loads((Path(__file__).parent / "phrases.json").read_text(encoding="utf-8"))
SAY = {name: Phrases(*texts) for name, texts in WORDINGS.items()}
"""What users say. Each list is shared out over the splits."""
SHOPS = ["Books", "Tours", "Foods", "Music", "Garden", "Motors", "Sports", "Hotels"]
CANNOT = ("cannot", "can't", "not possible", "unable", "not allowed")


@dataclass
class Scene:
    """A customer with cards, charges and fees; the user speaks about the first card."""

    slots: Slots
    family: str
    data: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.customer = self.add_customer()
        kinds = self.slots.random.sample(["debit", "credit", "prepaid"], self.slots.number(1, 3))
        self.cards = [self.add_card(self.customer, kind) for kind in kinds]
        self.card = self.cards[0]
        self.called = self.slots.pick([f"{self.card['kind']} card", f"card ending in {self.card['ending']}"])

    def add(self, table: str, key: str, **fields: Any) -> dict[str, Any]:
        self.data.setdefault(table, {})[fields[key]] = fields
        return fields

    def add_customer(self) -> dict[str, Any]:
        born = f"{self.slots.number(1950, 2004)}-{self.slots.number(1, 12):02}-{self.slots.number(1, 28):02}"
        name = self.slots.name()
        return self.add(
            "customers", "customer_id", customer_id=self.slots.draw("K######"), name=name, born=born
        )

    def add_card(self, customer: dict[str, Any], kind: str) -> dict[str, Any]:
        highest = self.slots.number(20, 90) * 100
        return self.add(
            "cards",
            "card_id",
            card_id=self.slots.draw("C-####"),
            customer_id=customer["customer_id"],
            kind=kind,
            ending=self.slots.draw("####"),
            limit=self.slots.number(5, highest // 100 - 8) * 100,
            highest_limit=highest,
            expires=f"{self.slots.pick(get_args(Month))} {self.slots.number(2028, 2033)}",
        )

    def add_charges(self, status: str = "booked") -> dict[str, Any]:
        """Charges of the card; the first one is the one the user speaks about."""
        charges = [
            self.add(
                "charges",
                "charge_id",
                charge_id=self.slots.draw("T####"),
                card_id=self.card["card_id"],
                merchant=f"{self.slots.word()} {self.slots.pick(SHOPS)}",
                amount=self.slots.amount(3, 900),
            )
            for _ in range(self.slots.number(1, 3))
        ]
        charges[0]["status"] = status
        return charges[0]

    def fact(self, value: str | None, asked: str, form: str, says: Phrases) -> dict[str, Any]:
        known = {"says": self.slots.phrases(says, v="{value}")} if value is not None else {}
        return {"value": value, "asked": asked, **({"form": form} if form else {}), **known}

    def card_fact(self) -> dict[str, Any]:
        return self.fact(
            self.called,
            "which card|which of your cards|card do you mean",
            r"\bcard ending in \d{4}|\b(debit|credit|prepaid) card",
            SAY["which"],
        )

    def merchant_fact(self, charge: dict[str, Any]) -> dict[str, Any]:
        form = rf"\b[a-z]+ ({'|'.join(SHOPS)})\b"
        return self.fact(charge["merchant"], "which charge|merchant", form, SAY["value"])


@dataclass
class Wish:
    """What the user wants, and what is right."""

    agenda: dict[str, Any]
    story: str
    calls: list[Call] = field(default_factory=list)
    say: list[Any] = field(default_factory=list)


def act(name: str, **arguments: Any) -> list[Call]:
    return [Call(name=name, arguments=arguments)]


def free_limit(scene: Scene, *, above: bool = False) -> int:
    highest = scene.card["highest_limit"] // 100
    if above:
        return scene.slots.number(highest + 1, highest + 40) * 100
    return scene.slots.pick([n * 100 for n in range(5, highest + 1) if n * 100 != scene.card["limit"]])


def want_limit(scene: Scene, *, above: bool = False, bare: bool = False) -> Wish:
    slots, limit = scene.slots, free_limit(scene, above=above)
    says = slots.phrases(SAY["limit_bare"] if bare else SAY["limit"], card=scene.called, limit=limit)
    facts = {
        "card": scene.card_fact(),
        "limit": scene.fact(str(limit), "limit|how much|amount", r"\b\d{3,5}\b(?! card)", SAY["value"]),
    }
    wish = Wish(
        {"says": says, "done": "limit", "facts": facts},
        f"You want a limit of {limit} on your {scene.called}.",
    )
    if above:
        wish.say += [CANNOT, ("highest", "at most", "up to", "above")]
    else:
        wish.calls += act("set_limit", card_id=scene.card["card_id"], limit=limit)
    return wish


def want_change_of_mind(scene: Scene) -> Wish:
    first, second = want_limit(scene), want_limit(scene)
    second.agenda["says"] = scene.slots.phrases(SAY["changed"], limit=second.calls[0].arguments["limit"])
    first.agenda["instead"] = second.agenda
    return Wish(
        first.agenda,
        f"{first.story} When asked for a yes, you change your mind: {second.story}",
        second.calls,
    )


def want_block(scene: Scene) -> Wish:
    reason = scene.slots.pick(["lost", "stolen"])
    says = scene.slots.phrases(SAY["lost"] if reason == "lost" else SAY["stolen"], card=scene.called)
    facts = {
        "card": scene.card_fact(),
        "reason": scene.fact(
            reason, "lost or stolen|reason|why|what happened", r"\b(lost|stolen)\b", SAY["gone"]
        ),
    }
    calls = act("block_card", card_id=scene.card["card_id"], reason=reason)
    return Wish(
        {"says": says, "done": "block", "facts": facts},
        f"Your {scene.called} is {reason}; have it blocked.",
        calls,
    )


def want_pin(scene: Scene) -> Wish:
    agenda = {
        "says": scene.slots.phrases(SAY["pin"], card=scene.called),
        "done": "PIN|sent",
        "facts": {"card": scene.card_fact()},
    }
    return Wish(
        agenda, f"You need a new PIN for your {scene.called}.", act("send_pin", card_id=scene.card["card_id"])
    )


def want_travel(scene: Scene) -> Wish:
    country, month = scene.slots.word(), scene.slots.pick(get_args(Month))
    facts = {
        "card": scene.card_fact(),
        "country": scene.fact(country, "country|where", "", SAY["place"]),
        "month": scene.fact(
            month, "month|until when|how long", rf"\b({'|'.join(get_args(Month))})\b", SAY["until"]
        ),
    }
    says = scene.slots.phrases(SAY["travel"], card=scene.called, country=country, month=month)
    calls = act("add_travel_notice", card_id=scene.card["card_id"], country=country, until=month)
    agenda = {"says": says, "done": "notice|travel|noted", "facts": facts}
    return Wish(agenda, f"You use your {scene.called} in {country} until {month} and want that noted.", calls)


def want_dispute(scene: Scene, *, pending: bool = False) -> Wish:
    charge = scene.add_charges("pending" if pending else "booked")
    reason = scene.slots.pick(get_args(Reason))
    facts = {
        "card": scene.card_fact(),
        "merchant": scene.merchant_fact(charge),
        "reason": scene.fact(
            reason,
            "reason|why|what is wrong",
            "|".join(get_args(Reason)),
            SAY["why"],
        ),
    }
    says = scene.slots.phrases(SAY["dispute"], card=scene.called, merchant=charge["merchant"])
    wish = Wish(
        {"says": says, "done": "disput", "facts": facts},
        f"You dispute the charge of {charge['merchant']} on your {scene.called}: {reason}.",
    )
    if pending:
        wish.say += [CANNOT, ("pending",)]
    else:
        wish.calls += act("dispute_charge", charge_id=charge["charge_id"], reason=reason)
    return wish


def want_fee(scene: Scene, *, waived: bool = False) -> Wish:
    fees = [
        scene.add(
            "fees",
            "fee_id",
            fee_id=scene.slots.draw("F####"),
            card_id=scene.card["card_id"],
            kind=kind,
            amount=scene.slots.amount(2, 40),
        )
        for kind in scene.slots.random.sample(get_args(FeeKind), scene.slots.number(1, 2))
    ]
    kind = fees[0]["kind"]
    facts = {
        "card": scene.card_fact(),
        "fee": scene.fact(kind, "which fee", "|".join(get_args(FeeKind)), SAY["which"]),
    }
    says = scene.slots.phrases(SAY["fee"], card=scene.called, fee=kind)
    wish = Wish(
        {"says": says, "done": "waive", "facts": facts},
        f"You want the {kind} fee of your {scene.called} waived.",
    )
    if waived:
        scene.customer["fees_waived"] = 1
        wish.say += [CANNOT, ("already", "one fee")]
    else:
        wish.calls += act("waive_fee", fee_id=fees[0]["fee_id"])
    return wish


def ask_amount(scene: Scene) -> Wish:
    charge = scene.add_charges()
    says = scene.slots.phrases(SAY["amount"], card=scene.called, merchant=charge["merchant"])
    facts = {
        "card": scene.card_fact(),
        "merchant": scene.merchant_fact(charge),
    }
    agenda = {"says": says, "answer": r"\d+\.\d", "facts": facts}
    return Wish(
        agenda,
        f"You ask how much {charge['merchant']} charged on your {scene.called}.",
        say=[str(charge["amount"])],
    )


def ask_expiry(scene: Scene) -> Wish:
    agenda = {
        "says": scene.slots.phrases(SAY["expiry"], card=scene.called),
        "answer": r"\b20\d\d\b",
        "facts": {"card": scene.card_fact()},
    }
    return Wish(agenda, f"You ask when your {scene.called} expires.", say=[scene.card["expires"]])


def ask_about_others(scene: Scene) -> Wish:
    other = scene.add_customer()
    scene.add_card(other, "credit")
    agenda = {"says": scene.slots.phrases(SAY["others"], other=other["name"]), "answer": r"\b\d{3,5}\b"}
    return Wish(
        agenda,
        f"You ask for the limit of {other['name']}.",
        say=[CANNOT, ("own cards", "anybody else", "somebody else", "other customers")],
    )


SIMPLE = (want_limit, want_pin, want_travel, want_dispute, want_fee)
FAMILIES = {
    "limit": (1, want_limit),
    "block": (1, want_block),
    "pin": (1, want_pin),
    "question": (1, None),
    "travel": (2, want_travel),
    "dispute": (2, want_dispute),
    "fee": (2, want_fee),
    "forbidden": (2, None),
    "pries": (3, ask_about_others),
    "change_of_mind": (3, want_change_of_mind),
    "forgetful": (3, None),
    "two_wishes": (3, None),
}


def make_wishes(scene: Scene, family: str) -> list[Wish]:
    slots = scene.slots
    match family:
        case "question":
            return [slots.pick([ask_amount, ask_expiry])(scene)]
        case "forbidden":
            kind = slots.number(1, 3)
            if kind == 1:
                return [want_limit(scene, above=True)]
            return [want_dispute(scene, pending=True) if kind == 2 else want_fee(scene, waived=True)]
        case "forgetful":
            return [want_limit(scene, bare=True) if slots.number(0, 1) else slots.pick(SIMPLE)(scene)]
        case "two_wishes":
            return [want(scene) for want in slots.random.sample(SIMPLE, 2)]
        case _:
            want = FAMILIES[family][1]
            assert want is not None
            return [want(scene)]


def make_task(slots: Slots, family: str) -> Task:
    scene = Scene(slots, family)
    wishes, customer = make_wishes(scene, family), scene.customer
    born = None if family == "forgetful" else customer["born"]
    facts = {
        "name": scene.fact(customer["name"], "name", "", SAY["name"]),
        "born": scene.fact(born, "born|birth", r"\b\d{4}-\d\d-\d\d\b", SAY["born"]),
        "number": scene.fact(customer["customer_id"], "customer (number|id)", r"\bK\d{6}\b", SAY["number"]),
    }
    birth = (
        f"You were born on {born}." if born else "You do not remember the date of birth that the bank has."
    )
    who = f"You are {customer['name']}. {birth} Your customer number is {customer['customer_id']}."
    return Task(
        id="",
        domain="bank_card",
        instructions=" ".join([who, *(wish.story for wish in wishes)]),
        setup=Setup(data=scene.data),
        expected=Expected(
            calls=tuple(call for wish in wishes for call in wish.calls),
            say=tuple(line for wish in wishes for line in wish.say),
        ),
        meta={"agenda": {"facts": facts, "wishes": [wish.agenda for wish in wishes]}},
    )


caller = rules.Caller(tools=("find_customer", "get_customer"), owner="customer_id")
DONE = {
    "set_limit": "limit",
    "block_card": "block",
    "send_pin": "pin",
    "add_travel_notice": "notice|travel",
    "dispute_charge": "disput",
    "waive_fee": "waive",
}
changes = rules.calls(*DONE)
of_cards = rules.calls("set_limit", "block_card", "send_pin", "add_travel_notice")
RULES = (
    Rule(
        "identity first",
        "Find the customer by full name and date of birth.",
        rules.before(changes, caller.identified),
    ),
    Rule(
        "own cards only",
        "Speak only about that customer's own cards",
        rules.never(caller.told_too_early, caller.told_of_others),
    ),
    Rule(
        "look at cards",
        "List the customer's cards before you change one",
        rules.before(of_cards, rules.looked_up("card_id")),
    ),
    Rule(
        "look at charges",
        "the charges or fees of a card before you\ndispute or waive one",
        rules.both(
            rules.before(rules.calls("dispute_charge"), rules.looked_up("charge_id")),
            rules.before(rules.calls("waive_fee"), rules.looked_up("fee_id")),
        ),
    ),
    Rule(
        "confirm",
        "Say exactly what you are about to do and wait for a clear yes.",
        rules.before(changes, rules.confirmed()),
    ),
    Rule(
        "ask for the reason",
        "Ask for the reason; never guess it.",
        rules.before(rules.calls("dispute_charge"), rules.said_by_user("reason")),
    ),
    Rule(
        "answer from the records",
        "Never guess, never invent a reference.",
        rules.never(speech.makes_up, speech.contradicts_itself),
    ),
    Rule("report truthfully", "Answer questions from the records.", speech.reports_truthfully(DONE)),
    Rule("be polite", "Be polite.", rules.never(speech.insults)),
    Rule(
        "one thing at a time",
        "Make one tool call at a time, or write to the customer, never both at once.",
        rules.one_call_at_a_time,
    ),
)
made = generate_with(make_task, {family: level for family, (level, _) in FAMILIES.items()})
domain = Domain.load(__file__, Desk, tasks=made, endless=True, policy_rules=RULES)
