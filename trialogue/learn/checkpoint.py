# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The learner and its checkpoints: weights, tokenizer and renderer in one folder, saved atomically."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from trialogue.config import EngineChoice, LearnerSettings, Limits
from trialogue.durable import MANIFEST, find_damage, put_back, put_in_place, saving, seal, write_json
from trialogue.errors import EngineError, OutOfMemory, RunError
from trialogue.run import Run, list_checkpoints
from trialogue.talk.local import LocalSource, Sampler, Sampling
from trialogue.talk.model import ModelSource
from trialogue.talk.render.api import Renderer
from trialogue.talk.render.load import count_ids, load_renderer, save_renderer

if TYPE_CHECKING:
    from trialogue.engine.api import Engine

_log = logging.getLogger("trialogue")


@dataclass(frozen=True, slots=True)
class Learner:
    """A model that learns: its engine, and how messages become its tokens."""

    engine: Engine
    renderer: Renderer
    tokenizer: Any

    def agent(
        self, limits: Limits | None = None, *, temperature: float = 1.0, sampler: Sampler | None = None
    ) -> ModelSource:
        """The agent that speaks with the present weights. Temperature 0 is greedy. `sampler` samples in
        place of the engine."""
        limits = limits or Limits()
        sampling = Sampling(
            temperature=temperature,
            reply_tokens=limits.reply_tokens,
            context_tokens=min(limits.context_tokens, self.engine.capabilities.max_length),
        )
        return LocalSource(sampler or self.engine, self.renderer, sampling)

    async def save(self, folder: str | Path) -> None:
        """Write the weights, the state of the optimizer, the tokenizer and the renderer to a folder, which
        `load_learner` and `--agent` read."""
        await self.engine.save_state(Path(folder))
        save_renderer(Path(folder), self.tokenizer, self.renderer)


def load_learner(
    learner: LearnerSettings | str | Path = "tiny", seed: int = 0, choice: EngineChoice | None = None
) -> Learner:
    """Load a model into an engine. `learner` is `tiny`, a run, a folder of weights, a hub name, or settings.
    Default engine: torch, in this process, whatever the size."""
    from trialogue.engine.api import EngineSettings, LoraSettings
    from trialogue.engine.find import find_engine
    from trialogue.engine.models import find_model_folder

    if not isinstance(learner, LearnerSettings):
        learner = LearnerSettings(model=str(learner))
    folder = find_model_folder(learner.model)
    tokenizer, renderer = load_renderer(folder, learner.renderer)
    settings = EngineSettings(
        vocabulary=count_ids(tokenizer),
        device=learner.device,
        precision=learner.precision,
        lora=LoraSettings(r=learner.lora_rank, alpha=learner.lora_alpha) if learner.lora_rank else None,
        gradient_checkpointing=learner.gradient_checkpointing,
        max_tokens_per_micro_batch=learner.micro_batch_tokens,
        cache_bytes=int(learner.cache_gigabytes * (1 << 30)),
        seed=seed,
    )
    return Learner(find_engine(choice or EngineChoice(name="torch"), folder, settings), renderer, tokenizer)


def settle_engine(choice: EngineChoice, learner: LearnerSettings) -> EngineChoice:
    """The engine with the name that runs, for the record, in place of `auto`."""
    from trialogue.engine.find import choose_name
    from trialogue.engine.models import find_model_folder

    if choice.name != "auto":
        return choice
    name = choose_name(choice, find_model_folder(learner.model), learner.device)
    return choice.model_copy(update={"name": name})


@dataclass(slots=True)
class Best:
    """The best of what was measured so far, and how often something worse came after it."""

    patience: int
    """Worse measurements in a row after which to stop. 0: never, and the best counts for nothing."""
    step: int | None = None
    value: float = 0.0
    worse: int = 0

    @classmethod
    def restore(cls, patience: int, known: dict[str, Any] | None) -> Best:
        """Go on from what a checkpoint kept."""
        return cls(patience, **(known or {}))

    def see(self, step: int, value: float) -> None:
        """Take in a measurement; an equal one counts as better, because more was learned."""
        if self.step is None or value >= self.value:
            self.step, self.value, self.worse = step, value, 0
        else:
            self.worse += 1

    @property
    def is_over(self) -> bool:
        return bool(self.patience) and self.worse >= self.patience

    @property
    def kept(self) -> int | None:
        """The step whose weights are kept to the end; None for those of the last."""
        return self.step if self.patience else None

    def to_data(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value, "worse": self.worse}


