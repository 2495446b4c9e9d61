"""Test tasks stay out of what is learned, unless somebody says otherwise, and then it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trialogue.config import EvalConfig, RunSettings, SftConfig, TrainConfig, load_config
from trialogue.errors import ConfigError
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.run import read_about, read_lines
from trialogue.score.evaluate import evaluate
from trialogue.view.report import write_report

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
