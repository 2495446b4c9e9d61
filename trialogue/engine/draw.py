# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Drawing tokens from logits: temperature, top-p, exact log-probabilities, noise that depends on nothing but
the request's seed and the token's position, so that company in the batch changes no draw."""

from __future__ import annotations

import torch
from torch import Tensor

from trialogue.engine.transfer import send

# splitmix64, in signed 64-bit numbers
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_ONE = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_TWO = 0x94D049BB133111EB - (1 << 64)

BLOCK = 64  # tokens summed up before one of them is looked for


def _mix(state: Tensor) -> Tensor:
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * _MIX_ONE
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * _MIX_TWO
    return state ^ (state >> 31 & (1 << 33) - 1)


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, position), float64."""
    mixed = _mix(_mix(seeds * _STEP + _STEP) + positions * _STEP)
    return (mixed >> 11 & (1 << 53) - 1).double() * 2.0**-53


def draw_tokens(logits: Tensor, temperatures: Tensor, top_p: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, V], the rest [R] on the host → tokens [R] and their log-probabilities under the tempered
    distribution.

    Temperature 0 takes the most probable token and reports its log-probability at temperature 1.
    """
    # What is needed is decided on the host, so that it does not wait for a GPU.
    is_greedy, is_tempered = temperatures == 0, bool((temperatures != 1).any())
    any_greedy = bool(is_greedy.any())
    all_greedy = any_greedy and bool(is_greedy.all())
    any_cut = not all_greedy and bool((top_p < 1).any())
    temperatures, top_p, noise = send([temperatures, top_p, noise], logits.device)
    greedy = temperatures == 0
    logits = logits.float()
    if is_tempered:
        logits = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    if all_greedy:
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(weights, noise)
        if any_cut:
            cut = (top_p < 1) & ~greedy
            probabilities = weights / weights.sum(-1, keepdim=True)
            tokens = torch.where(cut, _invert_nucleus(probabilities, top_p, noise), tokens)
        if any_greedy:
            tokens = torch.where(greedy, logits.argmax(-1), tokens)
    drawn = logits.gather(1, tokens[:, None]) - top - weights.sum(-1, keepdim=True).log_()
    return tokens, drawn[:, 0]


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """Inverse of the cumulative distribution, first by blocks and then within one: a running sum over the
    whole vocabulary costs more than the rest of drawing. A token of weight zero is never reached."""
    count = weights.shape[1]
    whole = count // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(-1)
    if whole < count:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    block, share = _find(sums, noise[:, None])
    places = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=count - 1)).masked_fill_(places >= count, 0)
    place, _ = _find(inside, share)
    return (block * BLOCK + place)[:, 0].clamp_(max=count - 1)


def _find(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Which weight each noise in [0, 1) falls on, and how far into it."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    wanted = noise * total
    # Rounding may not lead past the last weight that counts; what is not a number has no place at all.
    last = torch.searchsorted(cumulative, total).clamp_(max=weights.shape[1] - 1)
    found = torch.searchsorted(cumulative, wanted, right=True).minimum(last)
    chosen = weights.gather(1, found).double()
    return found, ((wanted - cumulative.gather(1, found)) / chosen + 1).clamp_(0, 1)


def _invert_nucleus(probabilities: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """The same within the smallest set of most probable tokens whose mass reaches top-p."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    kept = (cumulative - ordered < top_p[:, None]).sum(-1, keepdim=True).clamp_(min=1)
    wanted = noise[:, None] * cumulative.gather(1, kept - 1)
    found = torch.searchsorted(cumulative, wanted, right=True).minimum(kept - 1)
    return order.gather(1, found)[:, 0]
