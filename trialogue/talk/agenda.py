"""A rule-based user, driven by data: any domain may put an `agenda` into the meta data of its tasks.

An agenda lists wishes, one after the other, and facts that are told only when the agent asks for them:

    {"persona": "terse", "patience": 4,
     "facts": {"email": {"value": "mira@mail.net", "asked": "e-?mail", "says": ["It's {value}."]},
               "phone": {"value": null, "asked": "phone"}},                    # null: does not remember
     "wishes": [{"says": ["I'd like to cancel an order."], "done": "cancel",
                 "facts": {"order_id": {"value": "W1234", "asked": "order number", "form": "W\\\\d{4}"}}},
                {"says": ["What does the red lamp cost?"], "answer": "\\\\d+\\\\.\\\\d\\\\d"}],
     "tools": {"restart_phone": "restart|reboot"},
     "phrases": {"yes": ["Yes, please."]}}

`asked`, `form`, `done` and `answer` are regular expressions, matched in any case. A wish with `answer` is a
question, settled only by a text that looks like an answer; any other wish is settled by a report that it is
done, or by a refusal. A wish with `instead` is given up for that one when the agent asks for the final yes,
one that is `withdrawn` for nothing. A user who `claims` says to be known when first asked who it is. A text
that contradicts itself settles nothing, and one that never ends is not read: the user asks, then leaves.
A user with tools uses one when asked to, and tells what it shows; `tools` are words for them besides those of
their names and descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, ValidationError

from trialogue.errors import ConfigError, DomainError
from trialogue.messages import Frozen, ToolCall
from trialogue.talk.user_tools import find_requests, tell_result
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domain import STOP
from trialogue.world.speech import (
    ASKS,
    BARE_REPORT,
    CONFIRMS,
    ELSE,
    EXCUSED,
    OFFERS_HELP,
    OPEN,
    POSSIBLE,
    PROPOSES,
    QUESTION,
    REFUSES,
    REPORTS,
    SHORT_REPORT,
    YES_OR_NO,
    split_sentences,
    takes_back,
)
from trialogue.world.tools import Tool


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"'{pattern}' is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_checked)]
Texts = Annotated[tuple[str, ...], Field(min_length=1)]


class Fact(Frozen):
    """Something the agent may ask for."""

    value: str | None = None
    """None: the user was not told, or does not remember."""
    asked: Pattern
    """What the agent writes when asking for it."""
    form: Pattern | None = None
    """What any such value looks like: a proposal with another one is corrected."""
    says: Texts = ("{value}.",)


class Wish(Frozen):
    """One thing the user wants."""

    says: Texts
    facts: dict[str, Fact] = {}
    """Facts that belong to this wish; they come before the agenda's own of the same name."""
    done: Pattern = ""
    """What a report must speak of, besides being a report; empty: anything."""
    answer: Pattern | None = None
    """Given for a question: what an answer looks like, right or wrong."""
    about: Pattern | None = None
    """Which of the agenda's `actions` this wish is about."""
    instead: Wish | None = None
    withdrawn: bool = False
    """True: refused at the last moment, when the agent asks for the final yes; nothing may be done then."""


class Phrases(Frozen):
    """How this user speaks; each time one of the texts is drawn."""

    opening: Texts = ("Hello. {wish}", "Hi! {wish}")
    lead: Texts = ("",)
    """Words before an answer."""
    yes: Texts = ("Yes, please.", "Yes, go ahead.")
    correct: Texts = ("No, that's not right. {fact}",)
    unknown: Texts = ("I don't remember that, sorry.", "Sorry, I don't know that.")
    next: Texts = ("One more thing. {wish}", "Thanks. {wish}")
    change: Texts = ("Wait, I've changed my mind. {wish}",)
    withdraw: Texts = ("No, I'd rather leave it as it is.", "No. Please leave everything as it is.")
    claim: Texts = ("I'm already logged in, you know who I am.", "You have checked that already.")
    doubt: Texts = ("That contradicts itself. Which of it is true?",)
    too_much: Texts = ("That is too much to read. {wish}",)
    accept: Texts = ("All right.", "That's a pity.")
    """Words after a refusal, before going on."""
    nudge: Texts = ("As I said: {wish}", "I'm still waiting. {wish}")
    seen: Texts = ("It says: {fact}.", "I see this: {fact}.")
    """What a tool that changes nothing has shown."""
    did: Texts = ("Done: {fact}.", "OK, I did that: {fact}.")
    """What came of a tool that changes something."""
    failed: Texts = ("That does not work: {fact}.",)
    stop: Texts = ("Thank you, that's all.", "Great, thanks. Bye.")
    give_up: Texts = ("This is going nowhere, I'll try again another time. Goodbye.",)


