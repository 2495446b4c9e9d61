"""Synthesis from a domain: enough verified conversations, no doubles, nothing lost when it is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from trialogue import Trajectory, find_domain
from trialogue.config import RunSettings, SftConfig, SynthesizeConfig, load_config
from trialogue.corpus.corpus import Doubles, Forbidden, find_split, find_usual
from trialogue.corpus.synthesize import decide_again, synthesize
from trialogue.engine.models import BASES
from trialogue.learn.examples import read_parquet
from trialogue.run import Run, read_about, read_trajectories
from trialogue.view.report import to_report
from trialogue.world.scaffold import write_domain

SHOP = find_domain("shop")


def make(directory: Path, name: str, *settings: str) -> SynthesizeConfig:
    return load_config(SynthesizeConfig, None, [f"run.directory={directory}", f"run.name={name}", *settings])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupts."""
    directory = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        command(directory, "whole", "synthesize.count=40"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return directory / "whole"


def command(directory: Path, name: str, *words: str) -> list[str]:
    start = [sys.executable, "-m", "trialogue", "synthesize"]
    if "--resume" in words:
        return [*start, *words]
    return [*start, "shop", f"run.directory={directory}", f"run.name={name}", "seed=3", *words]


def read(path: Path) -> list[Trajectory]:
    return list(read_trajectories(path))


async def test_one_killed_before_anything_was_kept_goes_on(tmp_path: Path) -> None:
    config = make(tmp_path, "young", "domain=shop", "synthesize.count=2")
    Run.create(config.run, "synthesize", config.domain, config, config.seed).close("running")
    result = await synthesize(config, resume=tmp_path / "young")
    assert result["accepted"] == 2
    assert result["prompts"] == json.loads((tmp_path / "young/prompts.json").read_text())["hash"]


def test_every_conversation_carries_its_evidence_and_origin(corpus: Path) -> None:
    accepted = read(corpus / "accepted.jsonl")
    assert len(accepted) == 40
    for item in accepted:
        assert item.value == 1
        assert [verdict["stage"] for verdict in item.meta["verdicts"]] == ["program"]
        origin = item.meta["provenance"]
        assert (origin["agent"], origin["user"], origin["source"]) == ("oracle", "agenda", "domain")
        assert origin["seed"] == item.seed
        assert {len(origin["prompts"][name]) for name in ("policy", "tools", "user")} == {16}
    report = to_report(corpus)
    assert "**40** of" in report
    assert "## Rejected, by reason" in report


def test_families_are_balanced_and_scenarios_split(corpus: Path) -> None:
    accepted = read(corpus / "accepted.jsonl")
    families = {task.family for task in SHOP.tasks("train", 120, 3)}
    counts = Counter(item.task.family for item in accepted)
    assert max(counts.values()) <= -(-2 * 40 // len(families))
    assert {item.meta["split"] for item in accepted} == {"train", "validation"}


def test_the_parquet_files_have_the_shape_others_read(corpus: Path) -> None:
    accepted = {item.id: item for item in read(corpus / "accepted.jsonl")}
    seen: set[str] = set()
    for split in ("train", "validation"):
        for row in parquet.read_table(corpus / f"{split}.parquet").to_pylist():
            item = accepted[row["id"]]
            assert item.meta["split"] == split
            seen.add(row["id"])
            roles = [message["role"] for message in row["messages"]]
            assert roles[:2] == ["system", "user"]
            assert len(roles) == len(item.turns) + 1
            calls = [call for message in row["messages"] for call in message["tool_calls"] or ()]
            assert calls
            for call in calls:
                assert call["type"] == "function"
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
            answered = [message["tool_call_id"] for message in row["messages"] if message["role"] == "tool"]
            assert answered == [call["id"] for call in calls]
            assert {tool["function"]["name"] for tool in json.loads(row["tools"])} == set(SHOP.database.tools)
    assert seen == set(accepted)
    example = next(read_parquet(corpus / "train.parquet"))
    assert [turn.message.role for turn in example.turns][:2] == ["system", "user"]
    assert {tool.name for tool in example.tools} == set(SHOP.database.tools)


@pytest.mark.kill
def test_killed_and_resumed_it_loses_and_doubles_nothing(corpus: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "killed", "synthesize.count=40"), stderr=subprocess.DEVNULL)
    file = tmp_path / "killed" / "trajectories" / "synthesize.jsonl"
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_bytes().count(b"\n") >= 10):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = file.read_bytes()
    with file.open("ab") as target:  # as if it had been killed in the middle of a line
        target.write(b'{"id": "cut off')
    done = subprocess.run(
        command(tmp_path, "", "--resume", str(tmp_path / "killed")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(before)  # nothing that was held is lost
    held = read(tmp_path / "killed")
    assert len({item.id for item in held}) == len(held)  # and nothing is there twice
    for name in ("accepted.jsonl", "train.parquet", "validation.parquet"):
        assert (tmp_path / "killed" / name).read_bytes() == (corpus / name).read_bytes()


async def test_deciding_again_changes_nothing_that_nobody_reviewed(tmp_path: Path) -> None:
    more = ("synthesize.count=2", "tasks.levels=[1]", "user.prompt=scenario", "user.dynamics=light")
    result = await synthesize(make(tmp_path, "run", *more))
    run = tmp_path / "run"
    before = {file: file.read_bytes() for file in run.glob("*.jsonl")}
    assert decide_again(run) == result
    assert {file: file.read_bytes() for file in run.glob("*.jsonl")} == before
    del result["ledger"]  # as in results from before there was one
    (run / "result.json").write_text(json.dumps(result))
    assert "**2** of" in to_report(run)


async def test_a_careless_teacher_is_weeded_out(tmp_path: Path) -> None:
    """Whatever is wrong with a conversation is told, and kept apart from what is right."""
    write_domain(tmp_path / "bakery")
    config = make(
        tmp_path,
        "gold",
        f"domain={tmp_path / 'bakery'}",
        "agent.model=gold",
        "synthesize.count=3",
        "tasks.split=all",
        "reward.rules=off",  # else its reward is 0 already
    )
    result = await synthesize(config)
    rejected = read(tmp_path / "gold" / "rejected.jsonl")
    assert result["accepted"] + result["rejected"] == result["held"] == 9
    assert result["reasons"]["program: confirmation"] >= 3  # the gold agent asks nobody
    for item in rejected:
        last = item.meta["verdicts"][-1]
        assert not last["accepted"]
        assert last["reasons"] or last["note"]


def test_doubles_are_found(corpus: Path) -> None:
    first, second = read(corpus / "accepted.jsonl")[:2]
    doubles = Doubles(0.9)
    assert doubles.find(first) is None
    assert doubles.find(second) is None
    assert doubles.find(first.model_copy(update={"id": "again"})) == ("duplicate", first.id)
    turns = list(first.turns)
    words = turns[-1].message.model_copy(update={"content": "Bye then. ###STOP###"})
    turns[-1] = turns[-1].model_copy(update={"message": words})
    nearly = first.model_copy(update={"id": "nearly", "turns": tuple(turns)})
    assert doubles.find(nearly) == ("near duplicate", first.id)
    assert Doubles(1.0).find(nearly) is None


def test_what_will_be_tested_is_not_taught(tmp_path: Path, corpus: Path) -> None:
    write_domain(tmp_path / "bakery")
    bakery = find_domain(str(tmp_path / "bakery"))
    forbidden = Forbidden([f"{tmp_path / 'bakery'}/test"], None)
    usual = find_usual(bakery.tasks("all"))
    item = read(corpus / "accepted.jsonl")[0]

    def find(**fields: Any) -> str | None:
        task = bakery.tasks("train")[0].model_copy(update=fields)
        return forbidden.find(item.model_copy(update={"task": task, "turns": ()}), bakery, usual)

    tested = bakery.tasks("test")[1]
    assert find() is None
    assert "the gold writes are those of" in (find(expected=bakery.tasks("test")[0].expected) or "")
    assert "is in" in (find(instructions=f"Listen! {tested.instructions}") or "")


def test_a_scenario_is_on_one_side_for_good() -> None:
    settings = SynthesizeConfig().synthesize.model_copy(update={"validation": 0.3, "split_by": "family"})
    tasks = SHOP.tasks("train", 200, 0)
    sides = {(task.family, find_split(task, settings, 0)) for task in tasks}
    assert len(sides) == len({task.family for task in tasks})
    assert {side for _, side in sides} == {"train", "validation"}


async def test_a_corpus_carries_the_marks_of_every_teacher(tmp_path: Path) -> None:
    settings = SftConfig(domain="shop", run=RunSettings(directory=str(tmp_path), name="marked"))
    marked = Run.create(settings.run, "sft", "shop", settings, 0, ["learned"])
    shutil.copytree(BASES["tiny"], marked.path / "model")
    marked.close("finished")
    mix = f'agent.mix=[{{model = "oracle"}}, {{model = "{marked.path}", weight = 0.000001}}]'
    await synthesize(make(tmp_path, "run", "domain=shop", mix, "synthesize.count=1", "renderer.lenient=true"))
    marks = read_about(tmp_path / "run")["marks"]
    assert marks[0] == "learned"
    assert marks[1].startswith("renderer.lenient=true")
