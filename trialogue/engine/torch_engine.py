# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
"""The embedded engine: a transformers causal model in this process, on one device, sampled and updated in
place.

All computation runs on one worker thread, so the event loop stays free and operations do not overlap. While
requests are open, a task drives the sampler step by step; new requests join at the next step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trialogue.activity import ACTIVITY, notify, phase
from trialogue.engine.api import (
    Capabilities,
    Completion,
    EngineSettings,
    LoraSettings,
    LossFunction,
    OptimParams,
    Outputs,
    Precision,
    Row,
    SamplingParams,
)
from trialogue.engine.attention import SUPPORTED, ModelAdapter, refuse_unsupported
from trialogue.engine.cores import describe_threads
from trialogue.engine.model_folder import check_adapter, find_base, load_weights
from trialogue.engine.sampler import BatchSampler, SamplingRequest
from trialogue.engine.shapes import ModelShape, to_shape
from trialogue.engine.state import export_weights, load_engine, save_engine
from trialogue.engine.tree import TreePlan, grow_tree
from trialogue.engine.update import Update
from trialogue.errors import ConfigError, EngineError, OutOfMemory
from trialogue.reading import reading

Result = TypeVar("Result")

TURNS_BETWEEN_STEPS = 8
"""Iterations of the event loop between steps. Conversations that just got a reply can ask again before the
next step, so batches, and with them results, do not depend on timing."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
NEVER_TRIM = -1


