# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""Attention of an update on a CPU, in C (`c/tree.c`).

torch's own kernel reaches half the speed of a large matmul and must be called for every node and each of its
ancestors. Here a node's queries attend to their whole path at once. In bfloat16 inputs are rounded and sums
stay float32, on processors that multiply bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from trialogue.engine.cpu.compiled import compile_source, find_function, refuse_unreadable, require, share

WIDEST = 16  # most lanes of a vector; nodes are padded to it


@dataclass(frozen=True, slots=True)
class TreeKernels:
    """`c/tree.c` compiled for this machine."""

    attend: Callable[..., int]
    backpropagate: Callable[..., int]
    lanes: int
    block: int
    """Queries of one piece of work in the backward pass."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The nodes that each node attends to, itself last, and where each begins when padded to whole tiles."""

    starts: Tensor  # packed range of each node
    stops: Tensor
    places: Tensor
    path: Tensor  # nodes, path after path
    ends: Tensor  # where each path ends
    room: int  # tokens with padding
    lengths: list[int]

    @classmethod
    def make(cls, ranges: Sequence[tuple[int, int]], above: Sequence[Sequence[int]]) -> Paths:
        """From the nodes' packed ranges and the ancestors of each."""
        lengths = [stop - start for start, stop in ranges]
        padded = torch.tensor([length + -length % WIDEST for length in lengths])
        starts, stops = (torch.tensor(places) for places in zip(*ranges, strict=True))
        path = torch.tensor([number for node, nodes in enumerate(above) for number in (*nodes, node)])
        ends = torch.tensor([len(nodes) + 1 for nodes in above]).cumsum(0)
        return cls(starts, stops, padded.cumsum(0) - padded, path, ends, int(padded.sum()), lengths)

    def count(self, rows: int, group: int, kv_heads: int) -> int:
        """Number of pieces of `rows` queries."""
        return kv_heads * sum(-(-length * group // rows) for length in self.lengths)

    def addresses(self) -> list[int]:
        return [part.data_ptr() for part in (self.starts, self.stops, self.places, self.path, self.ends)]


def attend_paths(
    kernels: TreeKernels, query: Tensor, key: Tensor, value: Tensor, paths: Paths, scaling: float
) -> tuple[Tensor, Tensor]:
    """query [N, H, D], key and value [N, KV, D] in float32 → [N, H, D] and log-sums [N, H]."""
    refuse_unreadable(query, key, value)
    sizes = find_sizes(kernels, query, key, value, paths)
    output, sums = torch.empty_like(query), query.new_empty(query.shape[:2])
    places = [tensor.data_ptr() for tensor in (query, key, value, output, sums)] + paths.addresses()
    count = paths.count(kernels.lanes, query.shape[1] // key.shape[1], key.shape[1])
    share(lambda _, first, last: kernels.attend(*places, *sizes, scaling, first, last), count)
    return output, sums


def backpropagate_paths(
    kernels: TreeKernels, inputs: Sequence[Tensor], results: Sequence[Tensor], paths: Paths, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the `inputs` of `attend_paths`: query, key, value. `results` are its output, its log-sums,
    and the gradient of its output."""
    (query, key, value), (output, sums, grad) = inputs, results
    given = (*inputs, *results)
    refuse_unreadable(*given)
    sizes = find_sizes(kernels, query, key, value, paths)
    require(
        output.shape == grad.shape == query.shape and sums.shape == query.shape[:2], "gradients that differ"
    )
    # Pieces are ordered by head. With at most as many threads as heads, only neighbouring threads share a
    # head. So two accumulators are enough, and the sum does not depend on timing.
    threads = min(torch.get_num_threads(), key.shape[1])
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (tensor.new_zeros(min(threads, 2), *tensor.shape) for tensor in (key, value))

    def work(part: int, first: int, last: int) -> int:
        grads = (grad_query, grad_key[part % 2], grad_value[part % 2])
        places = [tensor.data_ptr() for tensor in (*given, *grads)] + paths.addresses()
        return kernels.backpropagate(*places, *sizes, scaling, first, last)

    count = paths.count(kernels.block, query.shape[1] // key.shape[1], key.shape[1])
    share(work, count, parts=threads)
    grad_key, grad_value = (tensor[0] if threads == 1 else tensor.sum(0) for tensor in (grad_key, grad_value))
    return grad_query, grad_key, grad_value


def find_sizes(
    kernels: TreeKernels, query: Tensor, key: Tensor, value: Tensor, paths: Paths
) -> tuple[int, int, int, int, int]:
    (tokens, heads, width), kv_heads = query.shape, key.shape[1]
    require(key.shape == value.shape == (tokens, kv_heads, width), "keys or values of another width")
    require(width % kernels.lanes == 0, "a width that is not a multiple of the vector")
    require(heads % kv_heads == 0, "heads that are not a multiple of the KV heads")
    require(sum(paths.lengths) == tokens, "tokens outside the nodes")
    return heads, kv_heads, width, len(paths.lengths), paths.room


def find_tree_kernels(query: Tensor, key: Tensor, value: Tensor) -> TreeKernels | None:
    """The kernels for these [N, heads, D] tensors, if they fit. A dtype that the processor cannot multiply is
    converted to float32."""
    is_narrow = query.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not is_narrow or key.shape != value.shape or not len(query):
        return None
    kernels = load_tree_kernels(is_half=True) if query.dtype == torch.bfloat16 else None
    kernels = kernels or load_tree_kernels(is_half=False)
    return kernels if kernels is not None and query.shape[2] % kernels.lanes == 0 else None


@cache
def load_tree_kernels(*, is_half: bool) -> TreeKernels | None:
    library = compile_source("tree.c", *(["-DPAIRS"] if is_half else []))
    if library is None:
        return None
    sizes = [*[ctypes.c_size_t] * 5, ctypes.c_double, *[ctypes.c_size_t] * 2]
    kernels = TreeKernels(
        find_function(library, "attend_tree", 10, *sizes),
        find_function(library, "backpropagate_tree", 14, *sizes),
        ctypes.c_size_t.in_dll(library, "lanes_of_a_vector").value,
        ctypes.c_size_t.in_dll(library, "queries_of_a_block").value,
    )
    return kernels if are_tree_kernels_right(kernels, 2e-2 if is_half else 1e-5) else None


def are_tree_kernels_right(kernels: TreeKernels, tolerance: float) -> bool:
    """Whether the kernels agree with torch, for a node with two children."""
    ranges, above = [(0, 20), (20, 27), (27, 90)], [[], [0], [0]]
    heads, kv_heads, width, count = 6, 2, 2 * kernels.lanes, 90
    chance = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(count, number, width, generator=chance) for number in (heads, kv_heads, kv_heads, heads)
    )
    visible = torch.zeros(count, count, dtype=torch.bool)
    for (start, stop), nodes in zip(ranges, above, strict=True):
        visible[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
        for node in nodes:
            visible[start:stop, slice(*ranges[node])] = True
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        batch = (tensor.transpose(0, 1)[None] for tensor in inputs)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *batch, attn_mask=visible, scale=0.2, enable_gqa=True
        )[0].transpose(0, 1)
        grads = torch.autograd.grad(expected, inputs, grad)
    paths = Paths.make(ranges, above)
    output, sums = attend_paths(kernels, query, key, value, paths, 0.2)
    found = backpropagate_paths(kernels, (query, key, value), (output, sums, grad), paths, 0.2)
    pairs = [(output, expected.detach()), *zip(found, grads, strict=True)]
    return all(bool((one - other).norm() <= tolerance * other.norm()) for one, other in pairs)
