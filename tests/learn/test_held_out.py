"""Test tasks stay out of what is learned, unless somebody says otherwise, and then it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trialogue.config import (
    EvalConfig,
    RunSettings,
    SftConfig,
    TrainConfig,
    load_config,
)
from trialogue.corpus.corpus import write_parquet
from trialogue.errors import ConfigError
from trialogue.learn.sft import collect, find_examples, sft
from trialogue.learn.train import train
from trialogue.run import read_about, read_lines, read_marks, read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.trajectory import Trajectory
from trialogue.view.report import write_report
from trialogue.world.find import find_domain

Configure = Callable[..., TrainConfig]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(run / "metrics.jsonl")]


@pytest.fixture
def tested(wall: str, tmp_path: Path) -> str:
    """The domain with a test split and none to evaluate on while it learns."""
    source = Path(wall).read_text(encoding="utf-8").replace('("train", "dev")', '("train", "test")')
    file = tmp_path / "tested.py"
    file.write_text(source, encoding="utf-8")
    return str(file)


async def test_learning_from_test_tasks_takes_a_word_and_leaves_a_mark(
    train_config: Configure, tested: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"6 of 12 tasks .* are test tasks .*tasks.allow_test_split=true"):
        await train(train_config(domain=tested, tasks__split="all"))
    with pytest.raises(ConfigError, match="6 of 6 tasks"):
        await train(train_config(domain=tested, tasks__split="test"))
    assert not (tmp_path / "runs").exists()
    clean = await train(train_config(domain=tested, training__steps=1, training__eval_every=1))
    assert "marks" not in read_about(clean)
    assert [line["step"] for line in read_metrics(clean)] == [1]  # there is no dev split to evaluate on
    allowed = train_config(
        domain=tested, tasks__split="test", tasks__allow_test_split=True, training__steps=1
    )
    run = await train(allowed.model_copy(update={"run": RunSettings(directory=str(tmp_path), name="marked")}))
    [mark] = read_about(run)["marks"]
    assert mark.startswith("learned from 6 test tasks of ")
    assert read_metrics(run)[-1]["marks"] == [mark]
    # What begins with its weights inherits the mark, and so does every figure of the agent.
    heir = train_config(learner__model=str(run), training__steps=1, run__name="heir")
    assert read_about(await train(heir))["marks"] == [mark]
    settings = [f"domain={tested}", f"agent.model={run / 'model'}", f"run.directory={tmp_path}"]
    settings += ["run.name=judged", "limits.reply_tokens=12", "limits.context_tokens=128"]
    result = await evaluate(load_config(EvalConfig, None, settings))
    assert result["notes"]["agent"] == mark
    assert read_marks(f"local:{run}") == read_marks(run / "model") == [mark]
    assert f"marked: {mark}" in write_report(tmp_path / "judged").read_text(encoding="utf-8")


async def test_so_it_is_with_recorded_conversations(
    sft_config: Callable[..., SftConfig], tested: str, tmp_path: Path
) -> None:
    settings = [f"domain={tested}", "tasks.split=test", f"run.directory={tmp_path}", "run.name=held"]
    await evaluate(load_config(EvalConfig, None, settings))
    learned = {"domain": tested, "sft__examples": str(tmp_path / "held"), "sft__epochs": 1.0}
    with pytest.raises(ConfigError, match="6 of 6 tasks to learn from are test tasks"):
        await sft(sft_config(**learned))
    with pytest.raises(ConfigError, match="6 of 6 tasks to learn from are test tasks"):
        await sft(sft_config(domain=tested, tasks__split="test"))
    run = await sft(sft_config(**learned, tasks__allow_test_split=True))
    assert read_about(run)["marks"] == read_metrics(run)[-1]["marks"]


async def test_nor_is_anything_learned_from_test_tasks_in_a_parquet_file(
    sft_config: Callable[..., SftConfig], tested: str, tmp_path: Path
) -> None:
    settings = [f"domain={tested}", "tasks.split=test", f"run.directory={tmp_path}", "run.name=held"]
    await evaluate(load_config(EvalConfig, None, [*settings, "tasks.trials=2"]))
    file = tmp_path / "corpus.parquet"
    write_parquet(file, list(read_trajectories(tmp_path / "held")), find_domain(tested))
    learned = {"domain": tested, "sft__examples": str(file)}
    with pytest.raises(ConfigError, match="6 of 6 tasks to learn from are test tasks"):
        await sft(sft_config(**learned))
    run = await sft(sft_config(**learned, sft__epochs=1.0, tasks__allow_test_split=True))
    assert read_about(run)["marks"][0].startswith("learned from 6 test tasks")


async def test_what_was_left_out_or_kept_apart_is_not_learned_from(
    sft_config: Callable[..., SftConfig], train_config: Configure, trained: Path
) -> None:
    run = await train(train_config(learner__model=str(trained), training__steps=1, training__eval_every=1))
    assert {item.task.split for item in read_trajectories(run)} == {"train", "dev"}
    config = sft_config(sft__examples=str(run), sft__only_successes=False)
    found = find_examples(find_domain(config.domain), config)
    assert isinstance(found, list)
    held = [item for item in found if isinstance(item, Trajectory)]
    assert (len(held), {item.task.split for item in held}) == (12, {"train"})
    spoilt = [item.model_copy(update={"excluded": place < 5}) for place, item in enumerate(held)]
    assert len(await collect(find_domain(config.domain), config, spoilt)) == 7
