"""The shop of TAU-bench: its records and sixteen tools.

`RetailTools` has the name of the benchmark's class, because Python's argument errors, which the agent reads,
contain it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import BaseModel

from trialogue.benchmarks.tau.arithmetic import work_out
from trialogue.benchmarks.tau.records import CreditCard, UserName
from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.reading import read_table
from trialogue.world.database import Table
from trialogue.world.tools import tool


class Variant(BaseModel):
    item_id: str
    options: dict[str, str]
    available: bool
    price: float


class RetailProduct(BaseModel):
    name: str
    product_id: str
    variants: dict[str, Variant]


class UserAddress(BaseModel):
    address1: str
    address2: str
    city: str
    country: str
    state: str
    zip: str


class RetailGiftCard(BaseModel):
    source: Literal["gift_card"]
    id: str
    balance: float


class Paypal(BaseModel):
    source: Literal["paypal"]
    id: str


class RetailUser(BaseModel):
    user_id: str
    name: UserName
    address: UserAddress
    email: str
    payment_methods: dict[str, CreditCard | RetailGiftCard | Paypal]
    orders: list[str]


class Fulfillment(BaseModel):
    tracking_id: list[str]
    item_ids: list[str]


class OrderItem(BaseModel):
    name: str
    product_id: str
    item_id: str
    price: float
    options: dict[str, str]


class OrderPayment(BaseModel):
    transaction_type: Literal["payment", "refund"]
    amount: float
    payment_method_id: str


class RetailOrder(BaseModel):
    order_id: str
    user_id: str
    address: UserAddress
    items: list[OrderItem]
    status: Literal[
        "processed",
        "pending",
        "pending (item modified)",
        "delivered",
        "cancelled",
        "exchange requested",
        "return requested",
    ]
    fulfillments: list[Fulfillment]
    payment_history: list[OrderPayment]
    cancel_reason: Literal["no longer needed", "ordered by mistake"] | None = None
    exchange_items: list[str] | None = None
    exchange_new_items: list[str] | None = None
    exchange_payment_method_id: str | None = None
    exchange_price_difference: float | None = None
    return_items: list[str] | None = None
    return_payment_method_id: str | None = None


ADDRESS = ("address1", "address2", "city", "state", "country", "zip")


class NotHeld(ValueError):
    """The order does not contain an item. The text may begin with the item's id."""


def _add_balance(method: Plain, amount: float) -> None:
    method["balance"] = round(method["balance"] + amount, 2)


