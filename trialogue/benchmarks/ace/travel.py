"""The airline of ACEBench: flights, customers and their reservations."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from trialogue.benchmarks.ace.texts import WORLD, say
from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.world.tools import tool

BAG_PRICE = 50
NOW = datetime(2024, 7, 14, 6)
FORMAT = "%Y-%m-%d %H:%M:%S"


def load_travel(language: str) -> Travel:
    """The initial state of the airline."""

    def city(name: str) -> str:
        return WORLD["cities"][name] if language == "zh" else name

    flights: list[Plain] = [
        {
            "flight_no": number,
            "origin": city(origin),
            "destination": city(destination),
            "depart_time": f"2024-07-{departs}:00",
            "arrival_time": f"2024-07-{arrives}:00",
            "status": "available",
            "seats_available": seats,
            "economy_price": economy,
            "business_price": business,
        }
        for number, origin, destination, departs, arrives, seats, economy, business in WORLD["flights"]
    ]
    users: dict[str, Plain] = {
        key: {
            "user_name": name,
            "password": password,
            "cash_balance": cash,
            "bank_balance": bank,
            "membership_level": level,
        }
        for key, name, password, cash, bank, level in WORLD["customers"]
    }
    reservations: list[Plain] = [
        {
            "reservation_id": f"res_{number}",
            "user_id": user,
            "flight_no": flight,
            "payment_method": "bank",
            "cabin": say(language, cabin),
            "baggage": 1,
            "origin": city(origin),
            "destination": city(destination),
        }
        for number, (user, flight, cabin, origin, destination) in enumerate(WORLD["reservations"], 1)
    ]
    return Travel.load(
        {"language": language, "flights": flights, "users": users, "reservations": reservations}
    )


class Travel(Toolkit):
    """The state of the airline."""

    language: str
    flights: list[Plain]
    users: dict[str, Plain]
    reservations: list[Plain]

    def _say(self, key: str, *values: object) -> str:
        return say(self.language, key, *values)

    def _refuse(self, key: str) -> Plain:
        return {"status": "error", "message": self._say(key)}

    def _find_flight(self, number: Any) -> Any:
        return next((flight for flight in self.flights if flight["flight_no"] == number), None)

    def _price(self, flight: Plain, cabin: Any) -> Any:
        """The price of a cabin; everything except economy class costs as much as business class."""
        return flight["economy_price" if cabin == self._say("economy") else "business_price"]

    def _free_bags(self, level: str, cabin: str) -> int:
        cabins = dict(
            zip((self._say("economy"), self._say("business")), WORLD["free_bags"][level], strict=True)
        )
        return cabins[cabin]

    @tool
    def get_flight_details(self, origin: str | None = None, destination: str | None = None) -> Any:
        """Flights from or to a city."""
        found = [
            dict(flight)
            for flight in self.flights
            if (not origin or flight["origin"] == origin)
            and (not destination or flight["destination"] == destination)
        ]
        return found or self._say("no_direct")

    @tool
    def get_user_details(self, user_id: str, password: str) -> Plain:
        """Look up a customer."""
        user = self.authenticate_user(user_id, password)
        return {key: value for key, value in user.items() if key != "password"}

    @tool
    def get_reservation_details(self, reservation_id: str | None = None, user_id: str | None = None) -> Any:
        """One reservation, or all of a customer, with their flights."""
        if not reservation_id and not user_id:
            return self._refuse("which_reservation")
        key, wanted = ("reservation_id", reservation_id) if reservation_id else ("user_id", user_id)
        return [
            {**item, "flight_info": self._find_flight(item["flight_no"])}
            for item in self.reservations
            if item[key] == wanted
        ]

    @tool
    def authenticate_user(self, user_id: str, password: str) -> Plain:
        """Check a customer's password."""
        user = self.users.get(user_id)
        return user if user and user["password"] == password else self._refuse("wrong_account")

    @tool
    def get_baggage_allowance(self, membership_level: str, cabin_class: str) -> int:
        """How many bags are free."""
        try:
            return self._free_bags(membership_level, cabin_class)
        except KeyError:
            return 0

    @tool
    def calculate_baggage_fee(self, membership_level: str, cabin_class: str, baggage_count: int) -> int:
        """What that many bags cost."""
        return max(baggage_count - self._free_bags(membership_level, cabin_class), 0) * BAG_PRICE

    @tool
    def find_transfer_flights(self, origin_city: str, transfer_city: str, destination_city: str) -> Any:
        """Pairs of flights that meet in a city."""

        def leg(origin: str, destination: str) -> list[Plain]:
            wanted = origin, destination, "available"
            return [
                item
                for item in self.flights
                if (item["origin"], item["destination"], item["status"]) == wanted
            ]

        found: list[Plain] = [
            {"first_leg": first, "second_leg": second}
            for first in leg(origin_city, transfer_city)
            for second in leg(transfer_city, destination_city)
            if first["arrival_time"] < second["depart_time"]
        ]
        return found or self._say("no_transfer")

    @tool(writes=True)
    def reserve_flight(
        self,
        user_id: str,
        password: str,
        flight_no: str,
        cabin: str,
        payment_method: str,
        baggage_count: int,
    ) -> str:
        """Book a flight."""
        user = self.authenticate_user(user_id, password)
        flight = self._find_flight(flight_no)
        cost = self._price(flight, cabin)
        # A wrong password raises only here: instead of a customer there is a refusal, which has no level.
        cost += self.calculate_baggage_fee(user["membership_level"], cabin, baggage_count)
        if payment_method not in ("cash", "bank"):
            return self._say("bad_payment")
        if cost > user[f"{payment_method}_balance"]:
            return self._say(f"{payment_method}_short")
        user[f"{payment_method}_balance"] -= cost
        flight["seats_available"] -= 1
        identity = f"res_{len(self.reservations) + 1}"
        self.reservations.append(
            {
                "reservation_id": identity,
                "user_id": user_id,
                "flight_no": flight_no,
                "payment_method": payment_method,
                "cabin": cabin,
                "baggage": baggage_count,
            }
        )
        return self._say("booked", identity, cost)

    @tool(writes=True)
    def modify_flight(
        self,
        user_id: str,
        reservation_id: str,
        new_flight_no: str | None = None,
        new_cabin: str | None = None,
        add_baggage: int = 0,
        new_payment_method: str | None = None,
    ) -> str:
        """Change the flight, cabin or bags of a reservation."""
        item = self._find_reservation(user_id, reservation_id)
        if item is None:
            return self._say("not_yours")
        flight = self._find_flight(item["flight_no"])
        if flight is None:
            return self._say("no_flight")
        method = new_payment_method or item["payment_method"]
        user = self.users[user_id]
        told: list[str] = []
        if new_flight_no and new_flight_no != item["flight_no"]:
            other = self._find_flight(new_flight_no)
            route = flight["origin"], flight["destination"]
            if other is None or (other["origin"], other["destination"]) != route:
                return self._say("flight_unfit")
            item["flight_no"] = new_flight_no
            told.append(self._say("flight_changed"))
        if new_cabin and new_cabin != item["cabin"]:
            # The price is that of the old flight, and the cabin changes even if the customer cannot pay.
            difference = self._cabin_price(flight, new_cabin) - self._cabin_price(flight, item["cabin"])
            item["cabin"] = new_cabin
            is_paid = not difference or self._pay(user, method, difference)
            if difference > 0:
                told.append(self._say("cabin_paid", difference) if is_paid else self._say("cabin_short"))
            elif difference < 0:
                told.append(self._say("cabin_refunded", -difference))
        if add_baggage > 0:
            bags = item["baggage"] + add_baggage
            allowance = self.get_baggage_allowance(user["membership_level"], item["cabin"])
            fee = max(0, bags - allowance) * BAG_PRICE
            if fee > 0:
                is_paid = self._pay(user, method, fee)
                told.append(self._say("baggage_paid", fee) if is_paid else self._say("baggage_short"))
            item["baggage"] = bags
        return " ".join(told) or self._say("changed_free")

    def _cabin_price(self, flight: Plain, cabin: Any) -> Any:
        known = {self._say("economy"): "economy_price", self._say("business"): "business_price"}
        return flight[known[cabin]] if cabin in known else 0

    @staticmethod
    def _pay(user: Plain, method: str, amount: Any) -> bool:
        """Take money, or return it if the amount is negative. Other payment methods cost nothing."""
        if method not in ("cash", "bank"):
            return True
        if user[f"{method}_balance"] - amount < 0:
            return False
        user[f"{method}_balance"] -= amount
        return True

    def _find_reservation(self, user_id: Any, reservation_id: Any) -> Any:
        wanted = reservation_id, user_id
        return next(
            (item for item in self.reservations if (item["reservation_id"], item["user_id"]) == wanted), None
        )

    @tool(writes=True)
    def cancel_reservation(self, user_id: str, reservation_id: str, reason: str) -> str:
        """Cancel a reservation; it stays on the list."""
        user = self.users.get(user_id)
        if not user:
            return self._say("bad_user")
        item = self._find_reservation(user_id, reservation_id)
        if item is None:
            return self._say("bad_reservation")
        flight = self._find_flight(item["flight_no"])
        if flight is None:
            return self._say("bad_flight")
        left = datetime.strptime(flight["depart_time"], FORMAT) - NOW
        if left < timedelta(0):
            return self._say("departed")
        price = self._price(flight, item["cabin"])
        if reason == self._say("airline_cancelled"):
            user["cash_balance"] += price
            return self._say("cancelled_by_airline", price)
        if left > timedelta(days=1):
            user["cash_balance"] += price
            return self._say("cancelled_early", price)
        fee = price * 0.1
        user["cash_balance"] += price - fee
        return self._say("cancelled_late", fee, price - fee)
