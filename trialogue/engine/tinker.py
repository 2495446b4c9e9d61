# pyright: reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Weights behind a Tinker-compatible service: the hosted one, or SkyRL's open server on one's own GPUs.

Services reduce a loss each in their own way and know few losses. So the gradient with respect to each
token's log-probability is worked out here, from the log-probabilities the service returns, for whatever loss
is asked; the service is sent that gradient as advantages of its importance-sampling loss at ratio one, with
explicit weights, multiplied by whatever the service will divide by. Any loss with any reduction is exact, at
the price of one more forward pass.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch

from trialogue.engine.api import (
    Capabilities,
    Completion,
    LossFunction,
    OptimParams,
    Outputs,
    Row,
    SamplingParams,
)
from trialogue.engine.update import check_rows, gather_tokens
from trialogue.errors import ConfigError, EngineError

Reduction = Literal["sum", "sequence_mean"]
"""How a service adds up the tokens' losses: all of them (the hosted service), or the mean within each
sequence and then over sequences (SkyRL)."""
STATE = "tinker.json"


class TinkerEngine:
    """Low-rank adapters on a base model that the service holds."""

    def __init__(
        self,
        base_model: str,
        url: str,
        *,
        reduction: Reduction,
        rank: int = 32,
        seed: int = 0,
        api_key_env: str = "TINKER_API_KEY",
        max_length: int = 32768,
    ) -> None:
        try:
            import tinker as package
        except ImportError:
            raise ConfigError("a Tinker service needs its client: pip install 'trialogue[tinker]'") from None
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        tinker: Any = package
        self.types: Any = tinker.types
        self.reduction: Reduction = reduction
        self.service: Any = tinker.ServiceClient(base_url=url, api_key=os.environ.get(api_key_env))
        self.trainer: Any = self.service.create_lora_training_client(
            base_model=base_model, rank=rank, seed=seed, train_unembed=False
        )
        self.sampler: Any = None
        self.capabilities = Capabilities(
            trains="lora",
            max_length=max_length,
            vocabulary=1 << 30,
        )
        self.weight_version = 0
        self._changed = False
        self._pending = 0
        """Sequences whose gradient waits for an optimizer step."""
        self._broken = False
        """Whether a gradient since the last optimizer step was no finite number, and so was not sent."""

    def close(self) -> None:
        """The service forgets a client that no longer calls."""

    # -- sampling --------------------------------------------------------------------------------------

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        if self.sampler is None:
            await self.publish()
        wanted = self.types.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            stop=list(params.stop_tokens),
            seed=None if params.seed is None else params.seed % (1 << 31),
        )
        sampler: Any = self.sampler
        asked = [
            sampler.sample_async(self.types.ModelInput.from_ints(list(prompt)), 1, wanted)
            for prompt in prompts
        ]
        return [self._to_completion(answer.sequences[0]) for answer in await asyncio.gather(*asked)]

    def _to_completion(self, sequence: Any) -> Completion:
        if sequence.logprobs is None:
            raise EngineError("the service sent no log-probabilities with a sampled reply")
        stop = "stop" if sequence.stop_reason == "stop" else "length"
        return Completion(list(sequence.tokens), list(sequence.logprobs), stop, self.weight_version)

    async def end_session(self, session: str) -> None:
        """Caches are the service's own affair."""

    # -- training --------------------------------------------------------------------------------------

    async def forward(self, rows: Sequence[Row], temperature: float = 1.0) -> list[list[float]]:
        refuse_temperature(temperature)
        whole = [1.0] * max((len(row.tokens) for row in rows), default=0)
        data = [self._to_datum(row, whole[1 : len(row.tokens)], None, None) for row in rows]
        output = await (await self.trainer.forward_async(data, "cross_entropy")).result_async()
        found = [list(item["logprobs"].data) for item in output.loss_fn_outputs]
        return [[0.0, *values[: len(row.tokens) - 1]] for row, values in zip(rows, found, strict=True)]

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossFunction, *, temperature: float = 1.0
    ) -> Outputs:
        check_rows(rows)
        if self._pending and self.reduction == "sequence_mean":
            raise EngineError(
                "this service averages over all sequences up to the optimizer step, so it takes one "
                "forward_backward for each; set training.mini_batches to 1"
            )
        everything = await self.forward(rows, temperature)
        masked = [[place for place, mask in enumerate(row.mask) if mask] for row in rows]
        now = [[values[place] for place in places] for values, places in zip(everything, masked, strict=True)]
        gradient, metrics = differentiate(rows, masked, now, loss)
        # A row without trained tokens has no gradient, and some services would divide by its weights.
        kept = [number for number, places in enumerate(masked) if places]
        numbers = (value for number in kept for value in everything[number] + gradient[number])
        if not all(map(isfinite, (metrics["loss"], *numbers))):
            self._broken = True
            return Outputs(now, metrics)
        data: list[Any] = []
        for number in kept:
            row, places = rows[number], masked[number]
            scale = len(kept) * len(places) if self.reduction == "sequence_mean" else 1
            weights, advantages = [0.0] * len(row.tokens), [0.0] * len(row.tokens)
            for place, slope in zip(places, gradient[number], strict=True):
                weights[place], advantages[place] = 1.0, -slope * scale
            data.append(self._to_datum(row, weights[1:], everything[number][1:], advantages[1:]))
        if data:
            output = await (
                await self.trainer.forward_backward_async(data, "importance_sampling")
            ).result_async()
            self._pending += len(data)
            check_logprobs(output, [everything[number][1:] for number in kept])
        return Outputs(now, metrics)

    def _to_datum(
        self, row: Row, weights: list[float], logprobs: list[float] | None, advantages: list[float] | None
    ) -> Any:
        """A row, each place of which predicts the next token."""

        def numbers(values: Sequence[float], kind: str = "float32") -> Any:
            return self.types.TensorData(data=list(values), dtype=kind, shape=[len(values)])

        inputs = {"target_tokens": numbers(row.tokens[1:], "int64"), "weights": numbers(weights)}
        if logprobs is not None and advantages is not None:
            inputs |= {"logprobs": numbers(logprobs), "advantages": numbers(advantages)}
        return self.types.Datum(
            model_input=self.types.ModelInput.from_ints(row.tokens[:-1]), loss_fn_inputs=inputs
        )

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        if not self._pending and not self._broken:
            raise EngineError("there is no gradient to apply: call forward_backward before optim_step")
        if params.grad_clip and self.reduction == "sequence_mean":
            raise EngineError("SkyRL's server does not clip gradients; set optimizer.gradient_clip=0")
        skipped, self._broken = self._broken, False
        if self._pending:
            # What was sent before a broken part cannot be taken back, only applied at rate 0.
            await self._apply(replace(params, learning_rate=0.0, weight_decay=0.0) if skipped else params)
            self._pending, self._changed = 0, self._changed or not skipped
        return {"learning_rate": params.learning_rate, "skipped": float(skipped)}

    async def _apply(self, params: OptimParams) -> None:
        adam = self.types.AdamParams(
            learning_rate=params.learning_rate,
            beta1=params.betas[0],
            beta2=params.betas[1],
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.grad_clip,
        )
        await (await self.trainer.optim_step_async(adam)).result_async()

    async def publish(self) -> int:
        if self._changed or self.sampler is None:
            self.sampler = await self.trainer.save_weights_and_get_sampling_client_async()
            self.weight_version += self._changed
            self._changed = False
        return self.weight_version

    # -- state -----------------------------------------------------------------------------------------

    async def save_state(self, path: Path) -> None:
        """The weights stay with the service; the folder says under which name."""
        name = f"{path.name.strip('.')}-{self.weight_version}"
        saved = await (await self.trainer.save_state_async(name, overwrite=True)).result_async()
        record = {"path": saved.path, "weight_version": self.weight_version}
        await asyncio.to_thread(write_record, path, record)

    async def load_state(self, path: Path) -> None:
        record = await asyncio.to_thread(read_record, path)
        await (await self.trainer.load_state_with_optimizer_async(record["path"])).result_async()
        self.weight_version, self.sampler = int(record["weight_version"]), None
        self._changed, self._pending, self._broken = False, 0, False


