# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportIncompatibleMethodOverride=false
"""From hidden states to log-probabilities of chosen tokens, differentiable; logits are computed in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LOGITS_AT_ONCE = 1 << 26  # floats of a chunk; matmuls of fewer rows take longer for each


class TorchLogits:
    """The operations of `TokenLogprobs` in torch, for any device."""

    def pack(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The output matrix [V, width] as `make_logits` reads it."""
        return weight.to(dtype)

    def make_logits(self, hidden: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """hidden [M, width] → logits [M, V] in float32"""
        bias = None if bias is None else bias.to(hidden.dtype)
        return self.multiply(hidden, packed, bias).float()

    def multiply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(inputs, weight, bias)

    def normalize(
        self, logits: Tensor, targets: Tensor, kept: torch.dtype | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Logits [M, V] in float32, which may be overwritten → log-probabilities of the targets, log-sums and
        entropies, [M] each, and with `kept` all probabilities in that dtype."""
        top = logits.amax(-1, keepdim=True)
        chosen = logits.gather(1, targets[:, None])[:, 0]
        weights = (logits - top).exp_()
        total = weights.sum(-1, keepdim=True)
        sums = (top + total.log())[:, 0]
        weights.div_(total)
        entropy = sums - logits.mul_(weights).sum(-1)
        return chosen - sums, sums, entropy, None if kept is None else weights.to(kept)


class TokenLogprobs(torch.autograd.Function):
    """Log-probability of each target and entropy of each distribution, one chunk of logits at a time.

    hidden [M, width] and the output matrix [V, width] → [M], [M]. The probabilities are kept for the backward
    pass if they are small enough; otherwise it computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        has_backward: bool,
        operations: TorchLogits,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        packed = operations.pack(weight, hidden.dtype)
        # One chunk in float32, or four in bfloat16, which takes half the memory and is rounded anyway.
        is_kept = has_backward and len(targets) <= (4 if hidden.dtype == torch.bfloat16 else 1) * chunk
        kept: list[Tensor | None] = []
        for part in to_chunks(len(targets), chunk):
            logits = make_tempered(operations, hidden[part], packed, weight, bias, temperature)
            found = operations.normalize(logits, targets[part], hidden.dtype if is_kept else None)
            logprobs[part], sums[part], entropy[part], probabilities = found
            kept.append(probabilities)
            del logits, found, probabilities  # free them before the next chunk is allocated
        ctx.save_for_backward(hidden, weight, bias, targets, sums, logprobs)
        ctx.temperature, ctx.chunk, ctx.kept = temperature, chunk, kept if is_kept else None
        ctx.operations = operations
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sums, logprobs = ctx.saved_tensors
        operations: TorchLogits = ctx.operations
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, None  # overwritten below; a second backward pass computes them again
        packed = operations.pack(weight, hidden.dtype) if kept is None else None
        transposed = weight.to(hidden.dtype).t()
        for part in to_chunks(len(targets), ctx.chunk):
            if kept is not None:
                probabilities = kept.pop(0)
            else:
                assert packed is not None
                logits = make_tempered(operations, hidden[part], packed, weight, bias, ctx.temperature)
                probabilities = logits.sub_(sums[part, None]).exp_()
                del logits
            # The gradient by the logits up to its sign and scale: p - 1 at the target, p elsewhere. A
            # probability near 1 may be rounded to 1, so p - 1 comes from the log-probability.
            at_target = torch.expm1(logprobs[part, None]).to(probabilities.dtype)
            grad_logits = probabilities.scatter_(1, targets[part, None], at_target).to(hidden.dtype)
            # The scale of each row is applied to the narrow matrices.
            scale = (grad[part, None] / -ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = operations.multiply(grad_logits, transposed).mul_(scale)
            if grad_weight is not None:
                scaled = hidden[part] * scale
                if scaled.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_logits.T, scaled)
                else:
                    grad_weight.add_(grad_logits.T @ scaled)
            if grad_bias is not None:
                grad_bias.add_((grad_logits.T @ scale)[:, 0])
            del probabilities, grad_logits
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def to_chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]


def make_tempered(
    operations: TorchLogits,
    hidden: Tensor,
    packed: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
) -> Tensor:
    logits = operations.make_logits(hidden, packed, len(weight), bias)
    return logits if temperature == 1 else logits.div_(temperature)
