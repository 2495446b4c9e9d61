"""TAU-bench retail: sixteen tools over orders, products and users."""

from __future__ import annotations

import json

from trialogue.benchmarks.arithmetic import ALLOWED
from trialogue.benchmarks.arithmetic import calculate as work_out
from trialogue.benchmarks.tau1.world import Tau1Toolkit
from trialogue.benchmarks.toolkit import Plain
from trialogue.world.database import Table
from trialogue.world.tools import tool


def _payment(kind: str, amount: float, method: str) -> Plain:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method}


def _add_balance(method: Plain, amount: float) -> None:
    method["balance"] += amount
    method["balance"] = round(method["balance"], 2)


class RetailTools(Tau1Toolkit):
    orders: Table[Plain]
    products: Table[Plain]
    users: Table[Plain]

    def _order(self, order_id: str, status: str, verb: str) -> Plain:
        """An order of a status, for reading."""
        order = self.need("orders", order_id, "order")
        if order["status"] != status:
            raise ValueError(f"non-{status} order cannot be {verb}")
        return order

    def _check_held(self, order: Plain, item_ids: list[str], complaint: str) -> None:
        held = [item["item_id"] for item in order["items"]]
        for item_id in item_ids:
            if item_ids.count(item_id) > held.count(item_id):
                raise ValueError(complaint.format(item_id=item_id))

    def _variants(self, product_id: str) -> Plain:
        product = self.look("products", product_id)
        if product is None:
            raise KeyError(product_id)
        return product["variants"]

    def _price_difference(self, order: Plain, item_ids: list[str], new_item_ids: list[str]) -> float:
        self._check_held(order, item_ids, "{item_id} not found")
        if len(item_ids) != len(new_item_ids):
            raise ValueError("the number of items to be exchanged should match")
        difference: float = 0
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = next(item for item in order["items"] if item["item_id"] == item_id)
            variants = self._variants(item["product_id"])
            if new_item_id not in variants or not variants[new_item_id]["available"]:
                raise ValueError(f"new item {new_item_id} not found or available")
            difference += variants[new_item_id]["price"] - item["price"]
        return difference

    def _method(self, order: Plain, payment_method_id: str) -> Plain:
        methods = self.need("users", order["user_id"], "user")["payment_methods"]
        if payment_method_id not in methods:
            raise ValueError("payment method not found")
        return methods[payment_method_id]

    def _own_method(self, order: Plain, payment_method_id: str) -> Plain:
        return self.touch("users", order["user_id"])["payment_methods"][payment_method_id]

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
    def cancel_pending_order(self, order_id: str, reason: str) -> Plain:
        """Cancel a pending order and refund what was paid for it.

        Args:
            order_id: Id of the order, with its leading '#'.
            reason: Either 'no longer needed' or 'ordered by mistake'.
        """
        self._order(order_id, "pending", "cancelled")
        if reason not in ["no longer needed", "ordered by mistake"]:
            raise ValueError("invalid reason")
        order = self.touch("orders", order_id)
        refunds: list[Plain] = []
        for payment in order["payment_history"]:
            paid_with = payment["payment_method_id"]
            refunds.append(_payment("refund", payment["amount"], paid_with))
            if "gift_card" in paid_with:
                _add_balance(self._own_method(order, paid_with), payment["amount"])
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
        order = self._order(order_id, "delivered", "exchanged")
        difference = round(self._price_difference(order, item_ids, new_item_ids), 2)
        method = self._method(order, payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < difference:
            raise ValueError("insufficient gift card balance to pay for the price difference")
        order = self.touch("orders", order_id)
        order["status"] = "exchange requested"
        order["exchange_items"] = sorted(item_ids)
        order["exchange_new_items"] = sorted(new_item_ids)
        order["exchange_payment_method_id"] = payment_method_id
        order["exchange_price_difference"] = difference
        return order

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
        raise ValueError("user not found")

    @tool
    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find a user's id by name and zip code.

        Args:
            first_name: First name.
            last_name: Last name.
            zip: Zip code of the user's address.
        """
        wanted = first_name.lower(), last_name.lower(), zip
        for user_id in self.users:
            user = self.look("users", user_id)
            name = user["name"]
            if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
                return user_id
        raise ValueError("user not found")

    @tool
    def get_order_details(self, order_id: str) -> Plain:
        """Look an order up.

        Args:
            order_id: Id of the order, with its leading '#'.
        """
        return self.need("orders", order_id, "order")

    @tool
    def get_product_details(self, product_id: str) -> Plain:
        """Look a product and all its variants up.

        Args:
            product_id: Id of the product, not of an item.
        """
        return self.need("products", product_id, "product")

    @tool
    def get_user_details(self, user_id: str) -> Plain:
        """Look a user and the ids of their orders up.

        Args:
            user_id: Id of the user.
        """
        return self.need("users", user_id, "user")

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
        self._order(order_id, "pending", "modified")
        order = self.touch("orders", order_id)
        order["address"] = _to_address(address1, address2, city, state, country, zip)
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
        order = self._order(order_id, "pending", "modified")
        difference = self._price_difference(order, item_ids, new_item_ids)
        method = self._method(order, payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < difference:
            raise ValueError("insufficient gift card balance to pay for the new item")
        order = self.touch("orders", order_id)
        kind = "payment" if difference > 0 else "refund"
        order["payment_history"].append(_payment(kind, abs(difference), payment_method_id))
        if method["source"] == "gift_card":
            _add_balance(self._own_method(order, payment_method_id), -difference)
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            item = [item for item in order["items"] if item["item_id"] == item_id][0]  # noqa: RUF015
            variant = self._variants(item["product_id"])[new_item_id]
            item["item_id"] = new_item_id
            item["price"] = variant["price"]
            item["options"] = dict(variant["options"])
        order["status"] = "pending (item modified)"
        return order

    @tool(writes=True)
    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Plain:
        """Pay a pending order by another method; what was paid before is refunded.

        Args:
            order_id: Id of the order, with its leading '#'.
            payment_method_id: The method to pay with instead.
        """
        order = self._order(order_id, "pending", "modified")
        method = self._method(order, payment_method_id)
        history = order["payment_history"]
        if len(history) > 1 or history[0]["transaction_type"] != "payment":
            raise ValueError("there should be exactly one payment for a pending order")
        before, amount = history[0]["payment_method_id"], history[0]["amount"]
        if before == payment_method_id:
            raise ValueError("the new payment method should be different from the current one")
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ValueError("insufficient gift card balance to pay for the order")
        order = self.touch("orders", order_id)
        order["payment_history"] += [
            _payment("payment", amount, payment_method_id),
            _payment("refund", amount, before),
        ]
        if method["source"] == "gift_card":
            _add_balance(self._own_method(order, payment_method_id), -amount)
        if "gift_card" in before:
            _add_balance(self._own_method(order, before), amount)
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
        self.need("users", user_id, "user")
        user = self.touch("users", user_id)
        user["address"] = _to_address(address1, address2, city, state, country, zip)
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
        order = self._order(order_id, "delivered", "returned")
        self._method(order, payment_method_id)
        paid_with = order["payment_history"][0]["payment_method_id"]
        if "gift_card" not in payment_method_id and payment_method_id != paid_with:
            raise ValueError("payment method should be either the original payment method or a gift card")
        self._check_held(order, item_ids, "some item not found")
        order = self.touch("orders", order_id)
        order["status"] = "return requested"
        order["return_items"] = sorted(item_ids)
        order["return_payment_method_id"] = payment_method_id
        return order

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


def _to_address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Plain:
    return {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip,
    }
