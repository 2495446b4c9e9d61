"""Matrices may be padded beyond the tokenizer's ids: what lies there is never sampled and has no weight."""

from __future__ import annotations

import pytest
import torch

from trialogue.engine import OptimParams, SamplingParams
from trialogue.engine.api import Row
from trialogue.errors import EngineError


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_padding_is_never_sampled(make_model, open_engine, temperature: float) -> None:
    model = make_model("llama")
    head = model.get_output_embeddings().weight
    size = head.shape[0]
    with torch.no_grad():
        head[size - 8 :] *= 100  # without a bound these would be drawn most of the time
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    engine = open_engine(model, vocabulary=size - 8)
    assert engine.capabilities.vocabulary == size - 8
    completions = await engine.sample([[1, 2, number] for number in range(8)], params)
    assert all(token < size - 8 for item in completions for token in item.tokens)
    with pytest.raises(EngineError, match="token ids must be between"):
        await engine.sample([[size - 1]], params)
    row = [1, 2, 0, *completions[0].tokens]
    [known] = await engine.forward([Row(row, [0] * len(row), [0.0] * len(row), [0.0] * len(row))])
    assert known[3:] == pytest.approx(completions[0].logprobs, abs=1e-4)


async def test_padding_is_never_trained(make_model, make_rows, open_engine, loss) -> None:
    model = make_model("llama")
    head = model.get_output_embeddings().weight
    size = head.shape[0]
    engine = open_engine(model, vocabulary=size - 8)
    before = head.detach().clone()
    rows = [
        Row([token % (size - 8) for token in row.tokens], row.mask, row.logprobs, row.advantages)
        for row in make_rows(seed=1, count=4)
    ]
    beyond = Row([1, size - 8], [0, 1], [0.0, 0.0], [0.0, 1.0], id="beyond")
    for verb in (lambda: engine.forward([beyond]), lambda: engine.forward_backward([*rows, beyond], loss)):
        with pytest.raises(EngineError, match="row beyond: token ids must be between"):
            await verb()
    await engine.forward_backward(rows, loss)
    await engine.optim_step(OptimParams(learning_rate=1e-2))
    assert torch.equal(head[size - 8 :], before[size - 8 :])
    assert not torch.equal(head[: size - 8], before[: size - 8])
