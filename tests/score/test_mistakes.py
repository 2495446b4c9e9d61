"""Why an agent lost: one reason for each conversation."""

from dataclasses import replace

import pytest

from trialogue import Call, Domain, Reward, find_domain
from trialogue.score.check import to_conversation
from trialogue.score.mistakes import HELP, WHAT, Kind, count_mistakes, find_mistakes, list_made
from trialogue.score.reward import grade
from trialogue.trajectory import End, Trajectory
from trialogue.world.scaffold import write_domain


@pytest.fixture(scope="module")
def bakery(tmp_path_factory: pytest.TempPathFactory) -> Domain:
    folder = tmp_path_factory.mktemp("domains") / "bakery"
    write_domain(folder)
    return find_domain(str(folder))


def hold(domain: Domain, name: str, calls: list[Call], *say: str, end: End | None = None) -> Trajectory:
    """A conversation whose user begins with the instructions of a task."""
    task = next(task for task in domain.tasks("all") if task.id == name)
    environment = domain.open(task)
    item = to_conversation(task, calls, say, environment)
    first = item.turns[0]
    told = first.message.model_copy(update={"content": f"{task.instructions} Or A101, A102, on Monday."})
    item = item.model_copy(update={"turns": (first.model_copy(update={"message": told}), *item.turns[1:])})
    reward = grade(task, item, environment)
    assert isinstance(reward, Reward)
    return item.model_copy(update={"reward": reward, "end": end or item.end})


def cancel(order_id: str) -> list[Call]:
    return [Call(name="cancel_order", arguments={"order_id": order_id})]


CASES: list[tuple[Kind, str, list[Call], str]] = [
    ("copied", "cancel-3", cancel("A999"), ""),
    ("malformed", "cancel-3", [Call(name="annul_order", arguments={})], ""),
    ("value", "cancel-3", cancel("A102"), ""),
    ("tool", "cancel-3", [Call(name="change_day", arguments={"order_id": "A108", "day": "Monday"})], ""),
    ("refused", "cancel-3", [], "I am sorry, but I cannot cancel order A108"),
    ("missing", "cancel-3", [], "What is your phone number?"),
    ("allowed", "question-1", cancel("A101"), ""),
    ("said", "question-1", [], "You ordered some rolls"),
]


@pytest.mark.parametrize(("kind", "name", "calls", "say"), CASES, ids=[case[0] for case in CASES])
def test_the_reason_is_found(bakery: Domain, kind: Kind, name: str, calls: list[Call], say: str) -> None:
    plain = replace(bakery, policy_rules=())
    (mistake,) = find_mistakes([hold(plain, name, calls, *filter(None, [say]))], plain)
    assert (mistake.kind, mistake.trajectory != "") == (kind, True), mistake


def test_a_broken_rule_and_a_lost_thread(bakery: Domain) -> None:
    (broken,) = find_mistakes([hold(bakery, "cancel-3", cancel("A108"))], bakery)
    assert broken.kind == "rule"
    (lost,) = find_mistakes([hold(bakery, "question-1", [], "Well", end="too_long")], bakery)
    assert lost.kind == "lost"


def test_what_is_solved_is_no_mistake_and_the_most_frequent_comes_first(bakery: Domain) -> None:
    plain = replace(bakery, policy_rules=())
    held = [
        hold(plain, "cancel-3", cancel("A108")),
        hold(plain, "cancel-1", cancel("A999")),
        *(hold(plain, name, [], "I cannot do that") for name in ("cancel-1", "cancel-3", "move-1")),
    ]
    counted = count_mistakes(find_mistakes(held, plain))
    assert [(each["kind"], each["conversations"]) for each in counted] == [("refused", 3), ("copied", 1)]
    assert counted[0]["families"] == {"cancel": 2, "move": 1}
    assert WHAT.keys() == HELP.keys()


def test_calls_of_several_messages_may_have_the_same_id(bakery: Domain) -> None:
    """A look-up that fails later does not make the change before it a refused one."""
    later = [*cancel("A102"), Call(name="cancel_order", arguments={"order_id": "A999"})]
    item = hold(bakery, "cancel-3", later, "It is done.")
    same = [
        turn.model_copy(
            update={
                "message": turn.message.model_copy(
                    update={
                        "tool_calls": tuple(
                            call.model_copy(update={"id": "call_0"}) for call in turn.message.tool_calls
                        ),
                        "tool_call_id": "call_0" if turn.message.role == "tool" else None,
                    }
                )
            }
        )
        for turn in item.turns
    ]
    assert [made[2] for made in list_made(item.model_copy(update={"turns": tuple(same)}))] == [False, True]
