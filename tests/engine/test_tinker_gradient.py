"""The gradient that a Tinker service is sent, against the embedded engine's own: no service needed."""

from __future__ import annotations

import pytest
import torch

from trialogue.config import LossSettings
from trialogue.engine.tinker import differentiate
from trialogue.learn.grpo import PolicyLoss


@pytest.mark.parametrize("reduction", ["token", "row", "constant"])
async def test_a_service_moves_weights_as_the_embedded_engine_does(
    reduction, make_model, make_rows, open_engine
):
    """A token's log-probability times what `differentiate` says, summed, has the gradient of the loss."""
    rows = make_rows(seed=2, count=6)
    loss = PolicyLoss(LossSettings(reduction=reduction, constant=40.0))
    engine, plain = open_engine("qwen3"), open_engine("qwen3")
    outputs = await engine.forward_backward(rows, loss)
    masked = [[place for place, mask in enumerate(row.mask) if mask] for row in rows]
    pulls, metrics = differentiate(rows, masked, outputs.logprobs, loss)
    assert metrics["loss"] == pytest.approx(outputs.metrics["loss"], rel=1e-5)

    class Linear:
        name = "linear"

        def __call__(self, new_logprobs, batch):
            return (new_logprobs * batch.advantages).sum(), {}

    given = []
    for row, places, pull in zip(rows, masked, pulls, strict=True):
        advantages = [0.0] * len(row.tokens)
        for place, value in zip(places, pull, strict=True):
            advantages[place] = value
        given.append(type(row)(row.tokens, row.mask, row.logprobs, advantages))
    await plain.forward_backward(given, Linear())
    for name, value in engine.update.parameters.items():
        assert torch.allclose(value.grad, plain.update.parameters[name].grad, rtol=1e-3, atol=1e-6), name
