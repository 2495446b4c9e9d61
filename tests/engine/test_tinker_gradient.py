"""The gradient that a Tinker service is sent, against the embedded engine's own: no service needed."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from trialogue.config import LossSettings
from trialogue.engine import OptimParams, Row
from trialogue.engine.tinker import TinkerEngine, check_logprobs, differentiate
from trialogue.errors import EngineError
from trialogue.learn.losses import PolicyLoss


class Linear:
    name = "linear"

    def __call__(self, new_logprobs, batch):
        return (new_logprobs * batch.advantages).sum(), {}


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

    given = []
    for row, places, grad_output in zip(rows, masked, pulls, strict=True):
        advantages = [0.0] * len(row.tokens)
        for place, value in zip(places, grad_output, strict=True):
            advantages[place] = value
        given.append(type(row)(row.tokens, row.mask, row.logprobs, advantages))
    await plain.forward_backward(given, Linear())
    for name, value in engine.update.parameters.items():
        assert torch.allclose(value.grad, plain.update.parameters[name].grad, rtol=1e-3, atol=1e-6), name


class Service:
    """A service's training client in this process, over the embedded engine: sums, and applies whatever it is
    sent, without a look at it."""

    def __init__(self, engine):
        self.engine = engine

    def to_row(self, datum):
        inputs = {name: given.data for name, given in datum.loss_fn_inputs.items()}
        tokens = [*datum.model_input, inputs["target_tokens"][-1]]
        pulls = [-value for value in inputs.get("advantages", inputs["weights"])]
        mask = [0, *(int(weight) for weight in inputs["weights"])]
        return Row(tokens, mask, [0.0] * len(tokens), [0.0, *pulls])

    async def forward_async(self, data, loss):
        found = await self.engine.forward([self.to_row(datum) for datum in data])
        return to_future([{"logprobs": SimpleNamespace(data=values[1:])} for values in found])

    async def forward_backward_async(self, data, loss):
        await self.engine.forward_backward([self.to_row(datum) for datum in data], Linear())
        return await self.forward_async(data, loss)

    async def optim_step_async(self, adam):
        params = OptimParams(
            adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm
        )
        for value in self.engine.update.parameters.values():
            value.grad.nan_to_num_(nan=1.0)  # the embedded engine would skip, and a service need not
        await self.engine.optim_step(params)
        return to_future([])


def to_future(outputs):
    async def result():
        return SimpleNamespace(loss_fn_outputs=outputs)

    return SimpleNamespace(result_async=result)


@pytest.mark.parametrize("before", [0, 1], ids=["alone", "after a good one"])
async def test_a_gradient_that_is_no_number_is_never_applied(before, make_rows, open_engine, monkeypatch):
    """Nor is what was sent before it in the same step. The next step moves the weights again."""
    hidden = open_engine("llama")
    client = SimpleNamespace(create_lora_training_client=lambda **_: Service(hidden))
    types = SimpleNamespace(
        TensorData=SimpleNamespace,
        Datum=SimpleNamespace,
        AdamParams=SimpleNamespace,
        ModelInput=SimpleNamespace(from_ints=list),
    )
    package = SimpleNamespace(types=types, ServiceClient=lambda **_: client)
    monkeypatch.setitem(sys.modules, "tinker", package)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    engine = TinkerEngine("llama", "http://127.0.0.1", reduction="sum")
    rows = make_rows(seed=2, count=4)
    spoilt = [replace(rows[0], advantages=[math.nan] * len(rows[0].tokens)), *rows[1:]]
    loss, step = PolicyLoss(LossSettings()), OptimParams(learning_rate=1e-2, weight_decay=0.1)
    weights = hidden.update.parameters
    kept = {name: value.detach().clone() for name, value in weights.items()}
    for _ in range(before):
        await engine.forward_backward(rows, loss)
    outputs = await engine.forward_backward(spoilt, loss)
    assert math.isnan(outputs.metrics["loss"])
    assert await engine.optim_step(step) == {"learning_rate": 1e-2, "skipped": 1.0}
    assert all(value.equal(kept[name]) for name, value in weights.items())
    with pytest.raises(EngineError, match="no gradient"):
        await engine.optim_step(step)
    await engine.forward_backward(rows, loss)
    assert (await engine.optim_step(step))["skipped"] == 0.0
    assert any(not value.equal(kept[name]) for name, value in weights.items())


@pytest.mark.parametrize("found", [-0.5, float("nan")])
def test_a_service_that_scores_otherwise_within_a_step_is_told(found):
    output = SimpleNamespace(loss_fn_outputs=[{"logprobs": SimpleNamespace(data=[-1.0, found])}])
    with pytest.raises(EngineError, match="differently"):
        check_logprobs(output, [[-1.0, -1.0]])
