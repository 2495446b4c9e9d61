"""The phone of ACEBench: messages, reminders and a food platform."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from trialogue.benchmarks.ace.texts import WORLD, say
from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.world.tools import tool

CAPACITY = 6
"""Maximum number of messages, and of reminders."""
PEOPLE = {name: f"USR{100 + number}" for number, (name, *_) in enumerate(WORLD["people"])}
FORMAT = "%Y-%m-%d"


def to_users() -> dict[str, Plain]:
    """The customers of the food platform."""
    return {
        name: {"user_id": f"U{100 + number}", "password": password, "balance": balance}
        for number, (name, password, balance) in enumerate(WORLD["people"])
    }


class AcePhone(Toolkit):
    """The state of the phone. Its four classes share Wi-Fi and login."""

    language: str
    wifi: bool = False
    logged_in: bool = True
    inbox: dict[int, Plain]
    last_message: int = 6
    reminder_list: dict[int, Plain]
    last_reminder: int = 3
    users: dict[str, Plain]
    logged_in_users: list[str] = []
    orders: list[Plain] = []

    def _answer(self, status: bool, key: str, *values: object) -> Plain:
        return {"status": status, "message": say(self.language, key, *values)}

    def _delete(
        self, records: dict[int, Plain], number: int, locked: str, missing: str, deleted: str
    ) -> Plain:
        """Delete a message or reminder, and answer with one of the texts."""
        if not self.logged_in:
            return self._answer(False, locked)
        if number not in records:
            return self._answer(False, missing)
        del records[number]
        return self._answer(True, deleted, number)

    # -- BaseApi -----------------------------------------------------------------------------------------

    @tool(writes=True)
    def turn_on_wifi(self) -> Plain:
        """Switch the Wi-Fi on."""
        self.wifi = True
        return self._answer(True, "wifi_on")

    @tool(writes=True)
    def login_device(self) -> Plain:
        """Unlock the phone."""
        self.logged_in = True
        return self._answer(True, "device_on")

    # -- MessageApi --------------------------------------------------------------------------------------

    @tool(writes=True)
    def send_message(self, sender_name: str, receiver_name: str, message: str) -> Plain:
        """Send a message between two people."""
        if not self.logged_in:
            return self._answer(False, "send_locked")
        if not self.wifi:
            return self._answer(False, "send_offline")
        if len(self.inbox) >= CAPACITY:
            return self._answer(False, "inbox_full")
        if sender_name not in PEOPLE or receiver_name not in PEOPLE:
            return self._answer(False, "no_party")
        self.last_message += 1
        self.inbox[self.last_message] = {
            "sender_id": PEOPLE[sender_name],
            "receiver_id": PEOPLE[receiver_name],
            "message": message,
        }
        return self._answer(True, "sent", receiver_name)

    @tool(writes=True)
    def delete_message(self, message_id: int) -> Plain:
        """Delete a message by its number."""
        return self._delete(self.inbox, message_id, "delete_locked", "no_message", "deleted")

    @tool
    def view_messages_between_users(self, sender_name: str, receiver_name: str) -> Plain:
        """Look at what one person has sent to another."""
        if not self.logged_in:
            return self._answer(False, "view_locked")
        if sender_name not in PEOPLE:
            return self._answer(False, "no_sender")
        if receiver_name not in PEOPLE:
            return self._answer(False, "no_receiver")
        pair = PEOPLE[sender_name], PEOPLE[receiver_name]
        found: list[Plain] = [
            {"id": number, "sender": sender_name, "receiver": receiver_name, "message": item["message"]}
            for number, item in self.inbox.items()
            if (item["sender_id"], item["receiver_id"]) == pair
        ]
        return {"status": True, "messages": found} if found else self._answer(False, "none_between")

    @tool
    def search_messages(self, user_name: str, keyword: str) -> Plain:
        """Find the messages from or to a person that hold a word."""
        if user_name not in PEOPLE:
            return self._answer(False, "no_user")
        person = PEOPLE[user_name]
        found: list[Plain] = [
            {"id": number, **{key: item[key] for key in ("sender_id", "receiver_id", "message")}}
            for number, item in self.inbox.items()
            if person in (item["sender_id"], item["receiver_id"])
            and keyword.lower() in item["message"].lower()
        ]
        return {"status": True, "messages": found} if found else self._answer(False, "none_found")

    @tool
    def get_all_message_times_with_ids(self) -> Plain:
        """The day of every message, by its number."""
        if not self.logged_in:
            return self._answer(False, "times_locked")
        return {number: item["time"] for number, item in self.inbox.items()}  # pyright: ignore[reportReturnType]

    @tool
    def get_latest_message_id(self) -> Plain:
        """The number of the newest message."""
        return self._find_by_day("latest", -1)

    @tool
    def get_earliest_message_id(self) -> Plain:
        """The number of the oldest message."""
        return self._find_by_day("earliest", 1)

    def _find_by_day(self, which: str, sign: int) -> Plain:
        if not self.logged_in:
            return self._answer(False, f"{which}_locked")
        if not self.inbox:
            return self._answer(False, "inbox_empty")
        # A message sent in the conversation has no time: it raises a KeyError here, as in the benchmark.
        days = {
            number: datetime.strptime(item["time"], FORMAT).toordinal() for number, item in self.inbox.items()
        }
        found = min(days, key=lambda number: sign * days[number])
        return {**self._answer(True, which, found), "message_id": found}

    # -- ReminderApi -------------------------------------------------------------------------------------

    @tool
    def view_reminder_by_title(self, title: str) -> Plain:
        """Look at the reminder of that title."""
        if not self.logged_in:
            return self._answer(False, "reminder_locked")
        for item in self.reminder_list.values():
            if item["title"] == title:
                return {"status": True, "reminder": item}
        return self._answer(False, "no_title", title)

    @tool(writes=True)
    def add_reminder(self, title: str, description: str, time: str) -> Plain:
        """Add a reminder."""
        if not self.logged_in:
            return self._answer(False, "add_locked")
        if len(self.reminder_list) >= CAPACITY:
            return self._answer(False, "reminders_full")
        self.last_reminder += 1
        self.reminder_list[self.last_reminder] = {
            "reminder_id": self.last_reminder,
            "title": title,
            "description": description,
            "time": time,
            "notified": False,
        }
        return self._answer(True, "reminder_added", title)

    @tool(writes=True)
    def delete_reminder(self, reminder_id: int) -> Plain:
        """Delete a reminder by its number."""
        texts = "remove_locked", "no_reminder", "reminder_deleted"
        return self._delete(self.reminder_list, reminder_id, *texts)

    @tool
    def view_all_reminders(self) -> Plain:
        """Look at every reminder."""
        if not self.reminder_list:
            return self._answer(False, "no_reminders")
        keys = ("title", "description", "time", "notified")
        found = [{key: item[key] for key in keys} for item in self.reminder_list.values()]
        return {"status": True, "reminders": found}

    @tool(writes=True)
    def mark_as_notified(self, reminder_id: int) -> Plain:
        """Mark a reminder as seen."""
        if reminder_id not in self.reminder_list:
            return self._answer(False, "no_reminder")
        self.reminder_list[reminder_id]["notified"] = True
        return self._answer(True, "notified", reminder_id)

    @tool
    def search_reminders(self, keyword: str) -> Plain:
        """Find the reminders that hold a word."""
        word = keyword.lower()
        for item in self.reminder_list.values():
            if word in item["title"].lower() or word in item["description"].lower():
                # The benchmark stores times as text and treats them as dates here.
                raise AttributeError("'str' object has no attribute 'strftime'")
        return self._answer(False, "no_reminder_found")

    # -- FoodPlatform ------------------------------------------------------------------------------------

    @tool(writes=True)
    def login_food_platform(self, username: str, password: str) -> Plain:
        """Log a customer in."""
        if not self.wifi:
            return self._answer(False, "login_offline")
        if username not in self.users:
            return self._answer(False, "no_user")
        if self.users[username]["password"] != password:
            return self._answer(False, "wrong_password")
        if username in self.logged_in_users:
            return self._answer(False, "already_in", username)
        self.logged_in_users.append(username)
        return self._answer(True, "food_in", username)

    @tool
    def view_logged_in_users(self) -> Plain:
        """Who is logged in."""
        if not self.logged_in_users:
            return self._answer(False, "nobody_in")
        return {"status": True, "logged_in_users": self.logged_in_users}

    @tool
    def check_balance(self, user_name: str) -> float:
        """How much money a customer has."""
        return self.users[user_name]["balance"] if user_name in self.users else 0.0

    @tool(writes=True)
    def add_food_delivery_order(self, username: str, merchant_name: str, items: list[Plain]) -> Plain:
        """Order from a merchant."""
        if username not in self.logged_in_users:
            return self._answer(False, "not_in", username)
        merchants = WORLD["merchants"][self.language]
        if merchant_name not in merchants:
            return self._answer(False, "no_merchant")
        menu = merchants[merchant_name]
        total = 0.0
        bought: list[Plain] = []
        for item in items:
            product: Any = item.get("product")
            quantity: Any = item.get("quantity", 1)
            if not isinstance(quantity, int) or quantity <= 0:
                return self._answer(False, "bad_quantity", quantity, product)
            if product not in menu:
                return self._answer(False, "no_product", product, merchant_name)
            total += menu[product] * quantity
            bought.append({"product": product, "quantity": quantity, "price_per_unit": menu[product]})
        account = self.users[username]
        # In the Chinese edition an order must cost less than the balance.
        if total > account["balance"] or (self.language == "zh" and total == account["balance"]):
            return self._answer(False, "too_poor")
        account["balance"] -= total
        self.orders.append(
            {"user_name": username, "merchant_name": merchant_name, "items": bought, "total_price": total}
        )
        return self._answer(True, "ordered", merchant_name, total)

    @tool
    def get_products(self, merchant_name: str) -> Any:
        """The menu of a merchant."""
        menu = WORLD["merchants"][self.language].get(merchant_name)
        if not menu:
            return self._answer(False, "no_such_merchant", merchant_name)
        return [{"product": product, "price": price} for product, price in menu.items()]

    @tool
    def view_orders(self, user_name: str) -> Plain:
        """The orders of a customer."""
        found = [order for order in self.orders if order["user_name"] == user_name]
        return {"status": True, "orders": found} if found else self._answer(False, "no_orders")

    @tool
    def search_orders(self, keyword: str) -> Plain:
        """The orders whose merchant or products hold a word."""
        word = keyword.lower()
        found = [order for order in self.orders if self._mentions(order, word)]
        return {"status": True, "orders": found} if found else self._answer(False, "no_order_found")

    def _mentions(self, order: Plain, word: str) -> bool:
        if word in order["merchant_name"].lower():
            return True
        if self.language == "zh" and order["items"]:
            # The Chinese edition treats the items of an order as text.
            raise AttributeError("'dict' object has no attribute 'lower'")
        return any(word in item["product"].lower() for item in order["items"])
