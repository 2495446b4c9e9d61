"""Trackers through their own packages, without a network: what was logged can be read back from disk."""

import json
import sqlite3
from pathlib import Path
from time import monotonic, sleep

import pytest

from trialogue.view.trackers import Trackers

METRICS = [
    {"step": 1, "reward": 0.25, "tools": {"get_order": 3}, "ends": {"user_stop": 8}},
    {"step": 1, "kind": "talk", "done": 3, "of": 8},
    {"step": 2, "reward": 0.75, "tools": {"get_order": 5}, "ends": {"user_stop": 8}},
    {"step": 2, "kind": "eval", "pass^1": 0.5},
]


def follow(name: str, folder: Path) -> Path:
    run = folder / "some-run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"seed": 3}))
    trackers = Trackers([name])
    trackers.started(run)
    for metrics in METRICS:
        trackers(metrics["step"], metrics)
    trackers.close()
    return run


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(follow("tensorboard", tmp_path) / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.75)]
    assert [event.value for event in events.Scalars("tools/get_order")] == [3, 5]
    assert [(event.step, event.value) for event in events.Scalars("eval/pass^1")] == [(2, 0.5)]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = follow("wandb", tmp_path)
    files = list(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    until = monotonic() + 30  # a process of its own writes it
    while b"tools/get_order" not in files[0].read_bytes() and monotonic() < until:
        sleep(0.2)
    assert b"tools/get_order" in files[0].read_bytes()


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    follow("trackio", tmp_path)
    (database,) = (tmp_path / "trackio").glob("*trialogue*.db")
    rows = sqlite3.connect(database).execute("select step, metrics from metrics order by id").fetchall()
    logged = [(step, json.loads(metrics).get("reward")) for step, metrics in rows]
    assert logged[:2] == [(1, 0.25), (2, 0.75)]
