"""Memory of one GPU by part, whether it fits, and the smallest change that makes it fit.

verl keeps the update and the sampler on the same GPUs, one after the other, so each phase has a sum of its
own. `train` has both at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from typing import Any

from trialogue.config import PlanConfig
from trialogue.engine.hardware import Gpu
from trialogue.engine.shapes import ModelShape
from trialogue.plan.layout import ACTOR, ROLLOUT, Layout, change, to_layout

LOGITS_AT_ONCE = 1 << 26
"""Logits that our own engine computes at once (engine/logprobs.py)."""
LEAST_CACHE = 1.5
"""Conversations of full length that the sampler's cache of one copy must hold."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one GPU holds, in GB."""

    update: Mapping[str, float]
    sampling: Mapping[str, float]
    cache_tokens: int
    """Tokens that the cache of one copy of the sampling weights holds."""
    room: float
    """What may be used of the GPU."""
    needed_tokens: int
    """Tokens that the cache has to hold."""

    @property
    def peak(self) -> float:
        return max(sum(self.update.values()), sum(self.sampling.values()))

    @property
    def fits(self) -> bool:
        return self.peak <= self.room and self.cache_tokens >= self.needed_tokens


def measure_memory(config: PlanConfig, layout: Layout, shape: ModelShape, gpu: Gpu) -> Memory:
    """Memory by part and phase."""
    update = find_update_parts(config, layout, shape, gpu)
    room = gpu.gigabytes - (config.plan.reserve_gigabytes if gpu.number_bytes == 2 else 1.0)
    per_token = shape.cache_numbers * gpu.number_bytes / 1e9
    needed = ceil(LEAST_CACHE * config.limits.context_tokens)
    if layout.route == "train":
        copy = shape.parameters * 2 / 1e9 if gpu.number_bytes == 2 else 0.0
        sampling = {name: update[name] for name in ("weights", "gradients", "moments")}
        sampling |= {"sampling weights": copy, "cache": layout.cache_gigabytes}
        whole = {**update, "sampling weights": copy, "cache": layout.cache_gigabytes}
        return Memory(whole, sampling, int(layout.cache_gigabytes / per_token), room, needed)
    weights = shape.parameters * 2 / 1e9 / layout.tensor
    resident = {
        "weights": 0.0 if layout.offload_parameters else update["weights"],
        "gradients": 0.0,  # freed by the optimizer's step
        "moments": 0.0 if layout.offload_moments else update["moments"],
    }
    given = layout.share * gpu.gigabytes
    cache = given - weights - 2.0  # activations and graphs of the sampler
    held = min(layout.tensor, shape.kv_heads)
    tokens = max(0, int(cache / (per_token / held)))
    sampling = {**resident, "sampling weights": weights, "cache": max(cache, 0.0), "sampler's graphs": 2.0}
    return Memory(update, sampling, tokens, room, needed)


