"""What a conversation costs on this machine, measured in the first seconds of a course."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from trialogue.activity import phase
from trialogue.config import SftConfig
from trialogue.engine.api import Row
from trialogue.learn.checkpoint import Learner, load_learner
from trialogue.learn.losses import cross_entropy
from trialogue.learn.sft import collect, split_rows
from trialogue.learn.sizes import BATCH, Pace
from trialogue.world.domain import Domain

MEASURED = 48
"""Conversations that are held to measure."""
SLOW = 5.0
"""Seconds of an update above which the next one is smaller."""
SMALL = 20_000_000
"""Weights up to which a model learns as if from scratch, with high learning rates."""


async def measure_pace(domain: Domain, config: SftConfig) -> Pace:
    """Let the teacher hold a few conversations, and learn from them."""
    few = config.sft.model_copy(update={"count": MEASURED, "validation": 0.0})
    config = config.model_copy(update={"sft": few})
    learner = load_learner(config.learner, config.seed)
    try:
        began = monotonic()
        with phase("a few conversations of the teacher"):
            examples = (await collect(domain, config))[:MEASURED]
        rows, _ = split_rows(examples, domain, learner.renderer, config)
        held = (monotonic() - began) / len(examples)
        learned = await measure_update(learner, rows)
    finally:
        learner.engine.close()
    return Pace(
        held,
        learned,
        longest=max(len(row.tokens) for row in rows),
        reply=max(find_longest(row.mask) for row in rows),
    )


async def measure_update(learner: Learner, rows: list[Row]) -> float:
    """Seconds to learn from one conversation. Nothing is changed: the gradients are dropped."""
    fastest = float("inf")
    size = min(BATCH, len(rows))
    for _ in range(3):  # the first one compiles
        began = monotonic()
        with phase("learning from a few conversations"):
            await learner.engine.forward_backward(rows[:size], cross_entropy)
        seconds = monotonic() - began
        fastest = min(fastest, seconds / size)
        if seconds > SLOW:
            size = max(1, size // 4)
    return fastest


def find_longest(mask: list[int]) -> int:
    """The longest run of tokens that are learned: a reply."""
    longest = here = 0
    for value in mask:
        here = here + 1 if value else 0
        longest = max(longest, here)
    return longest


def is_small(model: str) -> bool:
    """Whether a model has so few weights that it learns as if from scratch."""
    from trialogue.engine.models import find_model_folder

    files = list(Path(find_model_folder(model)).glob("*.safetensors"))
    return bool(files) and sum(file.stat().st_size for file in files) < 4 * SMALL
