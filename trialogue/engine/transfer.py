# pyright: reportUnknownMemberType=false
"""Sending small tensors from the host to the device of a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 16
"""Each tensor begins at a multiple of so many bytes."""


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on a device: by one copy, for which the host does not wait. On a CPU they stay as
    they are."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    starts = list(accumulate(sizes, initial=0))
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, start in zip(tensors, starts, strict=False):
        packed[start : start + tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
    moved = packed.to(device, non_blocking=True)
    return [
        moved[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=False)
    ]
