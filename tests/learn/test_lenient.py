"""A learner that writes its calls as text: training tells it, and `renderer.lenient` reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trialogue.config import SftConfig, TrainConfig
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.run import read_about, read_lines
from trialogue.view.live import show_steps

CALL = 'return call("paint", colour=self.colour)'
TEXT = "return Reply(f\"paint(colour='{self.colour}')\")"


@pytest.fixture
def writer(sft_config: Callable[..., SftConfig], wall: str, tmp_path: Path) -> Path:
    """A run of imitation of a painter who writes each call as text."""
    text = Path(wall).read_text(encoding="utf-8")
    assert CALL in text
    file = tmp_path / "writer.py"
    file.write_text(text.replace(CALL, TEXT), encoding="utf-8")
    settings: dict[str, Any] = {"sft__only_successes": False, "sft__epochs": 60.0, "sft__validation": 0.0}
    config = sft_config(domain=str(file), sft__batch=6, limits__reply_tokens=40, **settings)
    return asyncio.run(sft(config))


async def test_imitation_that_reads_leniently_is_marked(
    sft_config: Callable[..., SftConfig], wall: str
) -> None:
    run = await sft(sft_config(domain=wall, sft__epochs=0.1, renderer__lenient=True))
    assert any("renderer.lenient=true" in mark for mark in read_about(run)["marks"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lenient", [False, True])
async def test_training_tells_near_calls(
    train_config: Callable[..., TrainConfig],
    writer: Path,
    capfd: pytest.CaptureFixture[str],
    lenient: bool,
) -> None:
    config = train_config(
        learner__model=str(writer),
        limits__reply_tokens=40,
        training__steps=1,
        training__eval_every=1,
        renderer__lenient=lenient,
    )
    with show_steps() as watch:
        run = await train(config, watch=watch)
    [before, step, after] = [line for _, line in read_lines(run / "metrics.jsonl")]
    told = capfd.readouterr().err
    if lenient:
        assert not any("near_calls" in line for line in (before, step, after))
        assert step["tools"]["paint"] >= 6
        assert "near calls" not in told
        assert any("renderer.lenient=true" in mark for mark in read_about(run)["marks"])
        return
    assert step["near_calls"] >= 6  # in 12 conversations
    assert step["reward"] == 0.0
    assert "tools" not in step or "paint" not in step["tools"]
    for line in (before, step, after):
        [warning] = [text for text in line["warnings"] if text.startswith("near calls: ")]
        assert f"near calls: {line['near_calls']} replies look like tool calls" in warning
        assert "renderer.lenient=true" in warning
        assert f"warning: {warning}" in told
