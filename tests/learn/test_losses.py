"""Losses: numbers worked out by hand, finite differences, cutting into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trialogue.config import LossSettings
from trialogue.engine.api import TokenBatch
from trialogue.learn.losses import PolicyLoss, cross_entropy, k3

NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")


def make_batch(
    old: Sequence[Sequence[float]],
    advantage: Sequence[float],
    reference: Sequence[Sequence[float]] | None = None,
    *,
    entropy: float = 1.0,
) -> TokenBatch:
    """Rows of log-probabilities as an engine hands them over: flat, with totals."""
    counts = torch.tensor([len(row) for row in old])
    row = torch.arange(len(old)).repeat_interleave(counts)
    flat = torch.tensor([value for values in old for value in values], dtype=torch.float64)
    return TokenBatch(
        old_logprobs=flat,
        advantages=torch.tensor(advantage, dtype=torch.float64)[row],
        reference_logprobs=None
        if reference is None
        else torch.tensor([value for values in reference for value in values], dtype=torch.float64),
        entropy=torch.full_like(flat, entropy),
        row=row,
        turns=None,
        conversation_tokens=counts,
        elsewhere=torch.zeros(len(old)),
        rows=len(old),
        total_conversations=len(old),
        total_tokens=len(flat),
    )


def compute(
    new: Sequence[float] | Tensor, batch: TokenBatch, **settings: Any
) -> tuple[float, dict[str, Any]]:
    value, metrics = PolicyLoss(LossSettings(**settings))(torch.as_tensor(new, dtype=torch.float64), batch)
    return float(value), {name: float(found) for name, found in metrics.items()}


# Two rows of two tokens and one. Ratios new/old: 1.5, 1.0 and 0.5; advantages 2 and -1.
OLD = ((math.log(0.2), math.log(0.5)), (math.log(0.4),))
NEW = (math.log(0.3), math.log(0.5), math.log(0.2))
BATCH = make_batch(OLD, (2.0, -1.0))


# By hand: the tokens' losses are -min(1.5, 1.2)·2 = -2.4, -1·2 = -2, and max(0.5, 0.8)·1 = 0.8.
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "grpo"}, (-2.4 - 2 + 0.8) / 3),
        ({"name": "rloo"}, (-2.4 - 2 + 0.8) / 3),
        ({"name": "grpo", "reduction": "row"}, ((-2.4 - 2) / 2 + 0.8) / 2),
        ({"name": "dr_grpo", "reduction": "constant", "constant": 10}, (-2.4 - 2 + 0.8) / 20),
        ({"name": "dapo"}, (-1.28 * 2 - 2 + 0.8) / 3),
        ({"name": "grpo", "clip_high": 1.0, "clip_low": 1.0}, (-3 - 2 + 0.5) / 3),
        ({"name": "grpo", "clip_high": 0.0, "clip_low": 0.0}, (-2 - 2 + 1) / 3),
    ],
)
def test_clipped_losses_by_hand(settings: dict[str, Any], expected: float) -> None:
    value, metrics = compute(NEW, BATCH, **settings)
    assert value == pytest.approx(expected, rel=1e-6)
    assert metrics["loss"] == value


def test_cispo_by_hand() -> None:
    # weights min(ratio, 1 + high) on the log-likelihood: 1.25, 1, 0.5
    value, metrics = compute(NEW, BATCH, name="cispo", clip_high=0.25)
    by_hand = -(1.25 * 2 * NEW[0] + 2 * NEW[1] - 0.5 * NEW[2]) / 3
    assert value == pytest.approx(by_hand, rel=1e-6)
    assert metrics["clip_share"] == pytest.approx(1 / 3)


def test_gspo_has_one_ratio_for_each_row() -> None:
    # row 1: the geometric mean √(1.5 · 1) = 1.2247…; row 2: 0.5
    ratio = math.sqrt(1.5)
    value, _ = compute(NEW, BATCH, name="gspo", clip_low=0.2, clip_high=0.3, reduction="row")
    assert value == pytest.approx((-2 * ratio + 0.8) / 2, rel=1e-6)
    value, _ = compute(NEW, BATCH, name="gspo", clip_low=0.2, clip_high=0.2, reduction="row")
    assert value == pytest.approx((-2.4 + 0.8) / 2, rel=1e-6)
    value, _ = compute(NEW, BATCH, name="gspo")  # its own narrow bounds
    assert value == pytest.approx((-2 * 2 * 1.0004 + (1 - 3e-4)) / 3, rel=1e-6)


def test_dual_clip_bounds_a_bad_token_that_became_likely() -> None:
    batch = make_batch([[math.log(0.1)], [math.log(0.1)]], (-2.0, 2.0))
    new = (math.log(0.8), math.log(0.8))  # ratio 8
    assert compute(new, batch, dual_clip=3.0)[0] == pytest.approx((3 * 2 - 1.2 * 2) / 2, rel=1e-6)
    assert compute(new, batch, dual_clip=0)[0] == pytest.approx((8 * 2 - 1.2 * 2) / 2, rel=1e-6)


def test_importance_sampling_corrects_up_to_its_cap() -> None:
    # The trainer's own log-probabilities are the old ones, so every ratio is 1; weights 1.5, 1 and 0.5.
    value, metrics = compute(NEW, BATCH, importance_cap=2.0)
    assert value == pytest.approx((-2 * 1.5 - 2 + 0.5) / 3, rel=1e-6)
    assert metrics["clip_share"] == 0
    assert compute(NEW, BATCH, importance_cap=1.2)[0] == pytest.approx((-2 * 1.2 - 2 + 0.5) / 3, rel=1e-6)
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    PolicyLoss(LossSettings(importance_cap=1.2))(new, BATCH)[0].backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-2.4 / 3, -2 / 3, 0.5 / 3], rel=1e-6)


def test_divergence_from_the_reference_by_hand() -> None:
    reference = ((math.log(0.3), math.log(0.25)), (math.log(0.4),))
    batch = make_batch(OLD, (2.0, -1.0), reference)
    parts = [0.0, 0.5 - math.log(0.5) - 1, 2 - math.log(2) - 1]
    plain, metrics = compute(NEW, batch)
    assert metrics["kl"] == pytest.approx(sum(parts) / 3, rel=1e-6)
    assert compute(NEW, batch, kl=0.5)[0] == pytest.approx(plain + 0.5 * sum(parts) / 3, rel=1e-6)
    assert "kl" not in compute(NEW, BATCH)[1]


def test_wild_tokens_stay_finite() -> None:
    new = torch.tensor([-200.0, 0.0], dtype=torch.float32, requires_grad=True)
    divergence = k3(new, torch.tensor([0.0, -200.0]))
    assert divergence.tolist() == [10.0, 10.0]
    divergence.sum().backward()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()
    batch = make_batch([[-200.0, -1.0]], (-1.0,), [[0.0, -1.0]])
    for name in NAMES:
        fresh = torch.tensor([-0.5, -200.0], dtype=torch.float32, requires_grad=True)
        value, _ = PolicyLoss(LossSettings(name=name, kl=0.1))(fresh, replace(batch, row=batch.row))
        value.backward()
        assert fresh.grad is not None
        assert torch.isfinite(value)
        assert torch.isfinite(fresh.grad).all(), name


def test_metrics_are_means_over_the_trained_tokens() -> None:
    _, metrics = compute(NEW, make_batch(OLD, (2.0, -1.0), entropy=0.7))
    gaps = [math.log(1.5), 0.0, math.log(2)]
    assert metrics["entropy"] == pytest.approx(0.7)
    assert metrics["logprob_gap"] == pytest.approx(sum(gaps) / 3)
    assert metrics["logprob_gap_max"] == pytest.approx(math.log(2))
    assert metrics["clip_share"] == pytest.approx(2 / 3)


def test_cross_entropy_by_hand() -> None:
    value, metrics = cross_entropy(torch.tensor(NEW), BATCH)
    assert float(value) == pytest.approx(-sum(NEW) / 3)
    assert float(metrics["loss"]) == float(value)


rows = st.lists(st.lists(st.floats(-3, -0.05), min_size=1, max_size=4), min_size=1, max_size=5)
cases = st.tuples(rows, st.randoms(use_true_random=False))
losses = st.builds(
    LossSettings,
    name=st.sampled_from(NAMES),
    reduction=st.sampled_from(["token", "row", "constant"]),
    constant=st.sampled_from([1.0, 7.0]),
    kl=st.sampled_from([0.0, 0.3]),
    clip_low=st.sampled_from([None, 0.2]),
    clip_high=st.sampled_from([None, 0.3]),
    dual_clip=st.sampled_from([0.0, 3.0]),
)


def draw_case(case: Any) -> tuple[Tensor, TokenBatch]:
    """Log-probabilities near the old ones, such that a small step crosses no kink of the loss."""
    old, draw = case
    shifts = [-1.3, -0.31, -0.11, 0.09, 0.33, 1.4]
    flat = [value for row in old for value in row]
    new = torch.tensor([value + draw.choice(shifts) for value in flat], dtype=torch.float64)
    reference = [[value + draw.choice(shifts) for value in row] for row in old]
    return new, make_batch(old, [draw.choice([-1.7, -0.4, 0.6, 2.1]) for _ in old], reference)


@settings(max_examples=40, deadline=None)
@given(cases, losses)
def test_gradients_equal_finite_differences(case: Any, wanted: LossSettings) -> None:
    new, batch = draw_case(case)
    loss = PolicyLoss(wanted)
    leaf = new.clone().requires_grad_()
    loss(leaf, batch)[0].backward()
    assert leaf.grad is not None
    step = 1e-6
    for place in range(len(new)):
        above, below = new.clone(), new.clone()
        above[place] += step
        below[place] -= step
        if wanted.name == "cispo":  # its weights are held still: differentiate around them
            ratio = torch.exp(new - batch.old_logprobs).clamp(max=1 + wanted.clips[1])
            held = replace(batch, advantages=batch.advantages * ratio)
            plain = PolicyLoss(wanted.model_copy(update={"clip_high": 0.0}))
            rise = _likelihood(plain, above, held) - _likelihood(plain, below, held)
        else:
            rise = float(loss(above, batch)[0]) - float(loss(below, batch)[0])
        assert float(leaf.grad[place]) == pytest.approx(rise / (2 * step), rel=1e-4, abs=1e-6)


def _likelihood(loss: PolicyLoss, new: Tensor, batch: TokenBatch) -> float:
    """cispo with all ratios 1: what is left is the weighted log-likelihood and the divergence."""
    return float(loss(new, replace(batch, old_logprobs=new))[0])


@settings(max_examples=40, deadline=None)
@given(cases, losses, st.integers(0, 5))
def test_micro_batches_add_up(case: Any, wanted: LossSettings, cut: int) -> None:
    new, batch = draw_case(case)
    loss = PolicyLoss(wanted)
    whole, metrics = loss(new, batch)
    total, summed = 0.0, dict.fromkeys(metrics, 0.0)
    for chosen in (batch.row < cut, batch.row >= cut):
        if not chosen.any():
            continue
        part, found = loss(new[chosen], take(batch, chosen))
        total += float(part)
        for name, value in found.items():
            bigger = max(summed[name], float(value))
            summed[name] = bigger if name.endswith("_max") else summed[name] + float(value)
    assert total == pytest.approx(float(whole), rel=1e-9, abs=1e-12)
    assert summed == pytest.approx({name: float(value) for name, value in metrics.items()}, abs=1e-6)


def take(batch: TokenBatch, chosen: Tensor) -> TokenBatch:
    """Some whole rows of a batch as a micro-batch: the totals stay those of the whole."""
    kept = batch.row[chosen].unique()
    reference = batch.reference_logprobs
    return replace(
        batch,
        old_logprobs=batch.old_logprobs[chosen],
        advantages=batch.advantages[chosen],
        reference_logprobs=None if reference is None else reference[chosen],
        entropy=batch.entropy[chosen],
        row=torch.searchsorted(kept, batch.row[chosen]),
        conversation_tokens=batch.conversation_tokens[kept],
        elsewhere=batch.elsewhere[kept],
        rows=len(kept),
    )


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    PolicyLoss(LossSettings(name="cispo", clip_high=0.25))(new, BATCH)[0].backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.25 * 2 / 3, -2 / 3, 0.5 / 3], rel=1e-6)
    clipped = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    PolicyLoss(LossSettings(name="grpo"))(clipped, BATCH)[0].backward()
    assert clipped.grad is not None
    assert clipped.grad.tolist() == pytest.approx([0.0, -2 / 3, 0.0], abs=1e-12)
