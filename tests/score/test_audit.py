"""The audit of the user: each kind of fault planted into clean conversations, and clean ones left alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest

from trialogue import Message, Reply, RolloutSettings, Task, Tool, Trajectory, Turn, find_domain, rollout
from trialogue.config import AuditSettings, EvalConfig, Speaker
from trialogue.run import read_trajectories
from trialogue.score.audit import audit
from trialogue.score.evaluate import evaluate
from trialogue.score.metrics import audit_figures
from trialogue.score.reward import grade
from trialogue.score.verdict import find_audit
from trialogue.talk.agenda import Agenda, Wish, make_agenda_user
from trialogue.talk.model import Model
from trialogue.trajectory import Fault
from trialogue.world.domain import STOP

SHOP = find_domain("shop")
EACH = 30
Plant = Callable[[Trajectory, Random], Trajectory | None]


async def hold(tasks: Sequence[Task], agent: Any) -> list[Trajectory]:
    groups = rollout(SHOP, tasks, agent, make_agenda_user, RolloutSettings(grade=grade))
    return [item async for group in groups for item in group.trajectories]


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return SHOP.tasks("test", 100, 7)


def faulty(task: Task, seed: int) -> Model:
    return SHOP.oracle(task, seed, faults=0.3)  # type: ignore[misc, call-arg]


# -- planting: each takes a clean conversation and lets its user do one thing wrong --------------------------


def user_places(item: Trajectory) -> list[int]:
    return [place for place, turn in enumerate(item.turns) if turn.side == "user"]


def put(item: Trajectory, place: int, text: str, **changes: Any) -> Trajectory:
    turns = list(item.turns)
    turns[place] = Turn(side="user", message=Message(role="user", content=text))
    return item.model_copy(update={"turns": tuple(turns), **changes})


def agenda_of(item: Trajectory) -> Agenda:
    return Agenda.model_validate(item.task.meta["agenda"])


def facts_of(item: Trajectory) -> dict[str, list[str]]:
    """Every value the user knows, by the name of the fact."""
    agenda = agenda_of(item)
    found: dict[str, list[str]] = {}
    wishes: list[Wish] = list(agenda.wishes) + [wish.instead for wish in agenda.wishes if wish.instead]
    for source in [agenda.facts, *(wish.facts for wish in wishes)]:
        for name, fact in source.items():
            if fact.value is not None:
                found.setdefault(name, []).append(fact.value)
    return found


def other_values(name: str, item: Trajectory, chance: Random) -> str | None:
    """A value of that kind that another customer has and this one does not."""
    own = json.dumps(item.task.model_dump())
    for task in chance.sample(STRANGERS, len(STRANGERS)):
        for value in facts_of(Trajectory(id="x", task=task, turns=(), end="error")).get(name, []):
            if value not in own:
                return value
    return None


STRANGERS = SHOP.tasks("test", 60, 99)


def contradict(item: Trajectory, chance: Random) -> Trajectory | None:
    """States another value than its own."""
    for place in chance.sample(user_places(item), len(user_places(item))):
        text = item.turns[place].message.content
        for name in ("order_id", "email", "address", "payment_method"):
            for value in facts_of(item).get(name, []):
                other = other_values(name, item, chance)
                if value in text and other is not None:
                    return put(item, place, text.replace(value, other))
    return None


def invent(item: Trajectory, chance: Random) -> Trajectory | None:
    """Adds what no one told it: another's data, or data of no one."""
    places = user_places(item)[:-1]
    place = chance.choice(places)
    text = item.turns[place].message.content
    extras = [
        f"You can also call me at 0{chance.randrange(10**8, 10**9)}.",
        f"My customer number is C{chance.randrange(10000, 99999)}, by the way.",
        f"I paid {chance.randrange(100, 900)}.{chance.randrange(10, 99)} for it.",
        f"My sister {other_values('name', item, chance)} was there too.",
        f"I also have the {other_values('item', item, chance)} here.",
    ]
    return put(item, place, f"{text} {chance.choice(extras)}")


