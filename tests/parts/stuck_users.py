"""Users and agents that stop moving on, for the rules of stuck conversations: each plays its part honestly up
to a message drawn by its seed, then shows one fault for ever."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from trialogue import Reply, Task, Tool, Turn
from trialogue.talk.agenda import AgendaUser, read_agenda
from trialogue.talk.model import Model
from trialogue.world.domain import STOP

THANKS = (
    "Thank you so much!",
    "Thanks a lot for your help, have a great day!",
    "You're welcome! Bye.",
    "Great, thanks again.",
    "Perfect, that's all. I appreciate your help.",
    "Thank you! Have a nice evening.",
    "Okay, thanks!",
)
ROLE = (  # the first four were written by Qwen2.5-Coder-1.5B as the user
    "Sure, I can help you with that. Could you please provide your order number?",
    "I'm happy to help you with your order. What would you like to do?",
    "Your order has been successfully cancelled. Is there anything else I can help you with?",
    "Thank you for contacting us. How can I assist you today?",
    "Let me check that for you. Can I have your e-mail address?",
    "I have updated the address. Your order has been changed.",
    "Please provide your name and postcode so that I can look it up.",
    "As an AI assistant I cannot process that. Could you share your account?",
)
FAULTS = ("loop", "thanks", "role", "stop")


class FaultyUser:
    """The rule-based user with patience without end, until its fault begins."""

    def __init__(self, task: Task, seed: int, fault: str) -> None:
        self.random = Random(f"{fault}/{task.id}/{seed}")
        agenda = read_agenda(task).model_copy(update={"patience": 1000})
        self.honest = AgendaUser(agenda, f"{task.id}/{seed}")
        self.fault = fault
        self.begins = 0 if fault == "stop" else self.random.randrange(1, 5)
        self.before = ""
        self.faulty = 0
        """How many of its messages were faulty."""

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        spoken = sum(turn.message.role == "assistant" for turn in turns)
        reply = await self.honest.reply(turns, tools)
        is_over = STOP in reply.content
        if spoken < self.begins and not (is_over and self.fault in ("loop", "thanks")):
            self.before = reply.content
            return Reply(reply.content)
        self.begins = min(self.begins, spoken)
        self.faulty += 1
        match self.fault:
            case "stop":
                return Reply(f"Hello. {STOP}")
            case "thanks":
                return Reply(self.random.choice(THANKS))
            case "role":
                return Reply(self.random.choice(ROLE))
            case _:
                return Reply(self.before)


class PatientUser:
    """The rule-based user, without patience that ends: whoever does not move on, it is not this user."""

    def __init__(self, task: Task, seed: int) -> None:
        agenda = read_agenda(task).model_copy(update={"patience": 1000})
        self.honest = AgendaUser(agenda, f"{task.id}/{seed}")

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        return Reply((await self.honest.reply(turns, tools)).content)


class LoopingAgent:
    """An agent that says its own last text for ever, from a message drawn by the seed on."""

    def __init__(self, inner: Model, task: Task, seed: int) -> None:
        self.inner = inner
        self.begins = Random(f"agent/{task.id}/{seed}").randrange(1, 4)
        self.texts: list[str] = []

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        if len(self.texts) >= self.begins:
            return Reply(self.texts[-1])
        reply = await self.inner.reply(turns, tools)
        if not reply.tool_calls:
            self.texts.append(reply.content)
        return reply
