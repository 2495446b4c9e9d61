# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Products with published weights, for the few rows of a decoding step on a CPU.

Matrix libraries are made for many rows. For a handful, weights are laid out anew for oneDNN's own small
products, at the price of a second copy. Layers that take the same input are joined: fewer, larger products.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

FEW_ROWS = 32
SMALL = 1 << 18
"""Weights in a matrix that gains nothing from being laid out anew."""


class Joined:
    """Linear layers side by side: [N, in] → [N, the sum of their outputs]. What is made of their weights is
    made when first needed and kept until `forget`: a version counter would not tell, as a fused optimizer
    does not count."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        size = sum(layer.weight.numel() for layer in layers)
        self.is_packed = size >= SMALL and torch.backends.mkldnn.is_available()
        self.forget()

    def forget(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.is_packed and len(inputs) > FEW_ROWS:
            parts = [nn.functional.linear(inputs, layer.weight, layer.bias) for layer in self.layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self.weight is None:
            self._lay_out()
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return nn.functional.linear(inputs, cast(Tensor, self.weight), self.bias)

    def _lay_out(self) -> None:
        self.weight = join([layer.weight for layer in self.layers])
        if self.is_packed:
            self.weight = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(self.weight, FEW_ROWS))
        if any(cast("Tensor | None", layer.bias) is not None for layer in self.layers):
            self.bias = join([find_bias(layer) for layer in self.layers])


def join(parts: list[Tensor]) -> Tensor:
    return parts[0].detach() if len(parts) == 1 else torch.cat(parts)


def find_bias(layer: nn.Linear) -> Tensor:
    bias = cast("Tensor | None", layer.bias)
    return layer.weight.new_zeros(len(layer.weight)) if bias is None else bias
