"""The shop's policy as rules: every sentence of `policy.md` that can be seen in a conversation."""

from __future__ import annotations

import re

from trialogue.world.events import Event, Events, Record
from trialogue.world.policy_rules import (
    Caller,
    Condition,
    Rule,
    after,
    at_most,
    before,
    both,
    calls,
    confirmed,
    has,
    looked_up,
    never,
    on_record,
    only_with,
    said_by_user,
    says,
)
from trialogue.world.policy_speech import (
    claims,
    contradicts_itself,
    find_named,
    insults,
    makes_up,
    reads_out,
    recites,
    reports_truthfully,
)
from trialogue.world.texts import Text, by_form

ACTS = {
    "cancel_order": r"\bcancel",
    "return_items": r"\breturn|\bsen[dt]\b.* back\b",
    "exchange_items": r"\bexchang|\bswap",
    "change_items": r"\breplac|\bswap|\bexchang|\bchang\w*\b.*\bitems?\b",
    "change_address": r"\baddress|\bdeliver\w* to\b",
    "change_payment": r"\bpay|(?<!gift )\bcard\b",
    "refund_to_gift_card": r"\brefund|\bgift card",
}
"""The words for what each tool does."""
REASONS = {
    "no longer needed": r"\blonger\b|(?:n't|not) (?:need|want)|\bany ?more\b",
    "ordered by mistake": r"\bmistake|\baccident|\bby error\b",
    "found cheaper": r"\bcheaper|\bbetter price|\bless\b",
}
TOPICS = {
    "damaged item": r"\bdamag|\bbroken|\bdefect",
    "lost parcel": r"\blost\b|\bmissing\b|\bnever (?:arrived|came)",
    "invoice": r"\binvoice|\breceipt|\bbill\b",
    "complaint": r"\bcomplain",
    "website problem": r"\bweb ?site|\bpage\b|\blog ?in\b",
}
caller = Caller(("find_customer_by_email", "find_customer_by_name"), owner="customer_id")
changes = calls(*ACTS)
transfer = calls("transfer_to_human")


AMOUNT = r"\b\d+\.\d\d\b"
STATUSES = ("pending", "shipped", "delivered", "cancelled", "canceled", "returned")
STATUS = r"\b(?:pending|shipped|delivered|cancell?ed|returned)\b"
OF_POLICY = (
    r"\b(?:only|not|n't|never|no longer|if|once|unless|until|when|be|being) (?:\w+ ){0,2}?"
    rf"{STATUS}(?:,? (?:or|and) {STATUS})*|{STATUS}(?:,? (?:or|and) {STATUS})* (?:orders|items)\b"
)
"""Words about a status that say what the policy is, not what the status of an order is."""


def has_status(*allowed: str) -> Condition:
    """The order has one of these statuses."""
    return has("order_id", "status", *allowed)


def shows_status(orders: list[Record], words: str) -> bool:
    """Whether one of the orders has, or had, the status that some words give it."""
    status = "cancelled" if words == "canceled" else words
    return any(
        order.get("status") == status
        or bool(order.get(status))  # some of its items are returned
        or (status == "delivered" and "days_since_delivery" in order)
        for order in orders
    )


def _say_whose(text: Text) -> str:
    found = _OTHERS.search(text.lowered)
    return found.group() if found else ""


_OTHERS = re.compile(
    r"\b(?:another|different|other) customer|\bsomeone else|\b(?:not|n't) (?:belong|yours|your order)"
    r"|\bnot (?:on|in|linked to|associated with) your account"
)
find_others = by_form(_say_whose, _OTHERS.pattern)


@only_with("customer", "someone", "belong", "belongs", "yours", "your")
def says_whose_falsely(events: Events, said: Event) -> str:
    """Wrong: the text says that an order is another customer's, and no order is."""
    found = find_others(said)
    if not found:
        return ""
    who = caller.find(events, said)
    owners = {record["customer_id"] for record in find_named(events, said) if "customer_id" in record}
    return "" if owners - {who} else f"it says {found!r}, which no record shows"


