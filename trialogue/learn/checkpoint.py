# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The learner and its checkpoints: weights, tokenizer and renderer in one folder, saved whole or not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from trialogue.config import Learner, TrainConfig
from trialogue.errors import RunError
from trialogue.run import Run, list_checkpoints
from trialogue.talk.local import LocalSource, Sampling
from trialogue.talk.model import ModelSource
from trialogue.talk.render import Renderer
from trialogue.talk.speech import load_renderer, save_renderer

if TYPE_CHECKING:
    from trialogue.engine.torch_engine import TorchEngine


@dataclass(frozen=True, slots=True)
class Learned:
    """A model that learns: what computes, and how messages become its tokens."""

    engine: TorchEngine
    renderer: Renderer
    tokenizer: Any

    def agent(self, config: TrainConfig, purpose: str) -> ModelSource:
        """The agent that speaks with the present weights: sampled while it learns, greedy when evaluated."""
        sampling = Sampling(
            temperature=config.training.temperature if purpose == "train" else 0.0,
            reply_tokens=config.limits.reply_tokens,
            context_tokens=config.limits.context_tokens,
        )
        return LocalSource(self.engine, self.renderer, sampling)


def load_learner(learner: Learner, seed: int) -> Learned:
    """Load what a `Learner` setting names."""
    from trialogue.engine.api import EngineSettings, LoraSettings
    from trialogue.engine.models import find_folder
    from trialogue.engine.torch_engine import TorchEngine

    folder = find_folder(learner.model)
    lora = LoraSettings(r=learner.lora_rank, alpha=learner.lora_alpha) if learner.lora_rank else None
    settings = EngineSettings(
        device=learner.device,
        lora=lora,
        gradient_checkpointing=learner.gradient_checkpointing,
        max_tokens_per_micro_batch=learner.micro_batch_tokens,
        cache_bytes=int(learner.cache_gigabytes * (1 << 30)),
        seed=seed,
    )
    tokenizer, renderer = load_renderer(folder, learner.renderer)
    return Learned(TorchEngine.load(folder, settings), renderer, tokenizer)


class Checkpoints:
    """The checkpoints of a run, newest last; `finish` leaves the model where `eval --agent RUN` finds it."""

    def __init__(self, run: Run, learner: Learned, keep: int) -> None:
        self.run, self.learner, self.keep = run, learner, keep
        self.folder = run.path / "checkpoints"

    async def save(self, step: int, level: int = 0) -> Path:
        """Save everything needed to go on after this step."""
        target = self.folder / f"step-{step:06d}"
        partial = self.folder / f".partial-{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        await self.learner.engine.save_state(partial)
        save_renderer(partial, self.learner.tokenizer, self.learner.renderer)
        facts = {"step": step, "level": level}
        (partial / "trainer.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        sync_folder(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in list_checkpoints(self.run.path)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    async def restore(self) -> tuple[int, int]:
        """Load the newest checkpoint and forget what the run wrote after it. Returns step and level."""
        found = list_checkpoints(self.run.path)
        if not found:
            self.run.forget_after(0)
            return 0, 0
        facts: dict[str, Any] = json.loads((found[-1] / "trainer.json").read_text(encoding="utf-8"))
        await self.learner.engine.load_state(found[-1])
        self.run.forget_after(facts["step"])
        return facts["step"], facts["level"]

    async def finish(self) -> None:
        """Put the final model at `model/`."""
        found = list_checkpoints(self.run.path)
        if not found:
            raise RunError(f"{self.run.path} has no checkpoint to finish with")
        target = self.run.path / "model"
        shutil.rmtree(target, ignore_errors=True)
        leave = shutil.ignore_patterns("optimizer.safetensors", "random.safetensors", "trainer.json")
        shutil.copytree(found[-1], target, ignore=leave)


def sync_folder(folder: Path) -> None:
    """Make sure the folder's files are on disk before it gets its name."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Interrupt:
    """Turns the first Ctrl-C into a request to finish the step and save; the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        try:
            self._before = signal.signal(signal.SIGINT, self._hear)
        except ValueError:  # not the main thread: whoever owns it decides
            self._before = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
