# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Products with published weights, for the few rows of a decoding step on a CPU.

The kernel of `kernels.c` reads weights at the speed of memory; where it cannot be compiled, oneDNN's own
layout for small products is the next best. Either costs a second copy of the weights. Layers that take the
same input are joined: fewer, larger products.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from trialogue.engine.kernels import FEW_ROWS, Kernels, find_kernels, multiply, to_panels

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
        self.forget()

    def forget(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.kernels: Kernels | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.is_large and len(inputs) > FEW_ROWS:
            parts = [nn.functional.linear(inputs, layer.weight, layer.bias) for layer in self.layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        weight = self._lay_out() if self.weight is None else self.weight
        if self.kernels is not None:
            output = multiply(self.kernels, inputs.contiguous(), weight)
            return output if self.bias is None else output.add_(self.bias)
        if weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(inputs, weight, self.bias, "none", [], "")
        return nn.functional.linear(inputs, weight, self.bias)

    def _lay_out(self) -> Tensor:
        weight = join([layer.weight for layer in self.layers])
        kernels = find_kernels() if self.is_large else None
        if kernels is not None and self.outputs % kernels.lanes == 0:
            self.kernels, weight = kernels, to_panels(weight, kernels.lanes)
        elif self.is_large and torch.backends.mkldnn.is_available():
            weight = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS))
        if any(cast("Tensor | None", layer.bias) is not None for layer in self.layers):
            self.bias = join([find_bias(layer) for layer in self.layers])
        self.weight = weight
        return weight


def join(parts: list[Tensor]) -> Tensor:
    return parts[0].detach() if len(parts) == 1 else torch.cat(parts)


def find_bias(layer: nn.Linear) -> Tensor:
    bias = cast("Tensor | None", layer.bias)
    return layer.weight.new_zeros(len(layer.weight)) if bias is None else bias
