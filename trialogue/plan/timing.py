"""Seconds of the parts of a step: a decode step, reading a prompt, an update, handing weights over."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trialogue.assumptions import PlanSettings
from trialogue.engine.hardware import Gpu
from trialogue.engine.shapes import ModelShape
from trialogue.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Sampling:
    """How fast one copy of the sampling weights decodes and reads, and how many tokens its cache holds."""

    weight_seconds: float
    """Reading all weights once."""
    token_seconds: float
    """Reading the cached keys and values of one token."""
    product_seconds: float
    """Computing one token."""
    prefill_seconds: float
    """Reading one token of a prompt."""
    fixed_seconds: float
    room: int

    def decode(self, active: float, cached: float) -> float:
        """One decode step for so many conversations, which look back on so many tokens altogether."""
        reading = self.weight_seconds + cached * self.token_seconds
        return self.fixed_seconds + max(reading, active * self.product_seconds)

    def prefill(self, tokens: float) -> float:
        return tokens * self.prefill_seconds


def measure_sampling(
    settings: PlanSettings, layout: Layout, shape: ModelShape, gpu: Gpu, length: float, room: int
) -> Sampling:
    """Sampling by one copy of the weights, which `layout.tensor` GPUs hold together."""
    share = settings.decode_efficiency * layout.tensor
    operations = gpu.tflops * 1e12 * layout.tensor
    reading = gpu.bandwidth * 1e9 * share
    return Sampling(
        weight_seconds=shape.matrices * gpu.number_bytes / reading,
        token_seconds=shape.cache_numbers * gpu.number_bytes / reading,
        product_seconds=shape.count_operations(0) / (operations * settings.decode_efficiency),
        prefill_seconds=shape.count_operations(length) / (operations * settings.prefill_efficiency),
        fixed_seconds=settings.decode_seconds or 0.0,
        room=room,
    )


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds of an update by part."""

    compute: float = 0.0
    network: float = 0.0
    """What collectives take longer than the products that they overlap with, and moving state to the CPU."""
    publish: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.network + self.publish + self.other


def measure_update(
    settings: PlanSettings,
    layout: Layout,
    shape: ModelShape,
    gpu: Gpu,
    tokens: float,
    length: float,
    trained: float | None = None,
) -> Update:
    """An update on so many tokens of rows of so many tokens, the mean. Logits are computed of the `trained`
    ones only (default: all).

    A trained token costs three forward passes, four with checkpointing; verl adds one for its own
    log-probabilities, and a divergence one for those of the reference.
    """
    passes = 4.0 if layout.checkpointing else 3.0
    forwards = layout.reference + (layout.route == "verl" and layout.recomputed)
    left_out = 2.0 * shape.output * (0.0 if trained is None else tokens - trained)
    operations = (tokens * shape.count_operations(length / 2) - left_out) * (passes + forwards)
    speed = gpu.tflops * 1e12 * (settings.update_efficiency or 1.0) * layout.gpus
    compute = operations / speed
    network = publish = 0.0
    if layout.gpus > 1:
        machines = layout.gpus > gpu.per_machine
        link = (gpu.network if machines else gpu.link) * 1e9 * settings.link_efficiency
        batches = ceil(tokens / (layout.tokens * layout.gpus))
        # All weights in bfloat16 for the forward and the backward pass, gradients in float32; for each pass
        # without gradients the weights once.
        moved = shape.parameters * (2 * 2 + 4 + 2 * forwards) * batches
        network = max(0.0, moved / link - compute)
        publish = shape.parameters * 2 / layout.tensor / link
    elif gpu.number_bytes == 2:
        publish = shape.parameters * 6 / (gpu.bandwidth * 1e9)  # float32 weights become bfloat16 copies
    state = shape.parameters * 16 / layout.gpus
    if layout.offload_always:
        network += 2 * state / (gpu.host * 1e9)  # to the GPU and back
    elif layout.offload_moments or layout.offload_parameters:
        share = (8 if layout.offload_moments else 0) + (4 if layout.offload_parameters else 0)
        network += 2 * state * share / 16 / (gpu.host * 1e9)
    other = settings.step_seconds
    if other is None:
        other = 10.0 if layout.route == "verl" else 0.0
    return Update(compute, network, publish, other)
