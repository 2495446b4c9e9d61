"""The shop's records and the tools of its service desk.

A tool refuses only what cannot be done at all, such as an unknown order or one already cancelled. What may be
done is the policy's business, so an agent that ignores the policy leaves a wrong database behind.
"""

from __future__ import annotations

import ast
from typing import Any, Literal

from trialogue.errors import ToolError
from trialogue.world.database import Database, Record, Table
from trialogue.world.tools import tool

Status = Literal["pending", "shipped", "delivered", "cancelled", "returned"]
Reason = Literal["no longer needed", "ordered by mistake", "found cheaper"]
Topic = Literal["damaged item", "lost parcel", "invoice", "complaint", "website problem"]


class Product(Record):
    item_id: str
    name: str
    price: float
    in_stock: bool = True


class Item(Record):
    item_id: str
    name: str
    price: float


class Customer(Record):
    customer_id: str
    name: str
    email: str
    postcode: str
    payment_methods: list[str]
    order_ids: list[str]


class Order(Record):
    order_id: str
    customer_id: str
    status: Status
    days_since_delivery: int | None = None
    address: str
    payment_method: str
    items: list[Item]
    total: float
    exchanged: bool = False
    returned: list[str] = []
    """Item ids, sorted, so that the order of returning leaves no trace."""
    reason: Reason | None = None
    gift_card: float | None = None


class Ticket(Record):
    customer_id: str
    topic: Topic


