"""TAU2 telecom, the agent's side: customers, lines, plans, bills, devices and thirteen tools.

Dates are stored as ISO text, as they are shown and hashed. `keep_in_step` synchronizes this side with the
phone of the user.
"""

from __future__ import annotations

import json
import uuid
from datetime import date, datetime
from typing import Any, Literal

from pydantic import BaseModel

from trialogue.benchmarks.tau.phone import TelecomPhone
from trialogue.benchmarks.tau.records import StrictRecord
from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.reading import read_table
from trialogue.world.database import Table
from trialogue.world.tools import tool

TODAY = "2025-02-25"
"""The benchmark's clock has a fixed date."""
CYCLE_END = "2025-02-28"
LAST_MONTH = ("2025-01-01", "2025-01-31", "2025-01-15")
"""First day, last day and due date of the previous month."""
NEXT_MONTH = ("2025-03-01", "2025-03-31", "2025-03-15")


class CustomerAddress(StrictRecord):
    street: str
    city: str
    state: str
    zip_code: str


class Plan(StrictRecord):
    plan_id: str
    name: str
    data_limit_gb: float
    price_per_month: float
    data_refueling_price_per_gb: float


class TelecomDevice(StrictRecord):
    device_id: str
    device_type: Literal["phone", "router", "tablet", "watch", "other"]
    model: str
    imei: str | None = None
    is_esim_capable: bool
    activated: bool = False
    activation_date: datetime | None = None
    last_esim_transfer_date: datetime | None = None


class TelecomLine(StrictRecord):
    line_id: str
    phone_number: str
    status: Literal["Active", "Suspended", "Pending Activation", "Closed"] = "Pending Activation"
    plan_id: str
    device_id: str | None = None
    data_used_gb: float = 0.0
    data_refueling_gb: float = 0.0
    roaming_enabled: bool = False
    contract_end_date: date | None = None
    last_plan_change_date: date | None = None
    last_sim_replacement_date: date | None = None
    suspension_start_date: date | None = None


class LineItem(StrictRecord):
    description: str
    amount: float
    date: date
    item_type: str


class Bill(StrictRecord):
    bill_id: str
    customer_id: str
    period_start: date
    period_end: date
    issue_date: date
    total_due: float
    due_date: date
    line_items: list[LineItem] = []
    status: Literal["Draft", "Issued", "Awaiting Payment", "Paid", "Overdue", "Disputed"] = "Draft"


class PaymentMethod(StrictRecord):
    method_type: Literal["Credit Card", "Debit Card", "PayPal"]
    account_number_last_4: str
    expiration_date: str


class TelecomCustomer(StrictRecord):
    customer_id: str
    full_name: str
    date_of_birth: str
    email: str
    phone_number: str
    address: CustomerAddress
    account_status: Literal["Active", "Suspended", "Pending Verification", "Closed"] = "Pending Verification"
    payment_methods: list[PaymentMethod] = []
    line_ids: list[str] = []
    bill_ids: list[str] = []
    created_at: datetime | date = date(2025, 1, 1)
    last_extension_date: date | None = None
    goodwill_credit_used_this_year: float = 0.0


KEYS = {
    "plans": "plan_id",
    "customers": "customer_id",
    "lines": "line_id",
    "bills": "bill_id",
    "devices": "device_id",
}
"""The benchmark stores lists; this field is the key of each record."""


def key_lists(data: Plain) -> Plain:
    """The benchmark's lists as tables."""
    keyed: Plain = {}
    for name, value in data.items():
        records: Any = value
        keyed[name] = {record[KEYS[name]]: record for record in records} if name in KEYS else value
    return keyed


