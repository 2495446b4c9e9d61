"""An agent that solves every task of the shop through its tools and words alone; it never sees the task.

It understands the shop's customers by keyword, and reads like the policy: each step yields what to say or
call, and gets back what the customer or the tool answers. Its short, regular sentences serve as cold-start
data; with `faults` it becomes a careless teacher whose pupils have something left to learn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, cast, get_args

from trialogue.messages import ToolCall
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domains.shop.catalogue import COLOURS, KINDS, STREET_TYPES
from trialogue.world.domains.shop.database import Reason, Topic
from trialogue.world.tools import Tool

T = TypeVar("T")
Steps = Generator[Reply, str, T]
Data = dict[str, Any]

# The first rule that fits decides, so the more particular ones stand first.
RULES: dict[str, str] = {
    "damaged item": r"damaged",
    "lost parcel": r"\blost\b",
    "invoice": r"invoice",
    "complaint": r"complaint",
    "website problem": r"website",
    "refund": r"refund|gift card",
    "exchange": r"\bexchang",
    "return": r"\breturn|\b(?:send|take)\b.*\bback\b",
    "cancel": r"\bcancel",
    "change_items": r"\breplac|\bswap",
    "change_address": r"\b(?:chang|new|another|different)\w*\b.*\baddress|\baddress\b.*\bchang",
    "change_payment": r"\b(?:chang|new|another|different)\w*\b.*\bpay|\bpay\w*\b.*\bchang",
    "status": r"\bstatus",
    "total": r"\btotal",
    "price": r"\bprice",
    "payment_method": r"\bpayment",
    "address": r"\baddress",
}
TOPICS = get_args(Topic)
QUESTIONS = ("status", "total", "address", "payment_method")
REASON_WORDS: dict[str, Reason] = {
    "longer": "no longer needed",
    "mistake": "ordered by mistake",
    "cheaper": "found cheaper",
}
PRODUCT = re.compile(rf"\b(?:{'|'.join(COLOURS)}) (?:{'|'.join(KINDS)})\b")
ADDRESS = re.compile(rf"\b\d+ \w+ (?:{'|'.join(STREET_TYPES)})\b")
ORDER = re.compile(r"\bW\d{4}\b")
EMAIL = re.compile(r"(?<![\w.])[\w.]+@[\w.]+\w")
NAME = re.compile(r"\b[A-Z][a-z]+ [A-Z][a-z]+\b")
POSTCODE = re.compile(r"\b\d{4}\b")
PAYMENT = re.compile(r"\b(?:visa|mastercard|amex) \d{4}\b|\bpaypal\b", re.IGNORECASE)
WITHDRAWS = re.compile(r"\bleave (?:it|everything) as\b", re.IGNORECASE)
YES = re.compile(r"\b(?:yes|sure|ok|okay|go ahead)\b", re.IGNORECASE)


def understand(text: str) -> str | None:
    """What kind of request a customer's words are."""
    text = text[:2000].lower()
    return next((kind for kind, rule in RULES.items() if re.search(rule, text)), None)


@dataclass
class Request:
    """What is known of the request being dealt with."""

    kind: str
    text: str
    """All that the customer said about it."""
    order: Data = field(default_factory=lambda: {})
    item: Data = field(default_factory=lambda: {})
    new: Data = field(default_factory=lambda: {})


