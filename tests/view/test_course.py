"""What `learn` and `demo` tell at their end."""

import io
from pathlib import Path
from typing import Any

from trialogue.screen import Screen
from trialogue.view.course import show_course, write_course_report


def figures(paid: float, **more: float) -> dict[str, float]:
    return {"pass^1": paid, "low": paid - 0.05, "high": paid + 0.05, **more}


MISTAKE = {
    "kind": "copied",
    "what": "a value in a call that nobody had said",
    "helps": "learn longer",
    "conversations": 3,
    "families": {"cancel": 2, "move": 1},
    "examples": [["cancel-3/0", "cancel_order: order_id = 'A<999>'"]],
}


def summarize(**more: Any) -> dict[str, Any]:
    rates = [figures(0.3), figures(0.9)]
    return {
        "domain": "bakery",
        "model": "runs/learn-bakery/rl",
        "base": "tiny",
        "test_tasks": 200,
        "after_sft": figures(0.3, outcome=0.6, compliant=0.4),
        "after_rl": figures(0.9, outcome=0.95, compliant=0.91),
        "families": {"cancel": rates},
        "mistakes": [MISTAKE],
        "findings": ["few distinct values in train"],
        "advice": ["training tasks are solved (99%), dev tasks less (65%)"],
        "seconds": {"sft": 200.0, "total": 300.0},
        "runs": {"sft": "runs/learn-bakery/sft"},
        **more,
    }


def show(summary: dict[str, Any]) -> str:
    out = io.StringIO()
    show_course(summary, Path("runs/learn-bakery"), Screen(file=out, width=100))
    return out.getvalue()


def test_solved_is_told_from_kept_and_mistakes_are_named() -> None:
    shown = show(summarize())
    rows = {
        cells[0]: cells[1:]
        for line in shown.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) == 3
    }
    assert rows["solved, policy kept"] == ["30.0% (25%–35%)", "90.0% (85%–95%)"]
    assert rows["solved"] == ["60.0%", "95.0%"]
    assert rows["policy kept"] == ["40.0%", "91.0%"]
    assert rows["cancel"] == rows["solved, policy kept"]
    assert "3 × a value in a call that nobody had said (cancel 2, move 1)" in shown
    assert "what would help: learn longer" in shown
    assert "training tasks are solved (99%), dev tasks less (65%)" in shown
    assert "rehearsal" in shown
    assert "trialogue view runs/learn-bakery" in shown


def test_a_domain_without_rules_and_a_real_model() -> None:
    shown = show(
        summarize(base="smollm2", after_sft=figures(0.3), after_rl=figures(0.9), mistakes=[], findings=[])
    )
    assert "policy kept" not in shown
    assert "rehearsal" not in shown
    assert "What is still wrong" not in shown


def test_the_report_escapes_what_a_model_wrote(tmp_path: Path) -> None:
    text = write_course_report(summarize(), tmp_path).read_text(encoding="utf-8")
    assert "| cancel | 30.0% (25%–35%) | 90.0% (85%–95%) |" in text
    assert "`cancel_order: order_id = 'A<999>'`" in text
    assert "few distinct values in train" in text
