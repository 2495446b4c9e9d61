# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportIncompatibleMethodOverride=false
"""Operations between the matmuls of a layer on a CPU: norms, gates and rotary embeddings (`c/layers.c`).

For the few rows of a decode step torch takes longer to start such an operation than to compute it. For an
update torch makes twenty passes over memory and saves the inputs of each. Here each operation is one pass
with a gradient of its own. Saved for the backward pass are hidden states, gate and up projections, and what
attention saves; norms and gated values are computed again.
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
from trialogue.engine.cpu.linear import concatenate, multiply_many

ONE_THREAD_ROWS = 256
"""Most rows that one thread computes without sharing."""


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """`c/layers.c` compiled for this machine."""

    apply_norm: Callable[..., int]
    backpropagate_norm: Callable[..., int]
    gate: Callable[..., int]
    backpropagate_gate: Callable[..., int]
    apply_rotary: Callable[..., int]
    backpropagate_rotary: Callable[..., int]
    dtype: torch.dtype
    """Of the inputs and outputs of matmuls."""


class RmsNorm(torch.autograd.Function):
    """RMS norm of float32 hidden states [N, width], in the dtype of matmuls."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gain: Tensor, eps: float, kernels: LayerKernels) -> Tensor:
        output, scales = apply_norm(kernels, hidden, gain, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(hidden, gain, scales)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gain, scales = ctx.saved_tensors
        _, grad_hidden, grad_gain = backpropagate_norm(ctx.kernels, hidden, gain, scales, grad.contiguous())
        return grad_hidden, grad_gain, None, None


class NormLinear(torch.autograd.Function):
    """RMS norm of hidden states [N, in], times matrices [out, in] side by side → [N, sum of outputs]. Saves
    neither the norm nor the joined matrix."""

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
        normed, scales = apply_norm(kernels, hidden, gain, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(hidden, gain, scales, *weights)
        return multiply_many(normed, to_matrix(weights, kernels.dtype), to_dtype(bias, kernels.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gain, scales, *weights = ctx.saved_tensors
        grad, dtype, wanted = grad.contiguous(), ctx.kernels.dtype, ctx.needs_input_grad
        grad_normed = multiply_many(grad, to_matrix(weights, dtype).t())
        normed, grad_hidden, grad_gain = backpropagate_norm(ctx.kernels, hidden, gain, scales, grad_normed)
        grad_bias = grad.sum(0).float() if wanted[2] else None
        grads = (
            (grad.t() @ normed).float().split([len(weight) for weight in weights]) if any(wanted[5:]) else ()
        )
        return grad_hidden, grad_gain, grad_bias, None, None, *(grads or [None] * len(weights))


class GatedLinear(torch.autograd.Function):
    """silu(gate) * up [N, 2 * in], times a matrix [out, in] → [N, out]. Does not save the gated values."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None, kernels: LayerKernels
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate_up, weight)
        dtype = kernels.dtype
        return multiply_many(gate(kernels, gate_up), weight.to(dtype), to_dtype(bias, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        grad, wanted = grad.contiguous(), ctx.needs_input_grad
        grad_gated = multiply_many(grad, weight.to(ctx.kernels.dtype).t())
        gated, grad_gate_up = backpropagate_gate(ctx.kernels, gate_up, grad_gated)
        grad_weight = (grad.t() @ gated).float() if wanted[1] else None
        return grad_gate_up, grad_weight, grad.sum(0).float() if wanted[2] else None, None


class Rotary(torch.autograd.Function):
    """Split qkv [N, heads + 2 * kv_heads, width] into queries [N, heads, width], keys and values [N,
    kv_heads, width], with rotary embeddings of angles [N, 1, width] applied to queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int, kernels: LayerKernels
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.kernels = kernels
        ctx.save_for_backward(cosine, sine)
        return apply_rotary(kernels, qkv, cosine, sine, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (grad.contiguous() for grad in grads)
        return (
            backpropagate_rotary(ctx.kernels, query, key, value, *ctx.saved_tensors),
            None,
            None,
            None,
            None,
        )


def to_matrix(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return concatenate([weight.to(dtype) for weight in weights])


def to_dtype(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def apply_norm(kernels: LayerKernels, hidden: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMS norm over the last dimension, and the factor of each row."""
    refuse_unreadable(hidden, gain)
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    require(gain.shape == (width,), "a weight of another width")
    output, scales = torch.empty_like(hidden, dtype=kernels.dtype), hidden.new_empty(rows)
    places = [tensor.data_ptr() for tensor in (hidden, gain, output, scales)]
    share_rows(lambda _, first, last: kernels.apply_norm(*places, width, eps, first, last), rows)
    return output, scales


def backpropagate_norm(
    kernels: LayerKernels, hidden: Tensor, gain: Tensor, scales: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, computed again, and the gradients of hidden states and gain."""
    refuse_unreadable(hidden, gain, scales)
    refuse_unreadable(grad_output, dtype=kernels.dtype)
    (rows, width), threads = hidden.shape, torch.get_num_threads()
    require(grad_output.shape == hidden.shape, "gradients that differ")
    output, grad, grad_gains = (
        torch.empty_like(grad_output),
        torch.empty_like(hidden),
        hidden.new_zeros(threads, width),
    )
    places = [tensor.data_ptr() for tensor in (hidden, gain, scales, grad_output, output, grad)]

    def work(part: int, first: int, last: int) -> int:
        return kernels.backpropagate_norm(*places, grad_gains[part].data_ptr(), width, first, last)

    share(work, rows, parts=1 if rows <= ONE_THREAD_ROWS else threads)
    return output, grad, grad_gains.sum(0)


def gate(kernels: LayerKernels, gate_up: Tensor) -> Tensor:
    refuse_unreadable(gate_up, dtype=kernels.dtype)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(rows, width)
    places = (gate_up.data_ptr(), output.data_ptr())
    share_rows(lambda _, first, last: kernels.gate(*places, width, first, last), rows)
    return output


def backpropagate_gate(kernels: LayerKernels, gate_up: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """The gated values, computed again, and the gradient of gate and up."""
    refuse_unreadable(gate_up, grad_output, dtype=kernels.dtype)
    rows, width = grad_output.shape
    require(gate_up.shape == (rows, 2 * width), "gradients that differ")
    output, grad = torch.empty_like(grad_output), torch.empty_like(gate_up)
    places = [tensor.data_ptr() for tensor in (gate_up, grad_output, output, grad)]
    share_rows(lambda _, first, last: kernels.backpropagate_gate(*places, width, first, last), rows)
    return output, grad


def apply_rotary(
    kernels: LayerKernels, qkv: Tensor, cosine: Tensor, sine: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Rotary`: x * cos + (x with its halves swapped) * sin, with the first half of the sines negated."""
    refuse_unreadable(qkv, dtype=kernels.dtype)
    rows, count, width = qkv.shape
    kv_heads = (count - heads) // 2
    require(count == heads + 2 * kv_heads, "keys without values")
    check_angles(rows, width, cosine, sine)
    query, key, value = (qkv.new_empty(rows, number, width) for number in (heads, kv_heads, kv_heads))
    places = [tensor.data_ptr() for tensor in (qkv, cosine, sine, query, key, value)]
    share_rows(
        lambda _, first, last: kernels.apply_rotary(*places, heads, kv_heads, width, first, last), rows
    )
    return query, key, value


def backpropagate_rotary(
    kernels: LayerKernels, query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor
) -> Tensor:
    """The gradient of qkv by those of queries, keys and values."""
    refuse_unreadable(query, key, value, dtype=kernels.dtype)
    (rows, heads, width), kv_heads = query.shape, key.shape[1]
    require(key.shape == value.shape == (rows, kv_heads, width), "gradients that differ")
    check_angles(rows, width, cosine, sine)
    qkv = query.new_empty(rows, heads + 2 * kv_heads, width)
    places = [tensor.data_ptr() for tensor in (query, key, value, cosine, sine, qkv)]
    share_rows(
        lambda _, first, last: kernels.backpropagate_rotary(*places, heads, kv_heads, width, first, last),
        rows,
    )
    return qkv


def check_angles(rows: int, width: int, cosine: Tensor, sine: Tensor) -> None:
    refuse_unreadable(cosine, sine)
    require(cosine.shape == sine.shape == (rows, 1, width) and width % 2 == 0, "angles of another width")


def share_rows(work: Callable[[int, int, int], int], rows: int) -> None:
    share(work, rows, parts=1 if rows <= ONE_THREAD_ROWS else None)


@cache
def find_layer_kernels(dtype: torch.dtype) -> LayerKernels | None:
    """The kernels for matmuls in a dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    library = compile_source("layers.c", *(["-DHALVES"] if dtype == torch.bfloat16 else []))
    if library is None:
        return None
    size = ctypes.c_size_t
    kernels = LayerKernels(
        find_function(library, "normalize", 4, size, ctypes.c_double, size, size),
        find_function(library, "backpropagate_norm", 7, size, size, size),
        find_function(library, "gate", 2, size, size, size),
        find_function(library, "backpropagate_gate", 4, size, size, size),
        find_function(library, "apply_rotary", 6, *[size] * 5),
        find_function(library, "backpropagate_rotary", 6, *[size] * 5),
        dtype,
    )
    return kernels if are_layer_kernels_right(kernels) else None


def are_layer_kernels_right(kernels: LayerKernels) -> bool:
    """Whether the kernels agree with torch, for widths that are multiples of a vector and others."""
    return all(is_right_for_width(kernels, width) for width in (32, 38))


def is_right_for_width(kernels: LayerKernels, width: int) -> bool:
    rows, heads, kv_heads, dtype = 5, 2, 1, kernels.dtype
    chance = torch.Generator().manual_seed(width)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*shape, generator=chance) * 3).to(dtype).requires_grad_()

    with torch.inference_mode(False), torch.enable_grad():
        hidden, gain, weight = draw(rows, width), draw(width), draw(width, width)
        cosine, sine = (draw(rows, 1, width).detach() for _ in range(2))
        gate_up, qkv = (
            draw(rows, 2 * width, dtype=dtype),
            draw(rows, heads + 2 * kv_heads, width, dtype=dtype),
        )
        first, second = gate_up.float().chunk(2, 1)
        query_key, value = qkv.float().split([heads + kv_heads, kv_heads], 1)
        query_key = query_key * cosine + query_key.roll(width // 2, 2) * sine
        normed = nn.functional.rms_norm(hidden, gain.shape, gain, 1e-5)
        cases = [
            (RmsNorm.apply(hidden, gain, 1e-5, kernels), normed, (hidden, gain)),
            (
                NormLinear.apply(hidden, gain, None, 1e-5, kernels, weight),
                normed @ weight.t(),
                (hidden, gain, weight),
            ),
            (
                GatedLinear.apply(gate_up, weight, None, kernels),
                (nn.functional.silu(first) * second) @ weight.t(),
                (gate_up, weight),
            ),
            (
                torch.cat(cast("tuple[Tensor, ...]", Rotary.apply(qkv, cosine, sine, heads, kernels)), 1),
                torch.cat([query_key, value], 1),
                (qkv,),
            ),
        ]
        for found, expected, inputs in cases:
            grad_output = torch.randn(expected.shape, generator=chance)
            grads = torch.autograd.grad(cast(Tensor, found), inputs, grad_output.to(dtype))
            wanted = torch.autograd.grad(expected, inputs, grad_output, retain_graph=True)
            for one, other in zip((cast(Tensor, found), *grads), (expected, *wanted), strict=True):
                relative_error = (one - other).detach().norm() / other.detach().norm()
                if not relative_error <= (1e-5 if dtype == torch.float32 else 2e-2):  # NaN is refused, too
                    return False
    return True
