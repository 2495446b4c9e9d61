"""How the user will take the teacher's words: a second rule-based user of the same agenda hears them first.

A task without an agenda gets one made of its instructions, so that values can be asked for and the end is
known.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from random import Random
from typing import Any

from trialogue.talk.agenda import Agenda, AgendaUser, Fact, Wish
from trialogue.talk.evidence import find_leaves, to_pieces
from trialogue.talk.teacher.knowledge import to_text
from trialogue.talk.teacher.search import to_words
from trialogue.task import Call, Task
from trialogue.world.tools import Tool

_END = "###END###"
_PATIENCE = 10_000


class Listener:
    """Follows the user of a conversation and tries words on a copy of that user."""

    def __init__(self, agenda: Agenda, tools: Sequence[Tool] = ()) -> None:
        """`tools` are the user's own."""
        self.user = AgendaUser(agenda, "listener", _END, tools)
        self.user.patience = _PATIENCE
        self.is_over = False

    @property
    def wish(self) -> Wish:
        return self.user.wish

    @property
    def facts(self) -> dict[str, Fact]:
        return {**self.user.agenda.facts, **self.user.wish.facts}

    def hear(self, text: str) -> None:
        """Follow what the user does with words that were said."""
        self.is_over = self.user.respond(text).endswith(_END) or self.is_over

    def _try(self, text: str) -> tuple[AgendaUser, bool]:
        user = copy.copy(self.user)
        user.random = Random(0)
        user.following = list(user.following)
        user.told = set()
        user.agreed = False
        words = user.respond(text)
        return user, words.endswith(_END)

    def answer(self, text: str) -> str:
        """What the user would say to words."""
        user = copy.copy(self.user)
        user.random, user.following, user.told = Random(0), list(user.following), set(user.told)
        return user.respond(text).removesuffix(_END).strip()

    def is_asked(self, text: str, names: set[str]) -> bool:
        """Whether words ask for exactly these facts."""
        user, ended = self._try(text)
        return not ended and user.wish is self.user.wish and user.told == names and not user.agreed

    def is_proposal(self, text: str) -> bool:
        """Whether the user takes words as asking for the final yes."""
        user, ended = self._try(text)
        changed = self.user.wish.instead is not None and user.wish is self.user.wish.instead
        return not ended and not user.told and (changed or (user.agreed and user.wish is self.user.wish))

    def is_request(self, text: str, call: Call) -> bool:
        """Whether the user takes words as asking for this call, and for nothing else."""
        user, ended = self._try(text)
        return not ended and user.calls == [(call.name, dict(call.arguments))]

    def is_settling(self, text: str) -> bool:
        """Whether the user takes words as the end of the present wish."""
        user, ended = self._try(text)
        return ended or user.wish is not self.user.wish


def derive_agenda(task: Task, writes: Collection[str] = ()) -> Agenda:
    """An agenda for a task that has none: its instructions are the wish, and the gold arguments found in them
    are facts to ask for. `writes` are the tools that change something: who calls none answers a question."""
    facts: dict[str, Fact] = {}
    pieces = f" {' '.join(to_pieces(task.instructions))} "
    for call in task.expected.calls:
        for name, value in call.arguments.items():
            for leaf in find_leaves(value):
                text = " ".join(to_pieces(to_text(leaf)))
                if isinstance(leaf, bool) or not text or f" {text} " not in pieces:
                    continue
                asked = " ".join(to_words(name))
                facts.setdefault(name, Fact(value=str(leaf), asked=re.escape(asked)))
    answer = None
    if task.expected.say and not any(
        call.side == "user" or call.name in writes for call in task.expected.calls
    ):
        last = task.expected.say[-1]
        answer = "|".join(
            re.escape(text.replace(",", "")) for text in ([last] if isinstance(last, str) else last)
        )
    wish = Wish(says=(task.instructions.strip() or task.id,), answer=answer)
    return Agenda(patience=50, facts=facts, wishes=(wish,))


def read_agenda(task: Task, writes: Collection[str] = ()) -> Agenda:
    """The agenda of a task, or one made of its instructions."""
    data: Any = task.meta.get("agenda")
    return derive_agenda(task, writes) if data is None else Agenda.model_validate(data)
