"""What models, endpoints and records say reaches the terminal as visible text: real terminals and servers."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command import run_verb
from endpoint import Endpoint, completion, in_turn, to_call

from trialogue.foreign import show_line
from trialogue.world.scaffold import write_domain

NASTY = (
    "\x1b]52;c;cm0gLXJmIC8=\x07\x1b[2J\x1b]0;title\x07\x9b31m\r\nFORGED: all conversations won\n"
    "\u202eevil\u2066\u2028"
    "[bold red]markup[/] [link=http://evil.example]x[/link] :boom: "
    "![i](http://evil.example/i.png) <img src=x> `a|b`"
)
OURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[[0-9]*[AK]|\x1b\[\?2004[lh]|\r")
"""What rich and readline send: colours, cursor off and on, up, clear line, bracketed paste."""


def say(content: str, *calls: str) -> dict[str, Any]:
    """An answer that says something and calls tools of these names."""
    arguments = json.dumps({NASTY: NASTY})
    listed = [to_call(name, arguments, f"c{number}") for number, name in enumerate(calls)]
    return completion(content, **({"tool_calls": listed} if listed else {}))


REFUSAL = (400, {"error": {"message": NASTY, "code": NASTY, "type": NASTY}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_domain(tmp_path / "bakery")
    return tmp_path


def run(folder: Path, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return run_verb(folder, *words, said=said, OPENAI_API_KEY="none", COLUMNS="100")


def run_process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trialogue", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False, text=True)


def run_on_terminal(folder: Path, *words: str, said: str = "") -> str:
    """What a process prints on a terminal."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trialogue", *words],
        cwd=folder,
        stdin=other,
        stdout=other,
        stderr=other,
        env={**os.environ, "OPENAI_API_KEY": "none", "COLUMNS": "100", "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(other)
    os.write(main, said.encode())
    shown = b""
    with suppress(OSError):  # the end of a terminal is an error
        while block := os.read(main, 4096):
            shown += block
    process.wait()
    os.close(main)
    return OURS.sub("", shown.decode())


def refuse_control(text: str) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        assert line.replace("\t", " ") == show_line(line.replace("\t", " "), len(line)), (
            f"line {number}: {line!r}"
        )
        assert not line.startswith("FORGED"), f"line {number} is forged"


def refuse(done: subprocess.CompletedProcess[str]) -> str:
    for stream in (done.stdout, done.stderr):
        refuse_control(stream)
    return done.stdout + done.stderr


def hold(folder: Path, name: str) -> Path:
    """A run with conversations in which the agent says and calls what it should not."""
    with Endpoint(in_turn(say(NASTY, NASTY), say(NASTY))) as server:
        done = run(
            folder, "eval", "bakery", "--agent", "openai:m", f"agent.base_url={server.url}", "--tasks", "2",
            f"run.name={name}", "limits.observations=6",
        )  # fmt: skip
    refuse(done)
    return folder / "runs" / name


def test_eval_and_resume_show_what_an_endpoint_says_as_text(folder: Path) -> None:
    with Endpoint(in_turn(REFUSAL)) as server:
        words = (
            "--agent",
            "openai:m",
            f"agent.base_url={server.url}",
            "agent.retries=0",
            "--tasks",
            "2",
            "run.name=e",
        )
        done = run(folder, "eval", "bakery", *words)
        assert done.returncode == 1
        assert "\\x1b]52;c;" in refuse(done)
        shown = run_on_terminal(folder, "eval", "bakery", *words[:-1], "run.name=t")
        refuse_control(shown)
        again = run(folder, "eval", "--resume", "runs/e", "--trust")
        assert "\\x1b]52;c;" in refuse(again)
        data = run(folder, "eval", "--resume", "runs/e", "--json", "--trust")
    refuse(data)
    assert "FORGED" in str(json.loads(data.stdout)["errors"])


def test_what_a_model_says_and_calls_is_text_everywhere(folder: Path) -> None:
    path = hold(folder, "r")
    for words in (
        ("report", "runs/r"),
        ("report", "runs/r", "runs/r"),
        ("report", "runs/r", "--json"),
        ("score", "runs/r", "bakery"),
        ("score", "runs/r", "bakery", "--json"),
        ("users", "audit", "runs/r", "bakery"),
        ("users", "audit", "runs/r", "bakery", "--json"),
        ("eval", "--resume", "runs/r", "--trust"),
        ("eval", "--resume", "runs/r"),
    ):
        refuse(run(folder, *words))
    refuse_control((path / "report.md").read_text())
    refuse(run(folder, "review", "runs/r/trajectories/eval.jsonl", said="s\nr no\n"))
    refuse_control(run_on_terminal(folder, "review", "runs/r/trajectories/eval.jsonl", said="s\nr no\n"))


@pytest.mark.parametrize("side", ["user", "agent"])
def test_play_shows_the_other_side_as_text(folder: Path, side: str) -> None:
    other = "agent" if side == "user" else "user"
    for answer in (say(NASTY), REFUSAL):
        with Endpoint(in_turn(answer)) as server:
            words = (
                "play",
                "bakery",
                "--as",
                side,
                f"--{other}",
                "openai:m",
                f"{other}.base_url={server.url}",
            )
            words += (f"{other}.retries=0",)
            text = refuse(run(folder, *words, said="hello\n"))
            assert "\\x1b]52;c;" in text
            assert "[bold red]markup[/]" in text.replace("\n", "")
            refuse_control(run_on_terminal(folder, *words, said="hello\n/quit\n"))


def test_a_run_that_others_edited_is_text(folder: Path) -> None:
    """What a resumed run would do is told in words of that run."""
    path = hold(folder, "r")
    for file in ("config.json", "run.json", "result.json"):
        whole = json.loads((path / file).read_text())
        for place in list_texts(whole):
            (path / file).write_text(json.dumps(put(whole, place, NASTY)))
            for words in (("eval", "--resume", "runs/r"), ("report", "runs/r")):
                refuse(run(folder, *words))
        (path / file).write_text(json.dumps(whole))


def test_records_are_text(folder: Path) -> None:
    """Every text of a recorded conversation replaced, one after the other."""
    run(folder, "eval", "bakery", "--agent", "oracle", "--tasks", "1", "run.name=r")
    line = json.loads((folder / "runs/r/trajectories/eval.jsonl").read_text().splitlines()[0])
    file = folder / "r.jsonl"
    places = list_texts(line)
    assert len(places) > 10
    for place in places:
        file.write_text(json.dumps(put(line, place, NASTY)) + "\n")
        for words in (("score",), ("users", "audit"), ("review",)):
            domain = ["bakery"] if words != ("review",) else []
            told = refuse(run(folder, *words, str(file), *domain, said="s\n"))
            assert "unexpected extra argument" not in told  # the record is read


def list_texts(value: Any) -> list[tuple[Any, ...]]:
    """Where a record holds text: one place for each name, that is a dozen and not hundreds."""
    found: dict[Any, tuple[Any, ...]] = {}

    def walk(inner: Any, place: tuple[Any, ...]) -> None:
        items = (
            inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        )
        for key, item in items:
            walk(item, (*place, key))
        if isinstance(inner, str):
            found.setdefault(place[-1], place)

    walk(value, ())
    return list(found.values())


def put(value: Any, place: tuple[Any, ...], text: str) -> Any:
    if not place:
        return text
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = put(value[place[0]], place[1:], text)
    return copy


def test_check_shows_a_domain_of_others_as_text(folder: Path) -> None:
    tasks = folder / "bakery" / "tasks.jsonl"
    lines = [json.loads(line) for line in tasks.read_text().splitlines()]
    for change in (
        {"id": NASTY},
        {"instructions": 7, NASTY: NASTY},
        {"expected": {"calls": [{"name": NASTY}]}},
    ):
        tasks.write_text(json.dumps({**lines[0], **change}) + "\n")
        refuse(run(folder, "check", "bakery"))
        refuse_control(run_on_terminal(folder, "check", "bakery"))
        refuse(run(folder, "check", "--contamination", "bakery/train", "bakery/train"))
    source = folder / "bakery" / "domain.py"
    source.write_text(f"raise ValueError({NASTY!r})\n")
    for words in (("check", "bakery"), ("--debug", "check", "bakery")):
        done = run_process(folder, *words)
        for stream in (done.stdout, done.stderr):
            refuse_control(stream)


def test_wrong_usage_is_told_as_text(folder: Path) -> None:
    for words in (
        ("check", NASTY),
        ("eval", "bakery", f"{NASTY}=1"),
        ("eval", "bakery", "--agent", NASTY),
        ("score", NASTY),
        ("play", "bakery", "--task", NASTY),
        ("eval", "bakery", f"--{NASTY}"),
        ("users", "audit", NASTY),
        ("view", NASTY),
        ("init", NASTY),
    ):
        done = run(folder, *words)
        refuse(done)
        assert done.returncode == 2


def test_a_warning_of_python_is_shown_escaped(folder: Path) -> None:
    file = folder / "bakery" / "domain.py"
    file = file if file.exists() else next((folder / "bakery").glob("*.py"))
    with file.open("a") as target:
        target.write(f"\nimport warnings\nwarnings.warn({NASTY!r})\n")
    done = run_process(folder, "eval", "bakery", "--tasks", "1")
    assert done.returncode == 0, done.stderr
    told = done.stderr
    assert show_line(NASTY)[:40] in told
    assert "\x1b]" not in told
    assert not any(line.startswith("FORGED") for line in told.splitlines())