class RetailTools(Toolkit):
    """The tools of TAU2."""

    products: Table[Plain]
    users: Table[Plain]
    orders: Table[Plain]

    notes = read_table(__file__, "notes.toml")["retail"]
    shapes = {"products": RetailProduct, "users": RetailUser, "orders": RetailOrder}

    # -- what the first TAU-bench does differently -------------------------------------------------------

    reasons: ClassVar[Collection[str]] = frozenset({"no longer needed", "ordered by mistake"})
    must_differ: ClassVar[bool] = True
    """Whether an item of a pending order must be changed to a different one."""
    not_held: ClassVar[str] = "Number of {item_id} not found."
    not_matching: ClassVar[str] = "The number of items to be exchanged should match."
    no_variant: ClassVar[str] = "Variant not found"
    not_returnable: ClassVar[str] = "Some item not found"
    not_original: ClassVar[str] = "Payment method should be the original payment method"

    def _open_order(self, order_id: str) -> Plain:
        """An order whose address or payment may be changed."""
        order = self._order(order_id)
        if "pending" not in order["status"]:
            raise ValueError("Non-pending order cannot be modified")
        return order

    def _is_gift_card(self, order: Plain, payment_method_id: str) -> bool:
        return self._payment_method(order, payment_method_id)["source"] == "gift_card"

    def _to_payment(self, kind: str, amount: float, method: str) -> Plain:
        return {"transaction_type": kind, "amount": float(amount), "payment_method_id": method}

    def _to_address(self, *values: str) -> Plain:
        fields = dict(zip(ADDRESS, values, strict=True))
        return UserAddress(**fields).model_dump()

    def _choose_variant(self, item: Plain, new_item_id: str, last: Plain) -> Plain:
        """The benchmark gives every changed item the price and options of the last new item."""
        return last

    # -- steps of several tools --------------------------------------------------------------------------

    def _find(self, table: str, noun: str, key: str) -> Plain:
        found = self.look(table, key)
        if found is None:
            raise ValueError(f"{noun} not found")
        return found

    def _order(self, order_id: str) -> Plain:
        return self._find("orders", "Order", order_id)

    def _user(self, user_id: str) -> Plain:
        return self._find("users", "User", user_id)

    def _product(self, product_id: str) -> Plain:
        return self._find("products", "Product", product_id)

    def _order_of(self, order_id: str, status: str, verb: str) -> Plain:
        """An order of that status."""
        order = self._order(order_id)
        if order["status"] != status:
            raise ValueError(f"Non-{status} order cannot be {verb}")
        return order

    def _payment_method(self, order: Plain, payment_method_id: str) -> Plain:
        methods = self._user(order["user_id"])["payment_methods"]
        if payment_method_id not in methods:
            raise ValueError("Payment method not found")
        return methods[payment_method_id]

    def _check_balance(self, method: Plain, amount: float, purpose: str) -> None:
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ValueError(f"Insufficient gift card balance to pay for the {purpose}")

    def _change_balance(self, order: Plain, payment_method_id: str, amount: float) -> None:
        """Add an amount to a gift card."""
        methods = self.touch("users", order["user_id"])["payment_methods"]
        _add_balance(methods[payment_method_id], amount)

    def _check_held(self, order: Plain, item_ids: list[str], text: str) -> None:
        held = [item["item_id"] for item in order["items"]]
        for item_id in item_ids:
            if item_ids.count(item_id) > held.count(item_id):
                raise NotHeld(text.format(item_id=item_id))

    def _move(self, table: str, key: str, *values: str) -> Plain:
        """Change the address of an order or a user."""
        address = self._to_address(*values)
        record = self.touch(table, key)
        record["address"] = address
        return record

    def _check_pairs(
        self, order: Plain, item_ids: list[str], new_item_ids: list[str], not_held: str, not_matching: str
    ) -> None:
        self._check_held(order, item_ids, not_held)
        if len(item_ids) != len(new_item_ids):
            raise ValueError(not_matching)

    def _price_difference(
        self, order: Plain, item_ids: list[str], new_item_ids: list[str], must_differ: bool = False
    ) -> tuple[float, Plain]:
        """How much more the new items cost than the old ones, and the last new variant."""
        difference: float = 0
        variant: Plain = {}
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            if must_differ and item_id == new_item_id:
                raise ValueError("The new item id should be different from the old item id")
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            variants = self._product(item["product_id"])["variants"]
            if new_item_id not in variants:
                raise ValueError(self.no_variant.format(item_id=new_item_id))
            variant = variants[new_item_id]
            if not variant["available"]:
                raise ValueError(f"New item {new_item_id} not found or available")
            difference += variant["price"] - item["price"]
        return difference, variant

    # -- the tools, in the order they are offered --------------------------------------------------------

    @tool
    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression."""
        return work_out(expression)

    @tool(writes=True)
    def cancel_pending_order(self, order_id: str, reason: str) -> Plain:
        """Cancel a pending order and refund what was paid for it."""
        self._order_of(order_id, "pending", "cancelled")
        if reason not in self.reasons:
            raise ValueError("Invalid reason")
        order = self.touch("orders", order_id)
        refunds: list[Plain] = []
        for payment in order["payment_history"]:
            paid_with = payment["payment_method_id"]
            refunds.append(self._to_payment("refund", payment["amount"], paid_with))
            if self._is_gift_card(order, paid_with):
                self._change_balance(order, paid_with, payment["amount"])
        order["status"] = "cancelled"
        order["cancel_reason"] = reason
        order["payment_history"].extend(refunds)
        return order

    @tool(writes=True)
    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Plain:
        """Exchange items of a delivered order for others of the same products.

        Args:
            item_ids: Ids of the items to give back; one may occur several times.
        """
        order = self._order_of(order_id, "delivered", "exchanged")
        self._check_pairs(order, item_ids, new_item_ids, self.not_held, self.not_matching)
        difference, _ = self._price_difference(order, item_ids, new_item_ids)
        difference = round(difference, 2)
        method = self._payment_method(order, payment_method_id)
        self._check_balance(method, difference, "price difference")
        order = self.touch("orders", order_id)
        order["status"] = "exchange requested"
        order["exchange_items"] = sorted(item_ids)
        order["exchange_new_items"] = sorted(new_item_ids)
        order["exchange_payment_method_id"] = payment_method_id
        order["exchange_price_difference"] = difference
        return order

    @tool
    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find a user's id by name and zip code.

        Args:
            zip: Zip code of the user's address.
        """
        first, last = first_name.lower(), last_name.lower()
        for user_id in self.users:
            user = self.look("users", user_id)
            name = user["name"]
            if (
                name["first_name"].lower() == first
                and name["last_name"].lower() == last
                and user["address"]["zip"] == zip
            ):
                return user_id
        raise ValueError("User not found")

    @tool
    def find_user_id_by_email(self, email: str) -> str:
        """Find a user's id by email address."""
        wanted = email.lower()
        for user_id in self.users:
            if self.look("users", user_id)["email"].lower() == wanted:
                return user_id
        raise ValueError("User not found")

    @tool
    def get_order_details(self, order_id: str) -> Plain:
        """Look an order up."""
        return self._order(order_id)

    @tool
    def get_product_details(self, product_id: str) -> Plain:
        """Look a product and all its variants up."""
        return self._product(product_id)

    @tool
    def get_item_details(self, item_id: str) -> Plain:
        """Look one variant of a product up."""
        for product_id in self.products:
            variants = self.look("products", product_id)["variants"]
            if item_id in variants:
                return variants[item_id]
        raise ValueError("Item not found")

    @tool
    def get_user_details(self, user_id: str) -> Plain:
        """Look a user and the ids of their orders up."""
        return self._user(user_id)

    @tool
    def list_all_product_types(self) -> str:
        """List the name and id of every product."""
        products = [self.look("products", key) for key in self.products]
        return json.dumps({item["name"]: item["product_id"] for item in products}, sort_keys=True)

    @tool(writes=True)
    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Plain:
        """Change the shipping address of a pending order."""
        self._open_order(order_id)
        return self._move("orders", order_id, address1, address2, city, state, country, zip)

    @tool(writes=True)
    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Plain:
        """Change items of a pending order to others of the same products; possible once.

        Args:
            item_ids: Ids of the items to change; one may occur several times.
        """
        order = self._order_of(order_id, "pending", "modified")
        not_matching = "The number of items to be exchanged should match"
        self._check_pairs(order, item_ids, new_item_ids, "{item_id} not found", not_matching)
        difference, last = self._price_difference(order, item_ids, new_item_ids, self.must_differ)
        method = self._payment_method(order, payment_method_id)
        self._check_balance(method, difference, "new item")
        order = self.touch("orders", order_id)
        kind = "payment" if difference > 0 else "refund"
        order["payment_history"].append(self._to_payment(kind, abs(difference), payment_method_id))
        if method["source"] == "gift_card":
            self._change_balance(order, payment_method_id, -difference)
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            variant = self._choose_variant(item, new_item_id, last)
            item["item_id"] = new_item_id
            item["price"] = variant["price"]
            item["options"] = dict(variant["options"])
        order["status"] = "pending (item modified)"
        return order

    @tool(writes=True)
    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Plain:
        """Pay a pending order by another method; what was paid before is refunded.

        Args:
            payment_method_id: The method to pay with instead.
        """
        order = self._open_order(order_id)
        method = self._payment_method(order, payment_method_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ValueError("There should be exactly one payment for a pending order")
        before = history[0]["payment_method_id"]
        if before == payment_method_id:
            raise ValueError("The new payment method should be different from the current one")
        amount = history[0]["amount"]
        self._check_balance(method, amount, "order")
        order = self.touch("orders", order_id)
        order["payment_history"] += [
            self._to_payment("payment", amount, payment_method_id),
            self._to_payment("refund", amount, before),
        ]
        if method["source"] == "gift_card":
            self._change_balance(order, payment_method_id, -amount)
        if self._is_gift_card(order, before):
            self._change_balance(order, before, amount)
        return order

    @tool(writes=True)
    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Plain:
        """Change a user's default address."""
        self._user(user_id)
        return self._move("users", user_id, address1, address2, city, state, country, zip)

    @tool(writes=True)
    def return_delivered_order_items(
        self, order_id: str, item_ids: list[str], payment_method_id: str
    ) -> Plain:
        """Request the return of items of a delivered order.

        Args:
            item_ids: Ids of the items to return; one may occur several times.
            payment_method_id: What receives the refund: the original method or a gift card.
        """
        order = self._order_of(order_id, "delivered", "returned")
        self._payment_method(order, payment_method_id)
        paid_with = order["payment_history"][0]["payment_method_id"]
        if not self._is_gift_card(order, payment_method_id) and payment_method_id != paid_with:
            raise ValueError(self.not_original)
        self._check_held(order, item_ids, self.not_returnable)
        order = self.touch("orders", order_id)
        order["status"] = "return requested"
        order["return_items"] = sorted(item_ids)
        order["return_payment_method_id"] = payment_method_id
        return order

    @tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent."""
        return "Transfer successful"