class Shop(Database):
    """An online shop as its service desk sees it."""

    customers: Table[Customer]
    orders: Table[Order]
    products: Table[Product]
    tickets: Table[Ticket]
    caller: str = ""
    """The customer who was identified in this conversation: an agent that skips it leaves that behind."""

    # -- looking up -------------------------------------------------------------------------------------

    @tool(writes=True)
    def find_customer_by_email(self, email: str) -> Customer:
        """Identify the customer by e-mail."""
        found = self.customers.where(email=email.strip().lower())
        if not found:
            raise ToolError(f"no customer with e-mail {email}")
        self.caller = found[0].customer_id
        return found[0]

    @tool(writes=True)
    def find_customer_by_name(self, name: str, postcode: str) -> Customer:
        """Identify the customer by full name and postcode."""
        wanted = " ".join(name.lower().split())
        for customer in self.customers.where(postcode=postcode.strip()):
            if customer.name.lower() == wanted:
                self.caller = customer.customer_id
                return customer
        raise ToolError(f"no customer {name} with postcode {postcode}")

    @tool
    def get_customer(self, customer_id: str) -> Customer:
        """Look up a customer: e-mail, postcode, payment methods, order ids."""
        customer = self.customers.get(customer_id)
        if customer is None:
            raise ToolError(f"no customer {customer_id}")
        return customer

    @tool
    def get_order(self, order_id: str) -> dict[str, Any]:
        """Look up an order: status, days since delivery, address, payment method, items, total."""
        order = self._order(order_id)
        # What is unset says nothing; leaving it out keeps the record short.
        return {
            name: value
            for name, value in order.__dict__.items()
            if value is not None and value is not False and value != []
        }

    @tool
    def get_product(self, name: str) -> Product:
        """Look up a product by name: item id, price, whether it is in stock."""
        found = self.products.where(name=" ".join(name.lower().split()))
        if not found:
            raise ToolError(f"no product called {name}")
        return found[0]

    # -- changing ---------------------------------------------------------------------------------------

    @tool(writes=True)
    def cancel_order(self, order_id: str, reason: Reason) -> dict[str, Any]:
        """Cancel an order."""
        order = self._standing(order_id)
        order.status = "cancelled"
        order.reason = reason
        return {"order_id": order_id, "status": order.status}

    @tool(writes=True)
    def return_items(self, order_id: str, item_ids: list[str]) -> dict[str, Any]:
        """Return items of an order; the refund goes to its payment method."""
        order = self._standing(order_id)
        if not item_ids:
            raise ToolError("no items to return")
        for item_id in item_ids:
            self._position(order, item_id)
            if item_id in order.returned:
                raise ToolError(f"item {item_id} of order {order_id} is already returned")
            order.returned = sorted([*order.returned, item_id])
        if all(item.item_id in order.returned for item in order.items):
            order.status = "returned"
        return {"order_id": order_id, "returned": order.returned}

    @tool(writes=True)
    def exchange_items(self, order_id: str, item_ids: list[str], new_item_ids: list[str]) -> dict[str, Any]:
        """Exchange items of a delivered order for other items, one for one."""
        order = self._replace(order_id, item_ids, new_item_ids)
        order.exchanged = True
        return {"order_id": order_id, "items": order.items, "total": order.total}

    @tool(writes=True)
    def change_items(self, order_id: str, item_ids: list[str], new_item_ids: list[str]) -> dict[str, Any]:
        """Replace items of a pending order by other items, one for one."""
        order = self._replace(order_id, item_ids, new_item_ids)
        return {"order_id": order_id, "items": order.items, "total": order.total}

    @tool(writes=True)
    def change_address(self, order_id: str, address: str) -> dict[str, Any]:
        """Change the delivery address of an order."""
        order = self._standing(order_id)
        order.address = address
        return {"order_id": order_id, "address": address}

    @tool(writes=True)
    def change_payment(self, order_id: str, payment_method: str) -> dict[str, Any]:
        """Change the payment method of an order to another one of the customer's."""
        order = self._standing(order_id)
        known = self.customers[order.customer_id].payment_methods
        if payment_method not in known:
            raise ToolError(f"no payment method {payment_method}; the customer has {', '.join(known)}")
        order.payment_method = payment_method
        return {"order_id": order_id, "payment_method": payment_method}

    @tool(writes=True)
    def refund_to_gift_card(self, order_id: str, total: float) -> dict[str, Any]:
        """Pay the refund of an order to a gift card.

        Args:
            total: The order's total.
        """
        order = self._order(order_id)
        if order.gift_card is not None:
            raise ToolError(f"order {order_id} is already refunded to a gift card")
        if not 0 < total < 1e6:
            raise ToolError("total must be more than 0")
        order.gift_card = total
        return {"order_id": order_id, "gift_card": total}

    @tool(writes=True, ends=True)
    def transfer_to_human(self, customer_id: str, topic: Topic) -> Ticket:
        """Hand the conversation over to a human colleague. This ends it."""
        if customer_id not in self.customers:
            raise ToolError(f"no customer {customer_id}")
        ticket = Ticket(customer_id=customer_id, topic=topic)
        self.tickets[customer_id] = ticket
        return ticket

    @tool
    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression such as "12.50 + 3 * 4"."""
        return calculate(expression)

    # -- what several tools need ------------------------------------------------------------------------

    def _order(self, order_id: str) -> Order:
        order = self.orders.get(order_id)
        if order is None:
            raise ToolError(f"no order {order_id}")
        return order

    def _standing(self, order_id: str) -> Order:
        order = self._order(order_id)
        if order.status == "cancelled":
            raise ToolError(f"order {order_id} is cancelled")
        return order

    def _position(self, order: Order, item_id: str) -> int:
        for position, item in enumerate(order.items):
            if item.item_id == item_id:
                return position
        raise ToolError(f"no item {item_id} in order {order.order_id}")

    def _replace(self, order_id: str, item_ids: list[str], new_item_ids: list[str]) -> Order:
        order = self._standing(order_id)
        if not item_ids or len(item_ids) != len(new_item_ids):
            raise ToolError("item_ids and new_item_ids must have the same length, at least 1")
        for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
            position = self._position(order, item_id)
            product = self.products.get(new_item_id)
            if product is None:
                raise ToolError(f"no item {new_item_id}")
            order.items[position] = Item(item_id=new_item_id, name=product.name, price=product.price)
        order.total = round(sum(item.price for item in order.items), 2)
        return order


def calculate(expression: str) -> str:
    """The value of + - * / over numbers, rounded to cents. The text is parsed, never evaluated.

    >>> calculate("(12.50 + 3) * 2")
    '31.00'
    """

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return float(number)  # no integers of a million digits
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return value(left) - value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return value(left) / value(right)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case _:
                raise ValueError("only numbers, + - * / and parentheses are allowed")

    if len(expression) > 200:
        raise ToolError("calculate: the expression is longer than 200 characters")
    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):.2f}"
    except ZeroDivisionError:
        raise ToolError(f"calculate: '{expression}' divides by zero") from None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        raise ToolError(
            f"calculate: cannot read '{expression}'; only numbers, + - * / and parentheses are allowed"
        ) from None
