"""A guided user: rules decide what is said, a language model decides how.

The rule-based user of the task's agenda decides what to say next. The model puts it into words, in the manner
of the conversation's persona. Its words are checked (`wording.py`); a wording with a fault is asked for once
more, and then the rule's own sentence is said. So the model can neither tell what was not asked for, nor
forget, invent, change sides or stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trialogue.errors import ModelError
from trialogue.messages import Message
from trialogue.talk.agenda import AgendaUser, make_agenda_user
from trialogue.talk.model import Model, ModelSource, ask, close_source
from trialogue.talk.wording import Line, find_faults, list_things
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn, Usage
from trialogue.world.domain import Domain
from trialogue.world.tools import Tool

REPLY_TOKENS = 80
"""Tokens of one wording at most."""
PROMPT = """\
You are a customer. Put the line into your own words, as one short message to the service desk. Keep names, \
numbers, codes and addresses letter by letter. Add no facts, wishes or questions. {manner}\
"""
EXAMPLES = (
    ("Hello.", "I want to cancel order K55.", "Hi, I'd like to cancel order K55, please."),
    ("Shall I book it?", "Yes, please.", "Yes, please go ahead with that."),
)
HEARD = 160
"""Characters of the agent's last words that the model sees."""


@dataclass(frozen=True, slots=True)
class GuidedSource:
    """Makes the guided user of each conversation."""

    source: ModelSource
    domain: Domain
    things: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "things", list_things(self.domain.database))

    def __call__(self, task: Task, seed: int) -> Model:
        rules = make_agenda_user(task, seed, self.domain.rules.stop_tokens[0])
        manner = self.domain.persona(seed)[1] if self.domain.persona is not None else ""
        return GuidedUser(self, task, seed, rules, manner or f"You are {rules.agenda.persona}.")

    async def close(self) -> None:
        await close_source(self.source)


class GuidedUser:
    """The user of one conversation."""

    def __init__(self, made_by: GuidedSource, task: Task, seed: int, rules: AgendaUser, manner: str) -> None:
        self.made_by, self.task, self.seed = made_by, task, seed
        self.rules, self.manner = rules, manner

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = await self.rules.reply(turns, tools)
        acts = self.rules.acts
        if reply.tool_calls or not acts:
            return reply
        heard = turns[-1].message.content if turns[-1].message.role == "user" else ""
        line = Line(tuple(acts), self._list_hidden())
        return await self._word(reply, line, heard, self.seed + len(turns))

    def _list_hidden(self) -> tuple[str, ...]:
        """Values of facts that the rules do not tell now."""
        told = {act.value for act in self.rules.acts}
        facts = [*self.rules.agenda.facts.values()]
        for wish in self.rules.agenda.wishes:
            while wish is not None:
                facts += wish.facts.values()
                wish = wish.instead
        return tuple({fact.value: None for fact in facts if fact.value and fact.value not in told})

    async def _word(self, reply: Reply, line: Line, heard: str, seed: int) -> Reply:
        """The rule's reply in the model's words, or as it is."""
        ends = reply.content.endswith(self.rules.stop)
        asked = [
            _to_turn("system", PROMPT.format(manner=self.manner)),
            *_EXAMPLES,
            _to_turn("user", _to_request(heard, line)),
        ]
        rejected: list[str] = []
        usage: Usage | None = None
        name: str | None = None
        for number in range(2):
            model = self.made_by.source(self.task, seed + 1000 * number)
            try:
                found = await ask(model, asked, [], "user")
            except ModelError as error:
                if error.blame != "user":
                    raise
                rejected.append("form")
                continue
            usage = found.usage if usage is None or found.usage is None else usage + found.usage
            name = found.model or name
            text = _clean(found.content)
            faults = ["form"] if found.finish == "length" or found.tool_calls else []
            faults = faults or find_faults(text, line, heard, self.made_by.things)
            if not faults:
                content = f"{text} {self.rules.stop}" if ends else text
                return replace(reply, content=content, usage=usage, model=name, rejected=tuple(rejected))
            rejected.append(faults[0])
            asked += [
                _to_turn("assistant", found.content or "…"),
                _to_turn("user", f"{_REMARKS[faults[0]]}\nLine: {line.text}"),
            ]
        return replace(reply, usage=usage, model=name, rejected=tuple(rejected))


_REMARKS = {
    "form": "Only one short message, please.",
    "value": "Names and numbers must be there letter by letter.",
    "invention": "You added something.",
    "other fact": "You added something.",
    "meaning": "Something is missing.",
    "other thing": "You added something.",
    "role": "You are the customer, not the service desk.",
    "stand": "Your yes or no must be clear.",
    "stop": "Do not say goodbye.",
}
"""What the model is told when a wording had a fault."""


def _to_turn(role: str, text: str) -> Turn:
    side = "user" if role == "assistant" else "agent"
    return Turn(side=side, message=Message.model_validate({"role": role, "content": text}))


def _to_request(heard: str, line: Line | str) -> str:
    text = line if isinstance(line, str) else line.text
    shown = " ".join(heard.split())[-HEARD:] or "Hello."
    return f"Service desk: {shown}\nLine: {text}"


_EXAMPLES = [
    turn
    for heard, line, said in EXAMPLES
    for turn in (_to_turn("user", _to_request(heard, line)), _to_turn("assistant", said))
]


def _clean(text: str) -> str:
    """The words without quotation marks around all of them."""
    text = text.strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] == '"' else text
