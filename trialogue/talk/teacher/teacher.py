"""An agent that solves the tasks of any domain as an honest agent would, to be imitated.

It knows the task, so it knows where to go, but it says and uses only what it has heard or looked up: a value
that it needs is asked for, or found through the tools. It identifies the user first, looks records up before
it changes them, asks for a yes with the values of the change, and reports what was done.

    task ─► work.share_out ─► plan.Planner (ask, look up, unknown) ─► words, tried on a Listener ─► Reply
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, MutableSequence, Sequence
from itertools import chain, islice
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from trialogue.errors import ConfigError, DomainError, ModelError
from trialogue.messages import ToolCall
from trialogue.talk.agenda import Wish
from trialogue.talk.teacher import words
from trialogue.talk.teacher.answers import describe_value, find_reasons, find_said, list_shown
from trialogue.talk.teacher.knowledge import to_text
from trialogue.talk.teacher.listener import Listener, read_agenda
from trialogue.talk.teacher.plan import Planner, Step
from trialogue.talk.teacher.rulebook import Rulebook
from trialogue.talk.teacher.search import is_change, is_lookup
from trialogue.talk.teacher.work import Say, Work, find_leading, guess_call, is_refusal, share_out
from trialogue.task import Call, Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domain import Domain
from trialogue.world.tools import Tool

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")
Steps = Generator[Reply, tuple[str, bool], T]
MOST_STEPS = 40
"""Questions and look-ups for one call."""
MOST_WORDINGS = 12
"""Wordings that are tried for one that breaks no rule."""
MOST_REPORTS = 4
"""Reports that are tried before a request."""
MOST_LOOK_UPS = 4
"""Look-ups before one change that only the rules of the policy ask for."""
_NO = re.compile(r"^\W*(?:no|nope|not|don't|do not|wait|stop|actually|hold on)\b", re.IGNORECASE)


class Unknowable(DomainError):
    """A task asks for a value that nobody could know."""


class Teacher:
    """One conversation's agent. The same task and seed give the same words."""

    def __init__(self, domain: Domain, task: Task, seed: int | str = 0) -> None:
        environment = domain.open(task)
        if environment.remote:
            raise ConfigError(
                f"the teacher tries calls out first, which the tools of {domain.name} do not allow"
            )
        expected = task.expected
        if not expected.calls and not expected.say and not expected.nothing:
            raise Unknowable(f"task {task.id} has neither gold calls nor things to say: nothing to plan from")
        self.task = task
        self.random = Random(f"teacher/{task.id}/{seed}")
        writes = [tool.name for tool in environment.tools.values() if tool.ends or is_change(tool)]
        agenda = read_agenda(task, writes)
        self.listener = Listener(agenda, tuple(environment.user_tools.values()))
        self.planner = Planner(environment, is_strict="agenda" in task.meta)
        self.rulebook = Rulebook(domain)
        self.environment = environment
        self.first = [*find_leading(task, environment)]
        """Gold calls that identify the user: they come before everything else."""
        self.works = {id(work.wish): work for work in share_out(task, agenda, environment)}
        for work in self.works.values():
            work.calls = [call for call in work.calls if call not in self.first]
        self.said: list[str] = []
        self._refused: set[int] = set()
        self._replies: list[Reply] = []
        self._before = 0
        self._steps: Steps[None] | None = None

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        spoken = sum(turn.message.role == "assistant" for turn in turns)
        heard = turns[-1].message.content, turns[-1].failed
        self.rulebook.follow(turns)
        if self._steps is None:
            self._before = spoken
            self._steps = self._serve(heard[0])
            self._replies.append(next(self._steps))
        elif spoken - self._before >= len(self._replies):
            self._replies.append(self._steps.send(heard))
        return self._replies[-1]

    # -- the two moves ------------------------------------------------------------------------------------

    def _say(self, texts: Iterable[str], fits: Callable[[str], bool], what: str) -> Steps[str]:
        """Say the first text that the user takes as it is meant, never one that was said before. One that
        breaks a rule of the policy is said only where no other would do."""
        texts = iter(texts)
        tried = next(texts, "")
        texts = chain([tried] if tried else [], texts)
        fitting = islice((each for each in texts if each not in self.said and fits(each)), MOST_WORDINGS)
        text = first = next(fitting, None)
        while text is not None and not self.rulebook.may_say(text):
            text = next(fitting, None)
        text = text or first
        if text is None:
            heard = f"; {tried!r} is answered {self.listener.answer(tried)!r}" if tried else ""
            problem = f"the teacher found no words that the user understands {what}{heard}"
            raise ModelError(problem, blame="agent")
        self.said.append(text)
        self.listener.hear(text)
        heard, _ = yield Reply(text)
        self.planner.knowledge.hear(heard)
        return heard

    def _call(self, call: Call) -> Steps[bool]:
        identity = f"call_{len(self._replies)}"
        made = ToolCall(id=identity, name=call.name, arguments=dict(call.arguments))
        text, failed = yield Reply(tool_calls=(made,))
        self.planner.note_call(call.name, dict(call.arguments), text, failed)
        return not failed

    # -- the conversation ---------------------------------------------------------------------------------

    def _serve(self, text: str) -> Steps[None]:
        self.planner.knowledge.hear(text)
        is_identified = False
        while not self.listener.is_over:
            wish = self.listener.wish
            self.planner.take_up(self.listener.facts, set(wish.facts))
            if not is_identified:
                yield from self._identify()
                is_identified = True
            work = self.works[id(wish)]
            match work.kind:
                case "propose":
                    yield from self._propose_only(work)
                case "do":
                    yield from self._do(work)
                case _:
                    for call in work.calls:
                        yield from self._look(call)
                    yield from self._answer(work) if work.kind == "answer" else self._refuse(work)
            if self.listener.wish is wish and not self.listener.is_over:
                raise ModelError(
                    "the teacher did what the wish needs, but the user waits for more", blame="agent"
                )
        yield from self._say(("Is there anything else I can do for you?",), _anything, "as a question")
        while True:  # a user who only thanks is thanked
            yield Reply("You are welcome. Is there anything else I can do for you?")

    def _identify(self) -> Steps[None]:
        for call in self.first:
            yield from self._introduce(call)
        if not self.first:
            own = set(self.listener.user.agenda.facts)
            while (path := self.planner.find_identification(own)) is not None:
                if path.asks:
                    yield from self._ask(path.asks)
                    continue
                name, arguments = path.calls[0]
                yield from self._call(Call(name=name, arguments=arguments))
                break

    def _look(self, call: Call) -> Steps[None]:
        """Make a gold call that changes nothing for the user. One that nobody could make is left out."""
        try:
            yield from self._prepare(call, looks_up=False)
        except Unknowable:
            if self.environment.tools[call.name].writes:
                raise
            return
        if not self.planner.is_made(call):
            yield from self._call(call)

    def _introduce(self, call: Call) -> Steps[None]:
        """Make a gold call that identifies the user, or another one to the same end."""
        wanted = self.planner.search.reopen()
        wanted.call(call.name, call.arguments)
        for _ in range(MOST_STEPS):
            step = self.planner.find_first_step(call)
            if step is None:
                yield from self._call(call)
            else:
                yield from self._take(step)
            if self.environment.digest() == wanted.digest():
                return
        raise ModelError(f"the teacher does not get {call.name} together", blame="agent")

    def _prepare(self, call: Call, looks_up: bool = True) -> Steps[None]:
        """Ask and look up whatever a call needs."""
        for _ in range(MOST_STEPS):
            step = self.planner.find_step(call, looks_up=looks_up)
            if step is None:
                return
            yield from self._take(step)
        raise ModelError(f"the teacher does not get {call.name} together", blame="agent")

    def _take(self, step: Step) -> Steps[None]:
        if step.kind == "unknown":
            raise Unknowable(f"task {self.task.id}: {step.problem}")
        if step.call is not None:
            yield from self._call(step.call)
        else:
            yield from self._ask(step.names)

    def _ask(self, names: Sequence[str]) -> Steps[None]:
        facts = self.listener.facts
        groups: list[tuple[str, ...]] = [(name,) for name in names]
        own = {name: name not in self.listener.wish.facts for name in names}
        if len(names) > 1 and len(set(own.values())) == 1 and self.random.random() < 0.6:
            groups.insert(0, tuple(names))
        for group in groups:
            if self.planner.search.told.issuperset(group):
                continue
            listed = [words.list_names(name, facts[name].asked) for name in group]
            asked = set(group)
            questions = words.list_questions(listed, own[group[0]], self.random)
            texts = (text for text in questions if self.listener.is_asked(text, asked))
            first = next(texts, None)
            if first is None and len(group) > 1:
                continue
            found = texts if first is None else chain([first], texts)
            yield from self._say(found, _anything, f"as a question for {' and '.join(group)}")
            self.planner.search.told.update(group)

    # -- doing ------------------------------------------------------------------------------------------

    def _do(self, work: Work) -> Steps[None]:
        waiting: list[Call] = []
        made: list[Call] = []
        for call in work.calls:
            if call.side == "user":
                made += yield from self._carry_out(waiting)
                yield from self._request(call, work, made)
                waiting, made = [], []
                continue
            tool = self.environment.tools[call.name]
            if is_lookup(tool):
                yield from self._look(call)
                continue
            try:
                yield from self._prepare(call)
            except Unknowable:
                if not waiting:
                    raise
                made += yield from self._carry_out(waiting)
                waiting = []
                yield from self._prepare(call)
            if is_change(tool):
                waiting.append(call)
                continue
            made += yield from self._carry_out(waiting)
            waiting = []
            if work.say:
                extra = yield from self._find_extra(work.say)
                yield from self._say([extra], _anything, "as an answer")
            yield from self._keep_rules([call], "")
            yield from self._call(call)
        made += yield from self._carry_out(waiting)
        extra = yield from self._find_extra(work.say)
        spoken = f"{self.environment.policy} {' '.join(work.wish.says)}".lower()
        meant = [call for call in work.calls if call.side == "user" or self._changes(call)]
        if not made and any(call.side == "user" for call in meant):
            texts = words.list_solved(work.wish.done, spoken, self.random)
        elif not made and meant:  # a benchmark may expect calls that its tools refuse
            texts = words.list_refusals(self._list_acts(meant)[0], self.random)
        else:
            texts = self._list_reports(made, work)
        yield from self._close((f"{extra} {text}".strip() for text in texts), "as a report")

    def _changes(self, call: Call) -> bool:
        return is_change(self.environment.tools[call.name])

    def _list_reports(self, made: Sequence[Call], work: Work) -> Iterable[str]:
        acts, things = self._list_acts(made, past=True), self._list_things(made)
        return words.list_reports(acts, things, work.wish.done, self.random)

    def _carry_out(self, calls: Sequence[Call]) -> Steps[list[Call]]:
        """Ask for the final yes, then make the calls; those that were not refused."""
        if not calls:
            return []
        acts = self._list_acts(calls)
        yield from self._keep_rules(calls, f"Shall I {acts[0]}?")
        texts = words.list_proposals(acts, self.random)
        heard = yield from self._say(texts, self.listener.is_proposal, "as asking for the final yes")
        if _NO.search(heard):
            raise ModelError("the user did not agree to what the task expects", blame="user")
        made: list[Call] = []
        for call in calls:
            if (yield from self._call(call)):
                made.append(call)
            elif self.environment.domain.reward is None:
                raise ModelError(f"a gold call was refused: {call.name}", blame="tool")
        return made

    def _keep_rules(self, calls: Sequence[Call], proposal: str) -> Steps[None]:
        """Make the look-ups that only the rules of the policy ask for."""
        for _ in range(MOST_LOOK_UPS):
            look_up = self.rulebook.find_look_up(calls, proposal, self.planner.search)
            if look_up is None:
                return
            yield from self._call(look_up)

    def _request(self, call: Call, work: Work, made: Sequence[Call]) -> Steps[None]:
        """Report what was changed, then ask the user to use a tool of theirs."""
        tool = self.environment.user_tools[call.name]
        reports = [*islice(self._list_reports(made, work), MOST_REPORTS)] if made else [""]
        asked = words.list_requests(tool, call.arguments, self.random)
        is_followed = "agenda" in self.task.meta
        yield from self._say(
            (f"{report} {text}".strip() for text in asked for report in reports),
            lambda text: not is_followed or self.listener.is_request(text, call),
            f"as a request to use {call.name}",
        )
        self.planner.apply_user_call(call)

    def _propose_only(self, work: Work) -> Steps[None]:
        """Come to the point where the user changes their mind."""
        call = guess_call(work.wish, self.environment)
        acts = ["do that for you"]
        if call is not None:
            yield from self._prepare(call)
            acts = self._list_acts([call])
        named = [
            str(fact.value) for fact in work.wish.facts.values() if self.planner.knowledge.names(fact.value)
        ]
        if unsaid := [value for value in named if value not in acts[0]]:
            acts = [f"{act}: {', '.join(unsaid)}" for act in acts]
        yield from self._say(
            words.list_proposals(acts, self.random), self.listener.is_proposal, "as asking for the final yes"
        )

    def _close(self, texts: Iterable[str], what: str) -> Steps[None]:
        """Say the words that settle a wish, and offer more help."""
        offered = (f"{text} {words.draw_else(self.random)}".strip() for text in texts)
        yield from self._say(offered, self.listener.is_settling, what)

    # -- answering and refusing -----------------------------------------------------------------------------

    def _answer(self, work: Work) -> Steps[None]:
        told = yield from self._find_extra(work.say[:-1])
        texts = yield from self._find_statement(work.say[-1])
        yield from self._close((f"{told} {text}".strip() for text in texts), "as an answer")

    def _find_extra(self, says: Sequence[Say]) -> Steps[str]:
        """One sentence for each thing that has to be said."""
        told = ""
        for say in says:
            statements = yield from self._find_statement(say)
            told = f"{told} {statements[0]}".strip()
        return told

    def _find_statement(self, say: Say) -> Steps[list[str]]:
        """Sentences that say one of several wordings, after looking it up."""
        for _ in range(MOST_STEPS):
            leaf, step = self.planner.find_answer(lambda text: find_said(say, text) is not None)
            if leaf is not None:
                wording = find_said(say, to_text(leaf)) or say[0]
                value = str(leaf) if wording.lower() in to_text(leaf) else wording
                return [
                    *words.list_answers(
                        *describe_value(self.planner, self.listener.wish, leaf, value), self.random
                    )
                ]
            if step is None:
                break
            yield from self._take(step)
        evidence = self.planner.knowledge.evidence
        known = [wording for wording in say if not evidence.find_unknown_values(wording)]
        if not known:
            raise Unknowable(f"task {self.task.id}: no tool shows what is to be said: {' or '.join(say)}")
        return [f"{known[0][:1].upper()}{known[0][1:]}.", f"I can tell you this: {known[0]}."]

    def _refuse(self, work: Work) -> Steps[None]:
        call = guess_call(work.wish, self.environment)
        reasons = [say for say in work.say if not is_refusal([say])]
        if call is not None:
            needed = {
                name: value for name, value in call.arguments.items() if self.planner.is_telling(name, value)
            }
            yield from self._prepare(Call(name=call.name, arguments=needed))
            yield from self._find_forgotten_record()
            acts = self._list_acts([Call(name=call.name, arguments=needed)])
        else:
            acts = ["do that"]
        others = sum(other.kind == "refuse" and other is not work for other in self.works.values())
        if not others:
            yield from self._look_into(work.wish, reasons)
        # What gold calls have shown is enough. Where no tool does what is wished, the policy says so.
        named = self.planner.find_named(work.wish)
        is_looked_into = call is None or bool(work.calls) or self.planner.is_seen(named)
        found = find_reasons(self.planner, reasons, is_looked_into, bool(others))
        if unknown := [] if others else [say for say, text in found if not text]:
            raise Unknowable(
                f"task {self.task.id}: nothing leads to a record that says why: {' or '.join(unknown[0])}; "
                "name the record in a fact or in the words of the wish"
            )
        self._refused.add(id(work.wish))
        is_last = all(other.kind != "refuse" or key in self._refused for key, other in self.works.items())
        if is_last and is_looked_into:  # what no refusal has said belongs to this one
            found = [
                (say, text or ("" if self._has_said(say) else f"This is why: {say[0]}."))
                for say, text in found
            ]
        told = [*dict.fromkeys(text for _, text in found if text)]
        reasons_told = [" ".join(told)]
        if others:  # where all would be too much: one, and first what was not said yet
            reasons_told += [
                text for _, text in sorted(found, key=lambda each: self._has_said(each[0])) if text
            ]
        texts = words.list_refusals(acts[0], self.random)
        drafts = [f"{text} {why}".strip() for text in texts for why in reasons_told]
        whole = [
            " ".join(
                [
                    draft,
                    *(
                        f"That is {say[0]}."
                        for say in work.say
                        if is_refusal([say]) and find_said(say, draft) is None
                    ),
                ]
            )
            for draft in drafts
        ]
        yield from self._close(whole, "as a refusal")

    def _has_said(self, say: Say) -> bool:
        return any(find_said(say, text) is not None for text in self.said)

    def _look_into(self, wish: Wish, reasons: Sequence[Say]) -> Steps[None]:
        """Look up what a wish is about and what shows why it is refused: a reason is never said unseen."""
        planner = self.planner
        for _ in range(MOST_STEPS):
            named = planner.find_named(wish)
            if planner.is_seen(named):
                break
            steps = (planner.find_record([text]) for text in named)
            step = next(filter(None, steps), None)
            if step is None and (telling := planner.find_telling()) is not None:
                step = Step("ask", (telling,))
            if step is None:
                break
            yield from self._take(step)
        for say in reasons:
            for _ in range(MOST_STEPS):
                step = planner.find_source(lambda text, say=say: find_said(say, text) is not None)
                if step is None:
                    break
                yield from self._take(step)

    def _find_forgotten_record(self) -> Steps[None]:
        """Find the record that the user cannot name, by what else the user tells of it."""
        planner = self.planner
        for name in sorted(planner.own):
            if planner.facts[name].value is None and name not in planner.search.told:
                yield from self._ask([name])
                while (telling := planner.find_telling()) is not None:
                    yield from self._ask([telling])
                told = [
                    to_text(planner.facts[each].value)
                    for each in planner.own & planner.search.told
                    if planner.facts[each].value is not None
                ]
                for _ in range(MOST_STEPS):
                    step = planner.find_record(told)
                    if step is None or step.call is None:
                        break
                    yield from self._call(step.call)

    # -- showing --------------------------------------------------------------------------------------------

    def _list_acts(self, calls: Sequence[Call], past: bool = False) -> list[str]:
        listed: list[list[str]] = []
        for call in calls:
            tool = self.environment.tools[call.name]
            acts: list[str] = []
            for is_named in (True, False):
                shown = list_shown(self.planner, call, is_named)
                acts += words.list_acts(tool, shown, self.random, past)
            listed.append(acts)
        if not listed:
            return ["done what you asked for"] if past else ["do that"]
        return [" and ".join(acts) for acts in zip(*listed, strict=False)]

    def _list_things(self, calls: Sequence[Call]) -> list[tuple[str, str]]:
        """What was changed, and the participle of how."""
        if len(calls) != 1:
            return []
        shown = list_shown(self.planner, calls[0], False)
        return words.list_things(self.environment.tools[calls[0].name], shown)


def _anything(text: str) -> bool:
    return True


class First(Random):
    """Draws nothing: always the first, in the order that is there."""

    def random(self) -> float:
        return 0.0

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[0]

    def sample(self, population: Sequence[T], k: int, *, counts: Iterable[int] | None = None) -> list[T]:
        return list(population)[:k]

    def shuffle(self, x: MutableSequence[Any]) -> None:
        pass


def make_teacher(domain: Domain, plain: bool = False) -> Callable[[Task, int], Teacher]:
    """The teacher of a domain, as a source of models. A `plain` one has one wording for each thing."""

    def make(task: Task, seed: int) -> Teacher:
        teacher = Teacher(domain, task, seed)
        if plain:
            teacher.random = First()
        return teacher

    return make
