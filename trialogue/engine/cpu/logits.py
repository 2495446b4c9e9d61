# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportIncompatibleMethodOverride=false
"""From hidden states to log-probabilities of chosen tokens, with a gradient; logits are made part by part."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trialogue.engine.cpu.compiled import compile_source, find_function, share
from trialogue.engine.cpu.linear import multiply_laid, multiply_many, to_rounded

LOGITS_AT_ONCE = 1 << 26  # floats; a product of fewer rows takes longer for each


class TokenLogprobs(torch.autograd.Function):
    """Log-probability of each target and entropy of each distribution, a chunk of logits at a time.

    hidden [M, width] and the output matrix [V, width] → [M], [M]; where that is not too much the
    probabilities are kept for the backward pass, which otherwise computes logits again.
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
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        matrix = lay_out(weight, hidden)
        # One chunk of float32, or four of which each number takes half and will be rounded anyway.
        is_kept = has_backward and len(targets) <= (4 if hidden.dtype == torch.bfloat16 else 1) * chunk
        kept: list[Tensor | None] = []
        for part in split(len(targets), chunk):
            logits = make_logits(hidden[part], matrix, len(weight), bias, temperature)
            found = weigh(logits, targets[part], hidden.dtype if is_kept else None)
            logprobs[part], sums[part], entropy[part], probabilities = found
            kept.append(probabilities)
            del logits, found, probabilities  # before the next ones are made
        ctx.save_for_backward(hidden, weight, bias, targets, sums, logprobs)
        ctx.temperature, ctx.chunk, ctx.kept = temperature, chunk, kept if is_kept else None
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sums, logprobs = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, None  # used up; a second pass computes them again
        matrix = lay_out(weight, hidden) if kept is None else None
        turned = weight.to(hidden.dtype).t()
        for part in split(len(targets), ctx.chunk):
            if kept is not None:
                probabilities = kept.pop(0)
            else:
                assert matrix is not None
                logits = make_logits(hidden[part], matrix, len(weight), bias, ctx.temperature)
                probabilities = logits.sub_(sums[part, None]).exp_()
                del logits
            # How each logit changes the log-probability, up to its sign. A probability near one may be
            # rounded to it; what is left counts here.
            left = torch.expm1(logprobs[part, None]).to(probabilities.dtype)
            slopes = probabilities.scatter_(1, targets[part, None], left).to(hidden.dtype)
            # Rows of one number each are scaled where they are narrow.
            pull = (grad[part, None] / -ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = multiply_many(slopes, turned).mul_(pull)
            if grad_weight is not None:
                pulled = hidden[part] * pull
                if pulled.dtype == grad_weight.dtype:
                    grad_weight.addmm_(slopes.T, pulled)
                else:
                    grad_weight.add_(slopes.T @ pulled)
            if grad_bias is not None:
                grad_bias.add_((slopes.T @ pull)[:, 0])
            del probabilities, slopes
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def split(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]


def is_rounded(hidden: Tensor) -> bool:
    return hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu"


def lay_out(weight: Tensor, hidden: Tensor) -> Tensor:
    """The output matrix as `make_logits` takes it."""
    return to_rounded(weight) if is_rounded(hidden) else weight.to(hidden.dtype)


def make_logits(
    hidden: Tensor, matrix: Tensor, outputs: int, bias: Tensor | None, temperature: float
) -> Tensor:
    if is_rounded(hidden):
        logits = multiply_laid(hidden, matrix, outputs)
        logits = logits if bias is None else logits.add_(bias)
    else:
        logits = multiply_many(hidden, matrix, None if bias is None else bias.to(hidden.dtype)).float()
    return logits if temperature == 1 else logits.div_(temperature)


def weigh(
    logits: Tensor, targets: Tensor, kept: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Logits [M, V] in float32, which are used up → log-probabilities of the targets, log-sums and entropies,
    [M] each, and all probabilities in the type asked for, if any."""
    kernel = load_kernel() if logits.device.type == "cpu" and len(targets) else None
    if kernel is not None:
        return weigh_rows(kernel, logits, targets, kept)
    top = logits.amax(-1, keepdim=True)
    chosen = logits.gather(1, targets[:, None])[:, 0]
    weights = (logits - top).exp_()
    total = weights.sum(-1, keepdim=True)
    sums = (top + total.log())[:, 0]
    weights.div_(total)
    entropy = sums - logits.mul_(weights).sum(-1)
    return chosen - sums, sums, entropy, None if kept is None else weights.to(kept)


def weigh_rows(
    kernel: Callable[..., int], logits: Tensor, targets: Tensor, kept: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same by `c/logits.c`."""
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
    return kernel if is_right(kernel) else None


def is_right(kernel: Callable[..., int]) -> bool:
    """Whether it computes what torch does, with and without numbers left over for half a vector."""
    for size in (48, 53):
        logits = torch.arange(3.0 * size).mul(7).sin().mul(9).view(3, size)
        targets = torch.tensor([0, size - 1, 7])
        expected = logits.log_softmax(-1)
        for kept in (torch.float32, torch.bfloat16):
            logprobs, sums, entropy, weights = weigh_rows(kernel, logits.clone(), targets, kept)
            pairs = [
                (logprobs, expected.gather(1, targets[:, None])[:, 0]),
                (sums, logits.logsumexp(-1)),
                (entropy, -(expected.exp() * expected).sum(-1)),
            ]
            assert weights is not None
            is_near = all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
            if not (is_near and torch.allclose(weights.float(), expected.exp(), rtol=1e-2, atol=1e-5)):
                return False
    return True
