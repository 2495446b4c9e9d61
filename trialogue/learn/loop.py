"""The method on one page: collect conversations, build rows, update the weights, publish, record.

`train.py` stands around it: opening, resuming, the budget, Ctrl-C, checkpoints and evaluations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trialogue.engine.api import Engine, OptimParams, Row, find_conversations
from trialogue.learn.advantages import Advantage, build_rows
from trialogue.learn.checks import Checks
from trialogue.learn.collect import Collector, Gate
from trialogue.learn.losses import OwnLoss, PolicyLoss, add_elsewhere
from trialogue.talk.rollout import derive_seed
from trialogue.trajectory import Group


class StepObserver(Protocol):
    """Records what happens in a step and checks it."""

    checks: Checks

    def see_conversations(self, step: int, groups: Sequence[Group], rows: Sequence[Row]) -> None: ...

    def see_update(self, step: int, metrics: dict[str, float]) -> None: ...


@dataclass(frozen=True, slots=True)
class Method:
    """What an update computes, and how."""

    advantage: Advantage
    loss: PolicyLoss | OwnLoss
    temperature: float = 1.0
    """The temperature that the agent sampled with."""
    mini_batches: int = 1
    reference: Engine | None = None
    """The weights that a divergence is measured from."""
    seed: int = 0


async def train_step(
    step: int,
    collector: Collector,
    engine: Engine,
    gate: Gate,
    method: Method,
    optim: OptimParams,
    observer: StepObserver,
) -> None:
    """One step of reinforcement learning with a user in the loop."""
    groups = await collector.next_groups(step)
    rows = build_rows(groups, method.advantage, observer.checks)
    observer.see_conversations(step, groups, rows)
    async with gate.closed():
        metrics = await update(engine, rows, method, optim, step)
        observer.see_update(step, metrics)
        await engine.publish()


async def update(
    engine: Engine, rows: Sequence[Row], method: Method, optim: OptimParams, step: int = 0
) -> dict[str, float]:
    """One optimizer step, or one per mini-batch of conversations. Returns the metrics."""
    if not rows:
        return {"skipped": 1.0}
    if method.reference is not None:
        known = await method.reference.forward(rows, method.temperature)
        rows = [replace(row, reference_logprobs=logprobs) for row, logprobs in zip(rows, known, strict=True)]
    conversations = find_conversations(rows)
    random.Random(derive_seed(method.seed, "rows", step)).shuffle(conversations)
    size = -(-len(conversations) // method.mini_batches)
    parts: list[dict[str, float]] = []
    for first in range(0, len(conversations), size):
        chosen = conversations[first : first + size]
        part = [rows[index] for members in chosen for index in members]
        if method.loss.needs_elsewhere and len(part) > len(chosen):
            part = add_elsewhere(part, await engine.forward(part, method.temperature))
        outputs = await engine.forward_backward(part, method.loss, temperature=method.temperature)
        parts.append(outputs.metrics | await engine.optim_step(optim))
    return join_metrics(parts)


def join_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its mini-batches. Skipped updates are counted and the rest is
    averaged, so that NaN propagates. The gap is that of the first one, whose weights sampled the rows."""
    if len(parts) == 1:
        return parts[0]
    joined = dict(parts[0])
    for key in joined.keys() - {"logprob_gap", "logprob_gap_max", "learning_rate"}:
        joined[key] = sum(part[key] for part in parts) / (1 if key == "skipped" else len(parts))
    return joined
