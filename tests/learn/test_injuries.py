"""Injured records: whatever is changed in whatever file of a run, `verify` and `--resume` name the file."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from small_run import make_run

from trialogue.cli.main import main
from trialogue.config import SynthesizeConfig, load_config
from trialogue.corpus.synthesize import synthesize
from trialogue.digests import REPORTS
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.records import append_records
from trialogue.view.report import write_report

COUNT = 60
ENDPOINT = {"role": "agent", "model": "m", "calls": 1, "prompt": 3, "completion": 1, "usd": 0.1}
REPLY = {"key": "abc", "task": "t", "content": "Hello.", "usage": {"prompt": 3, "completion": 1}}


def ask(*words: str) -> Result:
    """What the command line says and how it ends. A traceback fails the test."""
    result = CliRunner().invoke(main, words)
    known = result.exception is None or isinstance(result.exception, SystemExit)
    assert known, f"{words}: {result.exception!r}\n{result.output}"
    assert "Traceback" not in result.output
    return result


def add_logs(run: Path) -> None:
    """What a run with a paid endpoint also has."""
    (run / "recordings").mkdir(exist_ok=True)
    for name, line in (("ledger.jsonl", ENDPOINT), ("recordings/user.jsonl", REPLY)):
        append_records(run / name, [json.dumps(line)] * 3)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ('agent.model="naive"', "tasks.count=12")
    folder = tmp_path_factory.mktemp("eval")
    run, _ = asyncio.run(make_run(folder, *settings, domain="shop", started=add_logs))
    write_report(run)
    return run


@pytest.fixture(scope="module")
def synthesized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthesize")
    settings = ['domain="shop"', "synthesize.count=8", f'run.directory="{folder}"']
    run = Path(asyncio.run(synthesize(load_config(SynthesizeConfig, None, settings)))["run"])
    write_report(run)
    return run


@pytest.fixture
def learned(train_config: Callable[..., Any], trained: Path) -> Path:
    config = train_config(learner__model=str(trained), training__eval_every=2, training__checkpoint_every=2)
    run = asyncio.run(train(config))
    write_report(run)
    return run


@pytest.fixture
def tuned(sft_config: Callable[..., Any]) -> Path:
    run = asyncio.run(sft(sft_config(sft__eval_tasks=2, sft__epochs=1.0)))
    write_report(run)
    return run


def find_kinds(run: Path) -> dict[str, list[Path]]:
    """The files of a run, by kind of file."""
    kinds: dict[str, list[Path]] = {}
    for file in sorted(run.rglob("*")):
        if file.is_file() and file.name != ".lock":
            parts = file.relative_to(run).parts
            folder = parts[0] if len(parts) > 1 else ""
            kinds.setdefault(folder if folder in ("trajectories", "recordings") else file.name, []).append(
                file
            )
    return kinds


def change_digit(content: bytes, draw: random.Random) -> bytes:
    places = [place for place, byte in enumerate(content) if 48 <= byte <= 56]
    if not places:
        return b""
    place = draw.choice(places)
    return content[:place] + bytes([content[place] + 1]) + content[place + 1 :]


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(7)]) + content[place + 1 :]


def misencode(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + b"\xff\xfe" + content[place:]


def injure(file: Path, kind: str, draw: random.Random) -> None:
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    match kind:
        case "deleted":
            file.unlink()
            return
        case "emptied":
            content = b""
        case "cut":
            content = content[: draw.randrange(1, len(content))]
        case "digit":
            content = change_digit(content, draw)
        case "letter":
            content = flip(content, draw)
        case "bytes":
            content = misencode(content, draw)
        case "doubled line":
            content = b"".join([*lines[: place + 1], lines[place], *lines[place + 1 :]])
        case "dropped line":
            content = b"".join(lines[:place] + lines[place + 1 :])
        case "swapped lines" if len(lines) > 1:
            one, other = draw.sample(range(len(lines)), 2)
            lines[one], lines[other] = lines[other], lines[one]
            content = b"".join(lines)
        case _:
            content = b"\n".join(content.split(b"\n")[::-1]) + b"\r\n"
    file.write_bytes(content)


ANY = ("letter", "digit", "bytes", "cut", "emptied", "deleted")
OF_LINES = ("doubled line", "dropped line", "swapped lines")


@pytest.mark.fuzz
def test_no_injury_is_unseen(
    evaluated: Path, synthesized: Path, learned: Path, tuned: Path, tmp_path: Path
) -> None:
    runs = {"eval": evaluated, "synthesize": synthesized, "train": learned, "sft": tuned}
    draw = random.Random(0)
    chosen = [(verb, kind) for verb, run in runs.items() for kind in find_kinds(run)]
    assert len(chosen) > 40
    assert {kind for _, kind in chosen} >= {"trajectories", "recordings", "metrics.jsonl", "ledger.jsonl"}
    draw.shuffle(chosen)
    seen: Counter[str] = Counter()
    of_lines, of_others = cycle((*OF_LINES, *ANY)), cycle(ANY)
    for run in runs.values():
        whole = ask("verify", str(run))
        assert whole.exit_code == 0, whole.output
    for number in range(max(COUNT, len(chosen))):
        verb, name = chosen[number % len(chosen)]
        run = tmp_path / f"{number}" / runs[verb].name
        shutil.copytree(runs[verb], run)
        file = draw.choice(find_kinds(run)[name])
        while file.stat().st_size == 0:
            file = draw.choice([item for files in find_kinds(run).values() for item in files])
        injury = next(of_lines if file.suffix == ".jsonl" else of_others)
        before = file.read_bytes()
        injure(file, injury, draw)
        if file.exists() and file.read_bytes() == before:
            continue
        where = f"{injury} in {file.relative_to(run)} of {verb}"
        done = ask("verify", str(run))
        assert done.exit_code == 1, f"{where}: {done.output}"
        inside = file.relative_to(run)
        told = inside.parts[1] if inside.parts[0] in ("checkpoints", "model") else file.name
        assert told in done.output or inside.parts[0] in done.output, f"{where}: {done.output}"
        seen[injury] += 1
        if inside.parts[0] not in ("checkpoints", "model") and file.name not in REPORTS:
            resumed = ask(verb, "--resume", str(run))
            assert resumed.exit_code == 1, f"{where}: {resumed.output}"
            assert file.name in resumed.output, f"{where}: {resumed.output}"
            assert len(resumed.output.strip().splitlines()) == 1, resumed.output
        shutil.rmtree(run)
    print(dict(seen))
    assert sum(seen.values()) >= COUNT - 2
    assert len(seen) == len(ANY) + len(OF_LINES)
