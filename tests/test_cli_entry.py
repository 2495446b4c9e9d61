"""How commands begin and end: broken outputs, disks that refuse, odd arguments, signals, narrow terminals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trialogue.durable import write
from trialogue.errors import RunError
from trialogue.screen import Screen
from trialogue.world.scaffold import write_domain

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "trialogue")
EVAL = ("eval", "bakery", "--agent", "oracle", "--tasks", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_domain(tmp_path / "bakery")
    return tmp_path


def run(folder: Path, *words: str | bytes, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    settings = {"capture_output": True, "stdin": subprocess.DEVNULL} | settings
    return subprocess.run([*COMMAND, *words], cwd=folder, check=False, **settings)


@pytest.mark.kill
def test_an_output_that_is_full_is_one_line(folder: Path) -> None:
    assert run(folder, *EVAL, "run.name=r").returncode == 0
    for words in (
        ("--help",),
        ("--version",),
        ("config",),
        ("report", "runs/r"),
        ("score", "runs/r", "--trust"),
        (*EVAL,),
        ("eval", "--resume", "runs/r", "--trust"),
    ):
        with open("/dev/full", "wb") as full:
            done = run(folder, *words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
        lines = done.stderr.decode().splitlines()
        assert lines[-1] == "trialogue: cannot write the output: No space left on device", lines
        assert done.returncode == 1
        assert "Traceback" not in done.stderr.decode()
        assert "Exception ignored" not in done.stderr.decode()


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m trialogue config | head -1",
        shell=True,
        cwd=folder,
        capture_output=True,
        check=False,
    )
    assert done.stdout.startswith(b"# trialogue")
    assert done.stderr == b""


READ_ONLY = """
mount --bind . . && cd "$PWD" && mount -o remount,bind,ro . || exit 77
"$PYTHON" -m trialogue report runs/r; echo "exit $?"
"$PYTHON" -m trialogue eval --resume runs/r --trust; echo "exit $?"
"$PYTHON" -m trialogue eval bakery --agent oracle --tasks 1; echo "exit $?"
"$PYTHON" -m trialogue view runs/r --export page.html; echo "exit $?"
"""


@pytest.mark.kill
def test_a_read_only_disk_is_one_line(folder: Path) -> None:
    assert run(folder, *EVAL, "run.name=r").returncode == 0
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no disk of one's own can be made here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["exit 1"] * 4
    told = [line for line in done.stderr.splitlines() if line.startswith("trialogue: ")]
    assert len(told) == 4, done.stderr
    assert all("Read-only file system" in line for line in told)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", [b"run.name=\xff", b"domain=\xed\xa0\x80"])
def test_an_argument_that_is_no_text_is_wrong_usage(folder: Path, word: bytes) -> None:
    done = run(folder, *EVAL, word)
    assert done.returncode == 2
    assert b"is not UTF-8 text" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert not (folder / "runs").exists()


ONE_BY_ONE = """
import json, sys
from trialogue.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        print("status", ended.code, flush=True)
"""


@pytest.mark.parametrize("coding", ["ascii", "latin-1"])
def test_an_output_without_our_letters_gets_others(folder: Path, coding: str) -> None:
    with (folder / "bakery" / "policy.md").open("a", encoding="utf-8") as policy:
        policy.write("Grüße, 日本語 🙂\n")
    environment = os.environ | {"PYTHONIOENCODING": coding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    verbs = (
        ((*EVAL, "run.name=r"), 0),
        (("report", "runs/r"), 0),
        (("check", "bakery"), 0),
        (("config",), 0),
        (("play", "bakery"), 1),
        (("play", "bakery", "--task", "日本語"), 2),
        (("play", "bakery", "--json"), 1),
        (("score", "runs/r", "--json", "--trust"), 0),
    )
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, json.dumps([words for words, _ in verbs])],
        cwd=folder,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment,
        check=True,
    )
    lines = done.stdout.decode(coding).splitlines()
    told = [line for line in lines if line.startswith("status ")]
    assert told == [f"status {status}" for _, status in verbs], done.stderr
    json.loads(lines[-2])
    assert b"Traceback" not in done.stderr


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    from trialogue.view.export import write_export

    write_domain(tmp_path / "bakery")
    assert run(tmp_path, *EVAL, "run.name=r").returncode == 0
    page = tmp_path / "page.html"
    page.write_text("the one before")
    script = "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
    script += (
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from trialogue.cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "view", "runs/r", "--export", "page.html"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no room left on the disk to write page.html" in done.stderr
    assert "Traceback" not in done.stderr
    assert page.read_text() == "the one before"
    assert not list(tmp_path.glob("page.html.*"))
    assert write_export(tmp_path / "runs" / "r", page, most=5)["conversations"] == 2
    with pytest.raises(RunError, match="it is not a file"):
        write(Path("/dev/null"), "x")


SLOW = """
import asyncio
from dataclasses import replace
from pathlib import Path
from trialogue import find_domain
from trialogue.talk.scripted import GoldParty