class Agenda(Frozen):
    """Everything a rule-based user needs to know."""

    persona: str = "plain"
    patience: int = Field(default=5, ge=0)
    """How many useless turns are borne before giving up."""
    facts: dict[str, Fact] = {}
    claims: bool = False
    """True: claims to be known when first asked for one of these facts, and tells it when asked again."""
    actions: Pattern | None = None
    """Words for what an agent may do: a proposal of another action than the wish is about is refused."""
    tools: dict[str, Pattern] = {}
    """What the agent writes when asking the user to use a tool; else it is the words of the tool's name or of
    its description."""
    wishes: Annotated[tuple[Wish, ...], Field(min_length=1)]
    phrases: Phrases = Phrases()


class Act(NamedTuple):
    """One thing that a text of the user does."""

    kind: str
    """`wish`, `fact`, or the name of a phrase, such as `yes`."""
    core: str
    """The words that mean something beyond the kind; empty where any words of the kind will do."""
    words: str
    """The words themselves."""
    value: str | None = None
    """The value of a fact that is told."""


MANNER = ("opening", "lead", "next", "nudge", "too_much")
"""Phrases that only lead to a wish or a fact."""
WHOLE = ("withdraw", "claim", "doubt")
"""Phrases whose every word counts."""
LONGEST_TEXT = 16_000
"""Characters of the agent's words that the user reads in one turn."""


def find_matches(pattern: str, text: str) -> Iterator[str]:
    """What a pattern of an agenda matches in a text, one sentence after the other."""
    for sentence in split_sentences(text):
        for match in re.finditer(pattern, sentence, re.IGNORECASE):
            yield match.group()


def has_match(pattern: str, text: str) -> bool:
    return next(find_matches(pattern, text), None) is not None


