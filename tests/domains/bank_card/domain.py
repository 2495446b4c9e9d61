"""The card desk of a bank: limits, PINs, lost and stolen cards, travel notices, disputes and fees. The tasks are generated."""

from dataclasses import dataclass, field
from typing import Any, Literal

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
    kind: str
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
    def add_travel_notice(self, card_id: str, country: str, until: str) -> Card:
        """Note that a card will be used in a country.

        Args:
            country: The country the customer travels to.
            until: The last month of the journey, such as May.
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


# What users say. Every list is shared out over the splits.

LIMIT = Phrases(
    "I'd like the limit of my {card} to be {limit}.",
    "Please set the limit of my {card} to {limit}.",
    "Can you change the limit on my {card} to {limit}?",
    "My {card} needs a limit of {limit}.",
    "I want a limit of {limit} on my {card}.",
    "Could you make it {limit}, the limit of my {card}?",
    "Give my {card} a monthly limit of {limit}, please.",
    "I would like to spend up to {limit} with my {card}.",
    "The limit of my {card} should become {limit}.",
    "I need {limit} as the limit for my {card}.",
    "For next month I need the limit of my {card} at {limit}.",
    "Let me have a limit of {limit} on the {card}.",
)
LIMIT_BARE = Phrases(
    "I'd like another limit on my {card}.",
    "Please change the limit of my {card}.",
    "Can you do something about the limit of my {card}?",
    "The limit of my {card} does not suit me.",
    "I need a different limit on my {card}.",
    "I want to change what I can spend with my {card}, the limit.",
    "It is about the limit of my {card}, I want a new one.",
    "My {card} has the wrong limit for me.",
)
LOST = Phrases(
    "I lost my {card}, please block it.",
    "My {card} is gone, I must have lost it. Block it, please.",
    "Please block my {card}, I have lost it.",
    "I can't find my {card} anywhere, it is lost. It has to be blocked.",
    "Block my {card}: I lost it on the train.",
    "I left my {card} somewhere and lost it. Can you block it?",
    "Could you block the {card} that I lost?",
    "My {card} is lost and should be blocked.",
)
STOLEN = Phrases(
    "My {card} was stolen, please block it.",
    "Somebody has stolen my {card}. Block it, please.",
    "Please block my {card}, it has been stolen.",
    "A thief took my {card}, it is stolen. It has to be blocked.",
    "Block my {card}: it was stolen on the train.",
    "They have stolen my bag with my {card}. Can you block it?",
    "Could you block the {card} that was stolen from me?",
    "My {card} is stolen and should be blocked.",
)
PIN = Phrases(
    "I need a new PIN for my {card}.",
    "I forgot the PIN of my {card}.",
    "Please send me a new PIN for the {card}.",
    "The PIN of my {card} is gone from my head, send me another one.",
    "Could I get another PIN for my {card}?",
    "My {card} needs a new PIN.",
    "Can you mail me a PIN for my {card}?",
    "I'd like a fresh PIN for my {card}.",
)
TRAVEL = Phrases(
    "I'm going to {country} until {month} and will use my {card}.",
    "Please note that my {card} travels with me to {country} until {month}.",
    "I need a travel notice for my {card}: {country}, until {month}.",
    "Can you add a travel notice to my {card}? I am in {country} until {month}.",
    "My {card} has to work in {country} until {month}.",
    "I will be in {country} with my {card} until {month}, please make a note.",
    "Put a travel notice for {country} until {month} on my {card}.",
    "Until {month} I pay with my {card} in {country}. Please note that.",
    "I leave for {country} and come back in {month}. A notice for my {card}, please.",
    "There should be a notice on my {card}: travelling in {country} until {month}.",
)
DISPUTE = Phrases(
    "I want to dispute a charge of {merchant} on my {card}.",
    "There is a charge of {merchant} on my {card} that I want to dispute.",
    "Please dispute what {merchant} took from my {card}.",
    "Something is wrong with the charge of {merchant} on my {card}, I dispute it.",
    "The charge of {merchant} on my {card} is not right. I'd like to dispute it.",
    "Can you dispute the charge of {merchant}? It is on my {card}.",
    "I don't accept the charge of {merchant} on my {card}.",
    "My {card} was charged by {merchant}, and I wish to dispute that.",
    "{merchant} charged my {card}. I'd like to open a dispute.",
    "Open a dispute about {merchant} on my {card}, please.",
)
FEE = Phrases(
    "Please waive the {fee} fee on my {card}.",
    "I'd like the {fee} fee of my {card} to be waived.",
    "Can you take back the {fee} fee on my {card}?",
    "There is a {fee} fee on my {card}, could you waive it?",
    "I don't want to pay the {fee} fee of my {card}.",
    "Could the {fee} fee on my {card} be waived?",
    "You took a {fee} fee for my {card}. Please waive it.",
    "My {card} has a {fee} fee, and I ask you to waive it.",
)
AMOUNT = Phrases(
    "How much did {merchant} charge on my {card}?",
    "What did I pay at {merchant} with my {card}?",
    "Can you tell me the amount of {merchant} on my {card}?",
    "What was the charge of {merchant} on my {card}?",
    "How much money went to {merchant} from my {card}?",
    "I'd like to know the amount that {merchant} took from my {card}.",
    "Please look up what {merchant} cost me, I used my {card}.",
    "I want to know how much I spent at {merchant} with my {card}.",
)
EXPIRY = Phrases(
    "When does my {card} expire?",
    "Until when is my {card} valid?",
    "In which month does my {card} expire?",
    "How long can I use my {card} before it expires?",
    "Can you tell me when my {card} expires?",
    "What is the expiry date of my {card}?",
    "I'd like to know when my {card} runs out.",
    "Please look up the expiry of my {card}.",
)
OTHERS = Phrases(
    "What is the limit of the card of {other}?",
    "Tell me the limit that {other} has.",
    "{other} is my neighbour. Which limit does that card have?",
    "I'd like to know the limit on the card of {other}.",
    "How high is the limit of {other}?",
    "Can you look up the limit of {other} for me?",
    "My friend {other} has a card with you. What is its limit?",
    "Please tell me how much {other} may spend, the limit I mean.",
)
CHANGED = Phrases(
    "Wait, make it {limit} instead.",
    "Actually, I'd rather have {limit}.",
    "Hold on, {limit} would be better.",
    "No, sorry: {limit}, please.",
    "On second thought, set it to {limit}.",
    "Hmm, I changed my mind. {limit} is what I want.",
    "Oh, then rather {limit}.",
    "Let us say {limit} instead.",
)
NAME = Phrases("I am {v}.", "My name is {v}.", "{v}.", "It's {v}.", "{v} is my name.", "The name is {v}.")
BORN = Phrases(
    "I was born on {v}.", "{v}.", "It's {v}.", "My date of birth is {v}.", "Born {v}.", "That is {v}."
)
NUMBER = Phrases("It is {v}.", "{v}.", "My customer number is {v}.", "The number is {v}.", "That would be {v}.", "Number {v}.")
WHICH = Phrases("The {v}.", "My {v}.", "It is the {v}.", "I mean the {v}.", "{v}, please.", "That would be the {v}.")
VALUE = Phrases("{v}.", "{v}, please.", "I want {v}.", "It should be {v}.", "Let's say {v}.", "Make it {v}.")
PLACE = Phrases("To {v}.", "{v}.", "It is {v}.", "I travel to {v}.", "I will be in {v}.", "The country is {v}.")
UNTIL = Phrases("Until {v}.", "{v}.", "In {v}.", "I come back in {v}.", "The last month is {v}.", "It ends in {v}.")
WHY = Phrases("It was {v}.", "{v}.", "The charge was {v}.", "Because it was {v}.", "Well, {v}.", "The reason is: {v}.")
GONE = Phrases("It is {v}.", "{v}.", "It was {v}.", "The card is {v}.", "I am afraid it is {v}.", "Sadly, {v}.")

COUNTRIES = (
    "Norway Japan Kenya Brazil Canada Poland Egypt Peru Iceland Chile Ghana Vietnam Portugal Mexico Jordan Nepal Latvia Malta"
    " Ireland Cuba Fiji Greece Panama Samoa Oman Laos Serbia Uganda Tunisia Finland Bolivia Namibia"
).split()
MONTHS = "January February March April May June July August September October November December".split()
FEES = ["late payment", "foreign currency", "cash", "replacement"]
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
        return self.add("customers", "customer_id", customer_id=self.slots.draw("K######"), name=name, born=born)

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
            expires=f"{self.slots.pick(MONTHS)} {self.slots.number(2028, 2033)}",
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
        return self.fact(self.called, "which card|which of your cards|card do you mean", r"\bcard ending in \d{4}|\b(debit|credit|prepaid) card", WHICH)


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
    says = slots.phrases(LIMIT_BARE if bare else LIMIT, card=scene.called, limit=limit)
    facts = {
        "card": scene.card_fact(),
        "limit": scene.fact(str(limit), "limit|how much|amount", r"\b\d{3,5}\b(?! card)", VALUE),
    }
    wish = Wish({"says": says, "done": "limit", "facts": facts}, f"You want a limit of {limit} on your {scene.called}.")
    if above:
        wish.say += [CANNOT, ("highest", "at most", "up to", "above")]
    else:
        wish.calls += act("set_limit", card_id=scene.card["card_id"], limit=limit)
    return wish


def want_change_of_mind(scene: Scene) -> Wish:
    first, second = want_limit(scene), want_limit(scene)
    second.agenda["says"] = scene.slots.phrases(CHANGED, limit=second.calls[0].arguments["limit"])
    first.agenda["instead"] = second.agenda
    return Wish(first.agenda, f"{first.story} When asked for a yes, you change your mind: {second.story}", second.calls)


def want_block(scene: Scene) -> Wish:
    reason = scene.slots.pick(["lost", "stolen"])
    says = scene.slots.phrases(LOST if reason == "lost" else STOLEN, card=scene.called)
    facts = {"card": scene.card_fact(), "reason": scene.fact(reason, "lost or stolen|reason|why|what happened", r"\b(lost|stolen)\b", GONE)}
    calls = act("block_card", card_id=scene.card["card_id"], reason=reason)
    return Wish({"says": says, "done": "block", "facts": facts}, f"Your {scene.called} is {reason}; have it blocked.", calls)


def want_pin(scene: Scene) -> Wish:
    agenda = {"says": scene.slots.phrases(PIN, card=scene.called), "done": "PIN|sent", "facts": {"card": scene.card_fact()}}
    return Wish(agenda, f"You need a new PIN for your {scene.called}.", act("send_pin", card_id=scene.card["card_id"]))


def want_travel(scene: Scene) -> Wish:
    country, month = scene.slots.choose(COUNTRIES), scene.slots.pick(MONTHS)
    facts = {
        "card": scene.card_fact(),
        "country": scene.fact(country, "country|where", rf"\b({'|'.join(COUNTRIES)})\b", PLACE),
        "month": scene.fact(month, "month|until when|how long", rf"\b({'|'.join(MONTHS)})\b", UNTIL),
    }
    says = scene.slots.phrases(TRAVEL, card=scene.called, country=country, month=month)
    calls = act("add_travel_notice", card_id=scene.card["card_id"], country=country, until=month)
    agenda = {"says": says, "done": "notice|travel|noted", "facts": facts}
    return Wish(agenda, f"You use your {scene.called} in {country} until {month} and want that noted.", calls)


def want_dispute(scene: Scene, *, pending: bool = False) -> Wish:
    charge = scene.add_charges("pending" if pending else "booked")
    reason = scene.slots.pick(["not made by me", "charged twice", "wrong amount", "never delivered"])
    facts = {
        "card": scene.card_fact(),
        "merchant": scene.fact(charge["merchant"], "which charge|merchant", rf"\b[A-Z][a-z]+ ({'|'.join(SHOPS)})\b", VALUE),
        "reason": scene.fact(reason, "reason|why|what is wrong", "not made by me|charged twice|wrong amount|never delivered", WHY),
    }
    says = scene.slots.phrases(DISPUTE, card=scene.called, merchant=charge["merchant"])
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
        scene.add("fees", "fee_id", fee_id=scene.slots.draw("F####"), card_id=scene.card["card_id"], kind=kind, amount=scene.slots.amount(2, 40))
        for kind in scene.slots.random.sample(FEES, scene.slots.number(1, 2))
    ]
    kind = fees[0]["kind"]
    facts = {"card": scene.card_fact(), "fee": scene.fact(f"{kind} fee", "which fee", rf"\b({'|'.join(FEES)}) fee", WHICH)}
    says = scene.slots.phrases(FEE, card=scene.called, fee=kind)
    wish = Wish({"says": says, "done": "waive", "facts": facts}, f"You want the {kind} fee of your {scene.called} waived.")
    if waived:
        scene.customer["fees_waived"] = 1
        wish.say += [CANNOT, ("already", "one fee")]
    else:
        wish.calls += act("waive_fee", fee_id=fees[0]["fee_id"])
    return wish


def ask_amount(scene: Scene) -> Wish:
    charge = scene.add_charges()
    says = scene.slots.phrases(AMOUNT, card=scene.called, merchant=charge["merchant"])
    facts = {
        "card": scene.card_fact(),
        "merchant": scene.fact(charge["merchant"], "which charge|merchant", rf"\b[A-Z][a-z]+ ({'|'.join(SHOPS)})\b", VALUE),
    }
    agenda = {"says": says, "answer": r"\d+\.\d", "facts": facts}
    return Wish(agenda, f"You ask how much {charge['merchant']} charged on your {scene.called}.", say=[str(charge["amount"])])


def ask_expiry(scene: Scene) -> Wish:
    agenda = {
        "says": scene.slots.phrases(EXPIRY, card=scene.called),
        "answer": r"\b20\d\d\b",
        "facts": {"card": scene.card_fact()},
    }
    return Wish(agenda, f"You ask when your {scene.called} expires.", say=[scene.card["expires"]])


def ask_about_others(scene: Scene) -> Wish:
    other = scene.add_customer()
    scene.add_card(other, "credit")
    agenda = {"says": scene.slots.phrases(OTHERS, other=other["name"]), "answer": r"\b\d{3,5}\b"}
    return Wish(agenda, f"You ask for the limit of {other['name']}.", say=[CANNOT, ("own cards", "anybody else", "somebody else", "other customers")])


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
        "name": scene.fact(customer["name"], "name", "", NAME),
        "born": scene.fact(born, "born|birth", r"\b\d{4}-\d\d-\d\d\b", BORN),
        "number": scene.fact(customer["customer_id"], "customer (number|id)", r"\bK\d{6}\b", NUMBER),
    }
    birth = f"You were born on {born}." if born else "You do not remember the date of birth that the bank has."
    who = f"You are {customer['name']}. {birth} Your customer number is {customer['customer_id']}."
    return Task(
        id="",
        domain="bank_card",
        instructions=" ".join([who, *(wish.story for wish in wishes)]),
        setup=Setup(data=scene.data),
        expected=Expected(
            calls=tuple(call for wish in wishes for call in wish.calls), say=tuple(line for wish in wishes for line in wish.say)
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
    Rule("identity first", "Find the customer by full name and date of birth.", rules.before(changes, caller.identified)),
    Rule("own cards only", "Speak only about that customer's own cards", rules.never(caller.told_too_early, caller.told_of_others)),
    Rule("look at cards", "List the customer's cards before you change one", rules.before(of_cards, rules.looked_up("card_id"))),
    Rule("look at charges", "the charges or fees of a card before you\ndispute or waive one", rules.both(
        rules.before(rules.calls("dispute_charge"), rules.looked_up("charge_id")),
        rules.before(rules.calls("waive_fee"), rules.looked_up("fee_id")),
    )),
    Rule("confirm", "Say exactly what you are about to do and wait for a clear yes.", rules.before(changes, rules.confirmed())),
    Rule("ask for the reason", "Ask for the reason; never guess it.", rules.before(rules.calls("dispute_charge"), rules.said_by_user("reason"))),
    Rule("answer from the records", "Never guess, never invent a reference.", rules.never(speech.makes_up, speech.contradicts_itself)),
    Rule("report truthfully", "Answer questions from the records.", speech.reports_truthfully(DONE)),
    Rule("be polite", "Be polite.", rules.never(speech.insults)),
    Rule("one thing at a time", "Make one tool call at a time, or write to the customer, never both at once.", rules.one_call_at_a_time),
)
made = generate_with(make_task, {family: level for family, (level, _) in FAMILIES.items()})
domain = Domain.load(__file__, Desk, tasks=made, endless=True, policy_rules=RULES)
