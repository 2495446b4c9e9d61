# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The operations of `TokenLogprobs` on a CPU: matmuls by oneDNN or in panels, and `c/logits.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from trialogue.engine.cpu.compiled import compile_source, find_function, share
from trialogue.engine.cpu.linear import multiply_many, multiply_packed, pack_half
from trialogue.engine.logprobs import TorchLogits


class CpuLogits(TorchLogits):
    def pack(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return pack_half(weight) if dtype == torch.bfloat16 else weight.to(dtype)

    def make_logits(self, hidden: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        if hidden.dtype != torch.bfloat16:
            return super().make_logits(hidden, packed, outputs, bias)
        logits = multiply_packed(hidden, packed, outputs)
        return logits if bias is None else logits.add_(bias)

    def multiply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply_many(inputs, weight, bias)

    def normalize(
        self, logits: Tensor, targets: Tensor, kept: torch.dtype | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        kernel = load_kernel() if len(targets) else None
        if kernel is None:
            return super().normalize(logits, targets, kept)
        return normalize_rows(kernel, logits, targets, kept)


def normalize_rows(
    kernel: Callable[..., int], logits: Tensor, targets: Tensor, kept: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`TorchLogits.normalize` by `c/logits.c`."""
    logits, targets = logits.contiguous(), targets.contiguous()
    count, size = logits.shape
    logprobs, sums, entropy = (logits.new_empty(count) for _ in range(3))
    rounded = torch.empty_like(logits, dtype=kept) if kept == torch.bfloat16 else None
    tensors = (logits, targets, logprobs, sums, entropy, rounded)
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    share(lambda _, first, last: kernel(*places, kept is not None, size, first, last), count)
    probabilities = rounded if rounded is not None or kept is None else logits.to(kept)
    return logprobs, sums, entropy, probabilities


@cache
def load_kernel() -> Callable[..., int] | None:
    library = compile_source("logits.c")
    if library is None:
        return None
    kernel = find_function(library, "weigh", 6, *[ctypes.c_size_t] * 4)
    return kernel if is_logits_kernel_right(kernel) else None


def is_logits_kernel_right(kernel: Callable[..., int]) -> bool:
    """Whether the kernel agrees with torch, for sizes that are multiples of a vector and others."""
    for size in (48, 53):
        logits = torch.arange(3.0 * size).mul(7).sin().mul(9).view(3, size)
        targets = torch.tensor([0, size - 1, 7])
        expected = logits.log_softmax(-1)
        for kept in (torch.float32, torch.bfloat16):
            logprobs, sums, entropy, weights = normalize_rows(kernel, logits.clone(), targets, kept)
            pairs = [
                (logprobs, expected.gather(1, targets[:, None])[:, 0]),
                (sums, logits.logsumexp(-1)),
                (entropy, -(expected.exp() * expected).sum(-1)),
            ]
            assert weights is not None
            is_close = all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
            if not (is_close and torch.allclose(weights.float(), expected.exp(), rtol=1e-2, atol=1e-5)):
                return False
    return True
