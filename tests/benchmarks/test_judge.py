"""A judge behind a real endpoint: answers are recorded, paid for and replayed; failures are no grades."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trialogue.benchmarks import tau2
from trialogue.config import EvalConfig, load_config
from trialogue.digests import list_now
from trialogue.run import judge_file, read_lines, read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.score.rescore import rescore
from trialogue.task import Task
from trialogue.view.report import write_report

DOMAIN = """
from dataclasses import replace
from trialogue.benchmarks import tau2
from trialogue.world.domain import from_list

whole = tau2.find("retail", {data!r})
tasks = [task for task in whole.tasks("all") if task.id == {task!r}]
domain = replace(whole, tasks=from_list("retail", tasks), reference=__file__)
"""


class Judge(ThreadingHTTPServer):
    """Gives its answers one after the other."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[str] = []
        self.asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        content = self.server.answers[self.server.asked]
        self.server.asked += 1
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        usage = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
        about = {"id": "x", "object": "chat.completion", "created": 1, "model": "reader"}
        body = json.dumps({**about, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Generator[Judge]:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    with Judge() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def to_answer(task: Task, met: bool) -> str:
    statements = task.meta["criteria"]["nl_assertions"]
    results = [{"expectedOutcome": text, "reasoning": "", "metExpectation": met} for text in statements]
    return json.dumps({"results": results})


def test_answers_are_recorded_paid_and_replayed(data: Path, tmp_path: Path, judge: Judge) -> None:
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
        f"judge.base_url=http://127.0.0.1:{judge.server_address[1]}/v1",
        "judge.price=[1.0, 2.0]",
        f"run.directory={tmp_path}",
        "run.name=judged",
    ]
    # The second answer is no verdict: that conversation is labelled, not graded, and held anew.
    judge.answers = [to_answer(task, True), "Fine, I guess.", to_answer(task, False)]
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
    assert judge.asked == len(list(read_lines(judge_file(run)))) == 3
    # Without the recording the verdict cannot be told again, and it is said.
    judge_file(run).unlink()
    list_now(run)
    lost = [row for row in rescore(run, trust=True) if not row.same]
    assert len(lost) == 2
    assert all("no judge was named" in row.to_line() for row in lost)
