"""Users side by side: what differs is seen, what is the same agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from trialogue import Message, Reward, Trajectory, Turn, find_domain
from trialogue.cli.main import main
from trialogue.score.audit import Case
from trialogue.score.compare import agree, measure_user, reveal

SHOP = find_domain("shop")


def test_several_users_are_compared_and_a_run_is_audited(tmp_path: Path) -> None:
    script = tmp_path / "odd.jsonl"
    script.write_text('"How can I help you today?"\n"Goodbye. ###STOP###"\n')
    runs = f"run.directory={tmp_path / 'runs'}"
    command = [
        "users",
        "compare",
        "shop",
        "--user=agenda",
        f"--user=scripted:{script}",
        "--tasks",
        "6",
        runs,
        "run.name=c",
        "--json",
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    good, odd = found["users"].values()
    assert (good["pass^1"], odd["pass^1"]) == (1.0, 0.0)
    assert (good["findings_per_100"], odd["findings"]["role"]) == (0.0, 6)
    assert good["distinct_openings"] > odd["distinct_openings"] == pytest.approx(1 / 6)
    assert good["revealed_per_turn"] > odd["revealed_per_turn"] == 0
    [pair] = found["agreement"].values()
    assert pair == {"conversations": 6, "same": 0.0, "kappa": pytest.approx(0.0)}
    for row, status in ((good, 0), (odd, 1)):
        audited = CliRunner().invoke(main, ["users", "audit", row["run"]])
        assert audited.exit_code == status
        assert f"{6 * status} of 6 conversations have findings" in audited.output
    shown = CliRunner().invoke(main, [*command[:4], "--tasks", "2", runs])
    assert "findings per 100" in shown.output


def test_agreement_is_beyond_chance() -> None:
    task = SHOP.tasks("test", 1, 0)[0]

    def make(values: list[int]) -> list[Trajectory]:
        return [
            Trajectory(id=f"t/{n}", task=task, trial=n, turns=(), end="user_stop", reward=Reward(value=value))
            for n, value in enumerate(values)
        ]

    assert agree(make([1, 1, 0, 0]), make([1, 1, 0, 0]))["kappa"] == 1.0
    assert agree(make([1, 1, 0, 0]), make([1, 0, 1, 0]))["kappa"] == 0.0
    assert agree(make([1, 0]), [])["kappa"] is None
    assert measure_user(SHOP, [])["pass^1"] is None


def test_a_fact_counts_once_where_it_is_first_told() -> None:
    task = SHOP.tasks("test", 40, 0)[0]
    facts = task.meta["agenda"]["facts"]
    texts = [f"I am {facts['name']['value']}.", f"{facts['name']['value']}, {facts['postcode']['value']}"]
    turns = tuple(Turn(side="user", message=Message(role="user", content=text)) for text in texts)
    case = Case(SHOP, Trajectory(id="x", task=task, turns=turns, end="max_turns"))
    assert reveal(case) == [1, 1]
