"""TAU2 retail: the records of the shop and the sixteen tools over them.

The class is named as its authors name theirs, because Python puts the name into the text of argument errors
that the agent reads.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

from trialogue.benchmarks.arithmetic import ALLOWED
from trialogue.benchmarks.arithmetic import calculate as work_out
from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.world.database import Table
from trialogue.world.tools import tool


class Variant(BaseModel):
    item_id: str
    options: dict[str, str]
    available: bool
    price: float


class Product(BaseModel):
    name: str
    product_id: str
    variants: dict[str, Variant]


class UserName(BaseModel):
    first_name: str
    last_name: str


class UserAddress(BaseModel):
    address1: str
    address2: str
    city: str
    country: str
    state: str
    zip: str


class CreditCard(BaseModel):
    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str


class GiftCard(BaseModel):
    source: Literal["gift_card"]
    id: str
    balance: float


class Paypal(BaseModel):
    source: Literal["paypal"]
    id: str


class User(BaseModel):
    user_id: str
    name: UserName
    address: UserAddress
    email: str
    payment_methods: dict[str, CreditCard | GiftCard | Paypal]
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


class Order(BaseModel):
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


def _payment(kind: str, amount: Any, method: Any) -> Plain:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method}


def _is_gift_card(method: Plain) -> bool:
    return method["source"] == "gift_card"


def _add_balance(method: Plain, amount: float) -> None:
    method["balance"] += amount
    method["balance"] = round(method["balance"], 2)


class RetailTools(Toolkit):
    products: Table[Plain]
    users: Table[Plain]
    orders: Table[Plain]

    shapes = {"products": Product, "users": User, "orders": Order}

    # -- looking records up ------------------------------------------------------------------------------

    def _order(self, order_id: str) -> Plain:
        order = self.look("orders", order_id)
        if order is None:
            raise ValueError("Order not found")
        return order

    def _user(self, user_id: str) -> Plain:
        user = self.look("users", user_id)
        if user is None:
            raise ValueError("User not found")
        return user

    def _product(self, product_id: str) -> Plain:
        product = self.look("products", product_id)
        if product is None:
            raise ValueError("Product not found")
        return product

    def _payment_method(self, user_id: str, payment_method_id: str) -> Plain:
        methods = self._user(user_id)["payment_methods"]
        if payment_method_id not in methods:
            raise ValueError("Payment method not found")
        return methods[payment_method_id]

    def _own_payment_method(self, user_id: str, payment_method_id: str) -> Plain:
        """A payment method whose balance may be changed."""
        return self.touch("users", user_id)["payment_methods"][payment_method_id]

    def _price_difference(
        self, order: Plain, item_ids: list[str], new_item_ids: list[str], must_differ: bool
    ) -> tuple[float, Plain]:
        """What the new items cost more than the old ones, and the last new variant."""
        difference: float = 0
        variant: Plain = {}
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            if must_differ and item_id == new_item_id:
                raise ValueError("The new item id should be different from the old item id")
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            variants = self._product(item["product_id"])["variants"]
            if new_item_id not in variants:
                raise ValueError("Variant not found")
            variant = variants[new_item_id]
            if not variant["available"]:
                raise ValueError(f"New item {new_item_id} not found or available")
            difference += variant["price"] - item["price"]
        return difference, variant

    # -- the tools, in the order they are offered --------------------------------------------------------

    @tool
    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses.
        """
        if not all(char in ALLOWED for char in expression):
            raise ValueError("Invalid characters in expression")
        return work_out(expression)

    @tool(writes=True)
    def cancel_pending_order(self, order_id: str, reason: str) -> Plain:
        """Cancel a pending order and refund what was paid for it.

        Args:
            order_id: Id of the order, with its leading '#'.
            reason: Either 'no longer needed' or 'ordered by mistake'.
        """
        if self._order(order_id)["status"] != "pending":
            raise ValueError("Non-pending order cannot be cancelled")
        if reason not in {"no longer needed", "ordered by mistake"}:
            raise ValueError("Invalid reason")
        order = self.touch("orders", order_id)
        refunds: list[Plain] = []
        for payment in order["payment_history"]:
            paid_with = payment["payment_method_id"]
            refunds.append(_payment("refund", payment["amount"], paid_with))
            if _is_gift_card(self._payment_method(order["user_id"], paid_with)):
                _add_balance(self._own_payment_method(order["user_id"], paid_with), payment["amount"])
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
            order_id: Id of the order, with its leading '#'.
            item_ids: Ids of the items to give back; one may occur several times.
            new_item_ids: Ids of the items wanted instead, in the same order.
            payment_method_id: What pays, or receives, the difference in price.
        """
        order = self._order(order_id)
        if order["status"] != "delivered":
            raise ValueError("Non-delivered order cannot be exchanged")
        held = [item["item_id"] for item in order["items"]]
        for item_id in item_ids:
            if item_ids.count(item_id) > held.count(item_id):
                raise ValueError(f"Number of {item_id} not found.")
        if len(item_ids) != len(new_item_ids):
            raise ValueError("The number of items to be exchanged should match.")
        difference, _ = self._price_difference(order, item_ids, new_item_ids, must_differ=False)
        difference = round(difference, 2)
        method = self._payment_method(order["user_id"], payment_method_id)
        if _is_gift_card(method) and method["balance"] < difference:
            raise ValueError("Insufficient gift card balance to pay for the price difference")
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
            first_name: First name.
            last_name: Last name.
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
        """Find a user's id by email address.

        Args:
            email: Email address.
        """
        wanted = email.lower()
        for user_id in self.users:
            if self.look("users", user_id)["email"].lower() == wanted:
                return user_id
        raise ValueError("User not found")

    @tool
    def get_order_details(self, order_id: str) -> Plain:
        """Look an order up.

        Args:
            order_id: Id of the order, with its leading '#'.
        """
        return self._order(order_id)

    @tool
    def get_product_details(self, product_id: str) -> Plain:
        """Look a product and all its variants up.

        Args:
            product_id: Id of the product, not of an item.
        """
        return self._product(product_id)

    @tool
    def get_item_details(self, item_id: str) -> Plain:
        """Look one variant of a product up.

        Args:
            item_id: Id of the item, not of the product.
        """
        for product_id in self.products:
            variants = self.look("products", product_id)["variants"]
            if item_id in variants:
                return variants[item_id]
        raise ValueError("Item not found")

    @tool
    def get_user_details(self, user_id: str) -> Plain:
        """Look a user and the ids of their orders up.

        Args:
            user_id: Id of the user.
        """
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
        """Change the shipping address of a pending order.

        Args:
            order_id: Id of the order, with its leading '#'.
            address1: First line of the address.
            address2: Second line; may be empty.
            city: City.
            state: State.
            country: Country.
            zip: Zip code.
        """
        if "pending" not in self._order(order_id)["status"]:
            raise ValueError("Non-pending order cannot be modified")
        address = UserAddress(
            address1=address1, address2=address2, city=city, state=state, country=country, zip=zip
        )
        order = self.touch("orders", order_id)
        order["address"] = address.model_dump()
        return order

    @tool(writes=True)
    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> Plain:
        """Change items of a pending order to others of the same products; possible once.

        Args:
            order_id: Id of the order, with its leading '#'.
            item_ids: Ids of the items to change; one may occur several times.
            new_item_ids: Ids of the items wanted instead, in the same order.
            payment_method_id: What pays, or receives, the difference in price.
        """
        order = self._order(order_id)
        if order["status"] != "pending":
            raise ValueError("Non-pending order cannot be modified")
        held = [item["item_id"] for item in order["items"]]
        for item_id in item_ids:
            if item_ids.count(item_id) > held.count(item_id):
                raise ValueError(f"{item_id} not found")
        if len(item_ids) != len(new_item_ids):
            raise ValueError("The number of items to be exchanged should match")
        difference, last = self._price_difference(order, item_ids, new_item_ids, must_differ=True)
        method = self._payment_method(order["user_id"], payment_method_id)
        if _is_gift_card(method) and method["balance"] < difference:
            raise ValueError("Insufficient gift card balance to pay for the new item")
        order = self.touch("orders", order_id)
        kind = "payment" if difference > 0 else "refund"
        order["payment_history"].append(_payment(kind, float(abs(difference)), payment_method_id))
        if _is_gift_card(method):
            _add_balance(self._own_payment_method(order["user_id"], payment_method_id), -difference)
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            item["item_id"] = new_item_id
            # The benchmark gives every changed item the price and options of the last new one.
            item["price"] = last["price"]
            item["options"] = dict(last["options"])
        order["status"] = "pending (item modified)"
        return order

    @tool(writes=True)
    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Plain:
        """Pay a pending order by another method; what was paid before is refunded.

        Args:
            order_id: Id of the order, with its leading '#'.
            payment_method_id: The method to pay with instead.
        """
        order = self._order(order_id)
        if "pending" not in order["status"]:
            raise ValueError("Non-pending order cannot be modified")
        method = self._payment_method(order["user_id"], payment_method_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ValueError("There should be exactly one payment for a pending order")
        before = history[0]["payment_method_id"]
        if before == payment_method_id:
            raise ValueError("The new payment method should be different from the current one")
        amount = history[0]["amount"]
        if _is_gift_card(method) and method["balance"] < amount:
            raise ValueError("Insufficient gift card balance to pay for the order")
        order = self.touch("orders", order_id)
        order["payment_history"] += [
            _payment("payment", amount, payment_method_id),
            _payment("refund", amount, before),
        ]
        if _is_gift_card(method):
            _add_balance(self._own_payment_method(order["user_id"], payment_method_id), -amount)
        if _is_gift_card(self._payment_method(order["user_id"], before)):
            _add_balance(self._own_payment_method(order["user_id"], before), amount)
        return order

    @tool(writes=True)
    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Plain:
        """Change a user's default address.

        Args:
            user_id: Id of the user.
            address1: First line of the address.
            address2: Second line; may be empty.
            city: City.
            state: State.
            country: Country.
            zip: Zip code.
        """
        self._user(user_id)
        address = UserAddress(
            address1=address1, address2=address2, city=city, state=state, country=country, zip=zip
        )
        user = self.touch("users", user_id)
        user["address"] = address.model_dump()
        return user

    @tool(writes=True)
    def return_delivered_order_items(
        self, order_id: str, item_ids: list[str], payment_method_id: str
    ) -> Plain:
        """Request the return of items of a delivered order.

        Args:
            order_id: Id of the order, with its leading '#'.
            item_ids: Ids of the items to return; one may occur several times.
            payment_method_id: What receives the refund: the original method or a gift card.
        """
        order = self._order(order_id)
        if order["status"] != "delivered":
            raise ValueError("Non-delivered order cannot be returned")
        method = self._payment_method(order["user_id"], payment_method_id)
        paid_with = order["payment_history"][0]["payment_method_id"]
        if not _is_gift_card(method) and payment_method_id != paid_with:
            raise ValueError("Payment method should be the original payment method")
        held = [item["item_id"] for item in order["items"]]
        for item_id in item_ids:
            if item_ids.count(item_id) > held.count(item_id):
                raise ValueError("Some item not found")
        order = self.touch("orders", order_id)
        order["status"] = "return requested"
        order["return_items"] = sorted(item_ids)
        order["return_payment_method_id"] = payment_method_id
        return order

    @tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent.

        Args:
            summary: What the user wants and what was done so far.
        """
        return "Transfer successful"
