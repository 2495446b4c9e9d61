"""A conversation counts once, however many rows its template made of it: numbers worked out by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trialogue.config import LossSettings, TrainConfig
from trialogue.engine.api import LossFunction, OptimParams, Outputs, Row
from trialogue.engine.tinker import differentiate
from trialogue.errors import ConfigError
from trialogue.hosts.conversations import refuse_rows
from trialogue.learn.checkpoint import load_learner
from trialogue.learn.loop import update
from trialogue.learn.losses import PolicyLoss
from trialogue.learn.train import find_method

OPTIM = OptimParams(learning_rate=1e-3)
Configure = Callable[..., TrainConfig]


def make_row(identity: str, old: list[float], advantage: float) -> Row:
    size = len(old) + 1
    return Row([7] * size, [0] + [1] * len(old), [0.0, *old], [advantage] * size, id=identity)


# Two conversations of four tokens each: `a` is two rows, of one token and of three, `b` is one.
ROWS = [
    make_row("a", [-1.0], 1.0),
    make_row("a", [-1.0, -1.0, -1.0], 1.0),
    make_row("b", [-1.0, -1.0, -1.0, -1.0], 1.0),
]


def weigh(rows: list[Row], **settings: Any) -> dict[str, list[float]]:
    """What a token's log-probability weighs in the loss at ratio 1, by conversation."""
    masked = [[place for place, mask in enumerate(row.mask) if mask] for row in rows]
    now = [[row.logprobs[place] for place in places] for row, places in zip(rows, masked, strict=True)]
    pulls, _ = differentiate(rows, masked, now, PolicyLoss(LossSettings(**settings)))
    weights: dict[str, list[float]] = {}
    for row, pull in zip(rows, pulls, strict=True):
        weights.setdefault(row.id, []).extend(-value for value in pull)
    return weights


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo"])
def test_row_means_give_equal_conversations_equal_weight(name: str) -> None:
    weights = weigh([replace(row, elsewhere=0.0) for row in ROWS], name=name, reduction="row")
    assert sum(weights["a"]) == pytest.approx(1 / 2)
    assert sum(weights["b"]) == pytest.approx(1 / 2)
    assert weights["a"] == pytest.approx([1 / 8] * 4)  # half a loss over four tokens, whichever their row


def test_constant_sums_are_divided_by_conversations() -> None:
    weights = weigh(ROWS, name="dr_grpo", reduction="constant", constant=10.0)
    assert weights["a"] == weights["b"] == pytest.approx([1 / 20] * 4)


def test_token_means_do_not_know_conversations() -> None:
    weights = weigh(ROWS, reduction="token")
    assert weights["a"] == weights["b"] == pytest.approx([1 / 8] * 4)


def test_rows_without_a_name_are_conversations_of_their_own() -> None:
    weights = weigh([replace(row, id="") for row in ROWS], reduction="row")
    assert weights[""] == pytest.approx([1 / 3] + [1 / 9] * 3 + [1 / 12] * 4)


def test_verl_is_not_given_rows_that_it_would_count_as_conversations() -> None:
    for settings in ({"reduction": "token"}, {"reduction": "constant"}, {"name": "rloo"}):
        refuse_rows(LossSettings.model_validate(settings), "qwen3-exact")
    for settings in ({"reduction": "row"}, {"name": "gspo"}):
        with pytest.raises(ConfigError, match="verl counts each of them as a conversation"):
            refuse_rows(LossSettings.model_validate(settings), "qwen3-exact")


class ShapeRecorder:
    """An engine whose log-probabilities are given: it notes the rows of each optimizer step and the loss."""

    def __init__(self, shift: Callable[[Row], list[float]]) -> None:
        self.shift = shift
        self.steps: list[list[Row]] = []
        self.losses: list[float] = []
        self.pulls: list[list[list[float]]] = []

    async def forward(self, rows: list[Row], temperature: float = 1.0) -> list[list[float]]:
        return [self.shift(row) for row in rows]

    async def forward_backward(
        self, rows: list[Row], loss: LossFunction, *, temperature: float = 1.0
    ) -> Outputs:
        masked = [[place for place, mask in enumerate(row.mask) if mask] for row in rows]
        now = [[self.shift(row)[place] for place in places] for row, places in zip(rows, masked, strict=True)]
        pulls, metrics = differentiate(rows, masked, now, loss)
        self.steps.append(rows)
        self.pulls.append(pulls)
        self.losses.append(metrics["loss"])
        return Outputs(now, metrics)

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return {"skipped": 0.0}


