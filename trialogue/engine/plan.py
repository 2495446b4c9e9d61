# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What the packed tokens of a forward pass attend to: the protocol, and the layout of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trialogue.engine.cpu.kernels import DecodeBatch


class AttentionPlan(Protocol):
    """How the N packed tokens of one forward pass attend to earlier tokens."""

    decode_batch: DecodeBatch | None
    """The tokens as the compiled kernels read them, where they are few enough."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [H, N, D], key and value [KV, N, D] → [N, H, D]."""
        ...

    def look_back(self, layer: int, inputs: Tensor, kernel: int) -> list[Tensor]:
        """inputs [N, C] → the inputs of the token `k` positions before each token, k = 1 … kernel-1."""
        ...


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """What each layer caches per token: (KV heads, key width, value width), or (channels, kernel)."""

    attention: dict[int, tuple[int, int, int]]
    convolution: dict[int, tuple[int, int]]
    dtype: torch.dtype


class ShapeRecorder:
    """An `AttentionPlan` for one sequence that records the shapes of its inputs."""

    decode_batch: DecodeBatch | None = None

    def __init__(self) -> None:
        self.attention: dict[int, tuple[int, int, int]] = {}
        self.convolution: dict[int, tuple[int, int]] = {}
        self.dtype = torch.float32

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.attention[layer] = (key.shape[0], key.shape[2], value.shape[2])
        self.dtype = value.dtype
        batch = (query[None], key[None], value[None])
        output = nn.functional.scaled_dot_product_attention(
            *batch, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output[0].transpose(0, 1)

    def look_back(self, layer: int, inputs: Tensor, kernel: int) -> list[Tensor]:
        self.convolution[layer] = (inputs.shape[1], kernel)
        padded = nn.functional.pad(inputs, (0, 0, kernel - 1, 0))
        return [padded[kernel - 1 - distance :][: len(inputs)] for distance in range(1, kernel)]


def convolve(module: nn.Conv1d, layer: int, projected: Tensor, plan: AttentionPlan) -> Tensor:
    """LFM2's gated short convolution; the plan supplies the inputs of earlier tokens."""
    gate_in, gate_out, values = projected.chunk(3, dim=-1)
    inputs = gate_in * values
    taps = module.weight[:, 0].unbind(-1)  # the last tap multiplies the token itself
    mixed = inputs * taps[-1]
    for distance, earlier in enumerate(plan.look_back(layer, inputs, len(taps)), start=1):
        mixed = torch.addcmul(mixed, earlier, taps[-1 - distance])
    if module.bias is not None:
        mixed = mixed + module.bias
    return gate_out * mixed


@dataclass(frozen=True, slots=True)
class Layout:
    """Memory layout of keys and values of `length` tokens. Keys are [length / lanes, width / per_unit, lanes,
    per_unit], so that a vector holds the scores of neighbouring tokens; values are [length / per_unit, width,
    per_unit]. Lengths are padded to a multiple of `lanes`."""

    lanes: int = 1  # floats of a vector
    per_unit: int = 1  # numbers that one multiplication takes from a row: 2 in bfloat16
    dtype: torch.dtype = torch.float32

    def pad(self, length: int) -> int:
        return -(-length // self.lanes) * self.lanes

    def shape_keys(self, length: int, width: int) -> tuple[int, int, int, int]:
        return length // self.lanes, width // self.per_unit, self.lanes, self.per_unit

    def shape_values(self, length: int, width: int) -> tuple[int, int, int]:
        return length // self.per_unit, width, self.per_unit

    def pack_keys(self, keys: Tensor) -> Tensor:
        """[…, T, D], T a multiple of lanes → […, T / lanes, D / per_unit, lanes, per_unit]"""
        units = keys.unflatten(-2, (-1, self.lanes)).unflatten(-1, (-1, self.per_unit))
        return units.transpose(-3, -2).to(self.dtype).contiguous()

    def pack_values(self, values: Tensor) -> Tensor:
        """[…, T, D] → […, T / per_unit, D, per_unit]"""
        return values.unflatten(-2, (-1, self.per_unit)).transpose(-2, -1).to(self.dtype).contiguous()

    def unpack_keys(self, packed: Tensor) -> Tensor:
        """The inverse of `pack_keys`; a view where the layout is plain."""
        return packed.transpose(-3, -2).flatten(-2).flatten(-3, -2)

    def unpack_values(self, packed: Tensor) -> Tensor:
        return packed.transpose(-2, -1).flatten(-3, -2)
