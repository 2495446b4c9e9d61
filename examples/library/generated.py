"""The library with tasks without limit: a model needs more to learn from than the eleven tasks of the folder.

    trialogue eval examples/library/generated.py --agent teacher --user agenda

Policy, tools, rules and the first records are those of `domain.py`; each task lays books and loans over them.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trialogue import Call, Expected, Phrases, Setup, Slots, Task, find_domain, generate_with

RENEW = Phrases(
    "I would like to renew {title}.",
    "Can I keep {title} two weeks longer?",
    "Please extend my loan of {title}.",
    "I need {title} for another two weeks.",
    "Could you renew {title} for me?",
    "I haven't finished {title}, please renew it.",
    "{title} should be renewed, please.",
    "May I have {title} a bit longer? Renew it, please.",
    "Renew {title}, please.",
    "I'm not through with {title} and want to extend it.",
    "Is it possible to renew {title}?",
    "I want another two weeks with {title}.",
    "Give me more time with {title}, I'd like it renewed.",
    "My loan of {title} has to be extended.",
    "Would you extend {title}?",
    "Two more weeks for {title}, please.",
)
RESERVE = Phrases(
    "Please put me on the list for {title}.",
    "I want to reserve {title}.",
    "Can you reserve {title} for me?",
    "I'd like to wait for {title}. Put me on its list.",
    "Reserve {title}, please.",
    "Is {title} out? Then reserve it for me.",
    "I would love to read {title}, please reserve it.",
    "Could I get on the waiting list of {title}?",
    "Somebody has {title}. I want to have it next.",
    "Please reserve the book {title}.",
    "Note me down for {title}.",
    "I'm looking for {title} and want to reserve it.",
    "Add me to those who wait for {title}.",
    "May I reserve {title}?",
    "Keep {title} for me when it comes back.",
    "Let me be on the list for {title}.",
)
DUE = Phrases(
    "When do I have to bring back {title}?",
    "When is {title} due?",
    "By which day must {title} be back?",
    "How long may I keep {title}?",
    "Can you tell me when {title} is due?",
    "What is the due date of {title}?",
    "I forgot when {title} has to be returned.",
    "On what day is {title} due?",
    "Please look up when {title} is due.",
    "Until when do I have {title}?",
    "Tell me the date on which {title} must be back.",
    "I'd like to know when to return {title}.",
    "Is {title} due soon? When?",
    "Which day do you want {title} back?",
    "My loan of {title}, when does it end?",
    "What date must I return {title}?",
)
FEES = Phrases(
    "I got a bill for late fees, and it is wrong.",
    "Why do I have to pay late fees?",
    "The fees you want from me can't be right.",
    "I want to complain about a fee.",
    "You charged me a late fee that I don't owe.",
    "There is a fee on my account that I don't understand.",
    "I was asked to pay fees, although I was in time.",
    "Please cancel my late fee.",
)
LOST = Phrases(
    "I have lost {title}. What now?",
    "{title} is gone, I must have lost it.",
    "I can't find {title} anywhere, I think I lost it.",
    "I left {title} on a bus. It is lost.",
    "What do I do about {title}? I lost it.",
    "I am sorry, but I have lost {title}.",
    "My dog ate {title}. The book is lost.",
    "How do I report that {title} is lost?",
)
RATHER = Phrases(
    "Actually, I'd rather have {title}.",
    "Wait, make it {title} instead.",
    "No, sorry, I want {title}.",
    "Hold on, {title} would be better.",
    "I meant {title}, sorry.",
    "On second thought, {title}, please.",
    "Let me take {title} instead.",
    "Hmm, no: {title}.",
)
CARD = Phrases(
    "It is {v}.",
    "My card number is {v}.",
    "{v}.",
    "The card says {v}.",
    "That would be {v}.",
    "Here it is: {v}.",
    "I have {v}.",
    "Card {v}.",
)
TITLE = Phrases("{v}.", "It is {v}.", "I mean {v}.", "The book is {v}.", "{v}, please.", "It's called {v}.")
NOUNS = ("Harbour", "Garden", "Letter", "Winter", "Bridge", "Orchard", "Mirror", "Station")
CANNOT = ("cannot", "can't", "not possible", "unable", "no longer")


@dataclass
class Desk:
    """What one task adds to the library, with the member whom it is about."""

    slots: Slots
    card: str
    data: dict[str, Any] = field(default_factory=lambda: {"books": {}, "loans": {}})
    calls: list[Call] = field(default_factory=lambda: [])
    say: list[Any] = field(default_factory=lambda: [])

    def add_book(self, **more: Any) -> tuple[str, str]:
        """A new book: its id and its title."""
        slots = self.slots
        book_id, title = slots.draw("B####"), f"The {slots.word()} {slots.pick(NOUNS)}"
        self.data["books"][book_id] = {"title": title, "author": slots.name(), "copies": 0, **more}
        return book_id, title

    def add_loan(self, reserved_by: tuple[str, ...] = (), renewals: int = 0) -> tuple[str, str, str]:
        """A book that the member has borrowed: the loan's id, the title, and the day on which it is due."""
        book_id, title = self.add_book(reserved_by=list(reserved_by))
        loan_id, due = self.slots.draw("N####"), f"{self.slots.number(11, 31)} March"
        loan = {"card": self.card, "book_id": book_id, "due": due, "renewals": renewals}
        self.data["loans"][loan_id] = loan
        return loan_id, title, due

    def wish(self, says: Phrases, title: str, **more: Any) -> dict[str, Any]:
        told = {"says": self.slots.phrases(TITLE, v="{value}")} if title else {}
        fact = {"value": title, "asked": "title|which book|what book|book", **told}
        return {"says": self.slots.phrases(says, title=title), "facts": {"title": fact}, **more}

    def renew(self) -> dict[str, Any]:
        loan_id, title, _ = self.add_loan(renewals=self.slots.number(0, 1))
        self.calls.append(Call(name="renew_loan", arguments={"loan_id": loan_id}))
        return self.wish(RENEW, title, done="renew|exten")

    def reserve(self) -> dict[str, Any]:
        book_id, title = self.add_book()
        self.calls.append(Call(name="reserve_book", arguments={"card": self.card, "book_id": book_id}))
        return self.wish(RESERVE, title, done="reserv|list")

    def question(self) -> dict[str, Any]:
        _, title, due = self.add_loan()
        self.say.append(due)
        return self.wish(DUE, title, answer=r"\b\d{1,2} March\b")

    def refuse(self) -> dict[str, Any]:
        kind = self.slots.pick(("renewed", "waited for", "on the shelf"))
        if kind == "on the shelf":
            _, title = self.add_book(copies=self.slots.number(1, 3))
            self.say += [CANNOT, ("shelf", "copy", "copies")]
            return self.wish(RESERVE, title, done="reserv|list")
        _, title, _ = self.add_loan(
            reserved_by=(self.slots.draw("L-####"),) if kind == "waited for" else (),
            renewals=2 if kind == "renewed" else 0,
        )
        self.say.append(CANNOT)
        return self.wish(RENEW, title, done="renew|exten")

    def transfer(self) -> dict[str, Any]:
        if self.slots.number(0, 1):
            topic, says, title = "fees", FEES, ""
        else:
            topic, says, title = "lost book", LOST, self.add_loan()[1]
        self.calls.append(Call(name="call_librarian", arguments={"card": self.card, "topic": topic}))
        wish = self.wish(says, title, done="librarian|colleague")
        return wish if title else {**wish, "facts": {}}

    def change_of_mind(self) -> dict[str, Any]:
        first, second = self.wish(RESERVE, self.add_book()[1], done="reserv|list"), self.reserve()
        title = second["facts"]["title"]["value"]
        return {**first, "instead": {**second, "says": self.slots.phrases(RATHER, title=title)}}


