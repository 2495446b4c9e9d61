# pyright: reportUnknownMemberType=false
"""What a decoding step on a CPU needs most, in C: `c/decode.c`, products and attention of a few rows.

Matrix libraries are made for many rows: for a handful they bring weights, keys and values from memory at
half the speed at which it delivers. Where nothing can be compiled, or what was computes something else,
callers do without. In bfloat16 there is the product alone, on processors that multiply such numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from trialogue.engine.compiled import compile_source, find_function, refuse_unreadable, require, share

FEW_ROWS = 32
"""Rows up to which a large product in float32 is done here."""
HALF_LANES = 16
"""Numbers in a vector of the processors that multiply bfloat16."""
THREADS = 2
"""Among more than these handing out the work takes longer than it saves."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """`c/decode.c` as compiled for this machine: functions that take addresses and sizes and return 0."""

    product: Callable[..., int]
    attend: Callable[..., int]
    lanes: int
    """Numbers in a vector: what widths must be multiples of."""


def find_kernels() -> Kernels | None:
    """The kernels, where they are of use."""
    return load_kernels() if torch.get_num_threads() <= THREADS else None


def to_panels(weight: Tensor, lanes: int) -> Tensor:
    """[out, in] → [out / lanes, in, lanes]"""
    return weight.view(-1, lanes, weight.shape[1]).transpose(1, 2).contiguous()


def to_half_panels(weight: Tensor) -> Tensor:
    """[out, in] → [out / lanes, in / 2, lanes, 2] in bfloat16, with zeros where outputs are left over"""
    padded = torch.nn.functional.pad(weight.bfloat16(), (0, 0, 0, -len(weight) % HALF_LANES))
    return padded.view(-1, HALF_LANES, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def turn_keys(keys: Tensor, lanes: int) -> Tensor:
    """[KV, T, D] → [KV, T / lanes, D, lanes], with zeros where T is no multiple of lanes."""
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[1] % lanes))
    return padded.view(len(keys), -1, lanes, keys.shape[2]).transpose(2, 3).contiguous()


def multiply(kernels: Kernels, inputs: Tensor, panels: Tensor) -> Tensor:
    """inputs [N, in] times a matrix in panels [out / lanes, in, lanes] → [N, out]"""
    rows, width = inputs.shape
    count, lanes = len(panels), kernels.lanes
    refuse_unreadable(inputs, panels)
    require(panels.shape[1:] == (width, lanes), "panels of another width")
    output = inputs.new_empty(rows, count * lanes)
    places = (inputs.data_ptr(), panels.data_ptr(), output.data_ptr())
    sizes = (rows, width, count * lanes)
    share(lambda _, first, last: kernels.product(*places, *sizes, first, last), count, lanes)
    return output


def multiply_halves(product: Callable[..., int], inputs: Tensor, panels: Tensor) -> Tensor:
    """inputs [N, in] times a matrix in panels [out / lanes, in / 2, lanes, 2] → [N, out] in float32."""
    rows, width = inputs.shape
    refuse_unreadable(inputs)
    require(panels.dtype == torch.bfloat16 and panels.is_contiguous(), "panels that lie otherwise")
    require(panels.shape[1:] == (width // 2, HALF_LANES, 2) and width % 2 == 0, "panels of another width")
    output = inputs.new_empty(rows, len(panels) * HALF_LANES)
    places = (inputs.data_ptr(), panels.data_ptr(), output.data_ptr())
    sizes = (rows, width // 2, output.shape[1])
    threads = THREADS if rows <= FEW_ROWS else None
    share(lambda _, first, last: product(*places, *sizes, first, last), len(panels), HALF_LANES, threads)
    return output


def attend_rows(
    kernels: Kernels,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    turned: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """Scaled queries [N, H, D] of one new token in each row → [N, H, D]. Row i looks at the first lengths[i]
    places of slots[i] in keys and values [slots, KV, capacity, D], and at a prefix, keys turned round."""
    (rows, heads, width), (_, kept, capacity, _) = queries.shape, keys.shape
    known = 0 if shared is None else shared.shape[1]
    refuse_unreadable(queries, keys, values)
    require(keys.shape == values.shape and keys.shape[3] == width, "keys or values of another width")
    require(width % kernels.lanes == 0, "a width that is no whole number of vectors")
    require(heads % kept == 0, "heads that cannot share keys evenly")
    require(len(slots) == len(lengths) == rows, "rows without a slot")
    require((turned is None) == (shared is None), "half a prefix")
    if turned is not None and shared is not None:
        refuse_unreadable(turned, shared)
        require(shared.shape == (kept, known, width), "a prefix of another width")
        panels = (kept, -(-known // kernels.lanes), width, kernels.lanes)
        require(turned.shape == panels, "keys not turned round")
    output = torch.empty_like(queries)
    places = [0 if tensor is None else tensor.data_ptr() for tensor in (queries, turned, shared)]
    places += [tensor.data_ptr() for tensor in (keys, values, slots, lengths, output)]
    sizes = (heads, kept, width, known, capacity)
    share(lambda _, first, last: kernels.attend(*places, *sizes, first, last), rows)
    return output


def refuse_outside(slots: Tensor, lengths: Tensor, held: int, capacity: int) -> None:
    """What rows look at must be there. Asked once for all layers of a step."""
    for places in (slots, lengths):
        require(places.dtype == torch.int64 and places.is_contiguous(), "places that lie otherwise")
    require(bool(((slots >= 0) & (slots < held)).all()), "slots that are not there")
    require(bool(((lengths > 0) & (lengths <= capacity)).all()), "lengths that no slot has")


@cache
def load_kernels() -> Kernels | None:
    library = compile_source("decode.c")
    if library is None:
        return None
    kernels = Kernels(
        find_function(library, "product", 3, *[ctypes.c_size_t] * 5),
        find_function(library, "attend", 8, *[ctypes.c_size_t] * 7),
        ctypes.c_size_t.in_dll(library, "lanes_of_a_vector").value,
    )
    return kernels if are_right(kernels) else None


@cache
def load_half_product() -> Callable[..., int] | None:
    """The product of bfloat16 numbers, where the processor has it; the width of its vectors is HALF_LANES."""
    library = compile_source("decode.c", "-DPAIRS")
    if library is None:
        return None
    product = find_function(library, "product", 3, *[ctypes.c_size_t] * 5)
    is_fit = ctypes.c_size_t.in_dll(library, "lanes_of_a_vector").value == HALF_LANES
    return product if is_fit and is_right(product) else None


def is_right(product: Callable[..., int]) -> bool:
    """Whether it computes what torch does of the same rounded numbers."""
    weight = torch.arange(HALF_LANES * 192.0).cos().view(-1, 64)
    for rows in range(1, 2 * HALF_LANES + 1):
        inputs = torch.arange(rows * 64.0).sin().view(-1, 64)
        expected = inputs.bfloat16().float() @ weight.bfloat16().float().T
        if not torch.allclose(multiply_halves(product, inputs, to_half_panels(weight)), expected, atol=1e-4):
            return False
    return True


def are_right(kernels: Kernels) -> bool:
    """Whether they compute what torch does."""
    lanes = kernels.lanes
    weight = torch.arange(lanes * 192.0).cos().view(-1, 64)
    for rows in range(1, FEW_ROWS + 1):  # each height of a tile is code of its own
        inputs = torch.arange(rows * 64.0).sin().view(-1, 64)
        product = multiply(kernels, inputs, to_panels(weight, lanes))
        if not torch.allclose(product, inputs @ weight.T, atol=1e-4):
            return False
    rows, heads, kept, width, known, own = 3, 4, 2, 2 * lanes, 5, 7
    queries, keys, values = (
        torch.arange(rows * count * width * 1.0).add(offset).sin().view(rows, -1, width)
        for offset, count in ((0, heads), (1, kept * own), (2, kept * own))
    )
    keys, values = (tensor.view(rows, kept, own, width) for tensor in (keys, values))
    shared = values[0, :, :known].contiguous().cos()
    slots, lengths = torch.tensor([2, 0, 1]), torch.tensor([7, 1, 4])
    found = attend_rows(kernels, queries, keys, values, slots, lengths, turn_keys(shared, lanes), shared)
    for row in range(rows):
        own_keys, own_values = (tensor[slots[row], :, : lengths[row]] for tensor in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries[row][None, :, None],
            torch.cat([shared, own_keys], 1)[None],
            torch.cat([shared, own_values], 1)[None],
            scale=1.0,
            enable_gqa=True,
        )
        if not torch.allclose(found[row], expected[0, :, 0], atol=1e-4):
            return False
    return True
