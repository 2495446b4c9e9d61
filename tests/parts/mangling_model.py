"""A language model's habits without one: words a line well, or with a fault, by its seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

from trialogue import Reply, Tool, Turn
from trialogue.trajectory import Usage

BEFORE = (
    "Hi there,",
    "Well,",
    "Hello!",
    "Thanks for asking.",
    "So,",
    "Please,",
    "Good to hear from you!",
    "Right,",
)
AFTER = ("Thanks!", "Please.", "That would be great.", "Thank you so much.", "I really appreciate it.", "")
FAULTS: dict[str, Callable[[str, Random], str]] = {
    "value": lambda text, draw: re.sub(r"\w*\d\w*|\S+@\S+", "", text),
    "digits": lambda text, draw: re.sub(r"\d", lambda _: str(draw.randrange(10)), text),
    "role": lambda text, draw: draw.choice(
        (
            "How can I help you today?",
            "I can't process that transaction. Could you use visa 5017 instead?",
            "Your order has been cancelled. Is there anything else I can do for you?",
            f"{text} I'll update you with that.",
            "Could you please provide your order number?",
        )
    ),
    "wish": lambda text, draw: draw.choice(
        (f"{text} And I want a refund too.", f"{text} My parcel is lost.", f"I want to cancel it. {text}")
    ),
    "question": lambda text, draw: f"{text} What is the status of it?",
    "name": lambda text, draw: f"{text} My friend is called Peter Miller.",
    "no": lambda text, draw: f"No, wait. {text}",
    "yes": lambda text, draw: f"Yes, sure. {text}",
    "stop": lambda text, draw: f"{text} That's all, goodbye. ###STOP###",
    "empty": lambda text, draw: "",
    "more": lambda text, draw: f"{text} " * 9,
    "meta": lambda text, draw: f"Here is the line in my own words: {text}",
    "paraphrase": lambda text, draw: "I have an issue with something that I bought some time ago.",
}
"""What a model does to a line, by kind of fault."""


class ManglingModel:
    """Counts what it was asked; `share` of its wordings have a fault."""

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self.asked = 0
        self.longest = 0

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        self.asked += 1
        said = turns[-1].message.content
        self.longest = max(self.longest, sum(len(turn.message.content) for turn in turns))
        draw = Random(f"{said}/{len(turns)}")
        line = re.sub(r"^.*Line: ", "", said, flags=re.DOTALL)
        text = f"{draw.choice(BEFORE)} {line} {draw.choice(AFTER)}".strip()
        if draw.random() < self.share:
            text = draw.choice(list(FAULTS.values()))(line, draw)
        return Reply(text, usage=Usage(prompt=100, completion=10), model="mangling")