LEVELS = {
    "renew": 1,
    "reserve": 1,
    "question": 1,
    "refuse": 2,
    "transfer": 2,
    "change_of_mind": 3,
    "two_wishes": 3,
}


STORIES = {
    "renew": "Your loan of {title} shall last two weeks longer.",
    "reserve": "You want to be the next reader of {title}.",
    "question": "You want to know the day on which {title} must be back.",
    "refuse": "You want {title}: a renewal if you have it, else a reservation. If that cannot be, accept it.",
    "transfer": "You have trouble with a late fee, or have lost {title}.",
    "change_of_mind": "You want to be the next reader of {title}; when asked for a yes, of {other} instead.",
}


def tell(wish: dict[str, Any]) -> dict[str, str]:
    """The titles of a wish."""
    titles = [
        each["facts"].get("title", {}).get("value", "a book") for each in (wish, wish.get("instead", wish))
    ]
    return {"title": titles[0], "other": titles[1]}


def make_task(slots: Slots, family: str) -> Task:
    """One task of a family."""
    desk = Desk(slots, slots.draw("L-####"))
    kinds = [family]
    if family == "two_wishes":
        kinds = slots.random.sample(["renew", "reserve", "question"], 2)
    wishes = [getattr(desk, kind)() for kind in kinds]
    for _ in range(slots.number(0, 2)):  # what else the member has borrowed
        desk.add_loan()
    card = {"value": desk.card, "asked": "card", "form": r"L-\d{4}", "says": slots.phrases(CARD, v="{value}")}
    stories = " ".join(STORIES[kind].format(**tell(wish)) for kind, wish in zip(kinds, wishes, strict=True))
    return Task(
        id="",
        domain="library",
        instructions=f"You are the member with card number {desk.card}. {stories}",
        setup=Setup(data=desk.data),
        expected=Expected(calls=tuple(desk.calls), say=tuple(desk.say)),
        meta={"agenda": {"facts": {"card": card}, "wishes": wishes}},
    )


library = find_domain(str(Path(__file__).parent))
domain = replace(library, tasks=generate_with(make_task, LEVELS), endless=True)
