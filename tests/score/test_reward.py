"""The outcome reward: by end, by database, by what was said, by assertions; and the figures made of it."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest

from trialogue import (
    Assertion,
    Call,
    Database,
    Domain,
    Environment,
    Expected,
    GradeError,
    Message,
    Record,
    Reward,
    RolloutSettings,
    Table,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    rollout,
    tool,
)
from trialogue.score.metrics import bootstrap, by_task, pass_hat, pass_hats, summarize
from trialogue.score.reward import grade, is_said, regrade
from trialogue.talk.scripted import ScriptedModel
from trialogue.world.domain import STOP, from_list


class Order(Record):
    status: str = "pending"


class Store(Database):
    orders: Table[Order]
    calls: int = 0

    @tool(writes=True)
    def cancel(self, order_id: str) -> Order:
        """Cancel an order."""
        self.orders[order_id].status = "cancelled"
        self.calls += 1
        return self.orders[order_id]

    def is_cancelled(self, order_id: str) -> bool:
        return self.orders[order_id].status == "cancelled"


CANCEL = Call(name="cancel", arguments={"order_id": "W1"})
DOMAIN = Domain("store", "", Store.load({"orders": {"W1": {}, "W2": {}}}), from_list("store", []))


def to_task(**expected: Any) -> Task:
    return Task(id="t", domain="store", instructions="", expected=Expected(**expected))


def held(task: Task, *texts: str, end: Any = "user_stop") -> Trajectory:
    turns = tuple(Turn(side="agent", message=Message(role="assistant", content=text)) for text in texts)
    return Trajectory(id="t/0", task=task, turns=turns, end=end)


def score(task: Task, *texts: str, end: Any = "user_stop", cancelled: tuple[str, ...] = ()) -> Reward | None:
    environment = DOMAIN.open(task)
    for order in cancelled:
        environment.call("cancel", {"order_id": order})
    reward = grade(task, held(task, *texts, end=end), environment)
    assert reward is None or isinstance(reward, Reward)
    return reward


def value(*arguments: Any, **more: Any) -> float:
    reward = score(*arguments, **more)
    assert reward is not None
    return reward.value


def test_only_a_proper_end_is_graded() -> None:
    task = to_task(calls=[CANCEL])
    assert value(task, cancelled=("W1",)) == 1
    assert value(task, cancelled=("W1",), end="agent_stop") == 1
    for end in ("max_turns", "too_long"):
        reward = score(task, cancelled=("W1",), end=end)
        assert reward == Reward(value=0.0, why=(f"ended by {end}: not graded",))
    assert score(task, cancelled=("W1",), end="error") is None


def test_doing_nothing_is_never_paid() -> None:
    quiet = to_task(nothing=True)
    assert value(quiet) == 1
    assert value(quiet, end="max_turns") == 0
    assert value(quiet, cancelled=("W1",)) == 0
    assert value(to_task(say=["not possible"])) == 0
    assert value(to_task(say=["not possible"]), "That is not possible.") == 1
    assert value(to_task(say=["not possible"]), "That is not possible.", cancelled=("W1",)) == 0
    assert value(to_task(calls=[CANCEL])) == 0
    with pytest.raises(GradeError, match="task t expects nothing: give it gold calls"):
        score(to_task())


def test_the_database_must_be_as_the_gold_calls_leave_it() -> None:
    reward = score(to_task(calls=[CANCEL]), cancelled=("W2",))
    assert reward is not None
    assert reward.parts == {"database": 0.0}
    assert reward.why == (
        "database: orders.W1.status should be 'cancelled', is 'pending'",
        "database: orders.W2.status should be 'pending', is 'cancelled'",
    )
    assert value(to_task(calls=[CANCEL]), cancelled=("W1", "W1")) == 0


def test_gold_is_carried_out_once_and_never_touched() -> None:
    task = to_task(calls=[CANCEL])
    environments = [DOMAIN.open(task) for _ in range(3)]
    assert [grade(task, held(task), item) for item in environments] == [
        grade(task, held(task), DOMAIN.open(task))
    ] * 3
    gold = environments[0].prepared.gold
    assert gold is environments[2].prepared.gold is not None
    assert [change.path for change in gold.difference()] == ["calls", "orders.W1.status"]


async def test_a_refused_gold_call_is_the_judges_fault() -> None:
    task = to_task(calls=[Call(name="cancel", arguments={"order_id": "W9"})])
    with pytest.raises(GradeError, match="gold call cancel was refused: Error: orders has no 'W9'"):
        score(task)

    def speak(task: Task, seed: int) -> ScriptedModel:
        return ScriptedModel(["Well.", STOP])

    [group] = [
        group
        async for group in rollout(DOMAIN, [task], speak, speak, RolloutSettings(grade=grade, redraws=0))
    ]
    [failed] = group.failed
    assert (failed.blame, failed.reward) == ("judge", None)


@pytest.mark.parametrize(
    ("wording", "text", "said"),
    [
        ("54.04", "You get $54.04 back.", True),
        ("1,054.04", "You get $1054.04 back.", True),
        ("1054", "You get 1,054 back.", True),
        ("5", "You get 15 back.", False),
        ("5", "You get 5.20 back.", False),
        ("5", "You get 1.5 back.", False),
        ("5", "You get 5.00 back.", True),
        ("5", "It is 5.", True),
        ("W1", "It is order W12.", False),
        ("W1", "It is order #W1.", True),
        ("Gift Card", "a **gift\ncard**", True),
        ("can't", "You can\u2019t.", True),
        ("(a.b)", "see (a.b)", True),
        ("(a.b)", "see (axb)", False),
    ],
)
def test_what_counts_as_said(wording: str, text: str, said: bool) -> None:
    assert value(to_task(say=[wording]), "Hello.", text) == float(said)


def test_one_of_several_wordings_suffices_and_each_thing_is_needed() -> None:
    task = to_task(say=[("no", "cannot"), "30 days"])
    assert value(task, "I cannot: after 30 days.") == 1
    reward = score(task, "I cannot.")
    assert reward is not None
    assert reward.why == ("said: the agent never said '30 days'",)
    reward = score(task)
    assert reward is not None
    assert reward.why[0] == "said: the agent never said 'no or cannot'"


def test_only_what_the_user_could_hear_counts() -> None:
    task = to_task(say=["secret"])
    calls = (ToolCall(id="1", name="cancel", arguments={}),)
    turns = (
        Turn(side="agent", message=Message(role="assistant", content="secret", tool_calls=calls)),
        Turn(side="agent", message=Message(role="tool", content="secret", tool_call_id="1")),
        Turn(side="user", message=Message(role="user", content="secret")),
    )
    trajectory = Trajectory(id="x", task=task, turns=turns, end="user_stop")
    reward = grade(task, trajectory, DOMAIN.open(task))
    assert isinstance(reward, Reward)
    assert reward.value == 0


def test_assertions_must_hold_and_may_not_be_refused() -> None:
    task = to_task(assertions=[Assertion(name="is_cancelled", arguments={"order_id": "W1"})])
    assert value(task, cancelled=("W1", "W2")) == 1
    assert value(task) == 0
    assert (
        value(to_task(assertions=[Assertion(name="is_cancelled", arguments={"order_id": "W1"}, value=False)]))
        == 1
    )
    reward = score(
        to_task(assertions=[Assertion(name="is_cancelled", arguments={"order_id": "W9"}, value=False)])
    )
    assert reward is not None
    assert reward.value == 0
    assert "has no answer: orders has no 'W9'" in reward.why[0]


def test_the_parts_multiply() -> None:
    holds = Assertion(name="is_cancelled", arguments={"order_id": "W1"})
    task = to_task(calls=[CANCEL], say=["done"], assertions=[holds])
    reward = score(task, "done", cancelled=("W1",))
    assert reward == Reward(
        value=1.0, parts={"database": 1.0, "said": 1.0, "assertions": 1.0}, why=("everything as expected",)
    )
    assert value(task, cancelled=("W1",)) == 0


def test_a_domain_may_have_a_reward_of_its_own() -> None:
    def half(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
        return Reward(value=0.5)

    own = Domain("own", "", Store.load({}), from_list("own", []), reward=half)
    task = to_task()
    assert grade(task, held(task), own.open(task)) == Reward(value=0.5)
    reward = grade(task, held(task, end="max_turns"), own.open(task))
    assert isinstance(reward, Reward)
    assert reward.value == 0


def test_calls_of_one_id_are_graded_again_in_their_order() -> None:
    task = to_task(calls=[CANCEL])
    first, second = (
        ToolCall(id="same", name="cancel", arguments={"order_id": order}) for order in ("W9", "W1")
    )
    turns = (
        Turn(side="agent", message=Message(role="assistant", tool_calls=(first, second))),
        Turn(
            side="agent",
            failed=True,
            message=Message(role="tool", content="Error: orders has no 'W9'", tool_call_id="same"),
        ),
        Turn(
            side="agent", message=Message(role="tool", content='{"status":"cancelled"}', tool_call_id="same")
        ),
    )
    trajectory = Trajectory(id="x", task=task, turns=turns, end="user_stop")
    reward, mismatches = regrade(trajectory, DOMAIN.open(task))
    assert (reward, mismatches) == (
        Reward(value=1.0, parts={"database": 1.0}, why=("everything as expected",)),
        [],
    )
    lone = trajectory.model_copy(update={"turns": turns[1:]})
    with pytest.raises(GradeError, match="a tool result without its call"):
        regrade(lone, DOMAIN.open(task))


def test_pass_hat_k_by_hand() -> None:
    assert pass_hat(3, 4, 1) == 3 / 4
    assert pass_hat(3, 4, 2) == 3 / 6  # pairs of good trials: 3 of 6
    assert pass_hat(3, 4, 3) == 1 / 4
    assert pass_hat(3, 4, 4) == 0
    assert pass_hat(4, 4, 4) == 1
    assert pass_hat(0, 4, 1) == 0


def test_pass_hats_average_over_the_tasks_that_have_so_many_trials() -> None:
    won, lost = True, False
    hats = pass_hats({"a": [won] * 4, "b": [won, won, lost, lost], "c": [lost, lost, won, won]})
    assert list(hats) == [1, 2, 3, 4]
    assert [hats[k].value for k in hats] == pytest.approx(
        [(1 + 1 / 2 + 1 / 2) / 3, (1 + 1 / 6 * 2) / 3, 1 / 3, 1 / 3]
    )
    fewer = pass_hats({"a": [won, won, lost], "b": [won, won]})  # a lost trial takes no figure away
    assert [interval.value for interval in fewer.values()] == pytest.approx([5 / 6, 2 / 3, 0])
    assert pass_hats({}) == {}


def test_an_interval_holds_its_value_and_narrows_with_more_tasks() -> None:
    few, many = bootstrap([1, 0] * 10), bootstrap([1, 0] * 1000)
    for interval in (few, many):
        assert interval.low < interval.value == 0.5 < interval.high
    # The error of a mean of n coins is 0.5 / sqrt(n), and 95 % lie within 1.96 of it.
    assert few.high - few.low == pytest.approx(2 * 1.96 * 0.5 / 20**0.5, rel=0.15)
    assert many.high - many.low == pytest.approx(2 * 1.96 * 0.5 / 2000**0.5, rel=0.15)
    assert bootstrap([1, 0] * 10) == few
    assert bootstrap([0.25] * 9) == (0.25, 0.25, 0.25)
    assert isnan(bootstrap([]).value)


def test_nine_of_nine_is_not_certainty() -> None:
    """The exact interval: all of nine succeed by chance once in forty where the true rate is 66 %."""
    assert bootstrap([1.0] * 9) == (1.0, pytest.approx(0.6637, abs=1e-4), 1.0)
    assert bootstrap([0.0] * 3) == (0.0, 0.0, pytest.approx(0.7076, abs=1e-4))


def test_failed_conversations_are_counted_and_never_averaged() -> None:
    task = to_task(calls=[CANCEL]).model_copy(update={"meta": {"family": "cancel", "level": 2}})
    good = held(task).model_copy(update={"reward": Reward(value=1.0)})
    bad = held(task, end="max_turns").model_copy(update={"reward": Reward(value=0.0), "trial": 1})
    failed = held(task, end="error").model_copy(update={"error": "x", "blame": "user"})
    summary = summarize([good, bad], [failed])
    assert summary["errors"] == {"x": 1}
    assert by_task([good, bad, failed]) == {"t": [True, False]}
    assert (summary["reward"], summary["pass^1"], summary["pass^2"]) == (0.5, 0.5, 0.0)
    assert (summary["tasks"], summary["conversations"], summary["failed"]) == (1, 2, 1)
    assert summary["ends"] == {"error": 1, "max_turns": 1, "user_stop": 1}
    assert summary["blame"] == {"user": 1}
    assert summary["families"]["cancel"]["pass^1"] == summary["levels"]["2"]["pass^1"] == 0.5


def test_numbers_alone_are_looked_at_whole() -> None:
    for wording, text in SAID:
        assert is_said(wording, text), (wording, text)
    for wording, text in UNSAID:
        assert not is_said(wording, text), (wording, text)
    assert is_said("15", "15 and 16")
    assert not is_said("1", "15 and 16")


SAID = [
    ("no", "no, sorry"),
    ("no", "the answer is no."),
    ("cinnamon roll", "two cinnamon rolls"),
    ("Anna", "anna's order"),
    ("5.2", "it costs $5.20."),
    ("5.20", "it costs 5.2 dollars"),
    ("54", "54.00 in all"),
    ("54.00", "you pay 54."),
    ("#W12", "order #w12."),
    ("2024-05-15", "on 2024-05-15"),
    ("已取消", "订单已取消了"),
    ("", "anything"),
]
UNSAID = [
    ("no", "i know"),
    ("no", "nothing"),
    ("art", "a start"),
    ("5", "15"),
    ("5", "5.20"),
    ("5.2", "5.25"),
    ("5.2", "15.2"),
    ("54", "54.001"),
    ("W1", "w12"),
]