class AgendaUser:
    """Plays the user of one conversation; the same agenda and seed give the same words."""

    def __init__(
        self, agenda: Agenda, seed: int | str = 0, stop: str = STOP, tools: Sequence[Tool] = ()
    ) -> None:
        self.agenda = agenda
        self.stop = stop
        self.tools = tools
        self.random = Random(f"agenda/{seed}")
        self.wish = agenda.wishes[0]
        self.following = list(agenda.wishes[1:])
        self.patience = agenda.patience
        self.told: set[str] = set()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """What the user does in place of an answer to what was said last."""
        self.acts: list[Act] = []
        """What the last text does."""
        self.agreed = False
        self.claimed = False
        self.withdrew = False
        self._last_done = ""
        self._said: list[Reply] = []

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        self.tools = tools
        heard: list[list[Turn]] = [
            []
        ]  # what came before each of the user's own turns, and since the last one
        for turn in turns:
            if turn.message.role == "assistant":
                heard.append([])
            elif turn.message.role in ("user", "tool"):
                heard[-1].append(turn)
        for news in heard[len(self._said) :]:  # nothing, if asked for the same words again
            self._said.append(self._react(news))
        return self._said[len(heard) - 1]

    def _react(self, news: Sequence[Turn]) -> Reply:
        """Words for what was said or what a tool has shown, or the calls that were asked for."""
        self.acts = []
        if not self._said:
            return Reply(self._put("opening"), has_patience=True)
        shown = [turn for turn in news if turn.message.role == "tool"]
        if shown:
            return Reply(self._tell_shown(shown), has_patience=True)
        words = self.respond("\n".join(["", *(turn.message.content for turn in news)]))
        if not self.calls:
            return Reply(words, has_patience=True)
        begin = len(self._said)
        made = [
            ToolCall(id=f"call_{begin}_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(self.calls)
        ]
        return Reply(tool_calls=tuple(made))

    def _tell_shown(self, shown: Sequence[Turn]) -> str:
        """What the user's own tools have shown; the same once more costs patience."""
        writing = {tool.name for tool in self.tools if tool.writes}
        names = [name for name, _ in self.calls]
        told = [
            self._put(
                "failed" if turn.failed else "did" if name in writing else "seen",
                tell_result(turn.message.content),
            )
            for turn, name in zip(shown, names, strict=False)
        ]
        done = repr(self.calls)
        repeated, self._last_done = done == self._last_done, done
        return self._bear(" ".join(told)) if repeated else " ".join(told)

    # -- one turn -----------------------------------------------------------------------------------------

    def respond(self, text: str) -> str:
        """What the user says to the agent's text; nothing where `calls` are what it asks for."""
        self.calls = []
        if len(text) > LONGEST_TEXT:
            return self._bear(self._put("too_much"))
        if takes_back(text):
            return self._bear(self._put("doubt"))  # whatever it was told, nothing is settled by it
        if self.withdrew:
            return self._move_on()
        facts = {name: fact.value for name, fact in self._facts().items()}
        self.calls = find_requests(text, self.tools, self.agenda.tools, facts)
        if self.calls:
            return ""
        sentences = split_sentences(text)
        asking = [sentence for sentence in sentences if ASKS.search(sentence) and not ELSE.search(sentence)]
        wanted: list[str] = []
        proposals: list[str] = []
        for sentence in asking:
            if PROPOSES.search(sentence) and not OPEN.search(sentence):
                proposals.append(sentence)
            elif names := self._find_wanted(sentence):
                wanted += [name for name in names if name not in wanted]
            elif CONFIRMS.search(sentence) or (YES_OR_NO.search(sentence) and self._names_value(sentence)):
                proposals.append(sentence)
        refused = any(REFUSES.search(sentence) and not EXCUSED.search(sentence) for sentence in sentences)
        if refused and self.told.issuperset(wanted):
            return self._move_on("accept")
        if self.wish.answer is not None:
            told = " ".join(sentence for sentence in sentences if sentence not in asking)
            if has_match(self.wish.answer, told.replace(",", "")):
                return self._move_on()
        if wanted:
            return self._tell(wanted, proposals)
        if proposals:
            return self._consider(proposals)
        if self.wish.answer is None and any(map(self._is_report, sentences)):
            return self._move_on()
        if any(OFFERS_HELP.search(sentence) for sentence in asking):
            return self._bear(self._draw_wish())
        if any(QUESTION.search(sentence) for sentence in asking):
            return self._bear(self._put("unknown"))
        return self._bear(self._put("nudge"))

    def _tell(self, names: Sequence[str], proposals: Sequence[str]) -> str:
        if self.agenda.claims and not self.claimed and not self.agenda.facts.keys().isdisjoint(names):
            self.claimed = True
            return self._put("claim")
        answers = [self._state(name) for name in names]
        repeated = self.told.issuperset(names)
        self.told.update(names)
        if proposals and self.wish.instead is None and not self._find_wrong(proposals):
            answers.append(self._put("yes"))
        words = " ".join(dict.fromkeys(answers))
        if repeated or all(self._facts()[name].value is None for name in names):
            return self._bear(words)
        return f"{self._put('lead')} {words}".strip()

    def _consider(self, proposals: Sequence[str]) -> str:
        """Answer a proposal: correct it, change one's mind, or agree."""
        if self.wish.instead is not None:
            return self._change()
        if self._is_unwanted(" ".join(proposals)):
            return self._bear(self._put("correct", fact=self.random.choice(self.wish.says)))
        wrong = self._find_wrong(proposals)
        if wrong is not None:
            self.told.add(wrong)
            return self._bear(self._put("correct", fact=self._state(wrong)))
        if self.wish.withdrawn:
            self.withdrew = True
            return self._put("withdraw")
        repeated, self.agreed = self.agreed, True
        return self._bear(self._put("yes")) if repeated else self._put("yes")

    def _move_on(self, act: str = "") -> str:
        """The present wish is settled, one way or the other; an act may come first."""
        if self.wish.instead is not None:
            return self._change()
        first = self._put(act) if act else ""
        if self.following:
            self._take_up(self.following.pop(0))
            return f"{first} {self._put('next')}".strip()
        return f"{first} {self._put('stop')} {self.stop}".strip()

    def _change(self) -> str:
        assert self.wish.instead is not None
        self._take_up(self.wish.instead)
        return self._put("change")

    def _take_up(self, wish: Wish) -> None:
        self.told -= wish.facts.keys()
        self.agreed = False
        self.withdrew = False
        self.wish = wish

    def _bear(self, words: str) -> str:
        """Say this after a useless turn, unless that was one too many."""
        self.patience -= 1
        return words if self.patience >= 0 else f"{self._put('give_up')} {self.stop}"

    # -- understanding and wording ------------------------------------------------------------------------

    def _facts(self) -> dict[str, Fact]:
        return {**self.agenda.facts, **self.wish.facts}

    def _find_wanted(self, sentence: str) -> list[str]:
        """Facts a sentence asks for. Of "your e-mail, or your name and postcode" one side is enough."""
        options: list[list[str]] = []
        for part in re.split(r"\bor\b", sentence):
            names = [name for name, fact in self._facts().items() if _is_asked(fact, part, sentence)]
            if names and not any(set(names) <= set(other) for other in options):
                options = [other for other in options if not set(other) <= set(names)] + [names]
        facts = self._facts()
        known = [names for names in options if all(facts[name].value is not None for name in names)]
        chosen = known or options
        return self.random.choice(chosen) if chosen else []

    def _names_value(self, sentence: str) -> bool:
        return any(
            fact.form and re.search(fact.form, sentence, re.IGNORECASE) for fact in self._facts().values()
        )

    def _is_unwanted(self, proposal: str) -> bool:
        actions, about = self.agenda.actions, self.wish.about
        if actions is None or not has_match(actions, proposal):
            return False
        return about is None or not has_match(about, proposal)

    def _find_wrong(self, proposals: Sequence[str]) -> str | None:
        """The first fact a proposal gets wrong: it names such values, and not the user's."""
        text = " ".join(proposals)
        for name, fact in self._facts().items():
            if fact.value is not None and fact.form is not None:
                named = [match.lower() for match in find_matches(fact.form, text)]
                if named and fact.value.lower() not in named:
                    return name
        return None

    def _is_report(self, sentence: str) -> bool:
        if BARE_REPORT.search(sentence):
            return True
        if short := SHORT_REPORT.search(sentence):
            begin = short.start("participle")  # the wish must be what is done: not "Cancellation failed."
            if any(match.end() > begin for match in re.finditer(self.wish.done, sentence, re.IGNORECASE)):
                return True
        if POSSIBLE.search(sentence) or not REPORTS.search(sentence):
            return False
        return re.search(self.wish.done, sentence, re.IGNORECASE) is not None

    def _state(self, name: str) -> str:
        fact = self._facts()[name]
        if fact.value is None and fact.says == Fact.model_fields["says"].default:
            return self._put("unknown")
        text = self.random.choice(fact.says).replace("{value}", fact.value or "")
        has_value = fact.value is not None and fact.value in text
        self.acts.append(Act("fact", "" if has_value else text, text, fact.value if has_value else None))
        return text

    def _draw_wish(self) -> str:
        text = self.random.choice(self.wish.says)
        self.acts.append(Act("wish", text, text))
        return text

    def _put(self, act: str, fact: str = "") -> str:
        """Words for an act of this user."""
        text: str = self.random.choice(getattr(self.agenda.phrases, act))
        if "{wish}" in text:
            text = text.replace("{wish}", self._draw_wish())
        text = text.replace("{fact}", fact).strip()
        if act not in MANNER:
            self.acts.append(Act(act, text if act in WHOLE else fact, text))
        return text


def _is_asked(fact: Fact, part: str, sentence: str) -> bool:
    """Whether part of a sentence asks for a fact. One that names the value does not, unless among others:
    "is it for no longer needed?" is a proposal, "what is the reason: no longer needed, or …?" a question."""
    if not re.search(fact.asked, part, re.IGNORECASE):
        return False
    if fact.value is None or fact.value.lower() not in sentence.lower() or OPEN.search(sentence):
        return True
    return fact.form is not None and len(re.findall(fact.form, sentence, re.IGNORECASE)) > 1


def read_agenda(task: Task) -> Agenda:
    """The agenda of a task's user."""
    data = task.meta.get("agenda")
    if data is None:
        raise ConfigError(
            f"task {task.id} has no meta['agenda'], so the agenda user cannot play it; "
            "choose another user, or let the domain write agendas"
        )
    try:
        return Agenda.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DomainError(f"task {task.id}, agenda, {where}: {first['msg']}") from None


def make_agenda_user(task: Task, seed: int, stop: str = STOP) -> AgendaUser:
    """The rule-based user of a task. Its words depend on the task and the seed, on nothing else."""
    return AgendaUser(read_agenda(task), f"{task.id}/{seed}", stop)
