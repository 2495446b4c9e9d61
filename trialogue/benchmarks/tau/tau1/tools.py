"""The tools of the first TAU-bench: those of TAU2 with the overrides in this file.

This generation checks less, does not normalize records, and begins error texts with a lower-case letter (see
`world`). It adds the tool `think`, and its transfer ends the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel

from trialogue.benchmarks.tau import airline, retail
from trialogue.benchmarks.toolkit import Plain
from trialogue.world.tools import tool
from trialogue.world.values import copy_value

TRANSFER = "transfer_to_human_agents"
"""The tool that ends a conversation."""


def to_hashable(value: Any) -> Any:
    """Dictionaries as sorted pairs, lists as tuples, as the benchmark hashes them."""
    if isinstance(value, dict):
        pairs = sorted(cast("dict[str, Any]", value).items())
        return tuple((key, to_hashable(inner)) for key, inner in pairs)
    if isinstance(value, list):
        return tuple(to_hashable(inner) for inner in cast("list[Any]", value))
    return value


class Tau1Toolkit:
    """The common parts of both databases of the first benchmark."""

    generic = frozenset({"calculate", "think", TRANSFER})
    shapes: ClassVar[Mapping[str, type[BaseModel]]] = {}
    later: ClassVar[frozenset[str]]
    """Tools that only TAU2 has."""

    @staticmethod
    def write(value: Any) -> str:
        return repr(to_hashable(value))

    @staticmethod
    def bind(parts: list[tuple[str, str]]) -> str:
        inner = ", ".join(f"({name!r}, {text})" for name, text in parts)
        return f"({inner},)" if len(parts) == 1 else f"({inner})"

    @tool
    def think(self, thought: str) -> str:
        """Think about something. Nothing happens.

        Args:
            thought: The thought.
        """
        return ""

    @tool(ends=True)
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent, which ends the conversation.

        Args:
            summary: What the user wants and what was done so far.
        """
        return "Transfer successful"


class Tau1RetailTools(Tau1Toolkit, retail.RetailTools):
    later = frozenset({"get_item_details"})
    reasons = ("no longer needed", "ordered by mistake")
    must_differ = False
    not_held = "{item_id} not found"
    not_matching = "The number of items to be exchanged should match"
    no_variant = "New item {item_id} not found or available"
    not_returnable = "some item not found"
    not_original = "Payment method should be either the original payment method or a gift card"

    def _open_order(self, order_id: str) -> Plain:
        return self._order_of(order_id, "pending", "modified")

    def _is_gift_card(self, order: Plain, payment_method_id: str) -> bool:
        return "gift_card" in payment_method_id

    def _to_payment(self, kind: str, amount: float, method: str) -> Plain:
        return {"transaction_type": kind, "amount": amount, "payment_method_id": method}

    def _to_address(self, *values: str) -> Plain:
        return dict(zip(retail.ADDRESS, values, strict=True))

    def _choose_variant(self, item: Plain, new_item_id: str, last: Plain) -> Plain:
        return self._product(item["product_id"])["variants"][new_item_id]


class Tau1AirlineTools(Tau1Toolkit, airline.AirlineTools):
    later = frozenset({"get_flight_status"})
    keeps_cabin = True

    def _read_all(self, kind: Any, values: Any) -> Any:
        return values

    def _part(self, flight: Any, name: str) -> str:
        return flight[name]

    def _user(self, user_id: str) -> Plain:
        return self._find("users", "user", user_id)

    def _reservation(self, reservation_id: str) -> Plain:
        return self._find("reservations", "reservation", reservation_id)

    def _show_reservation(self, reservation_id: str) -> Plain:
        return self._find("reservations", "user", reservation_id)  # a mistake of the benchmark

    def _find(self, table: str, noun: str, key: str) -> Plain:
        found = self.look(table, key)
        if found is None:
            raise ValueError(f"{noun} not found")
        return found

    def _show_airports(self) -> str:
        return json.dumps(airline.TABLES["airports"])

    def _on_date(self, flight: Plain, date: str) -> Plain:
        shown = {name: value for name, value in flight.items() if name != "dates"}
        return {**shown, **flight["dates"][date]}

    def _search(
        self, date: str, origin: str | None, destination: str | None, leave_after: str | None = None
    ) -> list[Plain]:
        flights = [self.look("flights", key) for key in self.keys_where("flights", "origin", origin)]
        return [
            self._on_date(flight, date)
            for flight in flights
            if flight["destination"] == destination and self._is_available(flight, date)
        ]

    @staticmethod
    def _is_available(flight: Plain, date: str) -> bool:
        on_date = flight["dates"].get(date)
        return on_date is not None and on_date["status"] == "available"

    def _search_pairs(self, origin: str, destination: str, date: str) -> list[list[Plain]]:
        found: list[list[Plain]] = []
        for key in self.keys_where("flights", "origin", origin):
            first = self.look("flights", key)
            arrival = first["scheduled_arrival_time_est"]
            for other in self.keys_where("flights", "origin", first["destination"]):
                second = self.look("flights", other)
                if second["destination"] != destination:
                    continue
                next_date = self._next_date(date, arrival)
                if arrival > second["scheduled_departure_time_est"]:
                    continue
                if self._is_available(first, date) and self._is_available(second, next_date):
                    # The benchmark shows the second flight as it is on the first date.
                    pair = [self._on_date(first, date), self._on_date(second, date)]
                    pair[0]["date"], pair[1]["date"] = date, next_date
                    found.append(pair)
        return found

    def _take_seats(self, flight_number: str, date: str, cabin: str, seats: int) -> None:
        """The benchmark does not change the number of free seats."""

    def _choose_id(self) -> str:
        ids: list[str] = airline.TABLES["reservation_ids"]
        return next((name for name in ids if name not in self.reservations), ids[-1])

    def _to_booked(self, flight: Any, known: Plain) -> Plain:
        return {**flight, **{name: known[name] for name in ("price", "origin", "destination")}}

    def _to_reservation(self, fields: Plain) -> Plain:
        return copy_value(fields)

    def _to_payment(self, payment_id: str, price: int) -> Plain:
        return {"payment_id": payment_id, "amount": price}

    def _to_passengers(self, values: Any) -> Any:
        return copy_value(values)

    def _to_certificate(self, payment_id: str, amount: int) -> Plain:
        return {"source": "certificate", "amount": amount, "id": payment_id}

    def _refuse_certificate(self) -> None:
        return None