class Oracle:
    """One conversation's perfect agent, or with `faults` (a probability) a careless one."""

    def __init__(self, seed: int | str = 0, faults: float = 0.0) -> None:
        self.random = Random(f"oracle/{seed}")
        self.faults = faults
        self.customer: Data = {}
        self.order: Data = {}
        """The one last looked at: "that order"."""
        self.done: dict[tuple[str, str], Data] = {}
        """The last change of each kind to each order."""
        self._steps: Steps[None] | None = None
        self._replies: list[Reply] = []

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        spoken = sum(turn.message.role == "assistant" for turn in turns)
        if spoken >= len(self._replies):  # else asked for the same words again
            heard = turns[-1].message.content
            if self._steps is None:
                self._steps = self._serve(heard)
                self._replies.append(next(self._steps))
            else:
                self._replies.append(self._steps.send(heard))
        return self._replies[-1]

    def _errs(self) -> bool:
        return self.random.random() < self.faults

    def _has_the_habit(self) -> bool:
        return self.random.random() < min(3 * self.faults, 0.75)

    # -- the two moves ------------------------------------------------------------------------------------

    def _say(self, text: str) -> Steps[str]:
        return (yield Reply(text))

    def _call(self, name: str, /, **arguments: Any) -> Steps[Data]:
        """Call a tool; an error comes back as an empty record."""
        number = len(self._replies)
        result = yield Reply(tool_calls=(ToolCall(id=f"call_{number}", name=name, arguments=arguments),))
        return {} if result.startswith("Error") else cast("Data", json.loads(result))

    # -- the conversation ---------------------------------------------------------------------------------

    def _serve(self, text: str) -> Steps[None]:
        while True:
            kind = understand(text)
            if kind is None:
                text = yield from self._say("How can I help you?")
                continue
            if not self.customer:
                yield from self._identify()
            if kind in TOPICS:
                topic = self.random.choice(TOPICS) if self._errs() else kind
                customer_id = self.customer["customer_id"]
                yield from self._call("transfer_to_human", customer_id=customer_id, topic=topic)
                text = yield from self._say("I transfer you to a colleague.")
            elif kind == "price":
                text = yield from self._tell_price(text)
            else:
                text = yield from self._deal_with(Request(kind, text))

    def _identify(self) -> Steps[None]:
        question = "Could I have your e-mail, or your name and postcode?"
        while not self.customer:
            text = yield from self._say(question)
            email, name, postcode = EMAIL.search(text), NAME.search(text), POSTCODE.search(text)
            if email:
                self.customer = yield from self._call("find_customer_by_email", email=email[0])
            elif name and postcode:
                self.customer = yield from self._call(
                    "find_customer_by_name", name=name[0], postcode=postcode[0]
                )
            question = "Could I have your name and postcode?"

    def _tell_price(self, text: str) -> Steps[str]:
        while not (name := PRODUCT.search(text)):
            text = yield from self._say("Which product do you mean?")
        product = yield from self._call("get_product", name=name[0])
        return (yield from self._say(f"The price of the {name[0]} is {product['price']}. Anything else?"))

    def _deal_with(self, request: Request) -> Steps[str]:
        """A request about an order, from looking up to reporting; gives back what the customer says then."""
        blind = request.kind in ("cancel", "change_address", "change_payment") and self._errs()
        yield from self._find_order(request, blind)
        order_id = request.order["order_id"]
        if request.kind in QUESTIONS and request.order["customer_id"] != self.customer["customer_id"]:
            words = f"Sorry, I cannot tell the {request.kind.replace('_', ' ')} of order {order_id}"
            return (yield from self._say(f"{words} because it belongs to another customer. Anything else?"))
        if request.kind in QUESTIONS:
            asked = self.random.choice(("status", "total", "address")) if self._errs() else request.kind
            words = f"The {request.kind.replace('_', ' ')} of order {order_id} is {request.order[asked]}."
            return (yield from self._say(f"{words} Anything else?"))
        obstacle = find_obstacle(request, self.customer["customer_id"])
        if self._has_the_habit() if request.kind == "refund" else self._errs():
            obstacle = None if obstacle else "it is shipped"
        if obstacle:
            return (yield from self._refuse(request, obstacle))
        careless = self._has_the_habit()
        arguments = yield from self._gather(request, careless)
        if request.new and not request.new["in_stock"] and not careless:
            return (yield from self._refuse(request, f"the {request.new['name']} is not in stock"))
        change = request.kind, order_id
        if self.done.get(change) == arguments:
            return (yield from self._say(f"{report(request, arguments)} Anything else?"))
        while not careless:
            answer = yield from self._say(f"Shall I {describe(request, arguments)}?")
            if YES.search(answer):
                break
            if WITHDRAWS.search(answer):
                return (yield from self._say("All right, it stays as it is. Anything else?"))
            if understand(answer):
                return answer  # another wish: begin again with that
            request.text = answer
            if ids := ORDER.findall(answer):
                request.order = yield from self._call("get_order", order_id=ids[0])
            request.new = {}
            arguments = yield from self._gather(request, careless)
        if self._errs():
            arguments = self._garble(arguments)
        name = {"cancel": "cancel_order", "refund": "refund_to_gift_card", "return": "return_items"}.get(
            request.kind
        )
        name = name or {"exchange": "exchange_items"}.get(request.kind, request.kind)
        result = yield from self._call(name, **arguments)
        if not result:
            return (yield from self._refuse(request, "the system refuses it"))
        self.done[change] = arguments
        return (yield from self._say(f"{report(request, arguments)} Anything else?"))

    def _refuse(self, request: Request, obstacle: str) -> Steps[str]:
        action = describe(request, {"order_id": request.order["order_id"]})
        return (yield from self._say(f"Sorry, I cannot {action} because {obstacle}. Anything else?"))

    def _find_order(self, request: Request, blind: bool) -> Steps[None]:
        """Find the order by its number, or by a product among the customer's orders."""
        if "that order" in request.text and self.order:
            request.order = self.order
            return
        if not ORDER.search(request.text):
            request.text += "\n" + (yield from self._say("What is the order number?"))
        number = ORDER.search(request.text)
        if number is None and not PRODUCT.search(request.text):
            request.text += "\n" + (yield from self._say("Which product is in the order?"))
        candidates = [number[0]] if number else list(self.customer["order_ids"])
        for order_id in candidates:
            if blind:  # as if it had been looked up, and nothing stood in the way
                request.order = {
                    "order_id": order_id,
                    "customer_id": self.customer["customer_id"],
                    "items": [],
                }
                request.order["status"] = "pending"
            else:
                request.order = yield from self._call("get_order", order_id=order_id)
            names = [item["name"] for item in request.order.get("items", ())]
            if number or any(name in request.text for name in names):
                break
        if not request.order:
            request.text = yield from self._say(
                f"Sorry, I do not find order {candidates[0]}. What is the order number?"
            )
            yield from self._find_order(request, blind)
        self.order = request.order

    def _gather(self, request: Request, careless: bool) -> Steps[Data]:
        """The arguments of the write: from what was said, from the order, or by asking."""
        arguments: Data = {"order_id": request.order["order_id"]}
        match request.kind:
            case "cancel":
                arguments["reason"] = yield from self._find_reason(request, careless)
            case "change_address":
                while not (address := ADDRESS.search(request.text)):
                    request.text += "\n" + (yield from self._say("What is the new address?"))
                arguments["address"] = address[0]
            case "change_payment":
                while not (method := PAYMENT.search(request.text)):
                    request.text += "\n" + (yield from self._say("Which payment method would you like?"))
                arguments["payment_method"] = method[0].lower()
            case "refund":
                arguments["total"] = request.order["total"]
            case _:
                yield from self._find_items(request)
                arguments["item_ids"] = [request.item["item_id"]]
                if request.new:
                    arguments["new_item_ids"] = [request.new["item_id"]]
        return arguments

    def _find_reason(self, request: Request, careless: bool) -> Steps[str]:
        while True:
            for word, reason in REASON_WORDS.items():
                if word in request.text.lower():
                    return reason
            if careless:
                return self.random.choice(get_args(Reason))
            question = "What is the reason: no longer needed, ordered by mistake or found cheaper?"
            request.text += "\n" + (yield from self._say(question))

    def _find_items(self, request: Request) -> Steps[None]:
        """The item in question and, for an exchange, the product wanted instead."""
        items = request.order["items"]
        while not request.item:
            named = [item for item in items if item["name"] in request.text]
            if len(items) == 1 or named:
                request.item = (named or items)[0]
            else:
                request.text += "\n" + (yield from self._say("Which item do you mean?"))
        while request.kind != "return" and not request.new:
            names = [name for name in PRODUCT.findall(request.text) if name != request.item["name"]]
            if names:
                request.new = yield from self._call("get_product", name=names[-1])
            else:
                request.text += "\n" + (yield from self._say("Which product would you like instead?"))

    def _garble(self, arguments: Data) -> Data:
        """The wrong order: another one of the customer, or swapped digits."""
        others = [order_id for order_id in self.customer["order_ids"] if order_id != arguments["order_id"]]
        if others:
            return {**arguments, "order_id": self.random.choice(others)}
        digits = arguments["order_id"][1:]
        return {**arguments, "order_id": f"W{digits[2:]}{digits[:2]}"}


