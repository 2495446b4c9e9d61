"""The report of a run: what it says of a good one, a lost one, a failed one, and one that is not finished."""

import json
from pathlib import Path

import pytest
from small_run import make_run

from trialogue.errors import RunError
from trialogue.view.report import read_result, to_report, write_report


async def test_a_good_run(tmp_path: Path) -> None:
    path, result = await make_run(tmp_path, "tasks.trials=2")
    text = write_report(path).read_text(encoding="utf-8")
    assert result["pass^2"] == 1
    assert "**oracle** with user **agenda** solves **100.0%** of 9 tasks of split `all`" in text
    assert "| all | 9 | 1.000 (0.664–1.000) | 1.000 (0.664–1.000) | 1.00 |" in text
    assert "| two wishes | 1 |" in text
    assert "| level 3 | 1 |" in text
    assert "- user_stop: 16" in text
    assert "- `cancel_order`: 6" in text
    assert "- `tasks.trials = 2`" in text
    assert "- seed: 0" in text
    assert "Lost conversations" not in text


async def test_losses_are_grouped_by_reason(tmp_path: Path) -> None:
    path, _ = await make_run(tmp_path, "agent.model=naive")
    text = to_report(path)
    assert "**0.0%** of 9 tasks" in text
    assert "**user_stop: database** (5)" in text
    assert "**user_stop: said** (3)" in text
    assert "**user_stop: database and said** (1)" in text
    assert "- `cancel-1/0`: database: orders.A101.status should be 'cancelled', is 'placed'" in text


async def test_failed_conversations_are_counted_and_never_scored(tmp_path: Path) -> None:
    recording = tmp_path / "empty.jsonl"
    recording.write_text("")
    path, result = await make_run(tmp_path, f"agent.model=replay:{recording}", "rollout.redraws=0")
    assert result["conversations"] == 0
    assert result["blame"] == {"infrastructure": 9}
    assert result["families"]["cancel"]["blame"] == {"infrastructure": 3}
    text = to_report(path)
    assert "No conversation could be graded." in text
    assert "9 of 9 conversations failed and are in no figure (9 attempts; blame: infrastructure 9)" in text


async def test_cost_and_tokens_are_told_by_side(tmp_path: Path) -> None:
    path, _ = await make_run(tmp_path)
    result = json.loads((path / "result.json").read_text())
    used = {"calls": 3, "prompt": 1000, "completion": 50, "cached": 0, "cost": 0.25, "seconds": 1.5}
    result["sides"]["agent"] = used
    for figures in (result, *result["families"].values(), *result["levels"].values()):
        figures["tokens"] = {"prompt": 1000, "completion": 50, "cached": 0}
        figures["cost"] = 0.25
    (path / "result.json").write_text(json.dumps(result))
    text = to_report(path)
    assert "| tokens | cost | seconds |" in text
    assert "| agent | 3 | 1000 | 50 | 0 | 0.2500 | 1.5 |" in text


async def test_text_of_a_domain_stays_in_its_place(tmp_path: Path) -> None:
    path, _ = await make_run(tmp_path, "agent.model=naive")
    result = json.loads((path / "result.json").read_text())
    result["families"]["a | b\n# c"] = result["families"].pop("cancel")
    (path / "result.json").write_text(json.dumps(result))
    assert "| `a \\| b\\n# c` | 3 |" in to_report(path)


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
async def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path, state: str) -> None:
    path, _ = await make_run(tmp_path)
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**about, "state": state}))
    with pytest.raises(RunError, match=f"not finished .*'{state}'.* trialogue eval --resume"):
        write_report(path)
    assert not (path / "report.md").exists()


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        read_result(tmp_path)
