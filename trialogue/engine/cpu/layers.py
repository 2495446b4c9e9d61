# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportIncompatibleMethodOverride=false
"""What lies between the products of a layer on a CPU: norms, gates, rotations, in one pass each (`layers.c`).

For the few rows of a decoding step torch takes longer to begin such an operation than to do it. For the many
of an update it makes twenty passes over memory, and each keeps its inputs for the backward pass; here
gradients are written out. Hidden states, both halves of the feed-forward layer, and what attention keeps are
held on to; norms, and what passes the gate, are made once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trialogue.engine.cpu.compiled import compile_source, find_function, refuse_unreadable, require, share
from trialogue.engine.cpu.linear import join, multiply_many

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


class Normed(torch.autograd.Function):
    """RMS norm of hidden states [N, width], which are float32, in the numbers that products take."""

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
    """The norm of hidden states [N, in], times matrices [out, in] side by side → [N, the sum of outputs].
    Neither the norm nor what was made of the matrices is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        eps: float,
        kernels: LayerKernels,
        *weights: Tensor,
    ) -> Tensor:
        normed, scales = normalize(kernels, hidden, gain, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(hidden, gain, scales, *weights)
        return multiply_many(normed, to_matrix(weights, kernels.numbers), to_numbers(bias, kernels.numbers))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gain, scales, *weights = ctx.saved_tensors
        grad, numbers, wanted = grad.contiguous(), ctx.kernels.numbers, ctx.needs_input_grad
        pull = multiply_many(grad, to_matrix(weights, numbers).t())
        normed, grad_hidden, grad_gain = backpropagate_norm(ctx.kernels, hidden, gain, scales, pull)
        grad_bias = grad.sum(0).float() if wanted[2] else None
        grads = (
            (grad.t() @ normed).float().split([len(weight) for weight in weights]) if any(wanted[5:]) else ()
        )
        return grad_hidden, grad_gain, grad_bias, None, None, *(grads or [None] * len(weights))


class GatedProduct(torch.autograd.Function):
    """Both halves of a feed-forward layer [N, 2 * in], gated, times a matrix [out, in] → [N, out]. What the
    gate lets through is not kept."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, bias: Tensor | None, kernels: LayerKernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(both, weight)
        numbers = kernels.numbers
        return multiply_many(gate(kernels, both), weight.to(numbers), to_numbers(bias, numbers))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, weight = ctx.saved_tensors
        grad, wanted = grad.contiguous(), ctx.needs_input_grad
        pull = multiply_many(grad, weight.to(ctx.kernels.numbers).t())
        gated, grad_both = backpropagate_gate(ctx.kernels, both, pull)
        grad_weight = (grad.t() @ gated).float() if wanted[1] else None
        return grad_both, grad_weight, grad.sum(0).float() if wanted[2] else None, None


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


def to_matrix(weights: Sequence[Tensor], numbers: torch.dtype) -> Tensor:
    return join([weight.to(numbers) for weight in weights])


def to_numbers(bias: Tensor | None, numbers: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(numbers)


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
    refuse_unreadable(pull, numbers=kernels.numbers)
    (rows, width), threads = hidden.shape, torch.get_num_threads()
    require(pull.shape == hidden.shape, "gradients that differ")
    output, grad, gained = torch.empty_like(pull), torch.empty_like(hidden), hidden.new_zeros(threads, width)
    places = [tensor.data_ptr() for tensor in (hidden, gain, scales, pull, output, grad)]

    def work(part: int, first: int, last: int) -> int:
        return kernels.backpropagate_norm(*places, gained[part].data_ptr(), width, first, last)

    share(work, rows, parts=1 if rows <= FEW else threads)
    return output, grad, gained.sum(0)


def gate(kernels: LayerKernels, both: Tensor) -> Tensor:
    refuse_unreadable(both, numbers=kernels.numbers)
    rows, width = both.shape[0], both.shape[1] // 2
    output = both.new_empty(rows, width)
    places = (both.data_ptr(), output.data_ptr())
    spread(lambda _, first, last: kernels.gate(*places, width, first, last), rows)
    return output


def backpropagate_gate(kernels: LayerKernels, both: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """What the gate let through once more, and the gradient of both halves by that of it."""
    refuse_unreadable(both, pull, numbers=kernels.numbers)
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
    refuse_unreadable(joined, numbers=kernels.numbers)
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
    refuse_unreadable(query, key, value, numbers=kernels.numbers)
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
    share(work, rows, parts=1 if rows <= FEW else None)


@cache
def find_layer_kernels(numbers: torch.dtype) -> LayerKernels | None:
    """The kernels for products of such numbers."""
    if numbers not in (torch.float32, torch.bfloat16):
        return None
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

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*shape, generator=chance) * 3).to(dtype).requires_grad_()

    with torch.inference_mode(False), torch.enable_grad():
        hidden, gain, weight = draw(rows, width), draw(width), draw(width, width)
        cosine, sine = (draw(rows, 1, width).detach() for _ in range(2))
        both, joined = (
            draw(rows, 2 * width, dtype=numbers),
            draw(rows, heads + 2 * kept, width, dtype=numbers),
        )
        first, second = both.float().chunk(2, 1)
        near, value = joined.float().split([heads + kept, kept], 1)
        near = near * cosine + near.roll(width // 2, 2) * sine
        normed = nn.functional.rms_norm(hidden, gain.shape, gain, 1e-5)
        cases = [
            (Normed.apply(hidden, gain, 1e-5, kernels), normed, (hidden, gain)),
            (
                NormedProduct.apply(hidden, gain, None, 1e-5, kernels, weight),
                normed @ weight.t(),
                (hidden, gain, weight),
            ),
            (
                GatedProduct.apply(both, weight, None, kernels),
                (nn.functional.silu(first) * second) @ weight.t(),
                (both, weight),
            ),
            (
                torch.cat(cast("tuple[Tensor, ...]", Turned.apply(joined, cosine, sine, heads, kernels)), 1),
                torch.cat([near, value], 1),
                (joined,),
            ),
        ]
        for found, expected, inputs in cases:
            pull = torch.randn(expected.shape, generator=chance)
            grads = torch.autograd.grad(cast(Tensor, found), inputs, pull.to(numbers))
            wanted = torch.autograd.grad(expected, inputs, pull, retain_graph=True)
            for one, other in zip((cast(Tensor, found), *grads), (expected, *wanted), strict=True):
                apart = (one - other).detach().norm() / other.detach().norm()
                if not apart <= (1e-5 if numbers == torch.float32 else 2e-2):  # nor what is no number
                    return False
    return True