class TorchEngine:
    """Made from a save_pretrained folder or hub name, a model, or a function that makes one. The engine takes
    over the model: it can no longer be called directly."""

    def __init__(
        self, source: str | Path | Callable[[], PreTrainedModel], settings: EngineSettings | None = None
    ) -> None:
        self.settings = settings or EngineSettings()
        self.device = find_device(self.settings.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        with phase("loading the model"):
            try:
                find_worker().submit(self._build, source).result()
            except torch.OutOfMemoryError:
                raise OutOfMemory(
                    f"{self.device} has too little memory to load the model: train adapters with "
                    "learner.lora_rank=32, or take a smaller model"
                ) from None
        self._requests = 0
        self._unpublished = False
        self._driver: asyncio.Task[None] | None = None
        self._open: dict[SamplingRequest, asyncio.Future[Completion]] = {}
        self._arrived: list[SamplingRequest] = []
        self._over: list[str] = []

    def _build(self, source: str | Path | Callable[[], PreTrainedModel]) -> None:
        settings = self.settings
        if self.device.type == "cpu":
            notify(describe_threads())
        if isinstance(source, str | Path):
            model, adapter = load_model(source, settings)
        else:
            model, adapter = source if isinstance(source, PreTrainedModel) else source(), None
        cast(nn.Module, model).to(self.device).eval()  # no dropout: it would change importance ratios
        if settings.lora is not None and adapter is None:
            adapter = add_adapter(model, settings.lora)
        self.model, self.adapter = model, adapter
        self.adapted = adapt(model)
        self.adapted.vocabulary = min(self.adapted.vocabulary, settings.vocabulary or self.adapted.vocabulary)
        if is_bfloat16(settings.precision, self.device):
            self.adapted.round()
        self.update = Update(
            self.adapted,
            self.device,
            max_tokens=settings.max_tokens_per_micro_batch,
            checkpointing=settings.gradient_checkpointing,
            shape=describe_shape(model),
        )
        self.sampler = BatchSampler(
            self.adapted,
            self.device,
            cache_bytes=settings.cache_bytes,
            prefill_chunk=settings.prefill_chunk,
            keep_sessions=settings.keep_sessions,
            share_prefixes=settings.share_prefixes,
        )
        config = model.config.get_text_config()
        self.capabilities = Capabilities(
            trains="full" if adapter is None else "lora",
            max_length=getattr(config, "max_position_embeddings", 1 << 30),
            vocabulary=self.adapted.vocabulary,
        )

    @classmethod
    def load(cls, path: str | Path, settings: EngineSettings | None = None) -> TorchEngine:
        return cls(path, settings)

    @property
    def weight_version(self) -> int:
        return self.sampler.weight_version

    def close(self) -> None:
        """Free everything that is cached."""
        find_worker().submit(self.sampler.reset).result()

    # -- sampling --------------------------------------------------------------------------------------

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        self._check(prompts, params, session)
        loop = asyncio.get_running_loop()
        opened: dict[SamplingRequest, asyncio.Future[Completion]] = {}
        for number, prompt in enumerate(prompts):
            self._requests += 1
            seed = (
                (self.settings.seed << 32) + self._requests
                if params.seed is None
                else params.seed + (number << 40)
            )
            room = self.capabilities.max_length - len(prompt)
            limited = params if params.max_tokens <= room else replace(params, max_tokens=room)
            opened[SamplingRequest(list(prompt), limited, session, seed % (1 << 63))] = loop.create_future()
        self._open |= opened
        self._arrived += opened
        self._wake()
        try:
            return [await future for future in opened.values()]
        finally:
            for request in opened:
                request.cancelled = True  # has no effect on one that has ended
                self._open.pop(request, None)

    async def end_session(self, session: str) -> None:
        self._over.append(session)
        self._wake()

    def _check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, session: str | None) -> None:
        if self._unpublished:
            raise EngineError(
                "the weights have changed since they were published: call publish() before sample()"
            )
        if session is not None and len(prompts) != 1:
            raise EngineError(
                f"a session is one conversation and takes one prompt at a time, not {len(prompts)}"
            )
        if params.max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
            raise EngineError(f"need max_tokens ≥ 1, temperature ≥ 0 and 0 < top_p ≤ 1, got {params}")
        for prompt in prompts:
            if not prompt:
                raise EngineError(
                    "an empty prompt gives the model nothing to go on; give it at least one token"
                )
            if len(prompt) >= self.capabilities.max_length:
                raise EngineError(
                    f"the prompt has {len(prompt)} tokens; the model takes at most "
                    f"{self.capabilities.max_length - 1}"
                )
            if min(prompt) < 0 or max(prompt) >= self.capabilities.vocabulary:
                raise EngineError(f"token ids must be between 0 and {self.capabilities.vocabulary - 1}")

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Run steps while requests are open."""
        while True:
            for _ in range(TURNS_BETWEEN_STEPS):
                await asyncio.sleep(0)
            if not self._open and not self._over:
                return
            arrived, over = self._arrived, self._over
            self._arrived, self._over = [], []
            try:
                ended = await self._run(self._step, arrived, over)
            except Exception as error:  # noqa: BLE001 - every waiting request must get the error
                ended = [request for request in self._open if request not in self._arrived]
                known = isinstance(error, OutOfMemory)
                for request in ended:
                    request.error = error if known else EngineError(f"sampling failed: {error!r}")
            for request in ended:
                future = self._open.pop(request, None)
                if future is None or future.done():
                    continue
                if request.completion is not None:
                    future.set_result(request.completion)
                else:
                    future.set_exception(request.error or EngineError("the request ended without a result"))

    def _step(self, arrived: Sequence[SamplingRequest], over: Sequence[str]) -> list[SamplingRequest]:
        for session in over:
            self.sampler.end_session(session)
        for request in arrived:
            self.sampler.submit(request)
        try:
            ACTIVITY.tokens += len(self._open)
            return self.sampler.step()
        except BaseException:
            self.sampler.reset()  # requests and caches may be incomplete
            raise

    async def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        run = partial(self._run_here, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(find_worker(), run)

    def _run_here(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function. When the GPU has no memory left, free what can be made again and say what to
        lower."""
        try:
            return function(*arguments)
        except torch.OutOfMemoryError as error:
            found = str(error).split(". ")[0]
        # Here nothing holds the tensors of the call that failed.
        is_unchanged = not (self._unpublished or function == self.update.optim_step)
        self.sampler.drop_caches()
        self.update.recover()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        is_sampling = function == self._step
        advice = explain_memory(self.settings, is_sampling=is_sampling, is_lora=self.adapter is not None)
        what = "sampling" if is_sampling else "an update"
        raise OutOfMemory(f"{self.device} has too little memory for {what} ({found}): {advice}", is_unchanged)

    # -- training --------------------------------------------------------------------------------------

    async def forward(self, rows: Sequence[Row], temperature: float = 1.0) -> list[list[float]]:
        return await self._run(self.update.forward, rows, temperature)

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossFunction, *, temperature: float = 1.0
    ) -> Outputs:
        return await self._run(self.update.forward_backward, rows, loss, temperature)

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        self._refuse_while_sampling("optim_step")
        metrics = await self._run(self.update.optim_step, params)
        self._unpublished |= not metrics["skipped"]
        return metrics

    async def publish(self) -> int:
        """Drop the caches and count up the version; sampler and update share the weights, so nothing is
        copied. Unchanged weights keep their version, but the caches are dropped, too: then the next replies
        are bit-identical to those after `load_state`."""
        self._refuse_while_sampling("publish")
        await self._run(self.sampler.drop_caches)
        self.sampler.weight_version += self._unpublished
        self._unpublished = False
        return self.sampler.weight_version

    def _refuse_while_sampling(self, verb: str) -> None:
        if self._open:
            raise EngineError(
                f"{verb} would change the weights under {len(self._open)} requests that are still sampling; "
                "await or cancel them first"
            )

    # -- state -----------------------------------------------------------------------------------------

    async def save_state(self, path: Path) -> None:
        counters = {
            "weight_version": self.sampler.weight_version,
            "unpublished": int(self._unpublished),
            "requests": self._requests,
            "skipped": self.update.skipped,
        }
        await self._run(save_engine, Path(path), self.model, self.adapter, self.update, counters)

    async def save_weights(self, path: Path) -> dict[str, float]:
        """Save the adapter, or all weights in the precision of the matmuls, for another program to sample
        with. Returns the sum of each matrix."""
        dtype = self.adapted.autocast_dtype or torch.float32
        return await self._run(export_weights, Path(path), self.model, self.adapter, dtype)

    async def scale_matrices(self, factor: float) -> None:
        """Multiply every matrix, including embeddings. With a power of two this can be undone exactly."""
        self._refuse_while_sampling("scale_matrices")
        await self._run(self._scale, factor)
        await self._run(self.sampler.drop_caches)

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for parameter in self.model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(factor)

    async def load_state(self, path: Path) -> None:
        self._refuse_while_sampling("load_state")
        counters = await self._run(load_engine, Path(path), self.model, self.adapter, self.update)
        await self._run(self.sampler.drop_caches)
        self.sampler.weight_version = counters["weight_version"]
        self._unpublished = bool(counters["unpublished"])
        self._requests = counters["requests"]
        self.update.skipped = counters["skipped"]