class Slow(GoldParty):
    async def reply(self, turns, tools):
        await asyncio.sleep(0.05)
        return await super().reply(turns, tools)

bakery = find_domain(str(Path(__file__).parent / "bakery"))
domain = replace(bakery, name="slow", oracle=Slow, reference=__file__)
"""


@pytest.mark.parametrize(
    ("number", "shell"),
    [
        (signal.SIGTERM, ""),
        pytest.param(signal.SIGHUP, "", marks=pytest.mark.kill),
        pytest.param(signal.SIGINT, "", marks=pytest.mark.kill),
        pytest.param(signal.SIGTERM, "trap '' INT; ", marks=pytest.mark.kill),
        pytest.param(signal.SIGHUP, "trap '' INT; ", marks=pytest.mark.kill),
    ],
)
def test_a_signal_stops_an_evaluation_and_saves(folder: Path, number: signal.Signals, shell: str) -> None:
    """Also where a script's background job ignores SIGINT."""
    (folder / "slow.py").write_text(SLOW)
    words = ("eval", "slow.py", "--agent", "oracle", "--split", "all", "--trials", "60", "run.name=r")
    script = f'{shell}exec "$0" "$@"'
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    process = subprocess.Popen(
        ["sh", "-c", script, *COMMAND, *words, "rollout.concurrency=4"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    signal.signal(signal.SIGHUP, ignored)
    file = folder / "runs" / "r" / "trajectories" / "eval.jsonl"
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number, told
    assert b"stopped; what was finished is in runs/r" in told
    assert b"Traceback" not in told
    about = json.loads((folder / "runs/r/run.json").read_text())
    assert about["state"] == "stopped"
    assert 0 < len(file.read_text().splitlines()) < 540


def test_a_hangup_that_is_ignored_stays_ignored(folder: Path) -> None:
    script = (
        "trap '' HUP; exec \"$0\" -c 'import signal, sys; from trialogue.cli.entry import ending_by_signal\n"
    )
    script += "with ending_by_signal(): print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)'"
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("width", [10, 20, 30, 40, 60, 80])
def test_every_figure_is_shown_at_every_width(width: int) -> None:
    out = io.StringIO()
    rows = [
        ("all", "12", "0.500", "0.250–0.750"),
        None,
        ("a long name of a family", "3", "0.125", "0.001–0.999"),
    ]
    Screen(file=out, width=width).print_table("a title", ("", "tasks", "pass^1", "95 %"), rows)
    for row in filter(None, rows):
        for figure in row[1:]:
            assert figure in out.getvalue()


def test_an_error_of_pydantic_is_recorded_without_its_address(folder: Path) -> None:
    (folder / "slow.py").write_text(
        SLOW.replace(
            "await asyncio.sleep(0.05)", "from trialogue import Task; Task.model_validate({'id': 7})"
        )
    )
    done = run(folder, "eval", "slow.py", "--agent", "oracle", "--tasks", "2", "run.name=r")
    recorded = "".join(file.read_text() for file in (folder / "runs/r").rglob("*.json*"))
    assert b"Task" in done.stdout + done.stderr
    assert "ValidationError: Task: id: Input should be a valid string" in recorded
    assert "errors.pydantic.dev" not in recorded + done.stdout.decode() + done.stderr.decode()
