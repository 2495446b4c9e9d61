# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""What lies between the products of a layer, for the sampler's shorter way: norms, gates, rotations.

For a few rows torch takes longer to begin such an operation than to do it; there `c/between.c` does each at
once, where it can be compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from trialogue.engine.kernels import compile_source, find_function, refuse_unreadable, require

FEW = 256
"""Rows up to which one thread does it at once."""


@dataclass(frozen=True, slots=True)
class Between:
    """`c/between.c` as compiled for this machine."""

    normalize: Callable[..., int]
    gate: Callable[..., int]
    rotate: Callable[..., int]


def find_between(rows: int) -> Between | None:
    """The kernels, where they are of use."""
    return load_between() if rows <= FEW else None


def normalize(inputs: Tensor, weight: Tensor, eps: float, kernels: Between | None) -> Tensor:
    """RMS norm over the last dimension: [..., width] → [..., width]"""
    if kernels is None:
        return nn.functional.rms_norm(inputs, weight.shape, weight, eps)
    inputs, width = inputs.contiguous(), inputs.shape[-1]
    refuse_unreadable(inputs, weight)
    require(weight.shape == (width,), "a weight of another width")
    output = torch.empty_like(inputs)
    places = (inputs.data_ptr(), weight.data_ptr(), output.data_ptr())
    kernels.normalize(*places, inputs.numel() // width, width, eps)
    return output


def gate(both: Tensor, kernels: Between | None) -> Tensor:
    """Both halves of a feed-forward layer [N, 2 * width] → silu of the first times the second [N, width]"""
    rows, width = both.shape[0], both.shape[1] // 2
    if kernels is None:
        first, second = both.chunk(2, 1)
        return nn.functional.silu(first).mul_(second)
    both = both.contiguous()
    refuse_unreadable(both)
    output = both.new_empty(rows, width)
    kernels.gate(both.data_ptr(), output.data_ptr(), rows, width)
    return output


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor, kernels: Between | None) -> Tensor:
    """heads [N, H, width], of which each row lies whole, by its angles [N, 1, width] → [N, H, width]. That is
    x * cos + (x with its halves exchanged) * sin, of which the first half is negated."""
    rows, count, width = heads.shape
    if kernels is None:
        return (heads * cosine).addcmul_(heads.roll(width // 2, 2), sine)
    cosine, sine = cosine.contiguous(), sine.contiguous()
    refuse_unreadable(cosine, sine)
    require(cosine.shape == sine.shape == (rows, 1, width) and width % 2 == 0, "angles of another width")
    require(heads.dtype == torch.float32 and heads.stride()[1:] == (width, 1), "heads that lie otherwise")
    output = heads.new_empty(heads.shape)
    places = [tensor.data_ptr() for tensor in (heads, cosine, sine, output)]
    kernels.rotate(*places, rows, heads.stride(0), count, width)
    return output


@cache
def load_between() -> Between | None:
    library = compile_source("between.c")
    if library is None:
        return None
    size = ctypes.c_size_t
    kernels = Between(
        find_function(library, "normalize", 3, size, size, ctypes.c_double),
        find_function(library, "gate", 2, size, size),
        find_function(library, "rotate", 4, size, size, size, size),
    )
    return kernels if are_right(kernels) else None


def are_right(kernels: Between) -> bool:
    """Whether they compute what torch does."""
    rows, heads, width = 3, 5, 38  # a width that leaves some numbers over for half a vector
    inputs = torch.arange(rows * heads * width * 1.0).mul(7).sin().mul(9).view(rows, heads, width)
    weight = torch.arange(width * 1.0).cos()
    cosine, sine = (inputs[:, :1] + offset for offset in (1, 2))
    flat = inputs[:, :4].reshape(rows, -1)
    found, expected = (
        (normalize(inputs, weight, 1e-5, how), gate(flat, how), rotate(inputs[:, :4], cosine, sine, how))
        for how in (kernels, None)
    )
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)
