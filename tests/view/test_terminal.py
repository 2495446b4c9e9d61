"""What the terminal shows fits into eighty columns."""

from __future__ import annotations

import io
from typing import Any

from trialogue.screen import Screen
from trialogue.view.terminal import show_check, show_result, tell_policy


def test_many_trials_fit(capsys: Any) -> None:
    figures: dict[str, Any] = {"tasks": 114, "turns": 123.4, "tool_calls": 12.3}
    for k in range(1, 9):
        figures |= {f"pass^{k}": 1 / k, f"pass^{k}_low": 0.5 / k, f"pass^{k}_high": 1 / k}
    spent = {"calls": 0, "prompt": 0, "completion": 0, "cached": 0, "cost": None, "seconds": 0.0}
    result = {
        "domain": "shop",
        "split": "test",
        "agent": "oracle",
        "user": "agenda",
        **figures,
        "families": {"exchange": figures, "cancel": figures},
        "family_mean": 1.0,
        "levels": {"1": figures},
        "ends": {"user_stop": 8},
        "failed": 0,
        "asked": 8,
        "conversations": 8,
        "blame": {},
        "excluded": 0,
        "faults": {},
        "sides": {"agent": spent, "user": spent},
        "wall_seconds": 1.0,
        "run": "runs/x",
    }
    out = io.StringIO()
    show_result(result, Screen(file=out, width=80))
    text = out.getvalue()
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "pass^4 0.250, pass^5 0.200" in text


def test_every_problem_that_is_counted_is_shown_or_said_to_be_hidden() -> None:
    common = [{"task": f"t{number}", "problem": "it is empty"} for number in range(8)]
    others = [{"task": "", "problem": f"it is empt{'i' * number}er"} for number in range(60)]
    out = io.StringIO()
    checked = {"domain": "d", "tasks": 9, "ok": False, "problems": common + others}
    show_check(checked, 0, Screen(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[0] == "✗ t0, t1, t2, t3, t4 and 3 more: it is empty"
    assert lines[50] == "… and 11 more problems; --json lists all"
    assert lines[-1].endswith("68 problems of 61 kinds")


def test_problems_that_differ_in_values_alone_are_shown_once() -> None:
    problems = [{"task": f"t{n}", "problem": f"turn {n} breaks owner: 'A{n}' is unknown"} for n in range(3)]
    out = io.StringIO()
    show_check({"domain": "d", "tasks": 9, "ok": False, "problems": problems}, 0, Screen(file=out, width=80))
    assert out.getvalue().splitlines() == [
        "✗ t0, t1, t2: turn 0 breaks owner: 'A0' is unknown",
        "d: 9 tasks checked, 0 played by the rule-based parties: 3 problems of 1 kind",
    ]


def test_a_sentence_without_a_rule_is_said_to_be_allowed() -> None:
    policy = {"without_rule": ["Be kind."], "never_exercised": [], "rules": 1, "sentences": 2}
    assert tell_policy(policy) == [
        "policy: not checked by a rule, which is allowed: Be kind.",
        "policy: 1 rules stand for 1 of 2 sentences",
    ]