def write_record(path: Path, record: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / STATE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    file = path / STATE
    if not file.is_file():
        raise EngineError(f"{path} holds no state of a Tinker service (no {STATE})")
    return json.loads(file.read_text(encoding="utf-8"))


def refuse_temperature(temperature: float) -> None:
    if temperature != 1:
        raise EngineError(
            f"a Tinker service scores tokens at temperature 1, not {temperature:g}; set training.temperature"
        )


def differentiate(
    rows: Sequence[Row], masked: Sequence[Sequence[int]], now: Sequence[Sequence[float]], loss: LossFunction
) -> tuple[list[list[float]], dict[str, float]]:
    """The gradient of a loss with respect to the log-probability of each trained token, and its metrics."""
    new = torch.tensor([value for values in now for value in values], requires_grad=True)
    # The entropy of what was drawn is right on average.
    batch = gather_tokens(rows, masked, -new.detach())
    value, metrics = loss(new, batch)
    value.backward()
    assert new.grad is not None
    numbers = {name: float(found) for name, found in metrics.items()}
    gradients = [part.tolist() for part in new.grad.split([len(places) for places in masked])]
    return gradients, {"loss": float(value.detach()), **numbers}


def check_logprobs(output: Any, expected: Sequence[Sequence[float]]) -> None:
    """The update must have seen the very log-probabilities its gradient was worked out from."""
    for item, known in zip(output.loss_fn_outputs, expected, strict=True):
        found = list(item["logprobs"].data)[: len(known)]
        gaps = [abs(one - other) for one, other in zip(found, known, strict=True)]
        if not all(gap <= 1e-2 for gap in gaps):
            raise EngineError(
                f"the service scored the same tokens differently by {max(gaps):.2g} within one step"
            )
