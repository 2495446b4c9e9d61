# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleMethodOverride=false
"""Matmuls with a model's weights on a CPU: for the few rows of a decode step and the many rows of an update.

For few rows the kernel of `c/decode.c` reads weights at the speed of memory; without a compiler, oneDNN's own
layout for small matmuls is the next best. Both need a second copy of the weights. Layers with the same input
are fused into one matmul. For many rows oneDNN uses full vectors where torch's matrix library uses half of
them on some processors. In bfloat16 weights and inputs are rounded, sums are not.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trialogue.engine.cpu.kernels import FEW_ROWS, Kernels, load_kernels, multiply, to_panels

SMALL = 1 << 18
"""Weights of a matrix below which another layout gains nothing."""


class FusedLinear:
    """Linear layers side by side: [N, in] → [N, sum of outputs]. The weights are laid out on first use and
    kept until `forget`. A tensor's version counter cannot replace `forget`: fused optimizers do not increment
    it."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.width, self.outputs = layers[0].in_features, sum(layer.out_features for layer in layers)
        self.is_large = sum(layer.weight.numel() for layer in layers) >= SMALL
        self.is_half = False
        self.forget()

    def forget(self) -> None:
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.is_large and not self.is_half and len(inputs) > FEW_ROWS:
            parts = [multiply_many(inputs, layer.weight, layer.bias) for layer in self.layers]
            return concatenate(parts, 1)
        packed = self._pack()
        if self.is_half or packed.ndim == 4:
            output = multiply_packed(inputs, packed, self.outputs)
            return output if self.bias is None else output.add_(self.bias)
        if packed.is_mkldnn:
            return multiply_by_onednn(inputs, packed, self.bias)
        return nn.functional.linear(inputs, packed, self.bias)

    def _pack(self) -> Tensor:
        if self.packed is None:
            self.packed, self.bias = self._lay_out(), self.find_bias()
        return self.packed

    def _lay_out(self) -> Tensor:
        weight = self._join_weights()
        if self.is_half:
            return pack_half(weight)
        kernels = load_kernels(is_half=False) if self.is_large else None
        if kernels is not None:
            return to_panels(kernels, weight)
        if self.is_large and torch.backends.mkldnn.is_available():
            return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS))
        return weight

    def _join_weights(self) -> Tensor:
        return concatenate(self.weights).detach().contiguous()

    def find_panels(self, kernels: Kernels) -> Tensor:
        """All weights in the panels that `kernels` read."""
        packed = self._pack()
        return packed if packed.ndim == 4 else to_panels(kernels, self._join_weights())

    @property
    def weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.layers]

    def find_bias(self) -> Tensor | None:
        """The biases side by side, zeros for a layer without one, None if none has one. Differentiable."""
        biases = [cast("Tensor | None", layer.bias) for layer in self.layers]
        if all(bias is None for bias in biases):
            return None
        pairs = zip(biases, self.weights, strict=True)
        return concatenate(
            [weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs]
        )


def pack_half(weight: Tensor) -> Tensor:
    """A matrix [out, in] in bfloat16, for `multiply_packed`."""
    kernels = load_kernels(is_half=True) if weight.shape[1] % 2 == 0 else None
    return weight.bfloat16() if kernels is None else to_panels(kernels, weight.float().contiguous())


def multiply_packed(inputs: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """inputs [N, in] times a matrix in panels → [N, out] in float32. Without kernels the matrix is plain
    bfloat16, and sums are rounded, too."""
    kernels = load_kernels(is_half=packed.dtype == torch.bfloat16) if packed.ndim == 4 else None
    if kernels is None:
        return nn.functional.linear(inputs.bfloat16(), packed).float()
    return multiply(kernels, inputs.float().contiguous(), packed)[:, :outputs]


def concatenate(parts: list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat that does not copy a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class OneDnnLinear(torch.autograd.Function):
    """A linear layer whose output and input gradient are computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wanted = ctx.needs_input_grad
        ctx.save_for_backward(inputs if wanted[1] else None, weight if wanted[0] else None)
        return multiply_by_onednn(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        return (
            multiply_by_onednn(grad, weight.t(), None) if wanted[0] else None,
            flat.t() @ inputs.flatten(0, -2) if wanted[1] else None,
            flat.sum(0) if wanted[2] else None,
        )


def compute_linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    """The forward pass of a linear layer in an update."""
    return compute_matmul(inputs, module.weight, cast("Tensor | None", module.bias))


def compute_matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [..., in] times [out, in], differentiable."""
    if not torch.is_grad_enabled() or not suits_onednn(inputs, weight):
        return multiply_many(inputs, weight, bias)
    return cast(Tensor, OneDnnLinear.apply(inputs, weight, bias))


def multiply_many(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [..., in] times [out, in]; by oneDNN where no gradient is needed and oneDNN is faster."""
    is_needed = torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad)
    if is_needed or not suits_onednn(inputs, weight):
        return nn.functional.linear(inputs, weight, bias)
    return multiply_by_onednn(inputs, weight, bias)


def suits_onednn(inputs: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN accepts these tensors and is faster."""
    is_plain = inputs.dtype == weight.dtype == torch.float32 and inputs.device.type == "cpu"
    return is_plain and inputs.numel() > 0 and not torch.is_autocast_enabled("cpu") and is_onednn_quicker()


def multiply_by_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


@cache
def is_onednn_quicker() -> bool:
    """Whether the processor has AVX-512, where oneDNN was measured to be faster. It is not timed here,
    because a resumed run would then depend on the clock."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