def find_obstacle(request: Request, customer_id: str) -> str | None:
    """Why the policy forbids a request, None where it does not."""
    order, kind = request.order, request.kind
    status = order["status"]
    if order["customer_id"] != customer_id:
        return "it belongs to another customer"
    if kind == "refund":
        if "gift card" not in request.text:
            return "refunds go to the original payment method or a gift card"
        return None if status in ("cancelled", "returned") else f"it is {status}"
    if kind in ("return", "exchange"):
        if status != "delivered":
            return f"it is {status}"
        if order["days_since_delivery"] > 30:
            return "it was delivered more than 30 days ago"
        return "it was already exchanged" if kind == "exchange" and order.get("exchanged") else None
    return None if status == "pending" else f"it is {status}"


def describe(request: Request, arguments: Data) -> str:
    """What is about to be done, or cannot be."""
    order = f"order {arguments['order_id']}"
    item = f"the {request.item['name']}" if request.item else "items"
    match request.kind:
        case "cancel":
            return f"cancel {order}" + (f", reason {arguments['reason']}" if "reason" in arguments else "")
        case "change_address":
            return f"change the address of {order}" + (
                f" to {arguments['address']}" if "address" in arguments else ""
            )
        case "change_payment":
            method = arguments.get("payment_method")
            return f"change the payment method of {order}" + (f" to {method}" if method else "")
        case "refund":
            return (
                f"refund {arguments['total']} of {order} to a gift card"
                if "total" in arguments
                else f"refund {order}"
            )
        case "return":
            return f"return {item} of {order}"
        case _:
            verb, link = ("exchange", "for") if request.kind == "exchange" else ("replace", "with")
            return f"{verb} {item} of {order}" + (f" {link} the {request.new['name']}" if request.new else "")


def report(request: Request, arguments: Data) -> str:
    """What has been done."""
    order = f"order {arguments['order_id']}"
    match request.kind:
        case "cancel":
            return f"O{order[1:]} has been cancelled."
        case "change_address":
            return f"The address of {order} has been changed."
        case "change_payment":
            return f"The payment method of {order} has been changed."
        case "refund":
            return f"O{order[1:]} has been refunded to a gift card."
        case "return":
            return f"The {request.item['name']} of {order} has been returned."
        case kind:
            verb = "exchanged" if kind == "exchange" else "replaced"
            return f"The {request.item['name']} of {order} has been {verb}."


def make_oracle(task: Task, seed: int, faults: float = 0.0) -> Oracle:
    """The oracle for a conversation; the task itself is not looked at.

    With `faults` it errs: with this probability each it decides without looking the order up, misjudges the
    policy, or gets a value wrong. Three times as likely are its two habits: it asks neither for the reason
    nor for the final yes, and it misjudges refunds.
    """
    return Oracle(f"{task.id}/{seed}", faults)
