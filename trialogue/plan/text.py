"""A plan as text: what was assumed, memory by part, and a table that is Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trialogue.plan.memory import Memory
from trialogue.plan.plan import BOTTLENECKS, Plan, Row

RECORDED = frozenset(
    ("prompt_tokens", "user_turns", "tool_calls", "reply_tokens", "user_tokens", "tool_tokens", "spread")
) | frozenset(("user_seconds", "user_spread", "tool_seconds"))
"""What the recorded conversations of `plan.like` stand for."""


def to_lines(plan: Plan) -> Iterator[str]:
    """The plan, line by line."""
    config, layout, gpu, shape = plan.config, plan.layout, plan.gpu, plan.shape
    first = plan.rows[0]
    yield f"{config.domain} · {shape.name}: {shape.parameters / 1e9:.3g} billion parameters"
    yield f"{layout.gpus} × {gpu.name} ({gpu.gigabytes:g} GB), {describe_route(plan)}"
    if config.learner.model in ("tiny", "tiny-desk"):
        yield "the tiny model needs no GPU: it trains on one core of a CPU. The figures below are for a GPU"
    yield ""
    yield from to_memory_lines(plan.memory)
    yield ""
    if plan.memory.fits:
        yield f"fits: {plan.memory.peak:.1f} of {plan.memory.room:.1f} GB"
    elif plan.memory.peak <= plan.memory.room:
        yield (
            f"does not fit: the cache of one sampler holds {plan.memory.cache_tokens:,} tokens, and "
            f"{plan.memory.needed_tokens:,} are needed"
        )
    else:
        yield f"does not fit: {plan.memory.peak:.1f} GB are needed, {plan.memory.room:.1f} GB are there"
    if not plan.memory.fits:
        yield f"the smallest change that fits: {to_remedy(plan)}"
    yield ""
    given = "" if first.fits else " with that change" if first.changed else ", if it did fit"
    yield f"a step{given}, {first.conversations:,} conversations at once: {first.step:.0f} s, of which"
    for name, seconds in sorted(first.parts.items(), key=lambda item: -item[1]):
        if seconds >= 0.005 * first.step:
            yield f"  {seconds:8.1f} s  {BOTTLENECKS[name]}"
    half, last = first.typical, first.collect
    yield f"half of the conversations are over after {half:.0f} s, the last one after {last:.0f} s"
    steps = config.training.steps
    cost = "" if first.user_usd is None else f", {first.user_usd:,.0f} dollars for the user"
    cost += "" if first.gpu_usd is None else f", {first.gpu_usd:,.0f} dollars for GPUs"
    yield f"{steps} steps with evaluations: {first.hours:.1f} hours, {first.gpu_hours:,.0f} GPU hours{cost}"
    if first.calls:
        yield (
            f"the user's endpoint: {first.calls:,.0f} requests, {first.requests_per_second:.1f} a second "
            f"while conversations are held, {first.busiest_second:,.0f} in the busiest second"
        )
    if plan.rows[1:]:
        yield ""
        yield from to_table(plan.rows[1:])
        if any(row.changed for row in plan.rows[1:]):
            yield "* does not fit as configured; the figures are those of the smallest change that fits"
    yield ""
    yield from to_assumptions(plan)


def describe_route(plan: Plan) -> str:
    layout = plan.layout
    if layout.route == "train":
        return "trialogue train on one device"
    return (
        f"verl: {layout.replicas} copies of the weights sample, on {count_gpus(layout.tensor)} each; a row "
        f"of the update is split over {count_gpus(layout.sequence)}"
    )


def to_memory_lines(memory: Memory) -> Iterator[str]:
    """Memory of one GPU: a line for each part, a column for each phase."""
    yield "| GB on one GPU | update | sampling |"
    yield "| --- | ---: | ---: |"
    for part in dict.fromkeys((*memory.update, *memory.sampling)):
        held = [memory.update.get(part, 0.0), memory.sampling.get(part, 0.0)]
        if any(value >= 0.05 for value in held):
            yield f"| {part} | " + " | ".join(f"{value:.1f}" if value else "" for value in held) + " |"
    sums = [sum(memory.update.values()), sum(memory.sampling.values())]
    yield "| sum | " + " | ".join(f"{value:.1f}" for value in sums) + " |"


def to_remedy(plan: Plan) -> str:
    if plan.remedy is None:
        return "none of those known; take a smaller model or other GPUs"
    gpus, settings = plan.remedy
    words = to_words(settings)
    return words if gpus == plan.layout.gpus else count_gpus(gpus)


def count_gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def to_words(settings: Mapping[str, Any]) -> str:
    """Settings as they are written on the command line."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()
    )


def to_table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each number of GPUs and conversations."""
    titles = ("GPUs", "at once", "fits", "step, s", "hours", "GPU hours", "requests/s", "user, $")
    yield "| " + " | ".join([*titles, "bottleneck"]) + " |"
    yield "| " + " | ".join(["---:"] * len(titles) + ["---"]) + " |"
    for row in rows:
        fits = "yes" if row.fits else "no*" if row.changed else "no"
        known = row.fits or row.changed
        figures = [
            f"{row.step:,.0f}",
            f"{row.hours:,.1f}",
            f"{row.gpu_hours:,.0f}",
            f"{row.requests_per_second:,.1f}",
            "" if row.user_usd is None else f"{row.user_usd:,.0f}",
        ]
        cells = figures if known else [""] * len(figures)
        named = f"{BOTTLENECKS[row.bottleneck]}, {to_share(row)}" if known else "memory"
        yield f"| {row.gpus} | {row.conversations:,} | {fits} | " + " | ".join([*cells, named]) + " |"


def to_share(row: Row) -> str:
    return f"{row.parts[row.bottleneck] / max(1e-9, row.step):.0%}"


def to_assumptions(plan: Plan) -> Iterator[str]:
    """Everything that was assumed, as settings that can be changed."""
    settings, gpu = plan.config.plan, plan.gpu
    yield (
        f"assumed of {gpu.name}: {gpu.tflops:g} Tflop/s; GB/s: {gpu.bandwidth:g} of its memory, {gpu.link:g} "
        f"to its neighbours, {gpu.network:g} to other machines, {gpu.host:g} to the CPU"
    )
    if plan.lengths.recorded:
        number = len(plan.lengths.recorded)
        yield f"turns, lengths and latencies: those of {number} conversations of {settings.like}"
    yield "assumed otherwise (change with plan.KEY=VALUE; * given):"
    for name, value in settings.model_dump().items():
        if name in ("gpus", "gpu", "route", "like") or (plan.lengths.recorded and name in RECORDED):
            continue
        if name == "user_seconds":
            value = plan.lengths.user_seconds
        if name == "step_seconds" and value is None:
            value = 10.0 if plan.layout.route == "verl" else 0.0
        mark = " *" if name in plan.given else ""
        yield f"  plan.{name}={value:g}{mark}"