class Checkpoints:
    """The checkpoints of a run. `finish` writes the model to where `eval --agent RUN` finds it."""

    def __init__(self, run: Run, learner: Learner, keep: int) -> None:
        self.run, self.learner, self.keep = run, learner, keep
        self.folder = run.path / "checkpoints"

    def find_folder(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    async def save(self, step: int, facts: dict[str, Any] | None = None, best: int | None = None) -> Path:
        """Save what is needed to continue after this step: weights, the state of the loop, and the length of
        the run's records. The folder gets its name when it is complete and on the disk. Old ones are removed,
        but for that of the `best` step."""
        target = self.find_folder(step)
        if await asyncio.to_thread(find_damage, target) is None:
            return target  # the same step has been saved already
        partial = self.folder / f".partial-{step:06d}"
        await asyncio.to_thread(self.run.sync)
        try:
            with saving(target):
                await self.learner.save(partial)
                write_json(
                    partial / "trainer.json", {"step": step, "records": self.run.mark(), **(facts or {})}
                )
                await asyncio.to_thread(seal, partial)
                put_in_place(partial, target)
        except BaseException:
            self._clear()
            raise
        for old in list_checkpoints(self.run.path)[: -self.keep]:
            if best is None or old != self.find_folder(best):
                shutil.rmtree(old, ignore_errors=True)
        return target

    async def restore(self) -> dict[str, Any]:
        """Load the newest undamaged checkpoint and drop what the run recorded after it. Returns the state of
        the loop with the step. A run without a checkpoint begins again."""
        self._clear()
        facts: dict[str, Any] = {"step": 0, "records": {}}
        for folder in reversed(list_checkpoints(self.run.path)):
            damage = await asyncio.to_thread(find_damage, folder)
            if damage is not None:
                _log.warning("%s is damaged and skipped: %s", folder, damage)
                continue
            facts |= json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
            await self.learner.engine.load_state(folder)
            break
        self.run.rewind(facts["records"])
        return facts

    async def finish(self, best: int | None = None) -> None:
        """Put the final model at `model/`: that of the last step, or of the `best`."""
        found = list_checkpoints(self.run.path)
        if best is not None:
            found = [folder for folder in found if folder == self.find_folder(best)]
        if not found:
            raise RunError(f"{self.run.path} has no checkpoint to take the final model from")
        leave = shutil.ignore_patterns(
            "optimizer.safetensors", "random.safetensors", "trainer.json", MANIFEST
        )
        partial = self.folder / ".model"
        try:
            with saving(self.run.path / "model"):
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(found[-1], partial, ignore=leave)
                await asyncio.to_thread(seal, partial)
                put_in_place(partial, self.run.path / "model")
        except BaseException:
            self._clear()
            raise

    def _clear(self) -> None:
        """Remove what was being written when the run ended. What it would have replaced is still there."""
        for place in (self.folder, self.run.path):
            put_back(place)
        for folder in self.folder.glob(".*"):
            shutil.rmtree(folder, ignore_errors=True)


async def save_and_raise(error: OutOfMemory, save: Callable[[], Awaitable[Any]], step: int) -> NoReturn:
    """Save a run whose GPU has too little memory, so that it can continue with other settings. Weights that a
    failed step changed in part are not saved: the last checkpoint stands."""
    if not error.is_unchanged:
        raise error
    await save()
    raise EngineError(f"{error}; saved after step {step}: continue with --resume") from None


class Interrupt:
    """Turns the first Ctrl-C, or the SIGTERM of a scheduler, into a request to finish the step and save. The
    second one stops at once. `notify` is called at the first one."""

    def __init__(self, notify: Callable[[], None] | None = None) -> None:
        self.asked = False
        self._notify = notify
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        with suppress(ValueError):  # not the main thread: its owner handles signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._notify is not None:
            self._notify()
