"""What stands in for GPUs: a server over our own engine for verl's client, which both loops sample from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from trialogue.engine.api import Completion, EngineSettings, SamplingParams
from trialogue.engine.torch_engine import TorchEngine
from trialogue.talk.rollout import derive_seed


class SeededSampler:
    """Draws the same reply for the same place of the same conversation, whoever asks."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        settings = EngineSettings(
            device="cpu", cache_bytes=1 << 26, keep_sessions=False, share_prefixes=False
        )
        self.engine = TorchEngine(folder, settings)

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        [prompt] = prompts
        return await self.engine.sample([prompt], replace(params, seed=derive_seed(session, len(prompt))))

    async def end_session(self, session: str) -> None: ...


class TinyServer:
    """What verl's client talks to, where a GPU server would be."""

    def __init__(self, folder: str) -> None:
        self.sampler = SeededSampler(folder)
        self.asked: list[tuple[str, int]] = []

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        assert sampling_params["logprobs"] is True
        assert sampling_params["top_p"] == 1
        self.asked.append((request_id, len(prompt_ids)))
        params = SamplingParams(
            max_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            stop_tokens=tuple(sampling_params["stop_token_ids"]),
        )
        [reply] = await self.sampler.sample([prompt_ids], params, session=request_id)
        return TokenOutput(
            token_ids=reply.tokens,
            log_probs=reply.logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": 3},
        )

    async def list_asked(self) -> list[tuple[str, int]]:
        return self.asked


class Here:
    """A server in this very process, called as if it were an actor of Ray."""

    def __init__(self, server: TinyServer) -> None:
        self.generate = SimpleNamespace(remote=server.generate)


class OneServerClient(LLMServerClient):
    """verl's client with one server and no balancer between servers."""

    def __init__(self, config: Any, server: Any) -> None:
        super().__init__(config)
        self.server = server

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "tiny", self.server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None: ...

    def _vllm_request_id(self, request_id: str) -> str:
        return request_id
