"""The policies of TAU2's domains as rules, as far as a conversation shows them.

They are reported beside the official grade and never change it: no rule is required.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trialogue.world.events import Event, Events, Record, find_leaves, is_stated
from trialogue.world.policy_rules import (
    Caller,
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
    once_per,
    one_call_at_a_time,
    report_only,
    said_by_user,
    says,
)
from trialogue.world.policy_speech import contradicts_itself, insults, invents_ids, tells_secrets

NAMES = ("name", "options", "brand", "last_four", "source")
"""Fields by which an agent names an item or a way to pay instead of by its id."""
TOLD_OTHERWISE = ("country", "state", "user_id", "reason", "order_id")
"""Arguments that an agent need not repeat letter by letter."""
_CHANGING = ("cancel_", "modify_", "return_", "exchange_", "book_", "update_", "send_certificate")
_OWN_REPORT = re.compile(
    r"\bI(?:['\u2019]ve| have)(?: also| just| now)? (cancel|return|exchang|book)l?ed\b",
    re.IGNORECASE,
)
"""A change that the agent reports as its own; the group begins the name of the tool that makes it."""
_DENIAL = re.compile(r"\bnothing (?:has been|was) changed\b", re.IGNORECASE)


def _misreports(events: Events, said: Event) -> str:
    """Wrong: the agent reports as its own a change that no call has made, or denies any after one."""
    done = [call for call in events.called if call.place < said.place and not call.failed]
    for report in _OWN_REPORT.finditer(said.text):
        if not any(call.name.startswith(report[1].lower()) for call in done):
            return f"{report[0]!r} reports what no call has done"
    changed = [call.name for call in done if call.name.startswith(_CHANGING)]
    if changed and _DENIAL.search(said.text):
        return f"{changed[0]} was done, and the agent says that nothing was"
    return ""


def list_shared(one_call: str, made_up: str) -> tuple[Rule, ...]:
    """The rules that all three policies have, two of them in words of their own."""
    return (
        Rule("one call at a time", one_call, one_call_at_a_time),
        Rule(
            "say that they are transferred",
            "send the message 'YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON.' to the user.",
            before(after(calls("transfer_to_human_agents")), says("being transferred")),
        ),
        Rule("make nothing up", made_up, never(invents_ids, contradicts_itself, tells_secrets, _misreports)),
        Rule("be civil", "you can help users", never(insults)),
    )


ONE_CALL = "if you make a tool call, you should not respond to the user simultaneously"
MADE_UP = "any information, knowledge, or procedures not provided by the user or available tools"

# -- retail ------------------------------------------------------------------------------------------------

_buyer = Caller(("find_user_id_by_email", "find_user_id_by_name_zip"), owner="user_id")
_ON_ORDERS = (
    *("cancel_pending_order", "modify_pending_order_address", "modify_pending_order_items"),
    *("modify_pending_order_payment", "return_delivered_order_items", "exchange_delivered_order_items"),
)
_orders = calls(*_ON_ORDERS)
_updates = calls(*_ON_ORDERS, "modify_user_address")
AUTHENTICATE = (
    "At the beginning of the conversation, you have to authenticate the user identity by locating their user "
    "id via email, or via name + zip code."
)
RETAIL = (
    Rule(
        "authenticate",
        AUTHENTICATE,
        before(_updates, _buyer.identified),
    ),
    Rule("authenticate by what the user says", AUTHENTICATE, before(calls(*_buyer.tools), said_by_user())),
    Rule(
        "tell only after authenticating",
        "Once the user has been authenticated, you can provide the user with information",
        never(_buyer.told_too_early),
    ),
    Rule(
        "serve one user",
        "You can only help one user per conversation",
        both(before(_orders, _buyer.owns("order_id")), never(_buyer.told_of_others)),
    ),
    Rule(
        "confirm",
        "you must list the action details and obtain explicit user confirmation (yes) to proceed.",
        before(_updates, confirmed(names=NAMES, untold=TOLD_OTHERWISE, earlier=True)),
    ),
    Rule(
        "check the order",
        "you should check its status before taking the action.",
        before(_orders, looked_up("order_id")),
    ),
    Rule(
        "pending orders only",
        "An order can only be cancelled if its status is 'pending'\n"
        "An order can only be modified if its status is 'pending'",
        before(
            calls("cancel_pending_order", "modify_pending_order_items", "modify_pending_order_payment"),
            has("order_id", "status", "pending"),
        ),
    ),
    Rule(
        "delivered orders only",
        "An order can only be returned if its status is 'delivered'\n"
        "An order can only be exchanged if its status is 'delivered'",
        before(
            calls("return_delivered_order_items", "exchange_delivered_order_items"),
            has("order_id", "status", "delivered"),
        ),
    ),
    Rule(
        "exchange or modify once",
        "Exchange or modify order tools can only be called once per order.",
        once_per("order_id", calls("exchange_delivered_order_items", "modify_pending_order_items")),
    ),
    *list_shared(
        "if you take a tool call, you should not respond to the user at the same time",
        "You should not make up any information",
    ),
)

# -- airline -----------------------------------------------------------------------------------------------

_flyer = Caller(("get_user_details",), owner="user_id")
_bookings = calls(
    *("book_reservation", "cancel_reservation", "update_reservation_baggages"),
    *("update_reservation_flights", "update_reservation_passengers"),
)
_changes = calls(
    *("cancel_reservation", "update_reservation_baggages"),
    *("update_reservation_flights", "update_reservation_passengers"),
)
A_DAY_AGO = "2024-05-14T15:00:00"


def _keeps_basic_economy(reservation: Record, call: Event) -> bool:
    """Whether the flights of a basic economy reservation stay as they are."""
    if reservation.get("cabin") != "basic_economy":
        return True
    return _list_flights(reservation) == _list_flights(call.arguments)


def _list_flights(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    flights: list[Any] = record.get("flights") or []
    return sorted((str(item.get("flight_number")), str(item.get("date"))) for item in flights)


def _keeps_bags(booked: Record, call: Event) -> bool:
    """Whether no checked bag is taken off a reservation."""
    asked, before = call.arguments.get("total_baggages"), booked.get("total_baggages")
    return not (isinstance(asked, int) and isinstance(before, int)) or asked >= before


def _is_small(events: Events, call: Event) -> str:
    """Condition: no more than two gigabytes."""
    amount = call.arguments.get("gb_amount")
    return "more than 2 GB" if isinstance(amount, int | float) and amount > 2 else ""


def _gave_user_id(events: Events, call: Event) -> str:
    """Condition: the user said the user id of the reservation, or the one that is booked for."""
    reservation = events.find_record(call.arguments.get("reservation_id"), call) or call.arguments
    user_id = reservation.get("user_id")
    if user_id is None or events.was_heard(user_id, call):
        return ""
    return f"{call.name} for {user_id}, an id that the user never gave"


def _listed_details(events: Events, call: Event) -> str:
    """Condition: the agent had stated a value of the call, whichever."""
    said = [text for text in events.said if text.place < call.place]
    if any(is_stated(value, *said) for value in find_leaves(call.arguments)):
        return ""
    return f"{call.name} without details: nothing that the agent had said gives any of its values"


def _may_be_cancelled(events: Events, call: Event) -> str:
    """Condition: one of the grounds for a cancellation is on record."""
    reservation = events.find_record(call.arguments.get("reservation_id"), call)
    if reservation is None:
        return "a reservation was cancelled that was not looked up"
    grounds = (
        str(reservation.get("created_at", "")) >= A_DAY_AGO,
        reservation.get("cabin") == "business",
        reservation.get("insurance") == "yes",
        events.was_shown(r"\bcancelled\b", call),
    )
    return "" if any(grounds) else "older than a day, not business, not insured, and no flight is cancelled"


def _may_be_compensated(events: Events, call: Event) -> str:
    """Condition: the user is silver or gold, or has insurance, or flies business."""
    shown = [record for _, record in events.find_records(call)]
    is_member = any(record.get("membership") in ("silver", "gold") for record in shown)
    is_entitled = any(
        record.get("insurance") == "yes" or record.get("cabin") == "business" for record in shown
    )
    return "" if is_member or is_entitled else "a regular member without insurance who flies economy"


AIRLINE = (
    Rule(
        "obtain the user id",
        "First, the agent must obtain the user id and reservation id.\nThe user must provide their user id.",
        before(_bookings, _gave_user_id),
    ),
    Rule(
        "own reservations only",
        "The user must provide their user id.",
        both(before(_changes, _flyer.owns("reservation_id")), never(_flyer.told_of_others)),
    ),
    Rule(
        "confirm",
        "you must list the action details and obtain explicit user confirmation (yes) to proceed.",
        before(_bookings, confirmed(told=()), _listed_details),
    ),
    Rule(
        "check the reservation",
        "The API does not check these for the agent, so the agent must make sure the rules apply",
        before(_changes, looked_up("reservation_id")),
    ),
    Rule(
        "basic economy stays",
        "Basic economy flights cannot be modified.",
        before(
            calls("update_reservation_flights"),
            on_record("reservation_id", _keeps_basic_economy, "basic economy flights were modified"),
        ),
    ),
    Rule(
        "cancel on grounds",
        "Otherwise, flight can be cancelled if any of the following is true:",
        before(calls("cancel_reservation"), _may_be_cancelled),
    ),
    Rule(
        "add bags only",
        "The user can add but not remove checked bags.",
        before(
            calls("update_reservation_baggages"),
            on_record(
                "reservation_id",
                _keeps_bags,
                "bags were removed",
            ),
        ),
    ),
    Rule(
        "compensate whom it is due",
        "Only compensate if the user is a silver/gold member or has travel insurance or flies business.",
        before(calls("send_certificate"), _may_be_compensated),
    ),
    *list_shared(ONE_CALL, MADE_UP),
)

# -- telecom -----------------------------------------------------------------------------------------------

_subscriber = Caller(
    ("get_customer_by_phone", "get_customer_by_id", "get_customer_by_name"), owner="customer_id"
)
_lines = calls(
    *(
        "suspend_line",
        "resume_line",
        "send_payment_request",
        "enable_roaming",
        "disable_roaming",
        "refuel_data",
    ),
)


def _is_overdue(events: Events, call: Event) -> str:
    """Condition: the bill was looked up, and is overdue."""
    bill = events.find_record(call.arguments.get("bill_id"), call)
    if bill is None:
        return "the bill was not looked up"
    return "" if str(bill.get("status")).lower() == "overdue" else f"the bill is {bill.get('status')}"


TELECOM = (
    Rule(
        "look the customer up",
        "You can look up customer information using:",
        before(_lines, _subscriber.identified),
    ),
    Rule(
        "look up by what the user says",
        "You can look up customer information using:",
        before(calls(*_subscriber.tools), said_by_user()),
    ),
    Rule("tell only the customer", "help users", never(_subscriber.told_too_early)),
    Rule(
        "check that the bill is overdue",
        "You should always check that the bill is overdue before sending a payment request.",
        before(calls("send_payment_request"), _is_overdue),
    ),
    Rule(
        "one payment request at a time",
        "A user can only have one bill in the AWAITING PAYMENT status at a time.",
        at_most(1, calls("send_payment_request")),
    ),
    Rule(
        "refuel two gigabytes at most",
        "The maximum amount of data that can be refueled is 2GB.",
        before(
            calls("refuel_data"),
            _is_small,
        ),
    ),
    Rule(
        "ask how much to refuel",
        "Ask them how much data they want to refuel\nConfirm the price",
        before(calls("refuel_data"), confirmed(told=("gb_amount",), earlier=True)),
    ),
    *list_shared(ONE_CALL, MADE_UP),
)

RULES = {
    name: report_only(rules)
    for name, rules in (
        ("retail", RETAIL),
        ("airline", AIRLINE),
        ("telecom", TELECOM),
        ("telecom-workflow", TELECOM),
    )
}
"""The rules of each domain that has some."""
