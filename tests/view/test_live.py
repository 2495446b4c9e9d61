"""What learning shows while it goes on: plain lines, the block, trackers that are not there, reports."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from trialogue.activity import to_duration
from trialogue.config import RunSettings, TrainConfig
from trialogue.errors import ConfigError, RunError
from trialogue.run import Run
from trialogue.view.api import to_overview
from trialogue.view.live import Steps, show_steps, spark
from trialogue.view.paired import compare_runs, to_comparison
from trialogue.view.report import write_report
from trialogue.view.run_reader import RunRecords
from trialogue.view.trackers import Trackers, to_flat_figures

STEP = {"reward": 0.34, "turns": 7.8, "no_signal": 0.31, "entropy": 0.05, "failed": 1, "cost": 0.02}
KEPT = {"outcome": 0.5, "compliant": 0.625}


def test_plain_lines_are_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    with show_steps(title="trialogue train", steps=3) as shown:
        shown(0, {"kind": "eval", "pass^1": 0.25, "pass^1_low": 0.2, "pass^1_high": 0.3})
        shown(0, {"kind": "talk", "done": 1, "of": 8})
        shown(1, STEP)
        shown(0, {"kind": "stopping"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step=0/3 pass1=0.250 s=")
    expected = "step=1/3 reward=0.340 turns=7.800 no_signal=0.310 entropy=0.050 errors=1 cost=0.0200 s="
    assert lines[1].startswith(expected)
    assert lines[1].endswith(" left=0s")
    assert lines[2].startswith(
        "stopping: the step in progress will be finished and saved, then the run ends; "
    )
    assert len(lines) == 3


def test_the_share_of_successes_is_told_where_it_is_not_the_reward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show_steps(steps=2) as shown:
        shown(1, {**STEP, "success": 0.34})
        shown(2, {**STEP, "success": 0.5})
    same, other = capsys.readouterr().out.splitlines()
    assert "success" not in same
    assert "reward=0.340 success=0.500 turns=" in other
    assert "success 0.50" in draw(shown)


def test_outcome_and_policy_are_told_where_rules_were_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with show_steps(steps=2) as shown:
        shown(
            0, {"kind": "eval", "pass^1": 0.25, "pass^1_low": 0.2, "pass^1_high": 0.3, "outcome": 0.5} | KEPT
        )
        shown(1, STEP)
        shown(2, {**STEP, "outcome": 0.5} | KEPT)
    checked, without, other = capsys.readouterr().out.splitlines()
    assert checked.startswith("step=0/2 pass1=0.250 outcome=0.500 compliant=0.625 s=")
    assert "compliant" not in without
    assert "reward=0.340 outcome=0.500 compliant=0.625 turns=" in other
    assert "policy kept 62%" in draw(shown)


def test_the_page_gets_the_curve_of_each_broken_rule(tmp_path: Path) -> None:
    run = Run.create(RunSettings(directory=str(tmp_path), name="learned"), "train", "shop", TrainConfig(), 0)
    run.add_metrics(
        {"step": 1, "conversations": 8, "outcome": 0.5, "breaches": {"confirm": 4, "civil": 1}} | KEPT
    )
    run.add_metrics({"step": 2, "conversations": 0})
    run.add_metrics({"step": 3, "conversations": 4, "breaches": {"confirm": 1}} | KEPT)
    run.close("finished")
    records = RunRecords(run.path)
    records.refresh()
    shown = to_overview(records)
    assert shown["breaches"] == {"confirm": [0.5, None, 0.25], "civil": [0.125, None, 0.0]}
    assert shown["series"]["compliant"] == [0.625, None, 0.625]
    assert shown["series"]["outcome"] == [0.5, None, 0.5]


def test_the_time_left_is_told_when_a_step_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Fine-tuning learns with its first step how many there are, long after it has begun."""
    with show_steps() as shown:
        for step in (1, 2):
            shown(step, {"loss": 0.5, "validation_loss": 0.5, "steps": 48})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step=1/48 ")
    assert "left=" not in first
    assert second.endswith(" left=0s")
    assert shown.find_fault() is None


