# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleMethodOverride=false
"""Products with a model's weights on a CPU: of the few rows of a decoding step, and of the many of an update.

For few rows the kernel of `c/decode.c` reads weights at the speed of memory; where it cannot be compiled,
oneDNN's own layout for small products is the next best. Either costs a second copy of the weights. Layers
that take the same input are joined: fewer, larger products. For many rows oneDNN uses the whole width of
vectors where torch's matrix library uses half of it on some processors. In bfloat16 weights and inputs are
rounded, sums are not: half the memory to read, twice the products a second.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trialogue.engine.cpu.kernels import FEW_ROWS, Kernels, load_kernels, multiply, to_panels

SMALL = 1 << 18
"""Weights in a matrix that gains nothing from being laid out anew."""


class Joined:
    """Linear layers side by side: [N, in] → [N, the sum of their outputs]. What is made of their weights is
    made when first needed and kept until `forget`: a version counter would not tell, as a fused optimizer
    does not count."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.width, self.outputs = layers[0].in_features, sum(layer.out_features for layer in layers)
        self.is_large = sum(layer.weight.numel() for layer in layers) >= SMALL
        self.is_half = False
        self.forget()

    def forget(self) -> None:
        self.laid: Tensor | None = None
        self.bias: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.is_large and not self.is_half and len(inputs) > FEW_ROWS:
            parts = [multiply_many(inputs, layer.weight, layer.bias) for layer in self.layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self.laid is None:
            self.laid, self.bias = self._lay_out(), self.find_bias()
        if self.is_half or self.laid.ndim == 4:
            output = multiply_laid(inputs, self.laid, self.outputs)
            return output if self.bias is None else output.add_(self.bias)
        if self.laid.is_mkldnn:
            return multiply_by_onednn(inputs, self.laid, self.bias)
        return nn.functional.linear(inputs, self.laid, self.bias)

    def _lay_out(self) -> Tensor:
        weight = join(self.weights).detach().contiguous()
        if self.is_half:
            return to_rounded(weight)
        kernels = load_kernels(is_half=False) if self.is_large else None
        if kernels is not None:
            return to_panels(kernels, weight)
        if self.is_large and torch.backends.mkldnn.is_available():
            return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS))
        return weight

    def find_panels(self, kernels: Kernels) -> Tensor:
        """All weights as `kernels` take them, which many matrices are anyway."""
        if self.laid is None:
            self.laid, self.bias = self._lay_out(), self.find_bias()
        return (
            self.laid if self.laid.ndim == 4 else to_panels(kernels, join(self.weights).detach().contiguous())
        )

    @property
    def weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.layers]

    def find_bias(self) -> Tensor | None:
        """Of all layers, nothing where one has none; gradients go back through it."""
        biases = [cast("Tensor | None", layer.bias) for layer in self.layers]
        if all(bias is None for bias in biases):
            return None
        pairs = zip(biases, self.weights, strict=True)
        return join([weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs])


def to_rounded(weight: Tensor) -> Tensor:
    """A matrix [out, in] in bfloat16 for `multiply_laid`."""
    kernels = load_kernels(is_half=True) if weight.shape[1] % 2 == 0 else None
    return weight.bfloat16() if kernels is None else to_panels(kernels, weight.float().contiguous())


def multiply_laid(inputs: Tensor, laid: Tensor, outputs: int) -> Tensor:
    """inputs [N, in] times a matrix in panels, or one in bfloat16 where there are no kernels and sums are
    rounded as well → [N, out] in float32"""
    kernels = load_kernels(is_half=laid.dtype == torch.bfloat16) if laid.ndim == 4 else None
    if kernels is None:
        return nn.functional.linear(inputs.bfloat16(), laid).float()
    return multiply(kernels, inputs.float().contiguous(), laid)[:, :outputs]


def join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Product(torch.autograd.Function):
    """A linear layer, with oneDNN for the product and for its gradient towards the inputs."""

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
    return compute_product(inputs, module.weight, cast("Tensor | None", module.bias))


def compute_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [..., in] times [out, in], with a gradient."""
    if not torch.is_grad_enabled() or not suits_onednn(inputs, weight):
        return multiply_many(inputs, weight, bias)
    return cast(Tensor, Product.apply(inputs, weight, bias))


def multiply_many(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [..., in] times [out, in], without a gradient where oneDNN is quicker."""
    is_needed = torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad)
    if is_needed or not suits_onednn(inputs, weight):
        return nn.functional.linear(inputs, weight, bias)
    return multiply_by_onednn(inputs, weight, bias)


def suits_onednn(inputs: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can take them as they are, and is the quicker one."""
    is_at_hand = inputs.dtype == weight.dtype == torch.float32 and inputs.device.type == "cpu"
    return is_at_hand and inputs.numel() > 0 and not torch.is_autocast_enabled("cpu") and is_onednn_quicker()


def multiply_by_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


@cache
def is_onednn_quicker() -> bool:
    """On processors with AVX-512, as far as was measured. Not found out by measuring: then a run would not be
    the same whenever it goes on."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
