"""Norms, gates and rotations in C, forward and backward, against torch; what an update keeps of them."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from trialogue.engine import attention, kernels, layers
from trialogue.engine.layers import FEW, GatedProduct, LayerKernels, Normed, NormedProduct, Turned
from trialogue.engine.torch_engine import find_worker

NUMBERS = [torch.float32, torch.bfloat16]


def load(numbers: torch.dtype) -> LayerKernels:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    found = layers.find_layer_kernels(numbers)
    assert found is not None
    return found


def differentiate(compute: Callable[..., torch.Tensor], inputs: list[torch.Tensor], seed: int = 0):
    """What it computes, and the gradients of all inputs by a random one of the output."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    output = compute(*inputs)
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, pull)]


def turn_plainly(joined, cosine, sine, heads):
    near, value = joined.split([(joined.shape[1] + heads) // 2, (joined.shape[1] - heads) // 2], 1)
    return torch.cat([near * cosine + near.roll(near.shape[2] // 2, 2) * sine, value], 1)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [2, 16, 38, 64])
@pytest.mark.parametrize("rows", [1, 5, FEW + 9])
def test_they_compute_what_torch_does(rows, width, threads, numbers, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = load(numbers)
    chance = torch.Generator().manual_seed(width)

    def draw(*shape: int, dtype: torch.dtype = numbers) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    hidden, gain = (draw(*shape, dtype=torch.float32) for shape in ((rows, width), (width,)))
    # From nearly nothing to where a logistic function is 0 or 1.
    both = (draw(rows, 2 * width).float() * torch.logspace(-3, 2, 2 * width)).to(numbers)
    weight, bias = draw(7, width), draw(7)
    cosine, sine = (draw(rows, 1, width, dtype=torch.float32) for _ in range(2))
    joined = draw(rows, 5, width)

    def normalize(hidden, gain):
        return torch.nn.functional.rms_norm(hidden, gain.shape, gain, 1e-5)

    def gate(both):
        first, second = both.chunk(2, 1)
        return torch.nn.functional.silu(first) * second

    cases = [
        (lambda *given: Normed.apply(*given, 1e-5, compiled), normalize, [hidden, gain]),
        (
            lambda *given: NormedProduct.apply(*given, 1e-5, compiled),
            lambda hidden, gain, weight, bias: normalize(hidden, gain) @ weight.t() + bias,
            [hidden, gain, weight, bias],
        ),
        (
            lambda *given: GatedProduct.apply(*given, compiled),
            lambda both, weight, bias: gate(both) @ weight.t() + bias,
            [both, weight, bias],
        ),
        (
            lambda joined: torch.cat(Turned.apply(joined, cosine, sine, 3, compiled), 1),
            lambda joined: turn_plainly(joined, cosine, sine, 3),
            [joined],
        ),
    ]
    for ours, plain, inputs in cases:
        found = differentiate(ours, inputs)
        expected = differentiate(plain, [tensor.double() for tensor in inputs])
        for one, other, given in zip(found, expected, [None, *inputs], strict=True):
            assert one.shape == other.shape
            assert given is None or one.dtype == given.dtype
            scale = max(other.norm().item(), 1e-3)  # a width of two leaves a norm hardly any gradient
            assert (one - other).norm().item() < (1e-5 if numbers == torch.float32 else 3e-2) * scale


def test_kernels_that_compute_something_else_are_refused():
    compiled = load(torch.float32)
    assert layers.are_right(compiled)
    outputs = {
        "normalize": (2, 3),
        "backpropagate_norm": (4, 5, 6),
        "gate": (1,),
        "backpropagate_gate": (2, 3),
        "turn_apart": (3, 4, 5),
        "turn_back": (5,),
    }
    for name, places in outputs.items():
        for place in places:

            def spoiled(*arguments: int, name: str = name, place: int = place) -> int:
                getattr(compiled, name)(*arguments)
                ctypes.memset(arguments[place], 0, 8)
                return 0

            assert not layers.are_right(replace(compiled, **{name: spoiled})), (name, place)


def test_kernels_are_not_given_what_they_would_misread():
    compiled = load(torch.float32)
    hidden, gain, scales = torch.zeros(2, 8), torch.zeros(8), torch.zeros(2)
    joined, angles, head = torch.zeros(2, 5, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)
    wrong = [
        lambda: layers.normalize(compiled, hidden.half(), gain, 1e-5),
        lambda: layers.normalize(compiled, hidden, torch.zeros(9), 1e-5),
        lambda: layers.backpropagate_norm(compiled, hidden, gain, scales, torch.zeros(2, 7)),
        lambda: layers.backpropagate_norm(compiled, hidden, gain, scales, hidden.bfloat16()),
        lambda: layers.gate(compiled, torch.zeros(8, 2).t()),
        lambda: layers.backpropagate_gate(compiled, hidden, hidden),
        lambda: layers.turn_apart(compiled, joined, angles[:1], angles, 3),
        lambda: layers.turn_apart(compiled, joined, angles, angles, 2),
        lambda: layers.turn_apart(compiled, joined.transpose(1, 2), angles, angles, 3),
        lambda: layers.turn_back(compiled, head, head, torch.zeros(2, 2, 8), angles, angles),
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
    load(torch.float32)
    rows = make_rows(seed=1, count=12, longest=90)
    ours = count_kept(open_engine("llama"), rows, loss)
    monkeypatch.setattr(attention, "find_layer_kernels", lambda numbers: None)
    assert ours < 0.65 * count_kept(open_engine("llama"), rows, loss)


def test_without_a_compiler_nothing_is_missing(kind, open_engine, make_rows, loss, monkeypatch):
    rows = make_rows(seed=2, count=6)
    engines = [open_engine(kind), open_engine(kind)]
    found = find_worker().submit(engines[0].update.forward_backward, rows, loss, 1.0).result()
    for module in (attention, layers):
        monkeypatch.setattr(module, "find_layer_kernels", lambda numbers: None)
    expected = find_worker().submit(engines[1].update.forward_backward, rows, loss, 1.0).result()
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    for one, other in zip(*(engine.model.parameters() for engine in engines), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-5)


# -- what was compiled is kept -----------------------------------------------------------------------------


@pytest.fixture
def compile_counted(tmp_path, monkeypatch):
    """Compile a source with a compiler that counts what it makes, and an empty cache."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    made, script = tmp_path / "made", tmp_path / "cc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo one >> {made};; esac\nexec {compiler} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def compiled() -> int:
        assert kernels.compile_source("logits.c") is not None
        return len(made.read_text().split())

    return compiled


def test_what_was_compiled_is_kept(compile_counted, tmp_path, monkeypatch):
    assert [compile_counted(), compile_counted()] == [1, 1]
    (library,) = kernels.find_cache().iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # a process loads no path twice
    kernels.find_cache().mkdir(parents=True)
    (kernels.find_cache() / library.name).write_bytes(b"no library")
    assert [compile_counted(), compile_counted()] == [2, 2]
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, "-O2"))
    assert compile_counted() == 3


def test_a_cache_nobody_can_write_is_done_without(compile_counted, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert [compile_counted(), compile_counted()] == [1, 2]
