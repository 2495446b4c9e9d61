"""Products in bfloat16 on a CPU: the same computation, rounded, with float32 weights and sums."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from trialogue.engine import EngineSettings, OptimParams, Row, SamplingParams, torch_engine
from trialogue.engine.cpu import linear
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import EngineError

needs_halves = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor does not multiply bfloat16"
)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 300])
@pytest.mark.parametrize(
    "shape", [(48, 64), (48, 65), (50, 64)]
)  # panels take pairs; outputs may be left over
@needs_halves
def test_a_rounded_product_is_one_of_rounded_numbers(rows, shape, threads, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(linear, "load_kernels", lambda **_: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chance = torch.Generator().manual_seed(rows)
    inputs, weight = (torch.randn(count, shape[1], generator=chance) for count in (rows, shape[0]))
    found = linear.multiply_packed(inputs, linear.pack_half(weight), len(weight))
    expected = inputs.bfloat16().double() @ weight.bfloat16().double().T
    is_exact = compiled and shape[1] == 64 and shutil.which("cc") is not None
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-4 if is_exact else 0.2)


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}])
@needs_halves
async def test_an_update_is_nearly_that_of_float32(kind, more, make_model, make_rows, open_engine, loss):
    model = make_model(kind)
    exact, rounded = (
        open_engine(copy.deepcopy(model), precision=name, **more) for name in ("float32", "bfloat16")
    )
    rows = make_rows(seed=3, count=10)
    outputs = [await engine.forward_backward(rows, loss) for engine in (exact, rounded)]
    for one, other in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
        assert other == pytest.approx(one, abs=0.3)
    assert outputs[0].logprobs != outputs[1].logprobs  # it did round
    wanted, found = (
        torch.cat([parameter.grad.flatten() for parameter in engine.model.parameters()])
        for engine in (exact, rounded)
    )
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(wanted, found, dim=0) > 0.99


@pytest.mark.parametrize("vocabulary", [300, 293])
@needs_halves
async def test_what_is_sampled_is_what_is_learned_from(kind, vocabulary, open_engine, loss):
    """The sampler's log-probabilities are those of the update, up to rounding, before and after a step."""
    engine = open_engine(kind, precision="bfloat16", vocabulary=vocabulary)
    prompt = list(range(7, 60))
    for step in range(2):
        (reply,) = await engine.sample([prompt], SamplingParams(max_tokens=40, seed=step))
        tokens = prompt + reply.tokens
        row = Row(
            tokens, [0] * 53 + [1] * 40, [0.0] * 53 + reply.logprobs, [1.0 if step else -1.0] * len(tokens)
        )
        outputs = await engine.forward_backward([row], loss)
        gaps = [abs(one - other) for one, other in zip(outputs.logprobs[0], reply.logprobs, strict=True)]
        assert sum(gaps) / len(gaps) < 0.03
        await engine.optim_step(OptimParams(learning_rate=1e-2))
        await engine.publish()
    assert all(parameter.dtype == torch.float32 for parameter in engine.model.parameters())


def test_a_processor_without_the_arithmetic_is_told(make_model, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.raises(EngineError, match=r"AVX512_BF16.*learner.precision=float32"):
        TorchEngine(make_model("llama"), EngineSettings(device="cpu", precision="bfloat16"))


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("float32", "cuda", False), ("bfloat16", "cuda", True)],
)
def test_where_numbers_are_rounded(precision, device, expected):
    assert torch_engine.is_bfloat16(precision, torch.device(device)) is expected
