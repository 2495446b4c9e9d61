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

from trialogue.engine.kernels import (
    FEW_ROWS,
    Kernels,
    find_kernels,
    load_half_product,
    multiply,
    multiply_halves,
    to_half_panels,
    to_panels,
)

SMALL = 1 << 18
"""Weights in a matrix that gains nothing from being laid out anew."""


class Joined:
    """Linear layers side by side: [N, in] → [N, the sum of their outputs]. What is made of their weights is
    made when first needed and kept until `forget`: a version counter would not tell, as a fused optimizer
    does not count."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.outputs = sum(layer.out_features for layer in layers)
        self.is_large = sum(layer.weight.numel() for layer in layers) >= SMALL
        self.is_half = False
        self.forget()

    def forget(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.kernels: Kernels | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.is_large and not self.is_half and len(inputs) > FEW_ROWS:
            parts = [multiply_many(inputs, layer.weight, layer.bias) for layer in self.layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        weight = self._lay_out() if self.weight is None else self.weight
        if self.is_half:
            output = multiply_rounded(inputs, weight, self.outputs)
            return output if self.bias is None else output.add_(self.bias)
        if self.kernels is not None:
            output = multiply(self.kernels, inputs.contiguous(), weight)
            return output if self.bias is None else output.add_(self.bias)
        if weight.is_mkldnn:
            return multiply_by_onednn(inputs, weight, self.bias)
        return nn.functional.linear(inputs, weight, self.bias)

    def _lay_out(self) -> Tensor:
        weight = join(self.weights).detach()
        kernels = find_kernels() if self.is_large and not self.is_half else None
        if self.is_half:
            weight = to_rounded(weight)
        elif kernels is not None and self.outputs % kernels.lanes == 0:
            self.kernels, weight = kernels, to_panels(weight, kernels.lanes)
        elif self.is_large and torch.backends.mkldnn.is_available():
            weight = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS))
        self.weight, self.bias = weight, self.find_bias()
        return weight

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
    """A matrix [out, in] for `multiply_rounded`."""
    is_even = weight.shape[1] % 2 == 0
    return to_half_panels(weight) if is_even and load_half_product() is not None else weight.bfloat16()


def multiply_rounded(inputs: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """inputs [N, in] times what `to_rounded` made of a matrix with so many outputs, both in bfloat16 →
    [N, out] in float32; without the kernel sums are rounded as well."""
    product = load_half_product() if weight.ndim == 4 else None
    if product is not None:
        return multiply_halves(product, inputs.float().contiguous(), weight)[:, :outputs]
    return nn.functional.linear(inputs.bfloat16(), weight).float()


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
