# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The policy losses and the loss of supervised fine-tuning, as pure functions on arrays.

A loss divides by totals of the whole step, so that the losses of micro-batches add up to the same number
however rows are split. `loss.name` names one of `PolicyLoss`, or a loss of your own as `module:name`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trialogue.config import LossSettings
from trialogue.engine.api import Row, TokenBatch, find_conversations
from trialogue.errors import ConfigError
from trialogue.seams import check_signature, describe_value, load_seam, loading
from trialogue.settings import LOSSES

if TYPE_CHECKING:
    from torch import Tensor

KL_BOUND = 10.0
"""The k3 estimate is clamped here, so that one outlier token does not dominate the step."""
LOG_BOUND = 20.0
"""Differences of log-probabilities are clamped here: beyond it the exponential could overflow, and its
gradient would be NaN."""


def find_loss(settings: LossSettings) -> PolicyLoss | OwnLoss:
    """The loss that `loss.name` names. A loss of your own is a function `(new_logprobs, batch)` that returns
    a scalar and metrics, an object with such a `__call__`, or a class of such objects."""
    if settings.name in LOSSES:
        return PolicyLoss(settings)
    found: Any = load_seam(settings.name, "loss")
    if inspect.isclass(found):
        check_signature(found, (), "loss")
        with loading(f"loss {describe_value(found)}"):
            found = found()
    check_signature(found, ("new_logprobs", "batch"), "loss")
    return OwnLoss(found)


@dataclass(frozen=True)
class OwnLoss:
    """A loss from outside the package. A mistake in it names its function, file and line."""

    function: Any

    @property
    def needs_elsewhere(self) -> bool:
        return bool(getattr(self.function, "needs_elsewhere", False))

    def __call__(self, new_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor | float]]:
        import torch

        what = f"loss {describe_value(self.function)}"
        with loading(what):
            found = self.function(new_logprobs, batch)
        if isinstance(found, tuple) and len(found) == 2:
            loss, metrics = found
            if isinstance(loss, torch.Tensor) and loss.ndim == 0 and isinstance(metrics, dict):
                return loss, {"loss": loss.detach(), **metrics}
        raise ConfigError(
            f"{what}: it must return a scalar tensor and a dict of metrics, not {describe_result(found)}"
        )


def describe_result(found: Any) -> str:
    """The type of what a loss returned, with the shape of tensors."""
    if isinstance(found, tuple):
        return f"({', '.join(map(describe_result, found))})"
    shape = getattr(found, "shape", None)
    return type(found).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss a `LossSettings` names, for an engine's `forward_backward`."""

    settings: LossSettings

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def needs_elsewhere(self) -> bool:
        """Whether a row needs the log-ratios of the other rows of its conversation (`Row.elsewhere`)."""
        return self.name == "gspo" and not self.settings.importance_cap

    def __call__(self, new_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor | float]]:
        import torch

        settings = self.settings
        fixed = new_logprobs.detach()
        old = fixed if settings.importance_cap else batch.old_logprobs
        log_ratio = (new_logprobs - old).clamp(-LOG_BOUND, LOG_BOUND)
        if settings.name == "gspo":
            log_ratio = _conversation_ratio(log_ratio, batch, settings.importance_cap > 0)
        ratio = torch.exp(log_ratio)
        losses, clipped = surrogate(ratio, new_logprobs, batch.advantages, settings)
        if settings.importance_cap:
            weights = torch.exp(fixed - batch.old_logprobs).clamp(max=settings.importance_cap)
            losses = losses * weights
        metrics: dict[str, Tensor | float] = {
            "clip_share": clipped.float().sum() / batch.total_tokens,
            "entropy": batch.entropy.sum() / batch.total_tokens,
            "logprob_gap": (fixed - batch.old_logprobs).abs().sum() / batch.total_tokens,
            "logprob_gap_max": (fixed - batch.old_logprobs).abs().max(),
        }
        if batch.reference_logprobs is not None:
            divergence = k3(new_logprobs, batch.reference_logprobs)
            metrics["kl"] = divergence.detach().sum() / batch.total_tokens
            if settings.kl:
                losses = losses + settings.kl * divergence
        loss = reduce(losses, batch, settings)
        metrics["loss"] = loss.detach()
        return loss, metrics