async def test_the_ratio_of_gspo_is_that_of_the_whole_conversation(train_config: Configure) -> None:
    """Log-ratios 0.4 in the row of one token and 0 in the other three: the mean of the four is 0.1. Row by
    row it would be 0.4 and 0."""
    settings: dict[str, Any] = {"loss__name": "gspo", "loss__reduction": "row", "loss__clip_high": 1.0}
    engine = ShapeRecorder(lambda row: [value + 0.4 * (len(row.tokens) == 2) for value in row.logprobs])
    await update(engine, list(ROWS), find_method(train_config(**settings)), OPTIM, 0)  # type: ignore[arg-type]
    ratio = math.exp(0.1)
    assert engine.losses == [pytest.approx(-(ratio + 1) / 2, rel=1e-5)]
    [rows], [pulls] = engine.steps, engine.pulls
    for row, pull in zip(rows, pulls, strict=True):
        wanted = -(ratio if row.id == "a" else 1.0) / 8
        assert pull == pytest.approx([wanted] * len(pull), rel=1e-5)


async def test_gspo_clips_a_conversation_as_a_whole(train_config: Configure) -> None:
    settings: dict[str, Any] = {"loss__name": "gspo", "loss__reduction": "row", "loss__clip_high": 0.2}
    shifted = ShapeRecorder(lambda row: [value + 0.4 * (row.id == "a") for value in row.logprobs])
    metrics = await update(shifted, list(ROWS), find_method(train_config(**settings)), OPTIM, 0)  # type: ignore[arg-type]
    assert shifted.losses == [pytest.approx(-(1.2 + 1) / 2, rel=1e-5)]
    assert metrics["clip_share"] == pytest.approx(1 / 2)  # four of eight tokens
    capped = train_config(**settings, loss__importance_cap=2.0)  # the update's own weights are the old ones
    again = ShapeRecorder(shifted.shift)
    metrics = await update(again, list(ROWS), find_method(capped), OPTIM, 0)  # type: ignore[arg-type]
    assert metrics["clip_share"] == 0.0
    assert again.losses == [pytest.approx(-(math.exp(0.4) + 1) / 2, rel=1e-5)]


async def test_gspo_refuses_to_guess_the_rest_of_a_conversation() -> None:
    with pytest.raises(ValueError, match="add_elsewhere"):
        weigh(ROWS, name="gspo", reduction="row")


async def test_mini_batches_hold_whole_conversations(train_config: Configure) -> None:
    """Six conversations of one, two and three rows in three optimizer steps: two in each."""
    rows = [make_row(f"c{number}", [-1.0], 1.0) for number in range(6) for _ in range(1 + number % 3)]
    config = train_config(training__mini_batches=3, loss__reduction="row")
    for step in range(5):
        engine = ShapeRecorder(lambda row: row.logprobs)
        await update(engine, list(rows), find_method(config), OPTIM, step)  # type: ignore[arg-type]
        names = [{row.id for row in part} for part in engine.steps]
        assert [len(part) for part in names] == [2, 2, 2]
        assert len(set.union(*names)) == 6
        assert engine.losses == pytest.approx([-1.0] * 3)


@pytest.mark.parametrize(("name", "reduction"), [("gspo", "row"), ("grpo", "row"), ("dr_grpo", "constant")])
async def test_micro_batches_cut_conversations_without_a_trace(
    train_config: Configure, blank: Path, name: str, reduction: str
) -> None:
    """The real engine, all rows at once and a row at a time: the same gradient and the same loss."""
    draw = random.Random(3)
    rows: list[Row] = []
    for number, identity in enumerate("aaabbc"):
        tokens = [draw.randrange(8, 290) for _ in range(6 + 3 * number)]
        old = [draw.uniform(-6.5, -5.0) for _ in tokens]
        mask = [0, 0, 0] + [1] * (len(tokens) - 3)
        rows.append(
            Row(tokens, mask, old, [{"a": 1.0, "b": -0.5, "c": 0.7}[identity]] * len(tokens), id=identity)
        )
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for budget in (16384, 16):
        config = train_config(
            learner__micro_batch_tokens=budget,
            loss__name=name,
            loss__reduction=reduction,
            loss__clip_low=0.9,
            loss__clip_high=9.0,
            optimizer__gradient_clip=0.0,
        )
        engine = load_learner(config.learner, 0).engine
        kept: dict[str, torch.Tensor] = {}
        apply: Any = engine.optim_step

        async def keep(
            params: OptimParams, engine: Any = engine, apply: Any = apply, kept: Any = kept
        ) -> Any:
            kept.update({key: value.grad.clone() for key, value in engine.update.parameters.items()})
            return await apply(params)

        engine.optim_step = keep  # type: ignore[method-assign]
        metrics = await update(engine, list(rows), find_method(config), OPTIM, 0)
        found.append((metrics["loss"], kept))
    (whole, gradient), (cut, pieces) = found
    assert cut == pytest.approx(whole, rel=1e-5)
    assert sum(float(value.norm()) for value in gradient.values()) > 0
    for key, value in gradient.items():
        assert torch.allclose(value, pieces[key], rtol=1e-3, atol=1e-6), key
