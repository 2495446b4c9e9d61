"""Finding what token sequences have in common: pure functions on lists of ints."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix. Slices compare in C, so halving beats walking."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def best_shared_prefix(entries: Sequence[tuple[list[int], int]], shortest: int) -> list[int] | None:
    """The prefix of at least `shortest` tokens that saves most computation, or None when none saves any.

    Each entry is (tokens, covered): `covered` leading tokens are already provided for, -1 says that the entry
    has all its tokens computed, so that a prefix copied from it costs nothing.
    """
    ordered = sorted(entries, key=lambda entry: entry[0])
    heights = [common_length(ordered[i][0], ordered[i + 1][0]) for i in range(len(ordered) - 1)]
    best, saved = None, 0
    for left, height in enumerate(heights):
        # Every maximal run of neighbours that share `height` tokens is met at its leftmost lowest gap.
        if height < shortest or (left > 0 and heights[left - 1] == height):
            continue
        low, high = left, left + 1
        while low > 0 and heights[low - 1] >= height:
            low -= 1
        while high < len(heights) and heights[high] >= height:
            high += 1
        members = ordered[low : high + 1]
        gain = sum(max(0, height - covered) for _, covered in members if covered >= 0)
        gain -= 0 if any(covered < 0 for _, covered in members) else height
        if gain > saved:
            best, saved = ordered[left][0][:height], gain
    return best