def misstates(field: str, words: str, form: str, about: str) -> Condition:
    """Wrong: a statement that gives a field of an order gives another value than the records do."""
    names, values = re.compile(words), re.compile(form)

    def find_sentences(text: Text) -> list[int]:
        return [
            place
            for place, sentence in enumerate(text.statements)
            if names.search(sentence) and not _BESIDES.search(sentence)
        ]

    find = by_form(find_sentences, words, _BESIDES.pattern)

    @only_with(about)
    def check(events: Events, said: Event) -> str:
        for place in find(said):
            sentence = said.statements[place]
            known = {str(record[field]).lower() for record in find_named(events, said) if field in record}
            for value in values.findall(sentence):
                if known and value not in known and value.rstrip("0") not in known:
                    return f"it gives {value!r} as {field}, the records give {', '.join(sorted(known))}"
        return ""

    return check


_BESIDES = re.compile(r"\b(?:also|besides|on file|profile|available|instead|chang\w*|updat\w*|from|to)\b")
GIFT_CARD = re.compile(r"\bgift\b", re.IGNORECASE)


@only_with("needed", "mistake", "cheaper")
def guesses_the_reason(events: Events, said: Event) -> str:
    """Wrong: the text gives one reason for a cancellation, and the user never did."""
    given = [reason for reason in REASONS if reason in said.lowered]
    if len(given) != 1 or any(
        re.search(REASONS[given[0]], heard.lowered) for heard in events.heard if heard.place < said.place
    ):
        return ""
    return f"it gives the reason {given[0]!r}, the user did not"


def asked_for_gift_card(events: Events, call: Event) -> str:
    """Condition: the user spoke of a gift card before."""
    heard = any(GIFT_CARD.search(item.text) for item in events.heard if item.place < call.place)
    return "" if heard else "a refund to a gift card that the user never asked for"


def is_their_method(events: Events, call: Event) -> str:
    """Condition: the payment method is one that the customer has on record."""
    customer = events.find_record(caller.find(events, call), call) or {}
    methods = customer.get("payment_methods", ())
    return "" if call.arguments.get("payment_method") in methods else "it is not the customer's"