def draw(steps: Steps) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(steps.draw())
    return captured.get()


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_steps(quiet=True) as shown:
        shown(1, STEP)
    assert capsys.readouterr() == ("", "")


def test_the_block() -> None:
    steps = Steps("trialogue train · shop · tiny", 200)
    steps.started(Path("runs/shop-1"))
    for number in range(1, 13):
        steps(number, {**STEP, "reward": number / 20})
    steps(12, {"kind": "eval", "pass^1": 0.31, "pass^1_low": 0.25, "pass^1_high": 0.4})
    steps(12, {"kind": "talk", "done": 41, "of": 64})
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(steps.draw())
    text = captured.get()
    assert "trialogue train · shop · tiny · runs/shop-1" in text
    assert "step 12/200" in text
    assert "rollout 41/64" in text
    assert "12 errors" in text
    assert "pass^1 0.31 (0.25–0.40)" in text
    assert "no signal 31%" in text
    assert "cost 0.2400" in text
    assert "trialogue view runs" in text
    steps(12, {"kind": "stopping"})
    with console.capture() as captured:
        console.print(steps.draw())
    assert "ctrl-c again to stop now" in captured.get()


def test_small_figures() -> None:
    assert spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark([2.0, 2.0]) == "▁▁"
    assert [to_duration(seconds) for seconds in (8040, 600, 59)] == ["2 h 14 min", "10 min", "59 s"]


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        Trackers(["wandb"])


def test_figures_are_flattened() -> None:
    metrics = {"step": 3, "reward": 0.5, "tools": {"a": 1}, "kind": "eval", "levels": [1], "skipped": True}
    assert to_flat_figures(metrics, "x/") == {"x/reward": 0.5, "x/tools/a": 1.0, "x/skipped": 1.0}


def test_the_report_of_learning(folder: Path, tmp_path: Path) -> None:
    """Two real evaluations as the first and the last of a training."""
    config = TrainConfig(run=RunSettings(directory=str(tmp_path), name="learned"), seed=5)
    run = Run.create(config.run, "train", "bakery", config, 5)
    for step, name in ((0, "bad"), (4, "good")):
        source = folder / "runs" / name
        lines = (source / "trajectories" / "eval.jsonl").read_text()
        (run.path / "trajectories" / f"eval-{step:06d}.jsonl").write_text(lines)
        run.add_metrics({**json.loads((source / "result.json").read_text()), "step": step, "kind": "eval"})
    run.add_metrics({"step": 4, "reward": 0.625, "success": 0.75, "turns": 5.0})
    run.close("finished")
    text = write_report(run.path).read_text()
    assert (
        "After step 4 the agent solves **100.0% (66.4%–100.0%)** of 9 dev tasks; at step 0 it was 0.0%"
        in text
    )
    assert "Mean reward of the last 1 steps: 0.625. Share of successes: 0.750." in text
    assert "**Gained** (9)" in text
    assert "**Lost** (0)" in text
    assert "`seed = 5`" in text
    assert (run.path / "curves.svg").read_text().count("<polyline") == 2
    assert "<script" in (run.path / "report.html").read_text()


def test_two_runs_are_compared_task_by_task(folder: Path, tmp_path: Path) -> None:
    compared = compare_runs(folder / "runs" / "bad", folder / "runs" / "good")
    assert (compared["tasks"], compared["difference"], compared["better"], compared["worse"]) == (
        9,
        1.0,
        9,
        0,
    )
    assert (compared["difference_low"], compared["difference_high"]) == (1.0, 1.0)
    assert len(compared["gains"]) == 5
    text = to_comparison(compared)
    assert "the second run is **+1.000** (+1.000 to +1.000): better." in text
    same = to_comparison(compare_runs(folder / "runs" / "good", folder / "runs" / "good"))
    assert "no clear difference" in same
    with pytest.raises(RunError, match="not a run directory"):
        compare_runs(folder, folder / "runs" / "good")
