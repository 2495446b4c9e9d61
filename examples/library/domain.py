"""The world of a public library: members, books and loans, and the tools of the desk."""

from typing import Literal

from trialogue import Database, Domain, Record, Rule, Table, ToolError, tool
from trialogue import policy_rules as rules
from trialogue import policy_speech as speech

MOST_RENEWALS = 2


class Book(Record):
    title: str
    author: str
    copies: int
    """Copies on the shelf."""
    reserved_by: list[str] = []
    """Cards of the members who wait for it, first come first served."""


class Loan(Record):
    card: str
    book_id: str
    due: str
    renewals: int = 0


class Message(Record):
    card: str
    topic: str


class Library(Database):
    books: Table[Book]
    loans: Table[Loan]
    messages: Table[Message]

    @tool
    def find_books(self, title: str) -> dict[str, Book]:
        """Find books by a part of their title. The keys are book ids."""
        return {key: book for key, book in self.books.items() if title.lower() in book.title.lower()}

    @tool
    def list_loans(self, card: str) -> dict[str, Loan]:
        """List what a member has borrowed. The keys are loan ids."""
        return {key: loan for key, loan in self.loans.items() if loan.card == card}

    @tool(writes=True)
    def renew_loan(self, loan_id: str) -> Loan:
        """Extend a loan by two weeks."""
        loan = self.loans[loan_id]
        if loan.renewals >= MOST_RENEWALS:
            raise ToolError(f"loan {loan_id} has been renewed {MOST_RENEWALS} times, which is the most")
        if self.books[loan.book_id].reserved_by:
            raise ToolError("another member waits for this book")
        loan.renewals += 1
        return loan

    @tool(writes=True)
    def reserve_book(self, card: str, book_id: str) -> Book:
        """Put a member on the waiting list of a book that is out."""
        book = self.books[book_id]
        if book.copies:
            raise ToolError("a copy is on the shelf; only books that are out can be reserved")
        if card in book.reserved_by:
            raise ToolError("this member already waits for the book")
        book.reserved_by = [*book.reserved_by, card]
        return book

    @tool(writes=True, ends=True)
    def call_librarian(self, card: str, topic: Literal["fees", "lost book", "other"]) -> str:
        """Hand the member over to a librarian. This ends the conversation."""
        self.messages[f"M{len(self.messages) + 1}"] = Message(card=card, topic=topic)
        return "A librarian takes over."


# The policy as rules: a conversation that breaks one earns nothing. Each quotes the sentence it stands for.
member = rules.Caller(tools=("list_loans",), owner="card")
changes = rules.calls("renew_loan", "reserve_book")
RULES = (
    Rule(
        "card first",
        "Ask for the member's card number before you look at loans or change anything.",
        rules.both(
            rules.before(rules.calls("list_loans"), rules.said_by_user()),
            rules.before(rules.calls("reserve_book"), rules.said_by_user("card")),
            rules.before(rules.calls("renew_loan", "reserve_book", "call_librarian"), member.identified),
            rules.never(member.told_too_early),
        ),
    ),
    Rule(
        "own loans only",
        "Speak only about that member's own loans.",
        rules.both(rules.before(changes, member.owns("loan_id")), rules.never(member.told_of_others)),
    ),
    Rule(
        "confirm",
        "Say exactly what you are about to do and wait for a clear yes.",
        rules.before(changes, rules.confirmed()),
    ),
    Rule(
        "renew twice at most",
        "A loan can be renewed twice, and not while another member waits for the book.",
        rules.before(
            rules.calls("renew_loan"),
            rules.looked_up("loan_id"),
            rules.has("loan_id", "renewals", *range(MOST_RENEWALS)),
        ),
    ),
    Rule(
        "never guess",
        "Answer questions from the records. Never guess.",
        rules.both(
            rules.never(speech.makes_up, speech.contradicts_itself, speech.insults),
            speech.reports_truthfully({"renew_loan": r"\brenew|\bexten", "reserve_book": r"\breserv|\blist"}),
        ),
    ),
    Rule("one thing at a time", "Make one tool call at a time", rules.one_call_at_a_time),
)

domain = Domain.load(
    __file__, Library, policy_rules=RULES
)  # policy.md, database.json and tasks.jsonl beside this file
