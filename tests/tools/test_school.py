"""Lessons in copying, and the base that was made of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from tools.tiny_base.school import School, Values
from trialogue.engine import models
from trialogue.engine.api import EngineSettings
from trialogue.engine.torch_engine import TorchEngine
from trialogue.talk.render.load import load_renderer
from trialogue.talk.render.tiny import BriefRenderer

KEYS = ["order_id", "email", "address", "able", "morning"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(models.find_model_folder("tiny"))


def find_brief(folder: Path) -> BriefRenderer:
    _, renderer = load_renderer(str(folder))
    assert isinstance(renderer, BriefRenderer)
    return renderer


def find_runs(mask: list[int]) -> list[tuple[int, int]]:
    """Where trained stretches begin and end."""
    edges = [place for place in range(1, len(mask) + 1) if [*mask, 0][place] != mask[place - 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_only_what_was_told_before_is_trained(folder: Path, difficulty: float):
    school = School(find_brief(folder), KEYS, seed=3)
    for _ in range(20):
        row = school.lesson(difficulty)
        runs = find_runs(row.mask)
        assert runs
        assert row.mask[0] == 0
        for start, end in runs:
            said = row.tokens[start:end]
            earlier = row.tokens[:start]
            assert any(earlier[at : at + len(said)] == said for at in range(start - len(said) + 1))


def test_the_same_seed_gives_the_same_lessons(folder: Path):
    renderer = find_brief(folder)
    first, second = (School(renderer, KEYS, seed=5) for _ in range(2))
    assert [first.lesson(1.0).tokens for _ in range(5)] == [second.lesson(1.0).tokens for _ in range(5)]


def test_values_are_drawn_from_the_whole_vocabulary():
    values = Values([" lamp", " red", "ka", "ro", "side", "7"], Random(0))
    assert {values.word() for _ in range(50)} == {"lamp", "red"}
    assert any(values.stem().endswith("side") for _ in range(200))


def test_the_base_is_small_and_copies(folder: Path):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10e6
    school = School(find_brief(folder), KEYS, seed=11)
    rows = [school.lesson(0.7) for _ in range(24)]
    engine = TorchEngine(str(folder), EngineSettings(device="cpu"))
    try:
        logprobs = asyncio.run(engine.forward(rows))
    finally:
        engine.close()
    trained = [
        value
        for row, values in zip(rows, logprobs, strict=True)
        for value, own in zip(values, row.mask, strict=True)
        if own
    ]
    sure = sum(value > -0.7 for value in trained) / len(trained)
    assert sure > 0.9, f"only {sure:.0%} of the repeated tokens are foreseen"
