"""Norms, gates and rotations in C, forward and backward, against torch; what an update keeps of them."""

from __future__ import annotations

import copy
import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trialogue.engine import Row, SamplingParams
from trialogue.engine.cpu import fast_path, fused, layers
from trialogue.engine.cpu.layers import (
    ONE_THREAD_ROWS,
    GatedLinear,
    LayerKernels,
    NormLinear,
    RmsNorm,
    Rotary,
)
from trialogue.engine.torch_engine import find_worker

DTYPES = [torch.float32, torch.bfloat16]


def load(dtype: torch.dtype) -> LayerKernels:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    found = layers.find_layer_kernels(dtype)
    assert found is not None
    return found


def differentiate(compute: Callable[..., torch.Tensor], inputs: list[torch.Tensor], seed: int = 0):
    """What it computes, and the gradients of all inputs by a random one of the output."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    output = compute(*inputs)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad_output)]


def rotate_plainly(qkv, cosine, sine, heads):
    both, value = qkv.split([(qkv.shape[1] + heads) // 2, (qkv.shape[1] - heads) // 2], 1)
    return torch.cat([both * cosine + both.roll(both.shape[2] // 2, 2) * sine, value], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [2, 16, 38, 64])
@pytest.mark.parametrize("rows", [1, 5, ONE_THREAD_ROWS + 9])
def test_they_compute_what_torch_does(rows, width, threads, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = load(dtype)
    chance = torch.Generator().manual_seed(width)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    hidden, gain, weight, bias = draw(rows, width), draw(width), draw(7, width), draw(7)
    if dtype == torch.bfloat16:  # such as can be compared
        weight, bias = weight.to(dtype).float(), bias.to(dtype).float()
    # From nearly nothing to where a logistic function is 0 or 1, and its power too small to be written.
    share_rows = torch.logspace(-3, 2, width)
    both = (draw(rows, 2 * width) * torch.cat([share_rows, share_rows.flip(0)])).to(dtype)
    cosine, sine = draw(rows, 1, width), draw(rows, 1, width)
    joined = draw(rows, 5, width, dtype=dtype)

    def apply_norm(hidden, gain):
        return torch.nn.functional.rms_norm(hidden, gain.shape, gain, 1e-5)

    def gate(both):
        first, second = both.chunk(2, 1)
        return torch.nn.functional.silu(first) * second

    cases = [
        (lambda *given: RmsNorm.apply(*given, 1e-5, compiled), apply_norm, [hidden, gain]),
        (
            lambda hidden, gain, bias, *parts: NormLinear.apply(hidden, gain, bias, 1e-5, compiled, *parts),
            lambda hidden, gain, bias, *parts: apply_norm(hidden, gain) @ torch.cat(parts).t() + bias,
            [hidden, gain, bias, weight[:4], weight[4:]],
        ),
        (
            lambda *given: GatedLinear.apply(*given, compiled),
            lambda both, weight, bias: gate(both) @ weight.t() + bias,
            [both, weight, bias],
        ),
        (
            lambda joined: torch.cat(Rotary.apply(joined, cosine, sine, 3, compiled), 1),
            lambda joined: rotate_plainly(joined, cosine, sine, 3),
            [joined],
        ),
    ]
    for ours, plain, inputs in cases:
        found = differentiate(ours, inputs)
        expected = differentiate(plain, [tensor.double() for tensor in inputs])
        for one, other, given in zip(found, expected, [None, *inputs], strict=True):
            assert one.shape == other.shape
            assert given is None or one.dtype == given.dtype
            # Column by column: others may be a hundred thousand times as large.
            least = 1e-3 if dtype == torch.float32 else 5e-2  # rounded sums may nearly cancel
            scale = other.norm(dim=0).clamp(min=least) if other.ndim > 1 else other.abs().clamp(min=1e-1)
            error = (one - other).norm(dim=0) if other.ndim > 1 else (one - other).abs()
            assert (error / scale).max() < (1e-4 if dtype == torch.float32 else 0.6)
            assert (error / scale).median() < (1e-5 if dtype == torch.float32 else 2e-2)


def test_kernels_that_compute_something_else_are_refused():
    compiled = load(torch.float32)
    assert layers.are_layer_kernels_right(compiled)
    outputs = {
        "apply_norm": (2, 3),
        "backpropagate_norm": (4, 5, 6),
        "gate": (1,),
        "backpropagate_gate": (2, 3),
        "apply_rotary": (3, 4, 5),
        "backpropagate_rotary": (5,),
    }
    wrong = [(name, place, byte) for name, places in outputs.items() for place in places for byte in (0, 255)]
    for name, place, byte in wrong:  # of bytes that are all 255 no number is made

        def spoiled(*arguments: int, name: str = name, place: int = place, byte: int = byte) -> int:
            getattr(compiled, name)(*arguments)
            ctypes.memset(arguments[place], byte, 8)
            return 0

        assert not layers.are_layer_kernels_right(replace(compiled, **{name: spoiled})), (name, place, byte)


def test_kernels_are_not_given_what_they_would_misread():
    compiled = load(torch.float32)
    hidden, gain, scales = torch.zeros(2, 8), torch.zeros(8), torch.zeros(2)
    joined, angles, head = torch.zeros(2, 5, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)
    wrong = [
        lambda: layers.apply_norm(compiled, hidden.half(), gain, 1e-5),
        lambda: layers.apply_norm(compiled, hidden, torch.zeros(9), 1e-5),
        lambda: layers.backpropagate_norm(compiled, hidden, gain, scales, torch.zeros(2, 7)),
        lambda: layers.backpropagate_norm(compiled, hidden, gain, scales, hidden.bfloat16()),
        lambda: layers.gate(compiled, torch.zeros(8, 2).t()),
        lambda: layers.backpropagate_gate(compiled, hidden, hidden),
        lambda: layers.apply_rotary(compiled, joined, angles[:1], angles, 3),
        lambda: layers.apply_rotary(compiled, joined, angles, angles, 2),
        lambda: layers.apply_rotary(compiled, joined.transpose(1, 2), angles, angles, 3),
        lambda: layers.backpropagate_rotary(compiled, head, head, torch.zeros(2, 2, 8), angles, angles),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="a kernel cannot take"):
            call()


def count_kept(engine, rows, loss) -> int:
    """Bytes that the forward pass of an update keeps for its backward pass, weights left out."""
    weights = {parameter.data_ptr() for parameter in engine.model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            found[place] = tensor.untyped_storage().nbytes()
        return tensor

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            engine.update.forward_backward(rows, loss, 1.0)

    find_worker().submit(run).result()
    return sum(found.values())


def test_an_update_keeps_less_than_autograd_would(open_engine, make_rows, loss, monkeypatch):
    """Many tokens, so that it is what is kept of each of them."""
    load(torch.float32)
    rows = make_rows(seed=1, count=12, longest=90)
    ours = count_kept(open_engine("llama"), rows, loss)
    monkeypatch.setattr(fast_path, "find_layer_kernels", lambda dtype: None)
    assert ours < 0.65 * count_kept(open_engine("llama"), rows, loss)


def test_an_update_keeps_no_copy_of_the_weights(open_engine, make_model, make_rows, loss):
    """A few tokens, so that it would be most of what is kept."""
    load(torch.float32)
    engine = open_engine(make_model("llama"))
    assert engine.adapted.fast.learns_fused
    layer = engine.model.model.layers[0]
    assert count_kept(engine, make_rows(seed=1, count=1)[:1], loss) < 4 * count_bytes(layer)
    tokens = [3, 4]
    row = Row(tokens, [0, 1], [0.0, 0.0], [0.0, 1.0])
    assert count_kept(engine, [row], loss) < 0.2 * count_bytes(layer)


def count_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * 4 for parameter in module.parameters())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "lfm2"])
async def test_gradients_are_those_of_transformers(
    kind, dtype, frozen, threads, make_model, make_rows, open_engine, loss, monkeypatch
):
    """Parameter by parameter: with biases, head norms, convolutions; where some weights are not learned."""
    if dtype == "bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16")
    load(torch.float32)
    model = make_biased() if kind == "qwen2" else make_model(kind)
    if frozen:
        for parameter in list(model.parameters())[::3]:
            parameter.requires_grad_(False)
    engines = [open_engine(copy.deepcopy(model), precision=dtype) for _ in range(2)]
    rows = make_rows(seed=5, count=8)
    assert engines[0].adapted.fast.learns_fused
    engines[1].adapted.fast.learns_fused = False
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found, expected = [await engine.forward_backward(rows, loss) for engine in engines]
    rough = dtype == "bfloat16"
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one == pytest.approx(other, abs=0.2 if rough else 1e-4)
    pairs = zip(*(engine.model.named_parameters() for engine in engines), strict=True)
    for (name, one), (_, other) in pairs:
        assert (one.grad is None) == (other.grad is None) == (not one.requires_grad), name
        if one.grad is not None:
            assert one.grad.dtype == torch.float32
            assert (one.grad - other.grad).norm() <= (6e-2 if rough else 1e-5) * other.grad.norm(), name


def make_biased():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, vocab_size=300, pad_token_id=None, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


async def test_without_a_compiler_nothing_is_missing(
    kind, make_model, make_rows, open_engine, loss, monkeypatch
):
    """Sampling and updates by torch alone are those of the kernels."""
    load(torch.float32)
    model, rows = make_model(kind), make_rows(seed=2, count=6)
    params = SamplingParams(max_tokens=8, seed=3)
    found = []
    for compiled in (True, False):
        if not compiled:
            for module in (fast_path, fused):
                monkeypatch.setattr(module, "find_layer_kernels", lambda dtype: None)
        engine = open_engine(copy.deepcopy(model))
        assert engine.adapted.fast.fused is not None
        assert engine.adapted.fast.learns_fused == compiled
        (reply,) = await engine.sample([rows[0].tokens], params)
        outputs = await engine.forward_backward(rows, loss)
        found.append((reply, outputs, [parameter.grad for parameter in engine.model.parameters()]))
    (one, outputs, grads), (other, expected, wanted) = found
    assert one.tokens == other.tokens
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    for found, wanted_ones in zip(outputs.logprobs, expected.logprobs, strict=True):
        assert found == pytest.approx(wanted_ones, abs=1e-4)
    assert all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in zip(grads, wanted, strict=True)
    )


@pytest.mark.parametrize("when", ["before", "after"])
async def test_hooks_are_heard_in_an_update(when, make_model, make_rows, open_engine, loss):
    model, rows = make_model("llama"), make_rows(seed=3, count=4)
    seen: list[int] = []

    def watch(target) -> None:
        target.model.layers[0].mlp.register_full_backward_hook(lambda *_: seen.append(1))

    if when == "before":
        watch(model)
    engine = open_engine(model)
    if when == "after":
        watch(engine.model)
    await engine.forward_backward(rows, loss)
    assert seen


async def test_a_module_that_computes_otherwise_goes_the_long_way(make_model, make_rows, open_engine, loss):
    """The same numbers, but no gradient."""
    model = make_model("llama")
    feed = model.model.layers[0].mlp
    feed.forward = lambda hidden: type(feed).forward(feed, hidden).detach()
    engine = open_engine(model)
    await engine.forward_backward(make_rows(seed=3, count=4), loss)
    assert feed.gate_proj.weight.grad is None