def describe_shape(model: PreTrainedModel) -> ModelShape | None:
    """The sizes that operations are counted from; None where the model's configuration names others."""
    text = model.config.get_text_config()
    own = sum(value.numel() for name, value in model.named_parameters() if "lora_" not in name)
    with suppress(ConfigError):
        return to_shape(type(model).__name__, text.to_dict(), parameters=own)
    return None


def explain_memory(settings: EngineSettings, *, is_sampling: bool, is_lora: bool) -> str:
    """What to change when the GPU's memory does not suffice."""
    if is_sampling:
        gigabytes = settings.cache_bytes / (1 << 30)
        return f"lower learner.cache_gigabytes (now {gigabytes:g}) or rollout.concurrency"
    advice = [f"lower learner.micro_batch_tokens (now {settings.max_tokens_per_micro_batch})"]
    if not settings.gradient_checkpointing:
        advice.append("set learner.gradient_checkpointing=true")
    if not is_lora:
        advice.append("train adapters with learner.lora_rank=32")
    return ", or ".join(advice)


@cache
def find_worker() -> concurrent.futures.ThreadPoolExecutor:
    """The one thread that computes, for all engines of the process and for loading. OpenMP keeps a pool for
    every thread that ever computed, and two pools on the same cores halve the speed of small steps."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engine")


def is_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Whether matmuls are computed in bfloat16. On a CPU only on request, because most CPUs are a hundred
    times slower with it."""
    if precision == "bfloat16" and device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        raise EngineError(
            "on a CPU bfloat16 needs a processor with AVX512_BF16, which this one lacks: set "
            "learner.precision=float32"
        )
    return precision == "bfloat16" or (precision == "auto" and device.type != "cpu")


