"""A judge behind a real endpoint: answers are recorded, paid for and replayed; failures are no grades."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from endpoint import Endpoint, completion, in_turn

from trialogue.benchmarks.tau import tau2
from trialogue.config import EvalConfig, load_config
from trialogue.digests import list_now
from trialogue.run import judge_file, read_lines, read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.score.rescore import rescore
from trialogue.task import Task
from trialogue.view.report import write_report

DOMAIN = """
from dataclasses import replace
from trialogue.benchmarks.tau import tau2
from trialogue.world.domain import from_list

whole = tau2.find("retail", {data!r})
tasks = [task for task in whole.tasks("all") if task.id == {task!r}]
domain = replace(whole, tasks=from_list("retail", tasks), reference=__file__)
"""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """Gives `answers` one after the other."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    with Endpoint(in_turn("")) as endpoint:
        yield endpoint


def to_answer(task: Task, met: bool) -> str:
    statements = task.meta["criteria"]["nl_assertions"]
    results = [{"expectedOutcome": text, "reasoning": "", "metExpectation": met} for text in statements]
    return json.dumps({"results": results})


def test_answers_are_recorded_paid_and_replayed(data: Path, tmp_path: Path, judge: Endpoint) -> None:
    retail = tau2.find("retail", str(data))
    task = next(
        task
        for task in retail.tasks("all")
        if task.meta["criteria"]["nl_assertions"]
        and not any(
            result.failed
            for result in retail.open(task).replay(
                (call.name, call.arguments, call.side) for call in task.expected.calls
            )
        )
    )
    domain = tmp_path / "one.py"
    domain.write_text(DOMAIN.format(data=str(data), task=task.id), encoding="utf-8")
    user = tmp_path / "user.jsonl"
    user.write_text('"Help."\n"###STOP###"\n', encoding="utf-8")
    settings = [
        f"domain={domain}",
        "agent.model=gold",
        f"user.model=scripted:{user}",
        "tasks.split=all",
        "tasks.trials=2",
        "rollout.concurrency=1",
        "judge.model=openai:reader",
        f"judge.base_url={judge.url}",
        "judge.price=[1.0, 2.0]",
        f"run.directory={tmp_path}",
        "run.name=judged",
    ]
    # The second answer is no verdict: that conversation is labelled, not graded, and held anew.
    verdicts = (to_answer(task, True), "Fine, I guess.", to_answer(task, False))
    judge.script = in_turn(*(completion(text, usage=(1000, 10)) for text in verdicts))
    result = asyncio.run(evaluate(load_config(EvalConfig, None, settings)))
    run = tmp_path / "judged"
    assert sorted(item.value for item in read_trajectories(run) if item.end != "error") == [0.0, 1.0]
    [failed] = [item for item in read_trajectories(run) if item.end == "error"]
    assert (failed.blame, failed.reward, failed.error) == ("judge", None, failed.error)
    assert "cannot be read" in str(failed.error)
    assert (result["pass^1"], result["blame"], result["judge"]) == (0.5, {"judge": 1}, "openai:reader")
    assert result["notes"]["judge"] == "openai:reader"
    spent = result["sides"]["judge"]
    assert (spent["calls"], spent["prompt"], spent["completion"]) == (3, 3000, 30)
    assert spent["cost"] == result["cost"] == pytest.approx(3060 / 1e6)
    assert "| judge | 3 | 3000 | 30 |" in write_report(run).read_text(encoding="utf-8")
    # Graded again, from the run or from its file, nobody is asked.
    for path in (run, run / "trajectories" / "eval.jsonl"):
        assert [row.same for row in rescore(path, trust=True)] == [True] * 3
    assert len(judge.requests) == len(list(read_lines(judge_file(run)))) == 3
    # Without the recording the verdict cannot be told again, and it is said.
    judge_file(run).unlink()
    list_now(run)
    lost = [row for row in rescore(run, trust=True) if not row.same]
    assert len(lost) == 2
    assert all("no judge was named" in row.to_line() for row in lost)