def dump(item: Trajectory, chance: Random) -> Trajectory | None:
    """Tells everything at once."""
    facts = agenda_of(item).facts
    place = user_places(item)[0]
    text = item.turns[place].message.content
    known = [fact.says[0].replace("{value}", fact.value) for fact in facts.values() if fact.value is not None]
    return put(item, place, f"{text} {' '.join(known)}") if len(known) >= 2 else None


def stop_early(item: Trajectory, chance: Random) -> Trajectory | None:
    """Stops while something is still to be done: right away, or with the yes that should lead to it."""
    places = user_places(item)[:-1]
    place = chance.choice(places)
    text = item.turns[place].message.content
    if item.value < 1 or item.end != "user_stop":
        return None
    turns = item.turns[: place + 1]
    cut = item.model_copy(update={"turns": turns})
    ended = put(cut, place, f"{text} {STOP}" if chance.random() < 0.5 else STOP)
    environment = SHOP.open(item.task)
    for turn in turns:
        for call in turn.message.tool_calls:
            environment.call(call.name, call.arguments)
    reward = grade(item.task, ended, environment)
    return ended.model_copy(update={"reward": reward})


def never_stop(item: Trajectory, chance: Random) -> Trajectory | None:
    """Goes on and on after everything is settled."""
    if item.end != "user_stop":
        return None
    place = user_places(item)[-1]
    text = item.turns[place].message.content.replace(STOP, "").strip()
    chat = ["Lovely weather today.", "You were so helpful.", "My dog says hello.", "Do you like your job?"]
    more: list[Turn] = []
    for line in chance.sample(chat, 3):
        more.append(Turn(side="agent", message=Message(role="assistant", content="Anything else?")))
        more.append(Turn(side="user", message=Message(role="user", content=line)))
    ended = put(item, place, text, end="max_turns")
    return ended.model_copy(update={"turns": (*ended.turns, *more)})


def speak_as_agent(item: Trajectory, chance: Random) -> Trajectory | None:
    """Turns the parts round."""
    lines = [
        "How can I help you today?",
        "Thank you for contacting us! Could I have your e-mail, please?",
        "I have cancelled your order. Is there anything else I can help you with?",
        "Sure, I'd be happy to help you with that. Please provide your order number.",
        "Your refund has been processed.",
        "Shall I go ahead and change it?",
    ]
    places = user_places(item)[1:-1]
    if not places:
        return None
    place = chance.choice(places)
    heard = next(
        turn.message.content
        for turn in reversed(item.turns[:place])
        if turn.side == "agent" and turn.message.role == "assistant" and turn.message.content
    )
    echo = [heard] if len(heard.split()) > 5 else []
    return put(item, place, chance.choice([*lines, *echo]))


def quote(item: Trajectory, chance: Random) -> Trajectory | None:
    """Reads the instructions out."""
    lines = [line for line in item.task.instructions.splitlines() if "You want" in line or "you are" in line]
    sentences = [part.strip() for line in lines for part in line.split(". ") if len(part.split()) > 6]
    sentences += [
        "Tell a detail only when you are asked for it.",
        "My instructions say that I must not tell.",
    ]
    place = chance.choice(user_places(item)[:-1])
    return put(item, place, f"{chance.choice(sentences)}")


def ignore(item: Trajectory, chance: Random) -> Trajectory | None:
    """Answers a question with small talk, twice, before it answers."""
    for place in user_places(item)[1:]:
        question = item.turns[place - 1]
        if "?" in question.message.content and "Anything else" not in question.message.content:
            chat = [
                "It has been raining all week.",
                "My cat just walked over the keyboard.",
                "Hm, nice shop.",
            ]
            said = [
                Turn(side="user", message=Message(role="user", content=t)) for t in chance.sample(chat, 2)
            ]
            turns = (*item.turns[:place], said[0], question, said[1], question, *item.turns[place:])
            return item.model_copy(update={"turns": turns})
    return None


