"""Killed anywhere, a run goes on as if nothing had happened: nothing lost, nothing doubled, equal by the bit.

`make test` kills each verb a few times, `make test-kill` thirty times.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from trialogue.config import EvalConfig, Section, SynthesizeConfig, load_config
from trialogue.records import unstamp
from trialogue.run import is_listed, read_about, read_lines, read_trajectories

KILLS = int(os.environ.get("TRIALOGUE_KILLS", "2"))
SEED = int(os.environ.get("TRIALOGUE_KILL_SEED", "0"))

PLACES = {
    "train": {"checkpoint", "log", "publish", "verb"},
    "sft": {"checkpoint", "log", "publish", "verb"},
    "eval": {"log", "verb"},
    "synthesize": {"log", "verb"},
}
"""Where a run of each verb is killed, besides in the middle of a write and at any time."""

Obey = Callable[..., dict[str, Any]]

pytestmark = [pytest.mark.kill, pytest.mark.timeout(120 + 30 * KILLS)]


@pytest.fixture(scope="module")
def obey() -> Generator[Obey]:
    """Gives an order to a process that has everything loaded."""
    script = Path(__file__).with_name("kill_targets.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        given, answers = process.stdin, process.stdout

        def order(kind: str, config: Path, run: Path, fault: list[Any] | None) -> dict[str, Any]:
            going_on = str(run) if run.exists() else None
            line = {"kind": kind, "config": str(config), "run": going_on, "fault": fault}
            print(json.dumps(line), file=given, flush=True)
            answer: dict[str, Any] = json.loads(answers.readline())
            assert "error" not in answer, answer["error"]
            return answer

        yield order
        given.close()
        process.wait(30)


def read_files(run: Path) -> dict[str, Any]:
    """Everything a run says and learned, but not how long it took or where it lies."""
    files: dict[str, Any] = {}
    for file in [*run.glob("*.jsonl"), *run.glob("*.parquet"), *run.glob("trajectories/*")]:
        lines = [unstamp(line) for line in file.read_bytes().splitlines()]
        in_any_order = file.name in ("eval.jsonl", "synthesize.jsonl")  # as conversations are over
        if file.name == "index.jsonl":
            assert is_listed(run)
            lines = [without_place(line) for line in lines]
            in_any_order = True
        files[file.name] = sorted(lines) if in_any_order else lines
    for file in run.glob("model/*"):
        files[f"model/{file.name}"] = file.read_bytes()
    if (run / "result.json").exists():
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        assert [line for _, line in read_lines(run / "metrics.jsonl")] == [result]
        files["metrics.jsonl"] = without_time({**result, "run": ""})
    files.pop("timings.jsonl")
    files.pop("checks.jsonl", None)
    return files


def without_place(line: bytes) -> str:
    return json.dumps({key: value for key, value in json.loads(line).items() if key not in ("at", "bytes")})


def without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_time(inner) for key, inner in value.items() if "seconds" not in key}
    return value


def assert_sound(run: Path) -> None:
    """Finished, every conversation and its seconds once, and nothing half written left."""
    assert read_about(run)["state"] == "finished"
    held = [item.id for item in read_trajectories(run)] if any((run / "trajectories").iterdir()) else []
    assert len(held) == len(set(held))
    timed = [line["id"] for _, line in read_lines(run / "timings.jsonl") if "id" in line]
    assert len(timed) == len(set(timed))
    assert set(timed) <= set(held)
    assert not [file for file in run.rglob("*") if ".partial" in file.name or file.name.startswith(".step")]
    assert not list(run.glob("checkpoints/.*"))


def kill_and_compare(obey: Obey, kind: str, config: Section, folder: Path) -> None:
    folder.mkdir(exist_ok=True)

    def order(name: str, fault: list[Any] | None) -> tuple[Path, dict[str, Any]]:
        file, run = folder / f"{name}.json", folder / "runs" / name
        settings = {"directory": str(folder / "runs"), "name": name}
        data = config.model_dump(mode="json") | {"run": settings}
        file.write_text(json.dumps(data), encoding="utf-8")
        return run, obey(kind, file, run, fault)

    whole, known = order("whole", None)
    places = sorted(known["lines"])
    assert set(places) >= PLACES[kind]
    assert sum(known["lines"].values()) > 100
    assert known["writes"] > 3
    assert_sound(whole)
    expected = read_files(whole)
    random_ = random.Random(f"{kind} {SEED}")
    kills, number = 0, 0
    killed: Counter[str] = Counter()
    while kills < KILLS:
        number += 1
        for _ in range(min(2, KILLS - kills)):
            mode = ("write", "line", "time")[kills % 3]
            place = places[kills // 3 % len(places)]
            fault = {
                "line": ["line", place, random_.randint(1, known["lines"][place])],
                "write": ["write", random_.randint(1, known["writes"]), random_.random()],
                "time": ["time", random_.uniform(0, known["seconds"] / 2)],
            }[mode]
            run, answer = order(f"killed-{number}", fault)
            kills += answer["killed"]
            killed[place if mode == "line" else mode] += answer["killed"]
            if not answer["killed"]:
                break
        run, answer = order(f"killed-{number}", ["time", 1000.0])
        assert not answer["killed"]
        assert_sound(run)
        found = read_files(run)
        assert found.keys() == expected.keys()
        for name, content in expected.items():
            assert found[name] == content, f"{name} of {run}"
    told = ", ".join(f"{count} {place}" for place, count in sorted(killed.items()))
    print(f"{kind}: {kills} kills in {number} runs: {told}")
    assert kills < 3 * len(places) or all(killed[place] for place in places)


def test_training(obey: Obey, train_config: Callable[..., Any], trained: Path, tmp_path: Path) -> None:
    config = train_config(
        learner__model=str(trained),
        training__steps=4,
        training__eval_every=2,
        training__checkpoint_every=1,
        training__curriculum=0.2,
        tasks__levels=[1, 2],
    )
    kill_and_compare(obey, "train", config, tmp_path / "kill")


def test_fine_tuning(obey: Obey, sft_config: Callable[..., Any], tmp_path: Path) -> None:
    config = sft_config(sft__epochs=4.0, sft__validation=0.2, sft__checkpoint_every=2)
    kill_and_compare(obey, "sft", config, tmp_path / "kill")


def test_evaluation(obey: Obey, tmp_path: Path) -> None:
    settings = ['domain="shop"', 'agent.model="naive"', "tasks.count=12", "tasks.trials=2"]
    config = load_config(EvalConfig, None, [*settings, "rollout.concurrency=4"])
    kill_and_compare(obey, "eval", config, tmp_path / "kill")


def test_synthesis(obey: Obey, tmp_path: Path) -> None:
    settings = ['domain="shop"', "synthesize.count=12", "rollout.concurrency=4"]
    kill_and_compare(obey, "synthesize", load_config(SynthesizeConfig, None, settings), tmp_path / "kill")


SHELL = """
mount -t tmpfs -o size=$SIZE none "$MOUNT" && cd "$MOUNT" || exit 77
$PYTHON -m trialogue $FIRST; echo "exit $?"; ls -A runs/full/checkpoints; df -k . | tail -1
mount -o remount,size=64m "$MOUNT"
$PYTHON -m trialogue $VERB --trust --resume runs/full; echo "exit $?"
cp -r runs/full "$OUT"
"""


def fill_disk(tmp_path: Path, size: str, verb: str, settings: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a verb on a small disk until it is full, make room, and go on. The run is copied to `full`."""
    (tmp_path / "mount").mkdir()
    environment = os.environ | {
        "SIZE": size,
        "MOUNT": str(tmp_path / "mount"),
        "OUT": str(tmp_path / "full"),
        "PYTHON": sys.executable,
        "VERB": verb,
        "FIRST": " ".join([verb, *settings, "run.name=full"]),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", SHELL],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no disk of one's own can be made here: {done.stderr.strip()}")
    return done


