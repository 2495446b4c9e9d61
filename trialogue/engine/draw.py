# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Drawing tokens from logits: temperature, top-p, exact log-probabilities, noise that depends on nothing but
the request's seed and the token's position, so that company in the batch changes no draw."""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64, in signed 64-bit numbers
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_ONE = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_TWO = 0x94D049BB133111EB - (1 << 64)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * _MIX_ONE
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * _MIX_TWO
    return state ^ (state >> 31 & (1 << 33) - 1)


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, position), float64."""
    mixed = _mix(_mix(seeds * _STEP + _STEP) + positions * _STEP)
    return (mixed >> 11 & (1 << 53) - 1).double() * 2.0**-53


def draw_tokens(logits: Tensor, temperatures: Tensor, top_p: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, V], the rest [R] → tokens [R] and their log-probabilities under the tempered distribution.

    Temperature 0 takes the most probable token and reports its log-probability at temperature 1.
    """
    greedy = temperatures == 0
    any_greedy = bool(greedy.any())
    logits = logits.float()
    if bool((temperatures != 1).any()):
        logits = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if any_greedy and bool(greedy.all()):
        tokens = logits.argmax(-1)
    else:
        probabilities = logprobs.exp()
        tokens = _invert(probabilities, noise)
        cut = (top_p < 1) & ~greedy
        if bool(cut.any()):
            tokens = torch.where(cut, _invert_nucleus(probabilities, top_p, noise), tokens)
        if any_greedy:
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _invert(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Inverse of the cumulative distribution; a token of probability zero is never reached."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    wanted = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp_(max=probabilities.shape[1] - 1)


def _invert_nucleus(probabilities: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """The same within the smallest set of most probable tokens whose mass reaches top-p."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    kept = (cumulative - ordered < top_p[:, None]).sum(-1, keepdim=True).clamp_(min=1)
    wanted = noise[:, None] * cumulative.gather(1, kept - 1)
    found = torch.searchsorted(cumulative, wanted, right=True).minimum(kept - 1)
    return order.gather(1, found)[:, 0]
