"""A run that is not as it was written is not resumed, scored or reported; what is wrong is named."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from time import perf_counter
from typing import Any

import pytest
from command import run_verb
from small_run import make_run

from trialogue.config import EvalConfig, RunSettings
from trialogue.digests import inspect, list_now, write_stamped
from trialogue.errors import RunError
from trialogue.records import append_records, check_line, find_next, read_lines, stamp, write_records
from trialogue.run import Run, is_listed, read_about, read_trajectories
from trialogue.view.api import Answers
from trialogue.view.report import write_report


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ('agent.model="naive"', "tasks.count=6", "tasks.trials=2", 'run.name="r"')
    run, _ = asyncio.run(make_run(tmp_path_factory.mktemp("whole"), *settings, domain="shop"))
    write_report(run)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "r")


def ask(*words: str | Path) -> CompletedProcess[str]:
    return run_verb(Path.cwd(), *map(str, words))


def change_lines(file: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))


def double(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[3], *lines[4:]]


def reward(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b'"value":0.0', b'"value":1.0'), *lines[1:]]


def letter(lines: list[bytes]) -> list[bytes]:
    place = lines[1].index(b'"content":"') + 12
    return [lines[0], lines[1][:place] + b"~" + lines[1][place + 1 :], *lines[2:]]


INJURIES = [
    (double, "line 5: repeats line 4"),
    (reward, "line 1: was changed after it was written: its digest does not agree"),
    (letter, "line 2: was changed after it was written: its digest does not agree"),
    (lambda lines: lines[:2] + lines[3:], "line 3: was line 4: 1 before it missing"),
    (lambda lines: lines[:-1], "is too short"),
    (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 3: was line 2: it is not in its place"),
]


@pytest.mark.parametrize(("change", "told"), INJURIES)
def test_resume_score_and_report_name_file_and_line(
    run: Path, change: Callable[[list[bytes]], list[bytes]], told: str
) -> None:
    change_lines(run / "trajectories" / "eval.jsonl", change)
    for words in (("eval", "--resume", run), ("score", run), ("report", run), ("users", "audit", run)):
        done = ask(*words)
        assert done.returncode == 1
        assert done.stdout == ""
        assert "trajectories/eval.jsonl" in done.stderr
        assert told in done.stderr
        assert f"`trialogue verify {run} --drop`" in done.stderr
    done = ask("verify", run)
    assert done.returncode == 1
    assert told in done.stdout


def test_a_damaged_configuration_is_an_injured_record(run: Path) -> None:
    """Not wrong usage, although it may be no configuration any more."""
    file = run / "config.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"rollout"', '"rolloUt"'), encoding="utf-8")
    done = ask("eval", "--resume", run)
    assert done.returncode == 1
    assert "config.json: was changed after it was written" in done.stderr


def test_a_sound_run_is_verified(run: Path) -> None:
    done = ask("verify", run, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert result["sound"]
    assert result["problems"] == []
    assert result["compared"] > 80
    assert result["not_derived"] == ["asked", "domain", "notes", "run"]


def test_injured_lines_are_dropped_and_held_again(run: Path) -> None:
    before = sorted(item.to_json() for item in read_trajectories(run))
    change_lines(run / "trajectories" / "eval.jsonl", lambda lines: double(reward(letter(lines))))
    injured = (run / "trajectories" / "eval.jsonl").read_bytes()
    done = ask("verify", run, "--drop")
    assert done.stdout.count("dropped: trajectories/eval.jsonl, line") == 3
    assert read_about(run)["state"] == "stopped"
    assert (run / "injured" / "trajectories" / "eval.jsonl").read_bytes() == injured
    assert len(list(read_trajectories(run))) == 10
    assert ask("eval", "--resume", run).returncode == 0
    assert sorted(item.to_json() for item in read_trajectories(run)) == before
    assert is_listed(run)
    assert ask("verify", run).returncode == 0


def relist(run: Path) -> None:
    """Make a run seem sound: new digests for what it holds now."""
    list_now(run)


@pytest.mark.parametrize("key", ["pass^1", "reward", "turns", "tools", "wall_seconds", "families", "agent"])
def test_a_figure_that_does_not_follow_is_named(run: Path, key: str) -> None:
    """Digests that were computed anew do not help a wrong figure."""
    file = run / "result.json"
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    value = result[key]
    wrong = value + 0.25 if isinstance(value, float) else {"x": 1} if isinstance(value, dict) else "other"
    file.write_text(json.dumps({**result, key: wrong}), encoding="utf-8")
    relist(run)
    assert inspect(run) == []
    done = ask("verify", run, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["injuries"] == []
    named = {
        item["figure"].partition(".")[0] for item in found["differences"] if item["file"] == "result.json"
    }
    assert named == {key}


def test_an_edited_reward_with_new_digests_shows_in_the_figures(run: Path) -> None:
    file = run / "trajectories" / "eval.jsonl"
    lines = [json.dumps(line) for _, line in read_lines(file)]
    write_records(file, [lines[0].replace('"value": 0.0', '"value": 1.0'), *lines[1:]])
    relist(run)
    done = ask("verify", run)
    assert done.returncode == 1
    assert "result.json: reward is" in done.stdout
    assert "index.jsonl, line 1" in done.stdout


def test_the_report_is_compared_with_the_records(run: Path) -> None:
    file = run / "report.md"
    file.write_text(file.read_text(encoding="utf-8").replace("seed: 0", "seed: 1"), encoding="utf-8")
    done = ask("verify", run)
    assert done.returncode == 1
    assert "report.md: was changed after it was written" in done.stdout
    assert "differs from the records" in done.stdout
    assert ask("report", run).returncode == 0  # it is made again
    assert ask("verify", run).returncode == 0


def test_what_a_crash_leaves_is_no_injury(run: Path, crash: Callable[[Path], None]) -> None:
    file = run / "trajectories" / "eval.jsonl"
    file.write_bytes(file.read_bytes()[:-100] + b"\x00" * 50 + b"\n" + b"\x00" * 7)
    assert [injury.line for injury in inspect(run)] == [12, 13, None]
    crash(run)
    assert inspect(run) == []
    done = ask("eval", "--resume", run)
    assert done.returncode == 0
    assert len(list(read_trajectories(run))) == 12
    assert ask("verify", run).returncode == 0


def test_a_conversation_that_is_there_twice_is_named(run: Path, crash: Callable[[Path], None]) -> None:
    file = run / "trajectories" / "eval.jsonl"
    first, *_ = read_trajectories(run)
    crash(run)
    append_records(file, [first.to_json()])
    [injury] = inspect(run)
    told = "trajectories/eval.jsonl, line 13: repeats the conversation of trajectories/eval.jsonl, line 1"
    assert injury.to_line() == told
    assert told in ask("eval", "--resume", run).stderr


def test_lines_from_elsewhere_are_read(run: Path, tmp_path: Path) -> None:
    """A choice of lines keeps their digests; lines without any are read as well; a changed one is not."""
    lines = (run / "trajectories" / "eval.jsonl").read_bytes().splitlines(keepends=True)
    file = tmp_path / "some.jsonl"
    file.write_bytes(lines[5] + lines[2] + lines[2])
    assert len(list(read_trajectories(file))) == 3
    file.write_text("".join(json.dumps(line) + "\n" for _, line in read_lines(file)), encoding="utf-8")
    assert len(list(read_trajectories(file))) == 3
    file.write_bytes(lines[5] + reward([lines[0]])[0])
    with pytest.raises(RunError, match=r"some.jsonl, line 2: was changed: its digest does not agree"):
        list(read_trajectories(file))
    assert ask("score", file).returncode == 1


def test_a_run_without_digests_is_read_but_not_resumed(run: Path) -> None:
    for file in [*run.glob("*.jsonl"), *run.glob("trajectories/*.jsonl")]:
        rows = [line for _, line in read_lines(file)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (run / "run.json").write_text(json.dumps(read_about(run)), encoding="utf-8")
    (run / "digests.json").unlink()
    assert ask("score", run).returncode in (0, 1)
    done = ask("eval", "--resume", run)
    assert done.returncode == 1
    assert "begun by an earlier version, without digests: begin a new run" in done.stderr
    assert "without digests: only the figures were compared" in ask("verify", run).stdout


def test_digests_are_a_pure_function_of_line_and_place(tmp_path: Path) -> None:
    for name in ("one", "other"):
        for _ in range(3):
            append_records(tmp_path / name, ['{"a": "ü"}', "{}"])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    lines = (tmp_path / "one").read_bytes().splitlines(keepends=True)
    assert [check_line(line) for line in lines] == [(number, True) for number in range(1, 7)]
    assert find_next(tmp_path / "one") == 7
    assert [line for _, line in read_lines(tmp_path / "one")] == [{"a": "ü"}, {}] * 3
    assert stamp("{}", 12).startswith('{"digest":"12-')
    write_records(tmp_path / "one", ['{"a": "ü"}', "{}"] * 3)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.load
def test_ten_thousand_conversations_are_inspected_in_seconds(
    run: Path, crash: Callable[[Path], None]
) -> None:
    first, *_ = read_trajectories(run)
    made = Run.create(RunSettings(directory=str(run.parent), name="large"), "eval", "shop", EvalConfig(), 0)
    text = first.to_json()
    began = perf_counter()
    for start in range(0, 10_000, 10):
        lines = [text.replace(first.id, f"t{number}/0", 1) for number in range(start, start + 10)]
        made.append("trajectories/eval.jsonl", *lines)
    made.close("stopped")
    assert inspect(made.path) == []
    assert perf_counter() - began < 60
    with (made.path / "trajectories" / "eval.jsonl").open("rb") as source:  # nothing but the end is read
        assert find_next(Path(f"/proc/self/fd/{source.fileno()}")) == 10_001
        assert os.fstat(source.fileno()).st_size > 10_000_000


def test_the_page_names_injured_records_and_keeps_serving(run: Path) -> None:
    answers = Answers(run)
    records = answers.open("r")
    assert answers.run("r")["injuries"] == []
    records.wait()
    assert answers.run("r")["injuries"] == []
    change_lines(run / "trajectories" / "eval.jsonl", reward)
    change_lines(run / "ledger.jsonl" if (run / "ledger.jsonl").exists() else run / "timings.jsonl", double)
    answers.run("r")
    records.wait()
    found = answers.run("r")
    assert found["injured"] == 2
    assert [text.partition(":")[0] for text in found["injuries"]] == [
        "timings.jsonl, line 5",
        "trajectories/eval.jsonl, line 1",
    ]
    assert answers.conversations("r", {})["total"] == 12
    assert "digest" not in answers.conversation("r", found_id(run), {})["trajectory"]


def test_an_export_names_injured_records(run: Path, tmp_path: Path) -> None:
    def export() -> CompletedProcess[str]:
        return ask("view", run, "--export", tmp_path / "page.html")

    assert export().stderr == ""
    file = run / "trajectories" / "eval.jsonl"
    whole = file.read_bytes()
    change_lines(file, reward)
    done = export()
    assert done.returncode == 0
    told = "trajectories/eval.jsonl, line 1: was changed after it was written: its digest does not agree"
    assert done.stderr == f"not as it was written: {told}\n"
    assert told in (tmp_path / "page.html").read_text(encoding="utf-8")
    file.write_bytes(whole)
    change_lines(file, lambda lines: lines[1:])  # the index leads to the middle of other lines
    done = export()
    assert done.returncode == 1
    assert "trajectories/eval.jsonl, line 1: was line 2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name", [".lock", "ledger.jsonl", "result.json.partial", "recordings", "trajectories/other.jsonl"]
)
def test_a_link_out_of_a_run_is_not_written_through(run: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    if name == "recordings":
        outside.mkdir()
    else:
        outside.write_text("mine")
    for file in (run / ".lock", run / "ledger.jsonl"):
        file.unlink(missing_ok=True)
    shutil.rmtree(run / "recordings", ignore_errors=True)
    list_now(run)
    (run / name).symlink_to(outside)
    for words in (("eval", "--resume", run), ("report", run), ("verify", run)):
        done = ask(*words)
        assert done.returncode == 1
        assert f"{name}: is a link that leads out of the run" in done.stdout + done.stderr
    assert list(outside.iterdir()) == [] if outside.is_dir() else outside.read_text() == "mine"
    if name == ".lock":  # it is needed to take anything out
        done = ask("verify", run, "--drop")
        assert done.returncode == 1
        assert ".lock" in done.stderr
        assert outside.read_text() == "mine"
        return
    ask("verify", run, "--drop")
    assert not (run / name).is_symlink()
    assert ask("eval", "--resume", run).returncode == 0
    assert list(outside.iterdir()) == [] if outside.is_dir() else outside.read_text() == "mine"


def test_a_link_within_a_run_is_no_injury(run: Path) -> None:
    (run / "again.json").symlink_to("result.json")
    assert inspect(run) == []
    (run / "round").symlink_to("round")
    assert [injury.to_line() for injury in inspect(run)] == ["round: is a link that leads out of the run"]


def found_id(run: Path) -> str:
    return next(line["id"] for _, line in read_lines(run / "index.jsonl"))


def test_run_json_is_known_by_its_own_digest(run: Path) -> None:
    about = read_about(run)
    write_stamped(run / "run.json", about)
    assert inspect(run) == []
    text = (run / "run.json").read_text(encoding="utf-8")
    (run / "run.json").write_text(text.replace('"finished"', '"running"'), encoding="utf-8")
    assert [injury.file for injury in inspect(run)] == ["run.json"]
    (run / "digests.json").unlink()
    assert {injury.file for injury in inspect(run)} == {"run.json", "digests.json"}