class TelecomTools(Toolkit):
    plans: Table[Plain]
    customers: Table[Plain]
    lines: Table[Plain]
    bills: Table[Plain]
    devices: Table[Plain]

    notes = read_table(__file__, "notes.toml")["telecom"]
    shapes = {
        "plans": Plan,
        "customers": TelecomCustomer,
        "lines": TelecomLine,
        "bills": Bill,
        "devices": TelecomDevice,
    }

    @classmethod
    def to_record(cls, value: BaseModel) -> Plain:
        return json.loads(json.dumps(value.model_dump(), default=str))

    def to_official(self) -> Plain:
        return {name: [self.look(name, key) for key in getattr(self, name)] for name in KEYS}

    def official_hash(self) -> str:
        return self.hash_whole()

    # -- looking records up ------------------------------------------------------------------------------

    def _find(self, table: str, noun: str, key: str) -> Plain:
        found = self.look(table, key)
        if found is None:
            raise ValueError(f"{noun} with ID {key} not found")
        return found

    def _line_of(self, customer_id: str, line_id: str) -> Plain:
        customer = self.get_customer_by_id(customer_id)
        if line_id not in customer["line_ids"]:
            raise ValueError(f"Line {line_id} not found for customer {customer_id}")
        return self._find("lines", "Line", line_id)

    def line_by_phone(self, phone_number: str) -> Plain:
        for key in self.keys_where("lines", "phone_number", phone_number):
            return self.look("lines", key)
        raise ValueError(f"Line with phone number {phone_number} not found")

    def bills_of(self, customer: Plain, status: str) -> list[Plain]:
        """A customer's bills of one status."""
        bills = [self._find("bills", "Bill", key) for key in customer["bill_ids"]]
        return [bill for bill in bills if bill["status"] == status]

    def set_bill_to_paid(self, bill_id: str) -> None:
        self._find("bills", "Bill", bill_id)
        self.touch("bills", bill_id)["status"] = "Paid"

    # -- the tools, in the order they are offered --------------------------------------------------------

    @tool
    def get_customer_by_phone(self, phone_number: str) -> Plain:
        """Find the customer who has a phone number."""
        for key in self.customers:
            customer = self.look("customers", key)
            if customer["phone_number"] == phone_number or any(
                self._find("lines", "Line", line_id)["phone_number"] == phone_number
                for line_id in customer["line_ids"]
            ):
                return customer
        raise ValueError(f"Customer with phone number {phone_number} not found")

    @tool
    def get_customer_by_id(self, customer_id: str) -> Plain:
        """Look a customer up.

        Args:
            customer_id: Id of the customer.
        """
        return self._find("customers", "Customer", customer_id)

    @tool
    def get_customer_by_name(self, full_name: str, dob: str) -> list[Plain]:
        """Find customers by name and date of birth."""
        customers = [self.look("customers", key) for key in self.customers]
        return [
            customer
            for customer in customers
            if customer["full_name"].lower() == full_name.lower() and customer["date_of_birth"] == dob
        ]

    @tool
    def get_details_by_id(self, id: str) -> dict[str, Any]:
        """Look up whatever an id names: a customer, line, device, bill or plan."""
        if id.startswith("L"):
            return self._find("lines", "Line", id)
        if id.startswith("D"):
            return self._find("devices", "Device", id)
        if id.startswith("B"):
            return self._find("bills", "Bill", id)
        if id.startswith("C"):
            return self._find("customers", "Customer", id)
        if id.startswith("P"):
            return self._find("plans", "Plan", id)
        raise ValueError(f"Unknown ID format or type: {id}")

    @tool(writes=True)
    def suspend_line(self, customer_id: str, line_id: str, reason: str) -> dict[str, Any]:
        """Suspend an active line."""
        if self._line_of(customer_id, line_id)["status"] != "Active":
            raise ValueError("Line must be active to suspend")
        line = self.touch("lines", line_id)
        line["status"] = "Suspended"
        line["suspension_start_date"] = TODAY
        return {
            "message": "Line suspended successfully. $5/month holding fee will apply.",
            "line": line,
        }

    @tool(writes=True)
    def resume_line(self, customer_id: str, line_id: str) -> dict[str, Any]:
        """Resume a suspended line."""
        if self._line_of(customer_id, line_id)["status"] not in ("Suspended", "Pending Activation"):
            raise ValueError("Line must be suspended to resume")
        line = self.touch("lines", line_id)
        line["status"] = "Active"
        line["suspension_start_date"] = None
        return {"message": "Line resumed successfully", "line": line}

    @tool
    def get_bills_for_customer(self, customer_id: str, limit: int = 12) -> list[Plain]:
        """List a customer's bills, the latest first.

        Args:
            customer_id: Id of the customer.
        """
        customer = self.get_customer_by_id(customer_id)
        bills = [self._find("bills", "Bill", key) for key in customer["bill_ids"]]
        return sorted(bills, key=lambda bill: bill["issue_date"], reverse=True)[:limit]

    @tool(writes=True)
    def send_payment_request(self, customer_id: str, bill_id: str) -> str:
        """Ask the customer to pay a bill; only one request may be open.

        Args:
            customer_id: Id of the customer.
        """
        customer = self.get_customer_by_id(customer_id)
        if self.bills_of(customer, "Awaiting Payment"):
            raise ValueError("A bill is already awaiting payment for this customer")
        if bill_id not in customer["bill_ids"]:
            raise ValueError(f"Bill {bill_id} not found for customer {customer_id}")
        self._find("bills", "Bill", bill_id)
        self.touch("bills", bill_id)["status"] = "Awaiting Payment"
        return f"Payment request sent to the customer for bill {bill_id}"

    @tool
    def get_data_usage(self, customer_id: str, line_id: str) -> dict[str, Any]:
        """Look up how much data a line has used in this billing cycle."""
        line = self._line_of(customer_id, line_id)
        plan = self._find("plans", "Plan", line["plan_id"])
        return {
            "line_id": line_id,
            "data_used_gb": str(line["data_used_gb"]),
            "data_limit_gb": str(plan["data_limit_gb"]),
            "data_refueling_gb": str(line["data_refueling_gb"]),
            "cycle_end_date": CYCLE_END,
        }

    @tool(writes=True)
    def enable_roaming(self, customer_id: str, line_id: str) -> dict[str, Any]:
        """Allow a line to roam."""
        return self._set_roaming(customer_id, line_id, True)  # pyright: ignore[reportReturnType]

    @tool(writes=True)
    def disable_roaming(self, customer_id: str, line_id: str) -> str:
        """Forbid a line to roam."""
        return self._set_roaming(customer_id, line_id, False)

    @tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent."""
        return "Transfer successful"

    @tool(writes=True)
    def refuel_data(self, customer_id: str, line_id: str, gb_amount: float) -> dict[str, Any]:
        """Add data to a line and put it on the customer's next bill."""
        line = self._line_of(customer_id, line_id)
        if gb_amount <= 0:
            raise ValueError("Refuel amount must be positive")
        rate = self._find("plans", "Plan", line["plan_id"])["data_refueling_price_per_gb"]
        charge = gb_amount * rate
        line = self.touch("lines", line_id)
        line["data_refueling_gb"] += gb_amount
        self._charge(customer_id, charge, f"Data refueling: {gb_amount} GB at ${rate}/GB")
        return {
            "message": f"Successfully added {gb_amount} GB of data for line {line_id} for ${charge:.2f}",
            "new_data_refueling_gb": str(line["data_refueling_gb"]),
            "charge": str(charge),
        }

    def _set_roaming(self, customer_id: str, line_id: str, enabled: bool) -> str:
        word = "enabled" if enabled else "disabled"
        if self._line_of(customer_id, line_id)["roaming_enabled"] == enabled:
            return f"Roaming was already {word}"
        self.touch("lines", line_id)["roaming_enabled"] = enabled
        return f"Roaming {word} successfully"

    def _charge(self, customer_id: str, amount: float, description: str) -> None:
        """Add a line to the customer's draft bill. Create the bill if there is none."""
        customer = self.get_customer_by_id(customer_id)
        drafts = self.bills_of(customer, "Draft")
        if drafts:
            bill = self.touch("bills", drafts[0]["bill_id"])
        else:
            # The benchmark draws a random id, so such a database never equals another one.
            bill = _new_bill(f"B{uuid.uuid4().hex[:8]}", customer_id, NEXT_MONTH, "Draft")
            self.lay("bills", bill["bill_id"], bill)
            self.touch("customers", customer_id)["bill_ids"].append(bill["bill_id"])
        bill["line_items"].append(_new_item(description, amount))
        bill["total_due"] += amount

    # -- set-up and assertions ---------------------------------------------------------------------------

    def set_data_usage(self, customer_id: str, line_id: str, data_used_gb: float) -> str:
        self._line_of(customer_id, line_id)
        self.touch("lines", line_id)["data_used_gb"] = data_used_gb
        return f"Data usage set to {data_used_gb} GB for line {line_id}"

    def suspend_line_for_overdue_bill(
        self, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
    ) -> str:
        line = self._find("lines", "Line", line_id)
        if line["status"] != "Active":
            raise ValueError("Line must be active to suspend for unpaid bill")
        amount = self._find("plans", "Plan", line["plan_id"])["price_per_month"]
        if amount <= 0:
            raise ValueError("Amount must be positive for overdue bill")
        if self.bills_of(self.get_customer_by_id(customer_id), "Overdue"):
            raise ValueError("Customer already has an overdue bill")
        bill = _new_bill(new_bill_id, customer_id, LAST_MONTH, "Overdue")
        bill["line_items"].append(_new_item(f"Charge for line {line_id}", amount))
        bill["total_due"] += amount
        self.lay("bills", new_bill_id, bill)
        self.touch("customers", customer_id)["bill_ids"].append(new_bill_id)
        line = self.touch("lines", line_id)
        line["status"] = "Suspended"
        line["suspension_start_date"] = TODAY
        if contract_ended:
            line["contract_end_date"] = LAST_MONTH[1]
        return f"Line {line_id} suspended for unpaid bill {new_bill_id}. Contract ended: {contract_ended}"

    def assert_data_refueling_amount(self, customer_id: str, line_id: str, expected_amount: float) -> bool:
        return abs(self._line_of(customer_id, line_id)["data_refueling_gb"] - expected_amount) < 1e-6

    def assert_line_status(self, customer_id: str, line_id: str, expected_status: str) -> bool:
        return self._line_of(customer_id, line_id)["status"] == expected_status

    def assert_overdue_bill_exists(self, customer_id: str, overdue_bill_id: str) -> bool:
        if overdue_bill_id not in self.get_customer_by_id(customer_id)["bill_ids"]:
            raise ValueError(f"Overdue bill {overdue_bill_id} not found")
        if self._find("bills", "Bill", overdue_bill_id)["status"] != "Overdue":
            raise ValueError(f"Overdue bill {overdue_bill_id} is not overdue")
        return True

    def assert_no_overdue_bill(self, overdue_bill_id: str) -> bool:
        bill = self.look("bills", overdue_bill_id)
        return bill is None or bill["status"] == "Paid"


