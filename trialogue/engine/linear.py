# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Linear layers for the few rows of a decoding step on a CPU.

Matrix libraries are made for many rows. For a handful, either the product is turned round, so that there is
something to share among cores, or the weights are laid out anew for oneDNN's own small products: faster by a
quarter, at the price of a second copy of the weights, which is therefore kept of small models only.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

FEW_ROWS = 32
LARGEST = 1 << 31
"""Bytes of weights that are kept a second time, laid out anew."""


def wire_linears(model: nn.Module) -> None:
    """Let every linear layer of a model take few rows by the shorter way."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    size = sum(module.weight.numel() * module.weight.element_size() for module in linears)
    pack_linears(model, torch.backends.mkldnn.is_available() and size <= LARGEST)
    for module in linears:
        cast(Any, module).forward = MethodType(multiply, module)


def pack_linears(model: nn.Module, is_packing: bool) -> None:
    """Whether layers may keep their weights a second time: not where these come and go, as shards do."""
    for module in model.modules():
        if type(module) is nn.Linear:
            cast(Any, module).packed = Packed() if is_packing else None


def forget_packed(model: nn.Module) -> None:
    """Let go of what was laid out of weights that have changed."""
    for module in model.modules():
        if isinstance(packed := getattr(module, "packed", None), Packed):
            packed.layout = None


@dataclass(slots=True, eq=False)
class Packed:
    """The weights of a layer as oneDNN wants them, made when first needed."""

    layout: Tensor | None = None

    def lay_out(self, weight: Tensor) -> Tensor:
        if self.layout is None:
            self.layout = cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS))
        return self.layout


def multiply(module: nn.Linear, inputs: Tensor) -> Tensor:
    """`nn.Linear.forward`. Packed weights are those that were published, so only the sampler may use them:
    it alone computes in inference mode."""
    rows = inputs.numel() // inputs.shape[-1]
    weight, bias = module.weight, cast("Tensor | None", module.bias)
    if rows > FEW_ROWS or torch.is_grad_enabled() or inputs.device.type != "cpu":
        return nn.functional.linear(inputs, weight, bias)
    packed = cast("Packed | None", cast(Any, module).packed)
    is_exact = weight.dtype == inputs.dtype == torch.float32
    if rows > 1 and packed is not None and is_exact and torch.is_inference_mode_enabled():
        return torch.ops.mkldnn._linear_pointwise(inputs, packed.lay_out(weight), bias, "none", [], "")
    turned = torch.mm(weight, inputs.reshape(rows, -1).T).T
    output = turned.contiguous() if bias is None else turned + bias
    return output.view(*inputs.shape[:-1], -1)
