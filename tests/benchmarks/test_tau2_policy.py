"""The policies of TAU2 as rules: what they find in recorded runs, beside a grade that they never change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trialogue.benchmarks.folder import read_json_lines
from trialogue.benchmarks.tau import tau2
from trialogue.benchmarks.tau.tau2.recorded import score_tau2_file
from trialogue.benchmarks.tau.tau2.world import to_turns
from trialogue.score.compliance import find_breaches, find_misquoted
from trialogue.trajectory import Turn
from trialogue.world.domain import Domain

RUN = "gpt-4.1__retail"
WRITES = ("cancel_pending", "modify_", "return_delivered", "exchange_delivered")


def name_rules(domain: Domain, turns: list[Turn]) -> set[str]:
    return {breach.rule for breach in find_breaches(domain.policy_rules, turns, domain.policy)}


def find_write(turns: list[Turn]) -> int:
    """Place of the first message with a call that changes something and is not refused."""
    refused = {turn.message.tool_call_id for turn in turns if turn.failed}
    places = [
        place
        for place, turn in enumerate(turns)
        if any(call.name.startswith(WRITES) and call.id not in refused for call in turn.message.tool_calls)
    ]
    return places[0] if places else -1


def say(turn: Turn, text: str) -> Turn:
    return turn.model_copy(update={"message": turn.message.model_copy(update={"content": text})})


def refuse(turns: list[Turn]) -> list[Turn]:
    """The user says no, and the change is made."""
    write = find_write(turns)
    heard = max(place for place in range(write) if turns[place].message.role == "user")
    return [*turns[:heard], say(turns[heard], "No, leave it as it is."), *turns[heard + 1 :]]


def forget_who(turns: list[Turn]) -> list[Turn]:
    """Nobody was authenticated."""
    return [
        turn
        for place, turn in enumerate(turns)
        if not any(
            call.name.startswith("find_user_id")
            for near in turns[max(0, place - 1) : place + 1]
            for call in near.message.tool_calls
        )
    ]


def talk_while_calling(turns: list[Turn]) -> list[Turn]:
    write = find_write(turns)
    return [*turns[:write], say(turns[write], "One moment, please."), *turns[write + 1 :]]


def change_last_words(text: str) -> Callable[[list[Turn]], list[Turn]]:
    def change(turns: list[Turn]) -> list[Turn]:
        last = max(
            place
            for place, turn in enumerate(turns)
            if turn.message.role == "assistant" and not turn.message.tool_calls
        )
        return [*turns[:last], say(turns[last], f"{turns[last].message.content} {text}"), *turns[last + 1 :]]

    return change


CHEATS: dict[str, Callable[[list[Turn]], list[Turn]]] = {
    "confirm": refuse,
    "authenticate": forget_who,
    "one call at a time": talk_while_calling,
    "make nothing up": change_last_words("Your reference is ZX99871."),
    "be civil": change_last_words("Goodbye, idiot."),
}


@pytest.mark.parametrize("name", ["retail", "airline", "telecom"])
def test_no_rule_of_a_benchmark_is_required(name: str, data: Path) -> None:
    domain = tau2.find(name, str(data))
    assert len(domain.policy_rules) >= 8
    assert not any(rule.required for rule in domain.policy_rules)
    assert list(find_misquoted(domain.policy, domain.policy_rules)) == []


def test_planted_breaches_are_found_in_recorded_conversations(data: Path) -> None:
    domain = tau2.find("retail", str(data))
    planted = dict.fromkeys(CHEATS, 0)
    for record in read_json_lines(data / "tau2-golden" / f"{RUN}.jsonl.gz"):
        turns = to_turns(record["messages"])
        broken = name_rules(domain, turns)
        for rule, cheat in CHEATS.items():
            if rule not in broken and find_write(turns) > 0:
                assert rule in name_rules(domain, cheat(turns)), (record["id"], rule)
                planted[rule] += 1
    assert all(number >= 5 for number in planted.values()), planted


def test_breaches_stand_beside_the_official_grade(data: Path) -> None:
    path = data / "tau2-golden" / f"{RUN}.jsonl.gz"
    rows = score_tau2_file(path, "retail", str(data))
    official = [record["expected"]["reward"] for record in read_json_lines(path)]
    assert [row.reward for row in rows] == official
    broken = [row for row in rows if row.reward == 1.0 and row.more["breaches"]]
    assert len(broken) == 21
    beyond = [
        item["rule"]
        for row in broken
        for item in row.more["breaches"]
        if item["rule"] != "one call at a time"
    ]
    assert beyond == ["confirm"] * 4
