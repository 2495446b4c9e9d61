"""A loss of your own: REINFORCE with truncated importance weights.

    trialogue train shop loss.name=examples/loss.py:reinforce advantage.name=dr_grpo

A loss takes the log-probabilities of the trained tokens under the present weights, and a `TokenBatch` with
what belongs to these tokens. It returns a scalar and metrics. Divide by the totals of the batch: they count
the whole step, so the losses of its micro-batches add up.
"""

import torch
from torch import Tensor

from trialogue import TokenBatch

CAP = 2.0


def reinforce(new_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Log-likelihood times advantage, weighted by how much likelier a token has become, at most twice."""
    ratio = torch.exp(new_logprobs.detach() - batch.old_logprobs)
    weight = ratio.clamp(max=CAP)
    loss = -(weight * batch.advantages * new_logprobs).sum() / batch.total_tokens
    return loss, {"capped": (ratio > CAP).sum() / batch.total_tokens}
