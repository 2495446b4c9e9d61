"""A real language model plays the user behind a real OpenAI-compatible server: SmolLM2-135M-Instruct out of
its package, served by `transformers serve`. `make test-users` runs this in an environment of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi", reason="the server needs transformers[serving]: run `make test-users`")

from trialogue.config import EvalConfig
from trialogue.engine.models import find_model_folder
from trialogue.run import read_trajectories
from trialogue.score.compare import audit_file
from trialogue.score.evaluate import evaluate

KEY = "sk-canary-7171"


@pytest.fixture(scope="module")
def server() -> Generator[tuple[str, str]]:
    """The address of the server and the name of its model."""
    folder = find_model_folder("smollm2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", folder, "--port", str(port)]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "transformers.cli.transformers"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--device", "cpu"], env=environment)
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except (URLError, OSError):
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1", folder
    finally:
        process.terminate()
        process.wait(timeout=60)


def find_key(folder: Path) -> list[Path]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file for file in files if KEY.encode() in file.read_bytes()]


@pytest.mark.timeout(3600)
async def test_smollm2_plays_the_user_is_audited_and_replayed(
    server: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    url, name = server
    settings = {
        "user": {"model": f"openai:{name}", "base_url": url, "temperature": 0.7, "timeout": 600.0},
        "tasks": {"count": int(os.environ.get("TRIALOGUE_USERS_TASKS", "4")), "levels": [1]},
        "limits": {"reply_tokens": 48, "observations": 6, "seconds": 3000.0},
        "rollout": {"concurrency": 1},
        "run": {"directory": str(tmp_path), "name": "live"},
    }
    live = await evaluate(EvalConfig.model_validate(settings))
    rows = audit_file(tmp_path / "live")
    with capsys.disabled():
        print(f"\n{live['conversations']} conversations, success {live['pass^1']}, ledger {live['ledger']}")
        for row in rows:
            print(row["id"], row["end"], [(item["kind"], item["evidence"]) for item in row["findings"]])
    assert live["failed"] == 0
    assert live["ledger"][0]["calls"] > 0
    assert live["ledger"][0]["completion"] > 0
    recorded = {
        item.id: [finding.model_dump() for finding in item.findings]
        for item in read_trajectories(tmp_path / "live")
    }
    assert {row["id"]: row["findings"] for row in rows} == recorded
    settings["user"] = {"model": f"replay:{tmp_path / 'live' / 'recordings' / 'user.jsonl'}"}
    settings["run"] = {"directory": str(tmp_path), "name": "again"}
    again = await evaluate(EvalConfig.model_validate(settings))
    assert again["ledger"] == []
    texts = [(tmp_path / run / "trajectories" / "eval.jsonl").read_bytes() for run in ("live", "again")]
    assert sorted(texts[0].splitlines()) == sorted(texts[1].splitlines())
    assert find_key(tmp_path) == []
    assert json.loads((tmp_path / "live" / "config.json").read_text())["user"]["base_url"] == url
