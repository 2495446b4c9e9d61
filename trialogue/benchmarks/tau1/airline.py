"""TAU-bench airline: fourteen tools over flights, reservations and users."""

from __future__ import annotations

import json
from typing import Any

from trialogue.benchmarks.arithmetic import ALLOWED
from trialogue.benchmarks.arithmetic import calculate as work_out
from trialogue.benchmarks.tau1.world import Tau1Toolkit
from trialogue.benchmarks.tau2.airline import AIRPORTS, CERTIFICATE_IDS, NOW, RESERVATION_IDS
from trialogue.benchmarks.toolkit import Plain
from trialogue.world.database import Table
from trialogue.world.tools import tool
from trialogue.world.values import copy_value


class AirlineTools(Tau1Toolkit):
    flights: Table[Plain]
    reservations: Table[Plain]
    users: Table[Plain]

    def _seat(self, flight: Plain, cabin: str, seats: int) -> Plain:
        """A wanted flight with its price, origin and destination filled in."""
        number = flight["flight_number"]
        known = self.look("flights", number)
        if known is None:
            raise ValueError(f"flight {number} not found")
        if flight["date"] not in known["dates"]:
            raise ValueError(f"flight {number} not found on date {flight['date']}")
        on_date = known["dates"][flight["date"]]
        if on_date["status"] != "available":
            raise ValueError(f"flight {number} not available on date {flight['date']}")
        if on_date["available_seats"][cabin] < seats:
            raise ValueError(f"not enough seats on flight {number}")
        return {
            **flight,
            "price": on_date["prices"][cabin],
            "origin": known["origin"],
            "destination": known["destination"],
        }

    def _on_date(self, flight: Plain, date: str) -> Plain:
        shown = {name: value for name, value in flight.items() if name != "dates"}
        return {**shown, **flight["dates"][date]}

    def _check_method(self, user_id: str, payment_id: str, price: int) -> bool:
        """Whether a gift card pays; complains where the method cannot."""
        user = self.look("users", user_id)
        if user is None:
            raise KeyError(user_id)
        if payment_id not in user["payment_methods"]:
            raise ValueError("payment method not found")
        method = user["payment_methods"][payment_id]
        if method["source"] == "certificate":
            raise ValueError("certificate cannot be used to update reservation")
        if method["source"] == "gift_card" and method["amount"] < price:
            raise ValueError("gift card balance is not enough")
        return method["source"] == "gift_card"

    @tool(writes=True)
    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: str,
        cabin: str,
        flights: list[dict[str, Any]],
        passengers: list[dict[str, Any]],
        payment_methods: list[dict[str, Any]],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: str,
    ) -> Plain:
        """Book a reservation.

        Args:
            user_id: Id of the user.
            origin: Airport code where the trip begins.
            destination: Airport code where it ends.
            flight_type: One way or round trip.
            cabin: Cabin class of all flights.
            flights: Number and date of each flight.
            passengers: First name, last name and date of birth of each passenger.
            payment_methods: Which payment method pays how much.
            total_baggages: Number of bags.
            nonfree_baggages: How many of them are to be paid.
            insurance: Whether to insure the trip.
        """
        user = self.need("users", user_id, "user")
        reservation_id = next(
            (name for name in RESERVATION_IDS if name not in self.reservations), RESERVATION_IDS[-1]
        )
        seats = len(passengers)
        booked = [self._seat(flight, cabin, seats) for flight in flights]
        price = sum(flight["price"] * seats for flight in booked)
        if insurance == "yes":
            price += 30 * seats
        price += 50 * nonfree_baggages
        for payment in payment_methods:
            payment_id, amount = payment["payment_id"], payment["amount"]
            if payment_id not in user["payment_methods"]:
                raise ValueError(f"payment method {payment_id} not found")
            method = user["payment_methods"][payment_id]
            if method["source"] in ("gift_card", "certificate") and method["amount"] < amount:
                raise ValueError(f"not enough balance in payment method {payment_id}")
        paid = sum(payment["amount"] for payment in payment_methods)
        if paid != price:
            raise ValueError(f"payment amount does not add up, total price is {price}, but paid {paid}")
        user = self.touch("users", user_id)
        for payment in payment_methods:
            method = user["payment_methods"][payment["payment_id"]]
            if method["source"] == "gift_card":
                method["amount"] -= payment["amount"]
            elif method["source"] == "certificate":
                del user["payment_methods"][payment["payment_id"]]
        reservation: Plain = {
            "reservation_id": reservation_id,
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": booked,
            "passengers": copy_value(passengers),
            "payment_history": copy_value(payment_methods),
            "created_at": NOW,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
        }
        self.lay("reservations", reservation_id, reservation)
        user["reservations"].append(reservation_id)
        return reservation

    @tool
    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses.
        """
        if not all(char in ALLOWED for char in expression):
            raise ValueError("invalid characters in expression")
        return work_out(expression)

    @tool(writes=True)
    def cancel_reservation(self, reservation_id: str) -> Plain:
        """Cancel a whole reservation and refund its payments.

        Args:
            reservation_id: Id of the reservation.
        """
        self.need("reservations", reservation_id, "reservation")
        reservation = self.touch("reservations", reservation_id)
        history = reservation["payment_history"]
        history += [{"payment_id": item["payment_id"], "amount": -item["amount"]} for item in history]
        reservation["status"] = "cancelled"
        return reservation

    @tool
    def get_reservation_details(self, reservation_id: str) -> Plain:
        """Look a reservation up.

        Args:
            reservation_id: Id of the reservation.
        """
        return self.need("reservations", reservation_id, "user")  # so says the benchmark

    @tool
    def get_user_details(self, user_id: str) -> Plain:
        """Look a user and the ids of their reservations up.

        Args:
            user_id: Id of the user.
        """
        return self.need("users", user_id, "user")

    @tool
    def list_all_airports(self) -> str:
        """List all airports and their cities."""
        return json.dumps(AIRPORTS)

    @tool
    def search_direct_flight(self, origin: str, destination: str, date: str) -> list[Plain]:
        """Find direct flights on a date.

        Args:
            origin: Airport code to leave from.
            destination: Airport code to arrive at.
            date: Date as YYYY-MM-DD.
        """
        found: list[Plain] = []
        for key in self.keys_where("flights", "origin", origin):
            flight = self.look("flights", key)
            on_date = flight["dates"].get(date) if flight["destination"] == destination else None
            if on_date is not None and on_date["status"] == "available":
                found.append(self._on_date(flight, date))
        return found

    @tool
    def search_onestop_flight(self, origin: str, destination: str, date: str) -> list[list[Plain]]:
        """Find pairs of flights with one stop on a date.

        Args:
            origin: Airport code to leave from.
            destination: Airport code to arrive at.
            date: Date as YYYY-MM-DD.
        """
        found: list[list[Plain]] = []
        for key in self.keys_where("flights", "origin", origin):
            first = self.look("flights", key)
            arrival = first["scheduled_arrival_time_est"]
            for other in self.keys_where("flights", "origin", first["destination"]):
                second = self.look("flights", other)
                if second["destination"] != destination:
                    continue
                next_date = f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date
                if arrival > second["scheduled_departure_time_est"]:
                    continue
                if date not in first["dates"] or next_date not in second["dates"]:
                    continue
                if (
                    first["dates"][date]["status"] == "available"
                    and second["dates"][next_date]["status"] == "available"
                ):
                    # The second flight is shown as it is on the first date: the benchmark's own slip.
                    pair = [self._on_date(first, date), self._on_date(second, date)]
                    pair[0]["date"], pair[1]["date"] = date, next_date
                    found.append(pair)
        return found

    @tool(writes=True)
    def send_certificate(self, user_id: str, amount: int) -> str | None:
        """Give a user a certificate.

        Args:
            user_id: Id of the user.
            amount: What it is worth.
        """
        methods = self.need("users", user_id, "user")["payment_methods"]
        for payment_id in CERTIFICATE_IDS:
            if payment_id not in methods:
                certificate = {"source": "certificate", "amount": amount, "id": payment_id}
                self.touch("users", user_id)["payment_methods"][payment_id] = certificate
                return f"Certificate {payment_id} added to user {user_id} with amount {amount}."
        return None

    @tool
    def think(self, thought: str) -> str:
        """Think about something; nothing happens.

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

    @tool(writes=True)
    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> Plain:
        """Change the number of bags of a reservation.

        Args:
            reservation_id: Id of the reservation.
            total_baggages: Number of bags from now on.
            nonfree_baggages: How many of them are to be paid.
            payment_id: What pays for additional bags.
        """
        reservation = self.need("reservations", reservation_id, "reservation")
        price = 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"])
        is_gift_card = self._check_method(reservation["user_id"], payment_id, price)
        reservation = self.touch("reservations", reservation_id)
        reservation["total_baggages"] = total_baggages
        reservation["nonfree_baggages"] = nonfree_baggages
        self._pay(reservation, payment_id, price, is_gift_card)
        return reservation

    @tool(writes=True)
    def update_reservation_flights(
        self, reservation_id: str, cabin: str, flights: list[dict[str, Any]], payment_id: str
    ) -> Plain:
        """Change the flights of a reservation.

        Args:
            reservation_id: Id of the reservation.
            cabin: Cabin class of all flights.
            flights: Number and date of every flight of the new reservation, unchanged ones included.
            payment_id: What pays, or receives, the difference in price.
        """
        reservation = self.need("reservations", reservation_id, "reservation")
        seats = len(reservation["passengers"])
        booked: list[Plain] = []
        for flight in flights:
            kept = next(
                (
                    held
                    for held in reservation["flights"]
                    if held["flight_number"] == flight["flight_number"]
                    and held["date"] == flight["date"]
                    and cabin == reservation["cabin"]
                ),
                None,
            )
            if kept is None:
                booked.append(self._seat(flight, cabin, seats))
            else:
                same = {name: kept[name] for name in ("price", "origin", "destination")}
                booked.append({**flight, **same})
        before = sum(flight["price"] for flight in reservation["flights"])
        price = (sum(flight["price"] for flight in booked) - before) * seats
        is_gift_card = self._check_method(reservation["user_id"], payment_id, price)
        reservation = self.touch("reservations", reservation_id)
        reservation["flights"] = booked
        self._pay(reservation, payment_id, price, is_gift_card)
        return reservation

    def _pay(self, reservation: Plain, payment_id: str, price: int, is_gift_card: bool) -> None:
        if is_gift_card:
            self.touch("users", reservation["user_id"])["payment_methods"][payment_id]["amount"] -= price
        if price != 0:
            reservation["payment_history"].append({"payment_id": payment_id, "amount": price})

    @tool(writes=True)
    def update_reservation_passengers(self, reservation_id: str, passengers: list[dict[str, Any]]) -> Plain:
        """Change the passengers of a reservation, not their number.

        Args:
            reservation_id: Id of the reservation.
            passengers: First name, last name and date of birth of each passenger.
        """
        reservation = self.need("reservations", reservation_id, "reservation")
        if len(passengers) != len(reservation["passengers"]):
            raise ValueError("number of passengers does not match")
        reservation = self.touch("reservations", reservation_id)
        reservation["passengers"] = copy_value(passengers)
        return reservation
