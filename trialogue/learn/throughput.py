# pyright: reportUnknownMemberType=false
"""How well a step uses the GPU: tokens a second, and the share of the GPU's peak that updates reach (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trialogue.engine.api import Engine, Row
from trialogue.engine.hardware import find_peak

if TYPE_CHECKING:
    from trialogue.engine.torch_engine import TorchEngine


class Throughput:
    """Counts what the engines of a run compute, and compares it with what their device could."""

    def __init__(self, engines: Sequence[Engine], peak_tflops: float = 0.0) -> None:
        self.trainers = [found for engine in engines if (found := find_trainer(engine)) is not None]
        self.peak = peak_tflops * 1e12 or max(map(find_device_peak, self.trainers), default=0.0)
        self.before = self.count()

    def count(self) -> float:
        """Operations of all updates so far."""
        return sum(trainer.update.operations for trainer in self.trainers)

    def begin(self) -> None:
        self.before = self.count()

    def measure(self, rows: Sequence[Row], *, rollout: float, update: float) -> dict[str, float]:
        """The figures of a step that took so many seconds to collect and to learn from these rows."""
        tokens = sum(len(row.tokens) for row in rows)
        found = {"tokens_per_second": tokens / max(rollout + update, 1e-9)}
        operations = self.count() - self.before
        if self.peak and operations:
            found["mfu"] = operations / max(update, 1e-9) / self.peak
        return found


def find_trainer(engine: Engine) -> TorchEngine | None:
    """The engine of ours that computes updates, alone or beside a vLLM server."""
    from trialogue.engine.torch_engine import TorchEngine

    trainer = getattr(engine, "trainer", engine)
    return trainer if isinstance(trainer, TorchEngine) else None


def find_device_peak(trainer: TorchEngine) -> float:
    import torch

    return find_peak(torch.cuda.get_device_name(trainer.device)) if trainer.device.type == "cuda" else 0.0
