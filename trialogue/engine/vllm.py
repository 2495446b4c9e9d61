# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Weights trained in this process and sampled by a vLLM server, which is faster on a GPU.

`publish` writes the adapter, or all weights in the precision of the matmuls, to a folder that both can read.
It makes the server load them and compares scores of the same tokens. Optimizer steps are small, so a server
that kept old weights could pass that. Therefore it first gets halved weights, whose scores differ clearly.
Later, its scores must change, in whatever digit, when the weights do. Each adapter has its own name.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from trialogue.endpoint import Answer, Endpoint, Unreachable
from trialogue.engine.api import (
    Capabilities,
    Completion,
    LossFunction,
    OptimParams,
    Outputs,
    Row,
    SamplingParams,
)
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import EngineError, TrialogueError
from trialogue.reading import reading

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference between log-probabilities of the same tokens, by the dtype of both sides."""
PROBE = 24
"""Tokens that both sides score after each update."""
SECONDS = 600.0
"""Time limit of one request."""
ANSWER_BYTES = 64_000_000
"""Longest answer: ids and log-probabilities of a long reply, and the ids of its prompt."""
WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each retry, when the server did not answer or was busy."""


class VllmEngine:
    """A `TorchEngine` that trains, and a vLLM server that samples with its weights.

    Start the server with `--logprobs-mode processed_logprobs` and VLLM_SERVER_DEV_MODE=1, from the folder
    that training starts with, in the precision of `learner.precision`."""

    def __init__(self, trainer: TorchEngine, url: str, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder.resolve()
        self.tolerance = TOLERANCE[trainer.adapted.autocast_dtype or torch.float32]
        self.url = url.rstrip("/").removesuffix("/v1")
        self.endpoint = Endpoint(self.url, os.environ.get("VLLM_API_KEY", "none"), ANSWER_BYTES)
        self.model: str | None = None
        """What the server is asked for: its model, or the adapter that it was given last."""
        self._sent: int | None = None
        """Version of the weights the server has."""
        self._sums: dict[str, float] = {}
        """Sums of the matrices that the server has."""
        self._scores: list[float] = []
        """Its scores with them."""
        self._adapters = 0
        self._run = token_hex(4)
        self._publishing = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return self.trainer.capabilities

    @property
    def weight_version(self) -> int:
        return self.trainer.weight_version

    # -- sampling --------------------------------------------------------------------------------------

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        if self._sent != self.trainer.weight_version:
            await self.publish()
        return await asyncio.gather(*(self._ask(list(prompt), params) for prompt in prompts))

    async def _ask(self, prompt: list[int], params: SamplingParams) -> Completion:
        answer = await self._complete(
            prompt,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            stop_token_ids=list(params.stop_tokens),
            seed=None if params.seed is None else params.seed % (1 << 31),
            logprobs=0,
            skip_special_tokens=False,
            ignore_eos=True,  # `stop_token_ids` ends a reply
        )
        with reading(f"the vLLM server at {self.url}", EngineError):
            tokens, logprobs = list(answer["token_ids"]), list(answer["logprobs"]["token_logprobs"])
        if len(tokens) != len(logprobs):
            raise EngineError(f"vLLM sent {len(tokens)} tokens with {len(logprobs)} log-probabilities")
        stopped = bool(tokens) and tokens[-1] in params.stop_tokens
        return Completion(tokens, logprobs, "stop" if stopped else "length", self.trainer.weight_version)

    async def end_session(self, session: str) -> None:
        """The server manages its caches itself."""

    async def _complete(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        with reading(f"the vLLM server at {self.url}", EngineError):
            if self.model is None:
                self.model = (await self._call("GET", "/v1/models"))["data"][0]["id"]
            body = {"model": self.model, "prompt": prompt, "return_token_ids": True, **options}
            answer = await self._call("POST", "/v1/completions", body)
            return answer["choices"][0]

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, is_read: bool = True
    ) -> Any:
        try:
            answer = await self._send_until_answered(method, path, body)
            if not answer.is_error:
                return answer.read() if answer.body and is_read else None
            error: object = answer.explain()[:500]
        except TimeoutError:
            error = f"no answer within {SECONDS:g} s"
        except TrialogueError as found:
            error = found
        raise EngineError(f"the vLLM server at {self.url} failed at {path}: {error}")

    async def _send_until_answered(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        for wait in (*WAITS, None):
            try:
                async with asyncio.timeout(SECONDS):
                    answer = await self.endpoint.ask(method, path, body if method == "GET" else body or {})
                if wait is None or not (answer.status in (408, 429) or answer.status >= 500):
                    return answer
            except Unreachable:
                if wait is None:
                    raise
            await asyncio.sleep(wait)
        raise AssertionError

    # -- weights ---------------------------------------------------------------------------------------

    async def publish(self) -> int:
        # Conversations that begin together all find old weights on the server; only one sends new ones.
        async with self._publishing:
            version = await self.trainer.publish()
            if self._sent != version:
                if self._sent is None and self.trainer.adapter is None:
                    await self._rehearse()
                await self._send()
                self._sent = version
            return version

    async def _rehearse(self) -> None:
        """Send halved matrices first, whose scores differ more than those of one optimizer step. All
        matrices, because a server may reload its layers but keep the output matrix."""
        await self.trainer.scale_matrices(0.5)
        try:
            await self._send()
        finally:
            await self.trainer.scale_matrices(2.0)

    async def _send(self) -> None:
        if self.trainer.adapter is not None:
            await self._send_adapter()
            return
        sums = await self.trainer.save_weights(self.folder)
        told = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        await self._call("POST", "/collective_rpc", told)
        await self._call("POST", "/reset_prefix_cache")
        before = self._scores
        await self.check()
        # A few weights may change without any effect on the probe, but not most matrices.
        changed = sum(self._sums.get(name) != value for name, value in sums.items())
        if self._sums and changed > len(sums) / 2 and self._scores == before:
            raise EngineError(
                f"the vLLM server does not have the weights it was sent: {changed} of {len(sums)} matrices "
                "changed, and its scores of the same tokens did not change in any digit"
            )
        self._sums = sums

    async def _send_adapter(self) -> None:
        """Give the server the adapter under a new name: if it kept an old one, it would not know the name."""
        base, self._adapters = self.model, self._adapters + 1
        name = f"trialogue-{self._run}-{self._adapters}"
        await self.trainer.save_weights(self.folder / name)
        told = {"lora_name": name, "lora_path": str(self.folder / name)}
        await self._call("POST", "/v1/load_lora_adapter", told, is_read=False)
        self.model = name
        await self.check()
        if self._adapters > 1:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": base}, is_read=False)
            shutil.rmtree(self.folder / str(base), ignore_errors=True)

    async def check(self) -> float:
        """Score the same tokens on both sides; returns the largest difference, raises if it is too large."""
        vocabulary = self.capabilities.vocabulary
        tokens = [1 + (7 * place * place + 3 * place) % (vocabulary - 1) for place in range(PROBE)]
        [ours] = await self.trainer.forward([Row(tokens, [0] * PROBE, [0.0] * PROBE, [0.0] * PROBE)])
        answer = await self._complete(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        with reading(f"the vLLM server at {self.url}", EngineError):
            theirs = [
                float(found[str(token)]["logprob"])
                for token, found in zip(tokens[1:], answer["prompt_logprobs"][1:], strict=True)
            ]
        self._scores = theirs
        gap = max(abs(one - other) for one, other in zip(ours[1:], theirs, strict=True))
        if not gap <= self.tolerance:
            raise EngineError(
                f"the vLLM server does not have the weights it was sent: the same tokens differ by {gap:.3g} "
                f"in log-probability, {self.tolerance:g} is allowed. On a CPU its packed output matrix keeps "
                "old weights (see docs/cluster.md)"
            )
        return gap

    # -- training --------------------------------------------------------------------------------------

    async def forward(self, rows: Sequence[Row], temperature: float = 1.0) -> list[list[float]]:
        return await self.trainer.forward(rows, temperature)

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossFunction, *, temperature: float = 1.0
    ) -> Outputs:
        return await self.trainer.forward_backward(rows, loss, temperature=temperature)

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return await self.trainer.optim_step(params)

    async def save_state(self, path: Path) -> None:
        await self.trainer.save_state(path)

    async def load_state(self, path: Path) -> None:
        await self.trainer.load_state(path)
        self._sent = None

    def close(self) -> None:
        self.trainer.close()
