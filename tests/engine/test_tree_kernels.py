"""Attention of an update in C, against attention with a mask in double precision."""

from __future__ import annotations

import ctypes
import platform
import random
import shutil
from dataclasses import replace

import pytest
import torch

from trialogue.engine.cpu import compiled, kernels, layers, logits, tree_kernels
from trialogue.engine.cpu.fast_path import find_fast_path
from trialogue.engine.cpu.tree_kernels import Paths, TreeKernels, attend_paths, backpropagate_paths
from trialogue.engine.tree import Tree, TreeAttention, TreePlan, grow_tree


def load(*, is_half: bool) -> TreeKernels:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    if is_half and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16")
    found = tree_kernels.load_tree_kernels(is_half=is_half)
    assert found is not None
    return found


def grow(lengths: tuple[int, ...], siblings: int, seed: int = 0) -> Tree:
    """Rows that part again and again, after so many tokens each time."""
    draw = random.Random(seed)
    rows: list[list[int]] = [[]]
    for length in lengths:
        rows = [row + [draw.randrange(1000) for _ in range(length)] for row in rows for _ in range(siblings)]
    return grow_tree(rows, shortest=1)


def attend_by_mask(tree: Tree, query, key, value, grad, scaling):
    """The same by torch, with one mask over all pairs of tokens."""
    seen = torch.zeros(len(tree.tokens), len(tree.tokens), dtype=torch.bool)
    for path in tree.paths:
        whole = torch.cat([torch.arange(start, stop) for start, stop in path])
        for place, token in enumerate(whole):
            seen[token, whole[: place + 1]] = True
    inputs = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    batch = (tensor.transpose(0, 1)[None] for tensor in inputs)
    output = torch.nn.functional.scaled_dot_product_attention(
        *batch, attn_mask=seen, scale=scaling, enable_gqa=True
    )[0].transpose(0, 1)
    return output.detach(), torch.autograd.grad(output, inputs, grad.double())


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("lengths", "siblings"), [((1,), 1), ((5,), 3), ((40, 70), 2), ((33, 1, 17), 3), ((130,), 1)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 16), (9, 3, 64), (4, 1, 32)])
def test_it_is_attention_along_paths(
    lengths, siblings, heads, kv_heads, width, threads, is_half, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = load(is_half=is_half)
    tree = grow(lengths, siblings)
    count = len(tree.tokens)
    chance = torch.Generator().manual_seed(count)
    query, key, value, grad = (
        torch.randn(count, number, width, generator=chance) for number in (heads, kv_heads, kv_heads, heads)
    )
    query *= torch.logspace(-1, 1, heads)[:, None]  # from even attention to that of a single key
    expected, grads = attend_by_mask(tree, query, key, value, grad, 0.3)
    paths = Paths.make([(node.start, node.stop) for node in tree.nodes], [node.above for node in tree.nodes])
    output, sums = attend_paths(compiled, query, key, value, paths, 0.3)
    found = backpropagate_paths(compiled, (query, key, value), (output, sums, grad), paths, 0.3)
    tolerance = 4e-2 if is_half else 1e-5
    for one, other in zip((output, *found), (expected, *grads), strict=True):
        scale = max(other.norm().item(), grad.norm().item())  # a single key has no gradient at all
        assert (one - other).norm().item() < tolerance * scale


def test_numbers_no_processor_computes_with_are_made_float32(make_model, monkeypatch):
    load(is_half=False)
    without = tree_kernels.load_tree_kernels
    monkeypatch.setattr(
        tree_kernels, "load_tree_kernels", lambda *, is_half: None if is_half else without(is_half=False)
    )
    tree = grow((20, 9), 2)
    plan = TreePlan(tree, torch.device("cpu"), find_fast_path(make_model("llama")))
    inputs = [torch.randn(heads, len(tree.tokens), 16).bfloat16() for heads in (4, 2, 2)]
    found = TreeAttention.apply(*inputs, plan, 0.25)
    token_first = [tensor.transpose(0, 1) for tensor in inputs]
    expected, _ = attend_by_mask(tree, *token_first, torch.zeros(len(tree.tokens), 4, 16), 0.25)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected, atol=2e-2)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="vectors of another kind")
def test_half_as_wide_vectors_compute_the_same(monkeypatch, tmp_path):
    """What processors without AVX-512 compile; this one can run it as well."""
    load(is_half=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native = compiled.compile_source
    narrow = lambda name, *flags: native(name, *flags, "-march=haswell")  # noqa: E731
    for module in (kernels, tree_kernels, logits, layers):
        monkeypatch.setattr(module, "compile_source", narrow)
    found = kernels.load_kernels.__wrapped__(is_half=False)
    assert found is not None
    assert found.lanes == 8
    assert tree_kernels.load_tree_kernels.__wrapped__(is_half=False).lanes == 8
    assert tree_kernels.load_tree_kernels.__wrapped__(is_half=True) is None  # no such arithmetic
    assert logits.load_kernel.__wrapped__() is not None
    for numbers in (torch.float32, torch.bfloat16):
        assert layers.find_layer_kernels.__wrapped__(numbers) is not None


def test_wider_numbers_are_left_to_torch():
    load(is_half=False)
    query, key = torch.zeros(5, 4, 16), torch.zeros(5, 2, 16)
    assert tree_kernels.find_tree_kernels(query, key, key) is not None
    assert tree_kernels.find_tree_kernels(query.double(), key.double(), key.double()) is None


def test_kernels_that_compute_something_else_are_refused():
    compiled = load(is_half=False)
    assert tree_kernels.are_tree_kernels_right(compiled, 1e-5)

    def spoil(name: str, output: int):
        def kernel(*arguments: int) -> int:
            getattr(compiled, name)(*arguments)
            ctypes.memset(arguments[output] + 8000, 0, 400)
            return 0

        return replace(compiled, **{name: kernel})

    assert not tree_kernels.are_tree_kernels_right(spoil("attend", 3), 1e-5)
    for gradient in (6, 7, 8):
        assert not tree_kernels.are_tree_kernels_right(spoil("backpropagate", gradient), 1e-5)


def test_kernels_are_not_given_what_they_would_misread():
    compiled = load(is_half=False)
    lanes = compiled.lanes
    paths = Paths.make([(0, 3), (3, 5)], [[], [0]])
    query, key = torch.zeros(5, 4, lanes), torch.zeros(5, 2, lanes)
    attend_paths(compiled, query, key, key, paths, 1.0)
    for wrong in (
        (query.bfloat16(), key, key),
        (torch.zeros(4, 5, lanes).transpose(0, 1), key, key),
        (query, key, torch.zeros(5, 2, 2 * lanes)),
        (torch.zeros(5, 4, 3), torch.zeros(5, 2, 3), torch.zeros(5, 2, 3)),
        (torch.zeros(5, 3, lanes), key, key),
        (torch.zeros(6, 4, lanes), torch.zeros(6, 2, lanes), torch.zeros(6, 2, lanes)),
    ):
        with pytest.raises(ValueError, match="a kernel cannot take"):
            attend_paths(compiled, *wrong, paths, 1.0)