def find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def load_model(path: str | Path, settings: EngineSettings) -> tuple[PreTrainedModel, Any]:
    """Load a model and, if the folder has one, its LoRA adapter. Trained weights are in float32; frozen
    weights under an adapter are in bfloat16 on a GPU."""
    adapter_config = Path(path) / "adapter_config.json"
    adapted = adapter_config.is_file()
    frozen = (adapted or settings.lora is not None) and find_device(settings.device).type != "cpu"
    dtype = torch.bfloat16 if frozen else torch.float32
    if not adapted:
        return load_weights(path, dtype), None
    from peft import PeftModel

    check_adapter(Path(path))
    model = load_weights(find_base(Path(path)), dtype)
    with reading(f"cannot load the adapter in {path}", EngineError):
        return model, PeftModel.from_pretrained(model, str(path), is_trainable=True)


def add_adapter(model: PreTrainedModel, settings: LoraSettings) -> Any:
    """Add LoRA adapters to the model in place; returns the peft model, which is needed to save them."""
    from peft import LoraConfig, get_peft_model

    targets = (
        settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    )
    return get_peft_model(
        model,
        LoraConfig(
            r=settings.r,
            lora_alpha=settings.alpha,
            target_modules=targets,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        ),
    )


@cache
def keep_freed_memory() -> bool:
    """Let the C library reuse freed memory for large tensors. Otherwise each gets new pages, which the system
    clears on first use: a tenth of the time of an update. Only glibc has these options, and only its first
    heap can hold large blocks, so threads started from now on share that heap. Versions before about 2.34
    refuse the limit and are left unchanged."""
    if platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    if not set_option(M_MMAP_THRESHOLD, 1 << 30):
        return False
    return bool(set_option(M_TRIM_THRESHOLD, NEVER_TRIM) and set_option(M_ARENA_MAX, 1))


@torch.no_grad()
def adapt(model: PreTrainedModel) -> ModelAdapter:
    """Put the adapter around the model, and check that its logits stay the same: this finds attention that a
    plan cannot reproduce."""
    refuse_unsupported(model)
    embeddings = cast(Tensor, model.get_input_embeddings().weight)
    vocabulary, device = embeddings.shape[0], embeddings.device
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (12, 7))
    rows = [first, first[:5] + second]
    expected = [model(torch.tensor([row], device=device), use_cache=False).logits[0] for row in rows]
    adapted = ModelAdapter(model)
    plan = TreePlan(grow_tree(rows, shortest=4), device, adapted.fast)
    with adapted.using(plan):
        hidden = adapted.hidden(
            torch.tensor(plan.tree.tokens, device=device), torch.tensor(plan.tree.positions, device=device)
        )
    for path, wanted in zip(plan.tree.paths, expected, strict=True):
        found: Tensor = adapted.logits(torch.cat([hidden[start:stop] for start, stop in path]))
        tolerance = (1e-3 if model.dtype == torch.float32 else 5e-2) * float(wanted.abs().max().clamp(min=1))
        difference = float((found - wanted).abs().max())
        if not difference <= tolerance:
            raise EngineError(
                f"{type(model).__name__} gives logits that differ by {difference:.2g} when its tokens are "
                f"packed. {SUPPORTED}"
            )
    return adapted
