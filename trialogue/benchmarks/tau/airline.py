"""The airline of TAU-bench: flights, users and reservations, and the fourteen tools over them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from trialogue.benchmarks.tau.arithmetic import work_out
from trialogue.benchmarks.tau.records import CreditCard, UserName
from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.reading import read_table
from trialogue.world.database import Table
from trialogue.world.tools import tool

FlightType = Literal["round_trip", "one_way"]
CabinClass = Literal["business", "economy", "basic_economy"]
Insurance = Literal["yes", "no"]

TABLES = read_table(__file__, "airline.toml")
"""The fixed time, the ids of new records in order, and the airports."""


class AirlineAddress(BaseModel):
    address1: str
    address2: str | None = None
    city: str
    country: str
    state: str
    zip: str


class Payment(BaseModel):
    payment_id: str
    amount: int


class AirlineGiftCard(BaseModel):
    source: Literal["gift_card"]
    id: str
    amount: float


class Certificate(BaseModel):
    source: Literal["certificate"]
    id: str
    amount: float


class Passenger(BaseModel):
    first_name: str
    last_name: str
    dob: str


class AvailableFlight(BaseModel):
    status: Literal["available"]
    available_seats: dict[CabinClass, int]
    prices: dict[CabinClass, int]


class LandedFlight(BaseModel):
    status: Literal["landed"]
    actual_departure_time_est: str
    actual_arrival_time_est: str


class CancelledFlight(BaseModel):
    status: Literal["cancelled"]


class ExpectedFlight(BaseModel):
    status: Literal["delayed", "on time"]
    estimated_departure_time_est: str
    estimated_arrival_time_est: str


class FlyingFlight(BaseModel):
    status: Literal["flying"]
    actual_departure_time_est: str
    estimated_arrival_time_est: str


class Flight(BaseModel):
    flight_number: str
    origin: str
    destination: str
    scheduled_departure_time_est: str
    scheduled_arrival_time_est: str
    dates: dict[str, AvailableFlight | LandedFlight | CancelledFlight | ExpectedFlight | FlyingFlight]


class ReservationFlight(BaseModel):
    flight_number: str
    origin: str
    destination: str
    date: str
    price: int


class FlightInfo(BaseModel):
    flight_number: str
    date: str


class AirlineUser(BaseModel):
    user_id: str
    name: UserName
    address: AirlineAddress
    email: str
    dob: str
    payment_methods: dict[str, CreditCard | AirlineGiftCard | Certificate]
    saved_passengers: list[Passenger]
    membership: Literal["gold", "silver", "regular"]
    reservations: list[str]


class Reservation(BaseModel):
    reservation_id: str
    user_id: str
    origin: str
    destination: str
    flight_type: FlightType
    cabin: CabinClass
    flights: list[ReservationFlight]
    passengers: list[Passenger]
    payment_history: list[Payment]
    created_at: str
    total_baggages: int
    nonfree_baggages: int
    insurance: Insurance
    status: Literal["cancelled"] | None = None


class AirlineTools(Toolkit):
    """The tools of TAU2. The first TAU-bench overrides methods before the first tool."""

    flights: Table[Plain]
    users: Table[Plain]
    reservations: Table[Plain]

    notes = read_table(__file__, "notes.toml")["airline"]
    shapes = {"flights": Flight, "users": AirlineUser, "reservations": Reservation}
    keeps_cabin: ClassVar[bool] = False
    """Whether changing the flights of a reservation keeps its cabin."""

    def _read_all(self, kind: Any, values: Any) -> Any:
        """Make records of a list of dictionaries. Anything else is returned unchanged."""
        is_read = all(isinstance(value, dict) for value in values)
        return [kind(**value) for value in values] if is_read else values

    def _part(self, flight: Any, name: str) -> str:
        """One field of a flight that `_read_all` has read."""
        return getattr(flight, name)

    def _user(self, user_id: str) -> Plain:
        user = self.look("users", user_id)
        if user is None:
            raise ValueError(f"User {user_id} not found")
        return user

    def _reservation(self, reservation_id: str) -> Plain:
        reservation = self.look("reservations", reservation_id)
        if reservation is None:
            raise ValueError(f"Reservation {reservation_id} not found")
        return reservation

    def _show_reservation(self, reservation_id: str) -> Plain:
        return self._reservation(reservation_id)

    def _show_airports(self) -> Any:
        return [{"iata": code, "city": city} for code, city in TABLES["airports"].items()]

    def _search(
        self, date: str, origin: str | None, destination: str | None, leave_after: str | None = None
    ) -> list[Plain]:
        found: list[Plain] = []
        for number in self.flights if origin is None else self.keys_where("flights", "origin", origin):
            flight = self.look("flights", number)
            if destination is not None and flight["destination"] != destination:
                continue
            on_date = flight["dates"].get(date)
            if on_date is None or on_date["status"] != "available":
                continue
            if leave_after is not None and flight["scheduled_departure_time_est"] < leave_after:
                continue
            found.append(
                {
                    "flight_number": flight["flight_number"],
                    "origin": flight["origin"],
                    "destination": flight["destination"],
                    "status": "available",
                    "scheduled_departure_time_est": flight["scheduled_departure_time_est"],
                    "scheduled_arrival_time_est": flight["scheduled_arrival_time_est"],
                    "date": None,
                    "available_seats": on_date["available_seats"],
                    "prices": on_date["prices"],
                }
            )
        return found

    def _search_pairs(self, origin: str, destination: str, date: str) -> list[list[Plain]]:
        found: list[list[Plain]] = []
        for first in self._search(date, origin, None):
            first["date"] = date
            arrival = first["scheduled_arrival_time_est"]
            next_date = self._next_date(date, arrival)
            for second in self._search(next_date, first["destination"], destination, arrival):
                second["date"] = next_date
                found.append([first, second])
        return found

    def _take_seats(self, flight_number: str, date: str, cabin: str, seats: int) -> None:
        """Copies only one date: a flight has a month of them."""
        flight = self._flight(flight_number)
        on_date = flight["dates"][date]
        free = {**on_date["available_seats"], cabin: on_date["available_seats"][cabin] - seats}
        dates = {**flight["dates"], date: {**on_date, "available_seats": free}}
        self.lay("flights", flight_number, {**flight, "dates": dates})

    def _choose_id(self) -> str:
        """The id of a new reservation."""
        ids: list[str] = TABLES["reservation_ids"]
        found = next((name for name in ids if name not in self.reservations), None)
        if found is None:
            raise ValueError("Too many reservations")
        return found

    def _to_booked(self, flight: Any, known: Plain) -> Plain:
        """A flight of a reservation: the requested flight with its price and airports."""
        return {
            "flight_number": flight.flight_number,
            "origin": known["origin"],
            "destination": known["destination"],
            "date": flight.date,
            "price": known["price"],
        }

    def _to_reservation(self, fields: Plain) -> Plain:
        return Reservation(**fields).model_dump()

    def _to_payment(self, payment_id: str, price: int) -> Plain:
        return Payment(payment_id=payment_id, amount=price).model_dump()

    def _to_passengers(self, values: Any) -> Any:
        return [value.model_dump() if isinstance(value, BaseModel) else value for value in values]

    def _to_certificate(self, payment_id: str, amount: int) -> Plain:
        return Certificate(id=payment_id, amount=amount, source="certificate").model_dump()

    def _refuse_certificate(self) -> Any:
        raise ValueError("Too many certificates")

    # -- steps of several tools --------------------------------------------------------------------------

    def _flight(self, flight_number: str) -> Plain:
        flight = self.look("flights", flight_number)
        if flight is None:
            raise ValueError(f"Flight {flight_number} not found")
        return flight

    def _flight_on(self, flight_number: str, date: str) -> Plain:
        dates = self._flight(flight_number)["dates"]
        if date not in dates:
            raise ValueError(f"Flight {flight_number} not found on date {date}")
        return dates[date]

    @staticmethod
    def _next_date(date: str, arrival: str) -> str:
        """The date on which a traveller changes planes."""
        return f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date

    def _book(self, flight: Any, cabin: str, seats: int) -> Plain:
        """A flight of a reservation, if enough seats are free."""
        number = self._part(flight, "flight_number")
        known = self._flight(number)
        date = self._part(flight, "date")
        on_date = self._flight_on(number, date)
        if on_date["status"] != "available":
            raise ValueError(f"Flight {number} not available on date {date}")
        if on_date["available_seats"][cabin] < seats:
            raise ValueError(f"Not enough seats on flight {number}")
        route = {name: known[name] for name in ("origin", "destination")}
        return self._to_booked(flight, {"price": on_date["prices"][cabin], **route})

    def _pay(self, user_id: str, payments: list[Plain], price: int) -> Plain:
        """Check that the payments add up to the price, and deduct them from the user's balances."""
        methods = self._user(user_id)["payment_methods"]
        for payment in payments:
            payment_id, amount = payment["payment_id"], payment["amount"]
            if payment_id not in methods:
                raise ValueError(f"Payment method {payment_id} not found")
            method = methods[payment_id]
            if method["source"] in ("gift_card", "certificate") and method["amount"] < amount:
                raise ValueError(f"Not enough balance in payment method {payment_id}")
        paid = sum(payment["amount"] for payment in payments)
        if paid != price:
            raise ValueError(f"Payment amount does not add up, total price is {price}, but paid {paid}")
        user = self.touch("users", user_id)
        for payment in payments:
            method = user["payment_methods"][payment["payment_id"]]
            if method["source"] == "gift_card":
                method["amount"] -= payment["amount"]
            elif method["source"] == "certificate":
                del user["payment_methods"][payment["payment_id"]]
        return user

    def _pay_update(self, reservation_id: str, payment_id: str, price: int) -> Plain:
        """Pay for a change of a reservation. Returns the reservation."""
        user_id = self._reservation(reservation_id)["user_id"]
        methods = self._user(user_id)["payment_methods"]
        if payment_id not in methods:
            raise ValueError("Payment method not found")
        method = methods[payment_id]
        if method["source"] == "certificate":
            raise ValueError("Certificate cannot be used to update reservation")
        if method["source"] == "gift_card":
            if method["amount"] < price:
                raise ValueError("Gift card balance is not enough")
            self.touch("users", user_id)["payment_methods"][payment_id]["amount"] -= price
        payment = self._to_payment(payment_id, price) if price != 0 else None
        reservation = self.touch("reservations", reservation_id)
        if payment is not None:
            reservation["payment_history"].append(payment)
        return reservation

    # -- the tools, in the order they are offered --------------------------------------------------------

    @tool(writes=True)
    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: FlightType,
        cabin: CabinClass,
        flights: list[FlightInfo | dict[str, Any]],
        passengers: list[Passenger | dict[str, Any]],
        payment_methods: list[Payment | dict[str, Any]],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: Insurance,
    ) -> Plain:
        """Book a reservation.

        Args:
            origin: Airport code where the trip begins.
            destination: Airport code where it ends.
            flights: Number and date of each flight.
            total_baggages: Number of bags.
        """
        wanted: Any = self._read_all(FlightInfo, flights)
        travellers: Any = self._read_all(Passenger, passengers)
        payments: Any = self._read_all(Payment, payment_methods)
        self._user(user_id)
        reservation_id = self._choose_id()
        reservation = self._to_reservation(
            {
                "reservation_id": reservation_id,
                "user_id": user_id,
                "origin": origin,
                "destination": destination,
                "flight_type": flight_type,
                "cabin": cabin,
                "flights": [],
                "passengers": travellers,
                "payment_history": payments,
                "created_at": TABLES["now"],
                "total_baggages": total_baggages,
                "nonfree_baggages": nonfree_baggages,
                "insurance": insurance,
            }
        )
        seats = len(travellers)
        booked = reservation["flights"] = [self._book(flight, cabin, seats) for flight in wanted]
        price = sum(flight["price"] * seats for flight in booked)
        if insurance == "yes":
            price += 30 * seats
        price += 50 * nonfree_baggages
        user = self._pay(user_id, reservation["payment_history"], price)
        for flight in booked:
            self._take_seats(flight["flight_number"], flight["date"], cabin, seats)
        self.lay("reservations", reservation_id, reservation)
        user["reservations"].append(reservation_id)
        return reservation

    @tool
    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression."""
        return work_out(expression)

    @tool(writes=True)
    def cancel_reservation(self, reservation_id: str) -> Plain:
        """Cancel a whole reservation and refund its payments."""
        self._reservation(reservation_id)
        reservation = self.touch("reservations", reservation_id)
        history = reservation["payment_history"]
        history += [{"payment_id": item["payment_id"], "amount": -item["amount"]} for item in history]
        reservation["status"] = "cancelled"
        return reservation

    @tool
    def get_reservation_details(self, reservation_id: str) -> Plain:
        """Look a reservation up."""
        return self._show_reservation(reservation_id)

    @tool
    def get_user_details(self, user_id: str) -> Plain:
        """Look a user and the ids of their reservations up."""
        return self._user(user_id)

    @tool
    def list_all_airports(self) -> list[Plain]:
        """List all airports and their cities."""
        return self._show_airports()

    @tool
    def search_direct_flight(self, origin: str, destination: str, date: str) -> list[Plain]:
        """Find direct flights on a date."""
        return self._search(date, origin, destination)

    @tool
    def search_onestop_flight(self, origin: str, destination: str, date: str) -> list[list[Plain]]:
        """Find pairs of flights with one stop on a date."""
        return self._search_pairs(origin, destination, date)

    @tool(writes=True)
    def send_certificate(self, user_id: str, amount: int) -> str:
        """Give a user a certificate."""
        methods = self._user(user_id)["payment_methods"]
        ids: list[str] = TABLES["certificate_ids"]
        payment_id = next((name for name in ids if name not in methods), None)
        if payment_id is None:
            return self._refuse_certificate()
        certificate = self._to_certificate(payment_id, amount)
        self.touch("users", user_id)["payment_methods"][payment_id] = certificate
        return f"Certificate {payment_id} added to user {user_id} with amount {amount}."

    @tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent."""
        return "Transfer successful"

    @tool(writes=True)
    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> Plain:
        """Change the number of bags of a reservation.

        Args:
            total_baggages: Number of bags from now on.
            payment_id: What pays for additional bags.
        """
        reservation = self._reservation(reservation_id)
        self._user(reservation["user_id"])
        price = 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"])
        reservation = self._pay_update(reservation_id, payment_id, price)
        reservation["total_baggages"] = total_baggages
        reservation["nonfree_baggages"] = nonfree_baggages
        return reservation

    @tool(writes=True)
    def update_reservation_flights(
        self,
        reservation_id: str,
        cabin: CabinClass,
        flights: list[FlightInfo | dict[str, Any]],
        payment_id: str,
    ) -> Plain:
        """Change the flights or the cabin of a reservation.

        Args:
            flights: Number and date of every flight of the new reservation, unchanged ones included.
            payment_id: What pays, or receives, the difference in price.
        """
        wanted: Any = self._read_all(FlightInfo, flights)
        reservation = self._reservation(reservation_id)
        self._user(reservation["user_id"])
        seats = len(reservation["passengers"])
        booked: list[Plain] = []
        for flight in wanted:
            kept = next(
                (
                    held
                    for held in reservation["flights"]
                    if held["flight_number"] == self._part(flight, "flight_number")
                    and held["date"] == self._part(flight, "date")
                    and cabin == reservation["cabin"]
                ),
                None,
            )
            booked.append(self._book(flight, cabin, seats) if kept is None else self._to_booked(flight, kept))
        before = sum(held["price"] for held in reservation["flights"])
        price = (sum(item["price"] for item in booked) - before) * seats
        reservation = self._pay_update(reservation_id, payment_id, price)
        reservation["flights"] = booked
        if not self.keeps_cabin:
            reservation["cabin"] = cabin
        return reservation

    @tool(writes=True)
    def update_reservation_passengers(
        self, reservation_id: str, passengers: list[Passenger | dict[str, Any]]
    ) -> Plain:
        """Change the passengers of a reservation, not their number."""
        travellers: Any = self._read_all(Passenger, passengers)
        reservation = self._reservation(reservation_id)
        if len(travellers) != len(reservation["passengers"]):
            raise ValueError("Number of passengers does not match")
        reservation = self.touch("reservations", reservation_id)
        reservation["passengers"] = self._to_passengers(travellers)
        return reservation

    @tool
    def get_flight_status(self, flight_number: str, date: str) -> str:
        """Look up how a flight is doing on a date."""
        return self._flight_on(flight_number, date)["status"]