PLANTS: dict[Fault, Plant] = {
    "contradiction": contradict,
    "invention": invent,
    "dump": dump,
    "early_stop": stop_early,
    "never_stops": never_stop,
    "role": speak_as_agent,
    "quote": quote,
    "ignored_question": ignore,
}


async def test_planted_faults_are_found_and_clean_users_left_alone(
    tasks: list[Task], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(PLANTS) == set(get_args(Fault))
    clean = [item for agent in (SHOP.oracle, faulty) for item in await hold(tasks, agent)]
    wrong = [(item.id, found) for item in clean if (found := audit(SHOP, item))]
    lines = [f"clean: {len(wrong)} of {len(clean)} conversations have findings"]
    recalls: dict[str, float] = {}
    for kind, plant in PLANTS.items():
        chance = Random(f"plant {kind}")
        planted = [spoilt for item in clean if (spoilt := plant(item, chance)) is not None][:EACH]
        assert len(planted) >= 20, kind
        found = [any(finding.kind == kind for finding in audit(SHOP, item)) for item in planted]
        recalls[kind] = sum(found) / len(found)
        lines.append(f"{kind}: {sum(found)} of {len(found)} planted faults found")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert len(wrong) <= 0.02 * len(clean), wrong[:3]
    assert min(recalls.values()) >= 0.95, recalls


async def test_a_fault_of_the_agent_is_not_the_users(tasks: list[Task]) -> None:
    """An agent that claims to be done, and one that asks the same again and again, leave the user clean."""

    class Asks:
        async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
            return Reply("Could I have your e-mail, or your name and postcode?")

    class Claims:
        async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
            return Reply("It is done. Anything else?")

    for model in (Asks(), Claims()):
        held = await hold(tasks[:40], lambda task, seed, model=model: model)
        assert not [finding for item in held for finding in audit(SHOP, item)]


# -- in a run ------------------------------------------------------------------------------------------------


class Blunder:
    """The rule-based user, who gives everything away in conversations of odd seeds."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.inner = task, seed, make_agenda_user(task, seed)

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        reply = await self.inner.reply(turns, tools)
        if self.seed % 2 and len(turns) == 1:
            facts = Agenda.model_validate(self.task.meta["agenda"]).facts.values()
            return Reply(f"{reply.content} {' '.join(fact.value for fact in facts if fact.value)}")
        return reply


async def test_a_spoilt_conversation_is_reported_or_left_out_and_held_anew(tasks: list[Task]) -> None:
    def report(item: Trajectory) -> Any:
        return audit(SHOP, item)

    async def run(**more: Any) -> list[Any]:
        groups = rollout(
            SHOP,
            tasks[:12],
            SHOP.oracle,
            Blunder,
            RolloutSettings(group_size=2, grade=grade, audit=report, **more),
        )
        return [group async for group in groups]

    reported = await run()
    held = [item for group in reported for item in group.trajectories]
    marked = [item for item in held if item.findings]
    assert len(held) == 24
    assert 6 <= len(marked) <= 18
    assert all(item.blame == "user" and item.reward is not None and not item.excluded for item in marked)
    assert all(item.seed % 2 for item in marked)

    excluding = await run(exclude=True, redraws=20)
    held = [item for group in excluding for item in group.trajectories]
    left_out = [item for group in excluding for item in group.excluded]
    assert len(held) == 24
    assert not any(item.findings for item in held)
    assert {item.id for item in marked} <= {item.id for item in left_out}
    assert all(item.excluded and item.blame == "user" and item.reward is not None for item in left_out)
    assert not any(group.failed for group in excluding)
    figures = audit_figures(held, left_out)
    assert figures["excluded"] == len(left_out)
    assert figures["success"]["all"]["conversations"] == 24
    assert figures["success"]["clean"] == {**figures["success"]["clean"], "conversations": 24, "pass^1": 1.0}


def test_exclusion_cannot_hide_faults_of_the_agent() -> None:
    """The figure over everything takes the first conversation of each trial, lost ones included."""
    task = SHOP.tasks("test", 1, 0)[0]
    base = Trajectory(id=f"{task.id}/0", task=task, turns=(), end="user_stop")
    finding = {"kind": "dump", "turn": 0, "evidence": "x"}
    lost = Trajectory.model_validate(
        {**base.model_dump(), "reward": {"value": 0.0}, "findings": [finding], "excluded": True}
    )
    won = Trajectory.model_validate({**base.model_dump(), "id": f"{task.id}/0.1", "reward": {"value": 1.0}})
    figures = audit_figures([won], [lost])
    assert figures["success"]["all"]["pass^1"] == 0.0
    assert figures["success"]["clean"]["pass^1"] == 1.0
    assert (figures["lost"], figures["lost_with_findings"]) == (1, 1)


class Judge:
    """Answers as a judge would, or not."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def __call__(self, task: Task, seed: int) -> Judge:
        return self

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        self.asked.append(turns[-1].message.content)
        return Reply(self.answer)


async def test_a_judge_is_heard_and_a_judge_who_fails_never_blames_the_user(tasks: list[Task]) -> None:
    faults = [
        {"kind": "role", "message": 0, "evidence": "odd"},
        {"kind": "role", "message": 1, "evidence": "agent"},
    ]
    judge = Judge(f"```json\n{json.dumps({'faults': faults})}\n```")
    audits = find_audit(AuditSettings(), Speaker(model="agenda"), SHOP, judge)
    groups = rollout(
        SHOP, tasks[:1], SHOP.oracle, make_agenda_user, RolloutSettings(grade=grade, audit=audits)
    )
    [group] = [group async for group in groups]
    [finding] = group.trajectories[0].findings
    assert (finding.kind, finding.turn, finding.by) == ("role", 0, "judge")
    assert tasks[0].instructions.splitlines()[0] in judge.asked[0]
    silent = find_audit(AuditSettings(), Speaker(model="agenda"), SHOP, Judge("no idea"))
    groups = rollout(
        SHOP, tasks[:1], SHOP.oracle, make_agenda_user, RolloutSettings(grade=grade, audit=silent, redraws=0)
    )
    [group] = [group async for group in groups]
    assert (group.failed[0].blame, group.failed[0].reward) == ("judge", None)
    assert "the verdict on the user cannot be read" in (group.failed[0].error or "")


async def test_a_run_reports_success_with_and_without(tmp_path: Path) -> None:
    (tmp_path / "blurts.jsonl").write_text('"How can I help you today?"\n"Bye. ###STOP###"\n')
    settings = {
        "user": {"model": f"scripted:{tmp_path / 'blurts.jsonl'}"},
        "tasks": {"count": 3},
        "run": {"directory": str(tmp_path), "name": "one"},
    }
    result = await evaluate(EvalConfig.model_validate(settings))
    assert Counter(result["audit"]["findings"])["role"] == 3
    assert result["conversations"] == 3
    assert result["audit"]["success"]["all"]["conversations"] == 3
    assert result["audit"]["success"]["clean"]["conversations"] == 0
    settings |= {"audit": {"policy": "exclude"}, "run": {"directory": str(tmp_path), "name": "two"}}
    excluded = await evaluate(EvalConfig.model_validate(settings))
    assert (excluded["conversations"], excluded["audit"]["excluded"]) == (0, 9)
    again = await evaluate(EvalConfig.model_validate(settings), resume=tmp_path / "two")
    assert (again["conversations"], again["audit"]["excluded"]) == (0, 18)
    ids = [item.id for item in read_trajectories(tmp_path / "two")]
    assert len(ids) == len(set(ids)) == 18