def surrogate(
    ratio: Tensor, new_logprobs: Tensor, advantage: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and which tokens were clipped."""
    import torch

    low, high = settings.clips
    if settings.name == "cispo":
        weight = ratio.detach().clamp(max=1 + high)
        return -weight * advantage * new_logprobs, ratio.detach() > 1 + high
    bounded = ratio.clamp(1 - low, 1 + high)
    plain, held = -ratio * advantage, -bounded * advantage
    losses = torch.maximum(plain, held)
    if settings.dual_clip:
        losses = torch.where(advantage < 0, torch.minimum(losses, -settings.dual_clip * advantage), losses)
    return losses, (held > plain).detach()


def k3(new_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The k3 estimate of the divergence from the reference: exp(d) - d - 1, never negative."""
    import torch

    distance = (reference_logprobs - new_logprobs).clamp(-LOG_BOUND, LOG_BOUND)
    return (torch.exp(distance) - distance - 1).clamp(-KL_BOUND, KL_BOUND)


def reduce(losses: Tensor, batch: TokenBatch, settings: LossSettings) -> Tensor:
    """Reduce the losses of tokens to this micro-batch's part of the loss of the step. The unit of `row` and
    `constant` is a conversation, however many rows it has."""
    if settings.reduction == "token":
        return losses.sum() / batch.total_tokens
    if settings.reduction == "constant":
        return losses.sum() / (batch.total_conversations * settings.constant)
    return (losses / batch.conversation_tokens[batch.row]).sum() / batch.total_conversations


def _conversation_ratio(log_ratio: Tensor, batch: TokenBatch, is_fresh: bool) -> Tensor:
    """The mean log-ratio of each token's conversation, over all tokens sampled in it.

    Other rows of the conversation may be in other micro-batches or processes, so their log-ratios come as a
    plain number (`elsewhere`). Each token passes on the gradient of its own log-ratio: summed over the
    conversation, whose tokens have one advantage, that is the gradient of the mean. `is_fresh` means that the
    present weights sampled the rows, so the log-ratios elsewhere are 0.
    """
    fixed = log_ratio.detach()
    elsewhere = batch.elsewhere.new_zeros(batch.rows) if is_fresh else batch.elsewhere
    if elsewhere.isnan().any():
        raise ValueError(
            "gspo: a conversation has several rows, and the log-ratios of its other rows are unknown; pass "
            "the rows through trialogue.learn.losses.add_elsewhere first"
        )
    sums = elsewhere.to(fixed.dtype).index_add(0, batch.row, fixed)
    return (sums / batch.conversation_tokens.clamp(min=1))[batch.row] + log_ratio - fixed


def add_elsewhere(rows: Sequence[Row], known: Sequence[Sequence[float]]) -> list[Row]:
    """Add to each row the log-ratios of the other rows of its conversation. `known` are the log-probabilities
    of all tokens under the present weights."""
    sums = [
        sum(
            max(-LOG_BOUND, min(LOG_BOUND, new - old))
            for new, old, mask in zip(logprobs, row.logprobs, row.mask, strict=True)
            if mask
        )
        for row, logprobs in zip(rows, known, strict=True)
    ]
    done = list(rows)
    for members in find_conversations(rows):
        for index in members:
            others = sum(sums[member] for member in members if member != index)
            done[index] = replace(rows[index], elsewhere=others)
    return done


def cross_entropy(new_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The loss of supervised fine-tuning: mean over the trained tokens of the step."""
    loss = -new_logprobs.sum() / batch.total_tokens
    return loss, {"loss": loss.detach()}
