# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Group advantages and the policy losses, as pure functions on arrays.

A loss divides by totals of the whole step, so micro-batches add up to the same number however rows are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from trialogue.config import LossSettings
from trialogue.engine.api import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6
KL_BOUND = 10.0
"""The k3 estimate is clamped here: one wild token must not own the step."""
LOG_BOUND = 20.0
"""Differences of log-probabilities are clamped here: beyond it an exponential could overflow and its gradient
would be no number."""


def advantages(rewards: Sequence[float], name: str = "grpo") -> list[float]:
    """How much better each conversation of a group was than its siblings.

    grpo and its kin: (r - mean) / (spread + 1e-6) with the unbiased spread; dr_grpo: r - mean;
    rloo: r - mean of the others. A group without spread has no signal: all zeros.

    >>> advantages([1.0, 0.0, 0.0, 1.0], "dr_grpo")
    [0.5, -0.5, -0.5, 0.5]
    """
    if len(rewards) < 2 or max(rewards) - min(rewards) < EPSILON:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    if name == "dr_grpo":
        return [reward - mean for reward in rewards]
    if name == "rloo":
        return [(reward - mean) * len(rewards) / (len(rewards) - 1) for reward in rewards]
    spread = stdev(rewards) + EPSILON
    return [(reward - mean) / spread for reward in rewards]


@dataclass(frozen=True)
class PolicyLoss:
    """The loss a `LossSettings` names, for an engine's `forward_backward`."""

    settings: LossSettings

    @property
    def name(self) -> str:
        return self.settings.name

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
    """The loss of each token, and where the clip took hold."""
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
    """Sum the tokens' losses into this micro-batch's share of the step's loss. The unit of `row` and
    `constant` is a conversation, whatever number of rows it has."""
    if settings.reduction == "token":
        return losses.sum() / batch.total_tokens
    if settings.reduction == "constant":
        return losses.sum() / (batch.total_conversations * settings.constant)
    return (losses / batch.conversation_tokens[batch.row]).sum() / batch.total_conversations


def _conversation_ratio(log_ratio: Tensor, batch: TokenBatch, is_fresh: bool) -> Tensor:
    """The mean log-ratio of each token's conversation, over all that was sampled in it.

    Its rows may lie in other micro-batches or processes, so what they add is a number. Each token passes the
    gradient of its own log-ratio: summed over the conversation, whose tokens share an advantage, that is the
    gradient of the mean. `is_fresh` says that the old weights are the present ones, so that the rest is 0.
    """
    fixed = log_ratio.detach()
    elsewhere = batch.elsewhere.new_zeros(batch.rows) if is_fresh else batch.elsewhere
    if elsewhere.isnan().any():
        raise ValueError(
            "gspo: a conversation has several rows, and the ratio of the others is not known; give rows "
            "through trialogue.learn.rows.add_elsewhere first"
        )
    sums = elsewhere.to(fixed.dtype).index_add(0, batch.row, fixed)
    return (sums / batch.conversation_tokens.clamp(min=1))[batch.row] + log_ratio - fixed


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of supervised fine-tuning: mean over the trained tokens of the step."""

    name: str = "cross_entropy"

    def __call__(self, new_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor | float]]:
        loss = -new_logprobs.sum() / batch.total_tokens
        return loss, {"loss": loss.detach()}
