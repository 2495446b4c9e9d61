"""`trialogue plan` as it is called: what it prints, what can be set, lengths from recorded conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trialogue.assumptions import PlanSettings
from trialogue.cli.main import main
from trialogue.config import PlanConfig, load_config
from trialogue.plan.lengths import read_recorded
from trialogue.plan.plan import CROWDS, SIZES, make_plan
from trialogue.run import read_trajectories

ROOT = Path(__file__).parents[2]
PAPER = str(ROOT / "configs" / "paper-8b.toml")


def ask(*words: str) -> Any:
    return CliRunner().invoke(main, ["plan", *words])


def read(*words: str) -> dict[str, Any]:
    done = ask(*words, "--no-table", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_the_table_names_a_bottleneck_in_every_row_and_every_assumption_is_printed() -> None:
    done = ask("--config", PAPER, "--gpus", "8", "--gpu", "a100-80g", "plan.simulated=100")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    table = [row for row in rows if len(row) == 9 and row[0].isdigit()]
    assert [(int(row[0]), int(row[1].replace(",", ""))) for row in table] == [
        (gpus, crowd) for gpus in SIZES for crowd in (256, *CROWDS)
    ]
    assert all(row[-1] for row in table)
    for name in PlanSettings.model_fields:
        if name not in ("gpus", "gpu", "route", "like"):
            assert f"  plan.{name}=" in done.output
    assert "312 Tflop/s" in done.output
    assert "dollars for the user" in done.output


def test_an_assumption_can_be_changed_and_matters() -> None:
    usual, slow = (
        read("--config", PAPER, "--gpus", "32", *words) for words in ((), ("plan.user_seconds=10",))
    )
    assert slow["assumptions"]["user_seconds"] == 10
    assert slow["rows"][0]["collect"] > 3 * usual["rows"][0]["collect"]
    assert slow["rows"][0]["update"] == usual["rows"][0]["update"]
    wide = read("--config", PAPER, "--gpus", "32", "user.concurrency=256")
    assert wide["rows"][0]["parts"]["limit"] == 0 < usual["rows"][0]["parts"]["limit"]
    assert "such key" in ask("--config", PAPER, "plan.user_second=1").output


def test_requests_and_dollars_follow_from_the_conversations() -> None:
    price = "user.price=[2.0, 8.0]"
    row = read("--config", PAPER, price, "plan.spread=0", "training.eval_every=0", "training.steps=10")[
        "rows"
    ][0]
    # Ten messages of the user in each of 256 conversations; its instructions are sent each time.
    assert row["calls"] == 10 * 256 * 10
    # Before message n it has said n - 1 of 40 tokens and was told n - 1 replies of 80.
    prompt = 256 * sum(600 + 120 * said for said in range(10))
    assert row["user_usd"] == pytest.approx(10 * (prompt * 2 + 256 * 10 * 40 * 8) / 1e6)
    hours = row["step"] * 10 / 3600
    assert row["hours"] == pytest.approx(hours)
    assert row["gpu_hours"] == pytest.approx(hours * 8)


def test_a_rule_based_user_costs_and_waits_for_nothing() -> None:
    row = read("shop", "--gpus", "1", "learner.model=Qwen/Qwen3-0.6B")["rows"][0]
    assert (row["calls"], row["user_usd"], row["parts"]["user"]) == (0, None, 0)
    assert row["route"] == "train"


def test_what_does_not_fit_is_told_with_what_fits() -> None:
    done = ask("--config", str(ROOT / "configs" / "paper-32b.toml"), "--gpus", "8", "--no-table")
    assert "does not fit" in done.output
    [line] = [line for line in done.output.splitlines() if line.startswith("the smallest change that fits: ")]
    words = line.partition(": ")[2].split()
    again = ask("--config", str(ROOT / "configs" / "paper-32b.toml"), "--gpus", "8", "--no-table", *words)
    assert "\nfits: " in again.output, again.output


def test_the_tiny_model_needs_no_gpu_and_one_gpu_is_no_plural() -> None:
    done = ask("shop", "--no-table", "--gpus", "2", "plan.route=verl")
    assert done.exit_code == 0, done.output
    assert "the tiny model needs no GPU" in done.output
    assert "on 1 GPU each" in done.output
    assert "1 GPUs" not in done.output
    assert "needs no GPU" not in ask("--config", PAPER, "--no-table", "--gpus", "8").output


def test_lengths_and_latencies_of_recorded_conversations(tmp_path: Path) -> None:
    held = CliRunner().invoke(
        main,
        [
            *("eval", "shop", "--tasks", "6", "--agent", "oracle"),
            *(f"run.directory={tmp_path}", "run.name=held"),
        ],
    )
    assert held.exit_code == 0, held.output
    recorded, shared = read_recorded(tmp_path / "held")
    items = list(read_trajectories(tmp_path / "held"))
    assert len(recorded) == len(items) == 6
    assert [[part.who for part in parts].count("tool") for parts in recorded] == [
        sum(turn.message.role == "tool" for turn in item.turns) for item in items
    ]
    assert shared > 100
    told = read("shop", "--gpus", "1", "learner.model=Qwen/Qwen3-0.6B", "--like", str(tmp_path / "held"))
    assert told["recorded"] == 6
    assert told["prompt_tokens"] == shared
    missing = ask("shop", "--like", str(tmp_path / "none"))
    assert missing.exit_code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("shop", "--gpu", "h1"), "no GPU 'h1' is known"),
        (("shop", "learner.model=Qwen/Qwen9", "--gpus", "1"), "the shape of 'Qwen/Qwen9' is not known"),
        ((), "name a DOMAIN"),
        (("shop", "plan.route=train", "--gpus", "2"), "plan.route=train is for one device"),
    ],
)
def test_wrong_usage_is_told_in_one_line(words: tuple[str, ...], told: str) -> None:
    done = ask(*words)
    assert done.exit_code == 2
    assert told in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_policies_of_stragglers_are_simulated_for_our_own_loop() -> None:
    words = ["learner.model=Qwen/Qwen3-0.6B", "plan.gpus=1", "plan.user_seconds=2", "plan.user_spread=1.5"]
    wait, cut, later = (
        make_plan(load_config(PlanConfig, None, [*words, f"stragglers.policy={policy}"]), table=False).rows[0]
        for policy in ("wait", "cut", "async")
    )
    assert cut.collect < wait.collect
    assert later.collect < wait.collect
