"""A person decides about a corpus, and a model learns from its files."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trialogue import find_domain
from trialogue.cli.main import main
from trialogue.config import SftConfig, SynthesizeConfig, load_config
from trialogue.corpus.synthesize import synthesize
from trialogue.learn.checkpoint import load_learner
from trialogue.learn.examples import read_parquet
from trialogue.learn.sft import sft, split_rows, to_example_rows, to_recorded_rows
from trialogue.run import read_lines, read_trajectories


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthesis of the shop."""
    directory = tmp_path_factory.mktemp("runs")
    settings = ["synthesize.count=5", "tasks.levels=[1]", f"run.directory={directory}", "run.name=corpus"]
    asyncio.run(synthesize(load_config(SynthesizeConfig, None, settings)))
    return directory / "corpus"


def make_sft(directory: Path, name: str, examples: Path) -> SftConfig:
    settings = {
        "sft.examples": examples,
        "sft.epochs": 1.0,
        "sft.batch": 2,
        "sft.eval_tasks": 1,
        "tasks.levels": [1],
        "limits.reply_tokens": 16,
        "limits.context_tokens": 512,
        "learner.device": "cpu",
        "run.directory": directory,
        "run.name": name,
    }
    return load_config(SftConfig, None, [f"{key}={value}" for key, value in settings.items()])


def ids(path: Path) -> list[str]:
    return [item.id for item in read_trajectories(path)]


def test_a_person_has_the_last_word(corpus: Path, tmp_path: Path) -> None:
    corpus = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    accepted, rejected = ids(corpus / "accepted.jsonl"), ids(corpus / "rejected.jsonl")
    assert accepted
    answers = "x\nr\nr too stiff\nq\n"  # neither a wrong letter nor a rejection without a reason counts
    done = CliRunner().invoke(main, ["review", str(corpus), "--by", "Ada"], input=answers)
    assert done.exit_code == 0, done.output
    assert "1 decided" in done.output
    assert "Anything else?" in done.output
    assert ids(corpus / "accepted.jsonl") == accepted[1:]
    assert sorted(ids(corpus / "rejected.jsonl")) == sorted([accepted[0], *rejected])
    result = json.loads((corpus / "result.json").read_text())
    assert result["reasons"]["review: too stiff"] == 1
    (verdict,) = [line for _, line in read_lines(corpus / "verdicts.jsonl")]
    assert (verdict["id"], verdict["by"], verdict["accepted"]) == (accepted[0], "Ada", False)
    done = CliRunner().invoke(main, ["review", str(corpus), "--rejected", "--json"], input="q\n")
    assert json.loads(done.stdout)["decided"] == 0


def test_a_file_can_be_reviewed_by_itself(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    shutil.copy(corpus / "accepted.jsonl", file)
    first, second = ids(file)[:2]
    done = CliRunner().invoke(main, ["review", str(file)], input="a well done\nr wrong colour\nq\n")
    assert done.exit_code == 0, done.output
    assert ids(tmp_path / "talks.accepted.jsonl") == [first]
    (rejected,) = read_trajectories(tmp_path / "talks.rejected.jsonl")
    assert rejected.id == second
    assert rejected.meta["verdicts"][-1]["reasons"] == ["wrong colour"]


async def test_all_forms_of_a_corpus_give_the_same_rows(corpus: Path, tmp_path: Path) -> None:
    config = make_sft(tmp_path, "rows", corpus)
    domain = find_domain("shop")
    learner = load_learner(config.learner, 0)
    renderer: Any = learner.renderer
    items = {item.id: item for item in read_trajectories(corpus / "accepted.jsonl")}
    count = 0
    for split in ("train", "validation"):
        for example in read_parquet(corpus / f"{split}.parquet"):
            count += 1
            ours = to_example_rows(items[example.id], domain, renderer, "agent")
            theirs = to_recorded_rows(example, renderer)
            assert [(row.tokens, row.mask) for row in ours] == [(row.tokens, row.mask) for row in theirs]
    assert count == len(items) == 5
    marked = [
        item.model_copy(update={"meta": {**item.meta, "split": "validation" if place == 0 else "train"}})
        for place, item in enumerate(items.values())
    ]
    rows, held_out = split_rows(marked, domain, renderer, config)
    assert (len(rows), len(held_out)) == (4, 1)


async def test_fine_tuning_on_a_corpus_is_measured_before_and_after(corpus: Path, tmp_path: Path) -> None:
    for name, examples in (("run", corpus), ("parquet", corpus / "train.parquet")):
        run = await sft(make_sft(tmp_path, name, examples))
        lines = [line for _, line in read_lines(run / "metrics.jsonl")]
        steps = max(line["step"] for line in lines)
        assert [line["step"] for line in lines if line.get("kind") == "eval"] == [0, steps]
        assert all(line["loss"] > 0 for line in lines if "loss" in line)
        assert json.loads((run / "run.json").read_text())["state"] == "finished"