IDENTIFY = (
    "Identify the customer first, by e-mail or by name and postcode, before telling or changing anything."
)
RULES = (
    # Always
    Rule(
        "identify before changing",
        IDENTIFY,
        before(changes, caller.identified),
    ),
    Rule("identify before telling", IDENTIFY, never(caller.told_too_early)),
    Rule(
        "identify by what the customer says",
        IDENTIFY,
        before(calls(*caller.tools), said_by_user()),
    ),
    Rule(
        "tell nobody of others",
        "Speak only about this customer's own orders.",
        never(caller.told_of_others),
    ),
    Rule(
        "change only their own orders",
        "Speak only about this customer's own orders.",
        before(changes, caller.owns("order_id")),
    ),
    Rule(
        "one change at a time",
        "Deal with one request at a time.",
        at_most(1, changes),
    ),
    Rule(
        "look up before changing",
        "Look an order up before deciding about it.",
        before(changes, looked_up("order_id")),
    ),
    Rule(
        "confirm each change",
        "Before each change say what you will do and get an explicit yes.\n"
        "If the customer changes their mind, do only what they want now.",
        before(changes, confirmed(acts=ACTS)),
    ),
    Rule(
        "report truthfully",
        "After each request say what was done",
        reports_truthfully(ACTS),
    ),
    Rule(
        "ask for more",
        "After each request say what was done and ask whether there is anything else.",
        before(after(changes), says(r"\belse\b|\bmore\b|\bfurther\b|\bother\b")),
        required=False,
    ),
    # Allowed
    Rule(
        "cancel only pending orders",
        "Cancel: only pending orders.",
        before(calls("cancel_order"), has_status("pending")),
    ),
    Rule(
        "ask for the reason",
        "Ask the reason: no longer needed, ordered by mistake, or found cheaper.",
        both(before(calls("cancel_order"), said_by_user("reason", REASONS)), never(guesses_the_reason)),
    ),
    Rule(
        "change only pending orders",
        "Change address, payment method or items: only pending orders.",
        before(calls("change_address", "change_payment", "change_items"), has_status("pending")),
    ),
    Rule(
        "pay by their own methods",
        "The payment method must be one of the customer's",
        before(calls("change_payment"), is_their_method),
    ),
    Rule(
        "only items in stock",
        "a new item must be in stock.\nfor an item in stock",
        before(
            calls("change_items", "exchange_items"),
            looked_up("new_item_ids"),
            on_record("new_item_ids", lambda item, call: item.get("in_stock") is True, "it is not in stock"),
        ),
    ),
    Rule(
        "return within 30 days",
        "Return: only delivered orders, at most 30 days since delivery.\n"
        "Exchange: only delivered orders, at most 30 days since delivery",
        before(
            calls("return_items", "exchange_items"),
            has_status("delivered"),
            on_record(
                "order_id",
                lambda order, call: order.get("days_since_delivery", 0) <= 30,
                "it was delivered more than 30 days ago",
            ),
        ),
    ),
    Rule(
        "exchange once",
        "only one exchange per order",
        before(
            calls("exchange_items"),
            on_record("order_id", lambda order, call: not order.get("exchanged"), "it was exchanged before"),
        ),
    ),
    Rule(
        "refund only what was taken back",
        "Refund to gift card: only cancelled or returned orders; refund the total.",
        before(
            calls("refund_to_gift_card"),
            has_status("cancelled", "returned"),
            on_record(
                "order_id",
                lambda order, call: order.get("total") == call.arguments.get("total"),
                "the amount is not the order's total",
            ),
        ),
    ),
    Rule(
        "refund where they asked",
        "Refunds go to the original payment method or a gift card, never anywhere else.\n"
        "The refund goes to the original payment method.",
        before(calls("refund_to_gift_card"), asked_for_gift_card),
    ),
    Rule(
        "answer from the records",
        "Questions about the customer's orders and about products: look up and answer.",
        never(
            makes_up,
            claims(STATUS, shows_status, STATUSES, unless=OF_POLICY),
            misstates("total", r"\btotal\b", AMOUNT, "total"),
            misstates(
                "payment_method",
                r"\bpayment method of\b",
                r"\b(?:visa|mastercard|amex) \d{4}\b|\bpaypal\b",
                "payment",
            ),
            misstates("address", r"\baddress of\b", r"\b\d+ \w+ (?:street|road|lane)\b", "address"),
        ),
    ),
    # Not allowed
    Rule(
        "give the true reason",
        "Refuse whatever is not allowed above, say why (the status, the 30 days, the earlier exchange, the "
        "stock, the original payment method, an order of another customer) and change nothing.",
        never(
            says_whose_falsely,
            claims(
                r"\b(?:not|n't|out of|no longer) (?:currently |now )?(?:in )?stock\b",
                lambda records, words: any(record.get("in_stock") is False for record in records),
                about=("stock",),
            ),
            claims(
                r"\balready (?:been )?exchanged|\bsecond exchange",
                lambda records, words: any(record.get("exchanged") for record in records),
                about=("exchanged", "exchange"),
            ),
            claims(
                r"\b(?:more than|over|past|beyond|exceeds?|outside) (?:\w+ ){0,2}?(?:30|thirty)[ -]day",
                lambda records, words: any(record.get("days_since_delivery", 0) > 30 for record in records),
                about=("day", "days"),
            ),
        ),
    ),
    Rule(
        "say one thing",
        "say why",
        never(
            contradicts_itself,
            recites(3, STATUS, "statuses", STATUSES),
            recites(
                2,
                r"\b(?:30|thirty)[ -]day|\bstock\b|\bexchanged\b|another customer|original payment",
                "reasons",
                ("day", "days", "stock", "exchanged", "customer", "original"),
            ),
            recites(6, AMOUNT, "amounts"),
            reads_out(7),
        ),
    ),
    # Out of scope
    Rule(
        "transfer after identifying",
        "Transfer to a human only for these topics, after identifying the customer",
        before(transfer, caller.identified),
    ),
    Rule(
        "transfer only for its topics",
        "damaged item, lost parcel, invoice, complaint, website problem.\nDo not transfer for that.",
        before(transfer, said_by_user("topic", TOPICS)),
    ),
    Rule(
        "be civil",
        "You help customers with their orders by talking with them and using the tools.",
        never(insults),
    ),
)