def _new_bill(bill_id: str, customer_id: str, month: tuple[str, str, str], status: str) -> Plain:
    start, end, due = month
    return {
        "bill_id": bill_id,
        "customer_id": customer_id,
        "period_start": start,
        "period_end": end,
        "issue_date": start,
        "total_due": 0.0,
        "due_date": due,
        "line_items": [],
        "status": status,
    }


def _new_item(description: str, amount: float) -> Plain:
    kind = "Credit" if amount < 0 else "Charge"
    return {"description": description, "amount": float(amount), "date": TODAY, "item_type": kind}


def keep_in_step(agent_side: TelecomTools, user_side: TelecomPhone) -> None:
    """Synchronize both sides: the line, roaming, used data, bills and payments."""
    around = user_side.look("", "surroundings")
    phone_number = around["phone_number"]
    if phone_number is None:
        return
    line = agent_side.line_by_phone(phone_number)
    plan = agent_side.look("plans", line["plan_id"])
    if plan is None:
        raise ValueError(f"Plan with ID {line['plan_id']} not found")
    state: Plain = {
        "line_active": line["status"] == "Active",
        "roaming_allowed": bool(line["roaming_enabled"]),
        "mobile_data_usage_exceeded": line["data_used_gb"]
        >= plan["data_limit_gb"] + line["data_refueling_gb"],
    }
    request = around["payment_request"]
    if request is not None and request["paid"]:
        agent_side.set_bill_to_paid(request["bill_id"])
        state["payment_request"] = request = None
    if request is None:
        waiting = agent_side.bills_of(agent_side.get_customer_by_phone(phone_number), "Awaiting Payment")
        if waiting:
            bill = waiting[0]
            state["payment_request"] = {
                "bill_id": bill["bill_id"],
                "amount_due": bill["total_due"],
                "paid": False,
            }
    if any(around[name] != value for name, value in state.items()):
        user_side.touch("", "surroundings").update(state)