def find_update_parts(config: PlanConfig, layout: Layout, shape: ModelShape, gpu: Gpu) -> dict[str, float]:
    """What the update holds on one GPU."""
    trained = shape.count_lora(layout.lora_rank) if layout.lora_rank else shape.parameters
    frozen = shape.parameters if layout.lora_rank else 0
    shared = layout.gpus if layout.route == "verl" else 1
    frozen_bytes = 2 if layout.route == "train" and gpu.number_bytes == 2 else 4
    state = 0.0 if layout.offload_always else 1.0
    tokens, width = layout.tokens, shape.width
    query, key = shape.heads * shape.head, shape.kv_heads * shape.head
    size = gpu.number_bytes
    # The peak of one layer: inputs, queries, keys, values, output of attention, three of the MLP, gradients.
    one_layer = tokens * size * 2 * (2 * width + 2 * query + 2 * key + 3 * shape.inner)
    kept = tokens * width * (size if layout.checkpointing else config.plan.layer_bytes)
    largest = max(shape.vocabulary * width, shape.matrices // max(1, shape.layers))
    gathered = 2 * (largest + shape.matrices / shape.layers) * size if shared > 1 else 0.0
    if layout.route == "verl":
        logits = tokens * shape.vocabulary * config.plan.logit_bytes
    else:
        logits = min(tokens * shape.vocabulary, LOGITS_AT_ONCE) * 8.0
    parts = {
        "weights": state * (4 * trained + frozen_bytes * frozen) / shared,
        "gradients": state * 4 * trained / shared,
        "moments": state * 8 * trained / shared,
        "gathered layers": gathered,
        "activations": shape.layers * kept + one_layer,
        "logits": logits,
    }
    if layout.reference and layout.route == "train" and not layout.lora_rank:
        parts["reference"] = 4.0 * shape.parameters
    return {name: value / 1e9 for name, value in parts.items()}


def find_changes(config: PlanConfig, layout: Layout) -> Iterator[tuple[int, dict[str, Any]]]:
    """Single changes that save memory, each with its price: a guess of the speed or quality lost."""
    if not layout.checkpointing:
        yield 3, {"learner.gradient_checkpointing": True}
    if layout.route == "train":
        for price, tokens in enumerate(halve(config.learner.micro_batch_tokens, 2048), 1):
            yield price, {"learner.micro_batch_tokens": tokens}
        for price, gigabytes in enumerate((20.0, 10.0, 5.0), 1):
            if gigabytes < layout.cache_gigabytes:
                yield price, {"learner.cache_gigabytes": gigabytes}
        if not layout.lora_rank:
            yield 10, {"learner.lora_rank": 32}
        return
    actor, rollout = f"engine.verl.{ACTOR}", f"engine.verl.{ROLLOUT}"
    shortest = max(2048, ceil(config.limits.context_tokens / layout.sequence))
    for price, tokens in enumerate(halve(layout.tokens, shortest), 1):
        yield price, {"learner.micro_batch_tokens": tokens}
    for sequence in (2, 4, 8):
        if layout.sequence < sequence <= layout.gpus:
            tokens = min(layout.tokens, max(2048, ceil(config.limits.context_tokens / sequence)))
            name = f"{actor}.ulysses_sequence_parallel_size"
            yield 2 + sequence // 2, {name: sequence, "learner.micro_batch_tokens": tokens}
    for price, share in enumerate((0.8, 0.7, 0.6, 0.5, 0.4, 0.3), 1):
        if share < layout.share:
            yield price, {f"{rollout}.gpu_memory_utilization": share}
    for tensor in (2, 4, 8):
        if layout.tensor < tensor <= layout.gpus:
            yield 1 + tensor // 2, {f"{rollout}.tensor_model_parallel_size": tensor}
    offload = f"{actor}.fsdp_config"
    if not (layout.offload_parameters and layout.offload_moments) and not layout.offload_always:
        yield 4, {f"{offload}.param_offload": True, f"{offload}.optimizer_offload": True}
    if not layout.offload_always:
        yield 9, {f"{offload}.offload_policy": True}


def halve(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


def find_smallest_change(
    config: PlanConfig, gpus: int, shape: ModelShape, gpu: Gpu
) -> tuple[int, dict[str, Any]] | None:
    """The cheapest settings with which the run fits on these GPUs, or else on more of them. Returns the
    number of GPUs and the settings; None where nothing helps."""
    known = list(find_changes(config, to_layout(config, gpus)))
    tries = [chosen for number in (1, 2, 3) for chosen in combinations(known, number)]
    for chosen in sorted(tries, key=lambda chosen: sum(price for price, _ in chosen)):
        settings = {key: value for _, one in chosen for key, value in one.items()}
        if sum(len(one) for _, one in chosen) > len(settings):
            continue  # two values for one setting
        changed = change(config, settings)
        if measure_memory(changed, to_layout(changed, gpus), shape, gpu).fits:
            return gpus, settings
    more = gpus
    while config.plan.route != "train" and (more := 2 * more) <= 1024:
        if measure_memory(config, to_layout(config, more), shape, gpu).fits:
            return more, {}
    return None
