"""`check --for-training` finds each planted hindrance, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from trialogue import Call, Domain, Expected, Task, find_domain
from trialogue.cli.domains import check_verb
from trialogue.score.check import check
from trialogue.score.training_check import check_for_training, to_template
from trialogue.world.domain import from_list
from trialogue.world.scaffold import write_domain

CAR_RENTAL = Path(__file__).parents[2] / "examples" / "car_rental"


def test_the_starter_has_too_few_of_everything(tmp_path: Path) -> None:
    write_domain(tmp_path / "bakery")
    found = check_for_training(find_domain(str(tmp_path / "bakery")))
    texts = "\n".join(found.texts)
    assert "few distinct values in train (order_id 2, phone 2)" in texts
    assert "values of test are in train too (order_id 1 of 4, phone 1 of 4)" in texts
    assert "few ways to put a wish in train (cancel 2, move 2, question 1)" in texts
    assert "train has no tasks of these families of test: refuse, transfer, two wishes" in texts
    assert found.figures["teacher"] == {"played": 3, "solved": 3}
    assert found.figures["tokens"]["longest"] < found.figures["tokens"]["limit"]


def test_generated_tasks_have_enough(tmp_path: Path) -> None:
    write_domain(tmp_path / "pastry", generated=True)
    found = check_for_training(find_domain(str(tmp_path / "pastry")))
    assert found.texts == []  # a quarter are refusals, which whoever always refuses wins: that is no fault
    assert found.figures["teacher"] == {"played": 80, "solved": 80}


def test_a_catalogue_that_splits_share_is_told() -> None:
    found = check_for_training(find_domain(str(CAR_RENTAL)))
    texts = "\n".join(found.texts)
    assert "few distinct values in train (model 20" in texts
    assert "share the values out with Slots" in texts
    assert "licence" not in texts


def make_desk(tmp_path: Path, *tasks: Task) -> Domain:
    write_domain(tmp_path / "desk")
    from dataclasses import replace

    found = find_domain(str(tmp_path / "desk"))
    return replace(found, tasks=from_list("desk", tasks), policy_rules=())


def test_what_nobody_could_know_is_a_problem_with_the_call_and_the_value(tmp_path: Path) -> None:
    agenda = {"wishes": [{"says": ["Cancel my order."], "done": "cancel"}]}
    expected = Expected(calls=(Call(name="cancel_order", arguments={"order_id": "A101"}),))
    task = Task(
        id="guess",
        domain="desk",
        instructions="Cancel.",
        expected=expected,
        split="train",
        meta={"agenda": agenda},
    )
    desk = make_desk(tmp_path, task)
    ((name, problem),) = check(desk).problems
    assert name == "guess"
    assert problem.startswith("nobody could know order_id = 'A101' of cancel_order")
    texts = "\n".join(check_for_training(desk).texts)
    assert "the teacher does not solve guess" in texts
    assert "1 of 1 groups are likely to give no signal (guess)" in texts
    assert "there are no tasks in split 'dev'" in texts


def test_a_template_has_no_values() -> None:
    assert to_template("Cancel order A12 for Jana, 3 days", ["A12", "Jana"]) == "Cancel order … for …, 0 days"


def test_the_verb_prints_findings_and_still_succeeds(tmp_path: Path) -> None:
    write_domain(tmp_path / "bakery")
    done = CliRunner().invoke(check_verb, [str(tmp_path / "bakery"), "--for-training"])
    assert done.exit_code == 0
    assert "! few distinct values in train" in done.output
    told = CliRunner().invoke(check_verb, [str(tmp_path / "bakery"), "--for-training", "--json"])
    data = json.loads(told.output)
    assert data["ok"]
    assert data["training"]["values"]["train"]["phone"] == 2