def test_a_full_disk_stops_an_evaluation_and_it_goes_on(tmp_path: Path) -> None:
    settings = ["shop", "--agent", "naive", "--tasks", "40"]
    done = fill_disk(tmp_path, "100k", "eval", settings)
    first, second = [line for line in done.stdout.splitlines() if line.startswith("exit")]
    assert (first, second) == ("exit 1", "exit 0"), done.stdout + done.stderr
    [message] = [line for line in done.stderr.splitlines() if line.startswith("trialogue:")]
    assert "no room left on the disk to write" in message
    assert "go on with --resume" in message
    assert "Traceback" not in done.stderr
    assert_sound(tmp_path / "full")
    assert len(list(read_trajectories(tmp_path / "full"))) == 40


@pytest.mark.slow
def test_a_full_disk_stops_training_and_it_goes_on(
    train_config: Callable[..., Any], trained: Path, tmp_path: Path
) -> None:
    config = train_config(learner__model=str(trained), training__steps=4, training__checkpoint_every=1)
    file = tmp_path / "train.toml"
    keys = ["domain", "learner.model", "training.steps", "training.tasks_per_step", "training.group_size"]
    keys += ["training.checkpoint_every", "training.eval_every", "limits.reply_tokens"]
    lines: list[str] = []
    for key in keys:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        lines.append(f"{key} = {json.dumps(value)}")
    file.write_text("\n".join(lines), encoding="utf-8")
    weights = sum(item.stat().st_size for item in (trained / "model").iterdir()) // 1024
    done = fill_disk(tmp_path, f"{weights * 7}k", "train", ["--config", str(file)])
    assert "exit 1" in done.stdout, done.stdout + done.stderr
    assert "exit 0" in done.stdout, done.stdout + done.stderr
    assert "no room left on the disk to write" in done.stderr
    assert "Traceback" not in done.stderr
    assert_sound(tmp_path / "full")
    assert [line["step"] for _, line in read_lines(tmp_path / "full" / "metrics.jsonl")] == [1, 2, 3, 4]
