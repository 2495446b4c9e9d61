# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportIncompatibleMethodOverride=false
"""What lies between the products of a layer on a CPU: norms, gates, rotations, in one pass each (`layers.c`).

For the few rows of a decoding step torch takes longer to begin such an operation than to do it. For the many
of an update it makes twenty passes over memory, and each keeps its inputs for the backward pass; here
gradients are written out, and hidden states, both halves of the feed-forward layer, queries, keys and values
are all that is kept: the rest is made once more from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trialogue.engine.kernels import compile_source, find_function, refuse_unreadable, require, share
from trialogue.engine.linear import multiply_many

FEW = 256
"""Rows up to which one thread does it at once."""


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """`c/layers.c` as compiled for this machine."""

    normalize: Callable[..., int]
    backpropagate_norm: Callable[..., int]
    gate: Callable[..., int]
    backpropagate_gate: Callable[..., int]
    turn_apart: Callable[..., int]
    turn_back: Callable[..., int]
    numbers: torch.dtype
    """What products give and take."""

    def check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            require(tensor.dtype == self.numbers and tensor.is_contiguous(), "numbers that lie otherwise")


class Normed(torch.autograd.Function):
    """RMS norm of hidden states [N, width] in float32, as products take it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gain: Tensor, eps: float, kernels: LayerKernels) -> Tensor:
        output, scales = normalize(kernels, hidden, gain, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(hidden, gain, scales)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gain, scales = ctx.saved_tensors
        _, grad_hidden, grad_gain = backpropagate_norm(ctx.kernels, hidden, gain, scales, grad.contiguous())
        return grad_hidden, grad_gain, None, None


class NormedProduct(torch.autograd.Function):
    """The norm of hidden states [N, in], times a matrix [out, in] → [N, out]. The norm is not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        gain: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        kernels: LayerKernels,
    ) -> Tensor:
        normed, scales = normalize(kernels, hidden, gain, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(hidden, gain, scales, weight)
        return multiply_many(normed, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gain, scales, weight = ctx.saved_tensors
        grad = grad.contiguous()
        pull = multiply_many(grad, weight.t())
        normed, grad_hidden, grad_gain = backpropagate_norm(ctx.kernels, hidden, gain, scales, pull)
        wanted = ctx.needs_input_grad
        grad_weight = grad.t() @ normed if wanted[2] else None
        return grad_hidden, grad_gain, grad_weight, grad.sum(0) if wanted[3] else None, None, None


class GatedProduct(torch.autograd.Function):
    """Both halves of a feed-forward layer [N, 2 * in], gated, times a matrix [out, in] → [N, out]. What the
    gate lets through is not kept."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, bias: Tensor | None, kernels: LayerKernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(both, weight)
        return multiply_many(gate(kernels, both), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, weight = ctx.saved_tensors
        grad = grad.contiguous()
        gated, grad_both = backpropagate_gate(ctx.kernels, both, multiply_many(grad, weight.t()))
        wanted = ctx.needs_input_grad
        grad_weight = grad.t() @ gated if wanted[1] else None
        return grad_both, grad_weight, grad.sum(0) if wanted[2] else None, None


class Turned(torch.autograd.Function):
    """Queries, keys and values side by side [N, heads + 2 * kept, width] → apart, [N, heads, width] and twice
    [N, kept, width]; queries and keys are turned by their angles [N, 1, width]."""

    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, cosine: Tensor, sine: Tensor, heads: int, kernels: LayerKernels
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.kernels = kernels
        ctx.save_for_backward(cosine, sine)
        return turn_apart(kernels, joined, cosine, sine, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (grad.contiguous() for grad in grads)
        return turn_back(ctx.kernels, query, key, value, *ctx.saved_tensors), None, None, None, None


def normalize(kernels: LayerKernels, hidden: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm over the last dimension, and what each row was multiplied by."""
    refuse_unreadable(hidden, gain)
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    require(gain.shape == (width,), "a weight of another width")
    output, scales = torch.empty_like(hidden, dtype=kernels.numbers), hidden.new_empty(rows)
    places = [tensor.data_ptr() for tensor in (hidden, gain, output, scales)]
    spread(lambda _, first, last: kernels.normalize(*places, width, eps, first, last), rows)
    return output, scales


def backpropagate_norm(
    kernels: LayerKernels, hidden: Tensor, gain: Tensor, scales: Tensor, pull: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm once more, and gradients of hidden states and gain by that of the norm."""
    refuse_unreadable(hidden, gain, scales)
    kernels.check(pull)
    (rows, width), threads = hidden.shape, torch.get_num_threads()
    require(pull.shape == hidden.shape, "gradients that differ")
    output, grad, gained = torch.empty_like(pull), torch.empty_like(hidden), hidden.new_zeros(threads, width)
    places = [tensor.data_ptr() for tensor in (hidden, gain, scales, pull, output, grad)]

    def work(part: int, first: int, last: int) -> int:
        return kernels.backpropagate_norm(*places, gained[part].data_ptr(), width, first, last)

    spread(work, rows)
    return output, grad, gained.sum(0)


def gate(kernels: LayerKernels, both: Tensor) -> Tensor:
    kernels.check(both)
    rows, width = both.shape[0], both.shape[1] // 2
    output = both.new_empty(rows, width)
    places = (both.data_ptr(), output.data_ptr())
    spread(lambda _, first, last: kernels.gate(*places, width, first, last), rows)
    return output


def backpropagate_gate(kernels: LayerKernels, both: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """What the gate let through once more, and the gradient of both halves by that of it."""
    kernels.check(both, pull)
    rows, width = pull.shape
    require(both.shape == (rows, 2 * width), "gradients that differ")
    output, grad = torch.empty_like(pull), torch.empty_like(both)
    places = [tensor.data_ptr() for tensor in (both, pull, output, grad)]
    spread(lambda _, first, last: kernels.backpropagate_gate(*places, width, first, last), rows)
    return output, grad


def turn_apart(
    kernels: LayerKernels, joined: Tensor, cosine: Tensor, sine: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Turned`. To turn is x * cos + (x with its halves exchanged) * sin, of which the first half is
    negated."""
    kernels.check(joined)
    rows, count, width = joined.shape
    kept = (count - heads) // 2
    require(count == heads + 2 * kept, "keys without values")
    check_angles(rows, width, cosine, sine)
    query, key, value = (joined.new_empty(rows, number, width) for number in (heads, kept, kept))
    places = [tensor.data_ptr() for tensor in (joined, cosine, sine, query, key, value)]
    spread(lambda _, first, last: kernels.turn_apart(*places, heads, kept, width, first, last), rows)
    return query, key, value


def turn_back(
    kernels: LayerKernels, query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor
) -> Tensor:
    """The gradient of what was joined by those of the three."""
    kernels.check(query, key, value)
    (rows, heads, width), kept = query.shape, key.shape[1]
    require(key.shape == value.shape == (rows, kept, width), "gradients that differ")
    check_angles(rows, width, cosine, sine)
    joined = query.new_empty(rows, heads + 2 * kept, width)
    places = [tensor.data_ptr() for tensor in (query, key, value, cosine, sine, joined)]
    spread(lambda _, first, last: kernels.turn_back(*places, heads, kept, width, first, last), rows)
    return joined


def check_angles(rows: int, width: int, cosine: Tensor, sine: Tensor) -> None:
    refuse_unreadable(cosine, sine)
    require(cosine.shape == sine.shape == (rows, 1, width) and width % 2 == 0, "angles of another width")


def spread(work: Callable[[int, int, int], int], rows: int) -> None:
    share(work, rows, most=1 if rows <= FEW else None)


def find_layer_kernels(numbers: torch.dtype) -> LayerKernels | None:
    """The kernels for products of such numbers."""
    return load_layer_kernels(numbers) if numbers in (torch.float32, torch.bfloat16) else None


@cache
def load_layer_kernels(numbers: torch.dtype) -> LayerKernels | None:
    library = compile_source("layers.c", *(["-DHALVES"] if numbers == torch.bfloat16 else []))
    if library is None:
        return None
    size = ctypes.c_size_t
    kernels = LayerKernels(
        find_function(library, "normalize", 4, size, ctypes.c_double, size, size),
        find_function(library, "backpropagate_norm", 7, size, size, size),
        find_function(library, "gate", 2, size, size, size),
        find_function(library, "backpropagate_gate", 4, size, size, size),
        find_function(library, "turn_apart", 6, *[size] * 5),
        find_function(library, "turn_back", 6, *[size] * 5),
        numbers,
    )
    return kernels if are_right(kernels) else None


def are_right(kernels: LayerKernels) -> bool:
    """Whether they compute what torch does, with and without numbers left over for half a vector."""
    return all(is_right_for(kernels, width) for width in (32, 38))


def is_right_for(kernels: LayerKernels, width: int) -> bool:
    rows, heads, kept, numbers = 5, 2, 1, kernels.numbers
    chance = torch.Generator().manual_seed(width)

    def draw(*shape: int, dtype: torch.dtype = numbers) -> Tensor:
        return (torch.randn(*shape, generator=chance) * 3).to(dtype).requires_grad_()

    with torch.inference_mode(False), torch.enable_grad():
        hidden, gain = draw(rows, width, dtype=torch.float32), draw(width, dtype=torch.float32)
        weight, both, joined = draw(width, width), draw(rows, 2 * width), draw(rows, 4, width)
        cosine, sine = (draw(rows, 1, width, dtype=torch.float32).detach() for _ in range(2))
        wide_weight, wide_both, wide_joined = (tensor.float() for tensor in (weight, both, joined))
        first, second = wide_both.chunk(2, 1)
        near, value = wide_joined.split([heads + kept, kept], 1)
        near = near * cosine + near.roll(width // 2, 2) * sine
        normed = nn.functional.rms_norm(hidden, gain.shape, gain, 1e-5)
        pairs = [
            (Normed.apply(hidden, gain, 1e-5, kernels), normed, (hidden, gain)),
            (
                NormedProduct.apply(hidden, gain, weight, None, 1e-5, kernels),
                normed @ wide_weight.t(),
                (hidden, gain, weight),
            ),
            (
                GatedProduct.apply(both, weight, None, kernels),
                (nn.functional.silu(first) * second) @ wide_weight.t(),
                (both, weight),
            ),
            (
                torch.cat(cast("tuple[Tensor, ...]", Turned.apply(joined, cosine, sine, heads, kernels)), 1),
                torch.cat([near, value], 1),
                (joined,),
            ),
        ]
        for found, expected, inputs in pairs:
            pull = torch.randn(expected.shape, generator=chance)
            grads = torch.autograd.grad(cast(Tensor, found), inputs, pull.to(numbers))
            wanted = torch.autograd.grad(expected, inputs, pull, retain_graph=True)
            both_ways = zip((cast(Tensor, found), *grads), (expected, *wanted), strict=True)
            apart = [(one - other).detach().norm() / other.detach().norm() for one, other in both_ways]
            if not max(apart) <= (1e-5 if numbers == torch.float32 else 2e-2):
                return False
    return True
