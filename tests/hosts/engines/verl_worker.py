"""verl's workers on a CPU, for `actor_rollout_ref.model.external_lib=verl_worker` and `rollout.name=cpu`:
its own FSDP2 engine registered for the device, and a rollout server over our sampler, which gets its weights
from there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from trialogue.engine.api import EngineSettings, SamplingParams
from trialogue.engine.torch_engine import TorchEngine

KEEPS_WEIGHTS = "VERL_CPU_KEEPS_WEIGHTS"
"""Set to make the servers drop every update."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
class CpuEngine(FSDPEngineWithLMHead):
    def _build_fsdp_module(self, module: Any) -> Any:
        """A reference would be offloaded to pinned memory, which a machine without accelerator has not."""
        forward_only, self.engine_config.forward_only = self.engine_config.forward_only, False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only


@ray.remote(num_cpus=0)
class CpuServer:
    """A rollout server: token ids in, token ids and log-probabilities out."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.engine = TorchEngine(folder, EngineSettings(device="cpu", cache_bytes=1 << 26))
        self.step = 0
        self.sampling: set[asyncio.Task[Any]] = set()
        self.open = asyncio.Event()
        self.open.set()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        params = SamplingParams(
            max_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            stop_tokens=tuple(sampling_params["stop_token_ids"]),
            seed=sampling_params["seed"],
        )
        await self.open.wait()
        step = {"global_steps": self.step}
        task = asyncio.ensure_future(self.engine.sample([list(prompt_ids)], params))
        self.sampling.add(task)
        try:
            [reply] = await task
        except asyncio.CancelledError:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=step)
        finally:
            self.sampling.discard(task)
        return TokenOutput(
            token_ids=reply.tokens, log_probs=reply.logprobs, stop_reason="completed", extra_fields=step
        )

    async def abort_all_requests(self, **_: Any) -> None:
        """Give up what is being sampled, and begin nothing until the weights are new."""
        self.open.clear()
        sampling = list(self.sampling)
        for task in sampling:
            task.cancel()
        await asyncio.gather(*sampling, return_exceptions=True)

    async def resume_generation(self) -> None:
        self.open.set()

    async def load(self, weights: dict[str, torch.Tensor], step: int | None) -> None:
        if KEEPS_WEIGHTS not in os.environ:
            missing, unexpected = self.engine.model.load_state_dict(weights, strict=False)
            assert set(missing) <= {"lm_head.weight"}, missing
            assert set(unexpected) <= {"lm_head.weight"}, unexpected
            await self.engine.publish()
        self.step = step or 0

    async def do_nothing(self, *_: Any, **__: Any) -> None: ...

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = do_nothing


class CpuReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        name = f"cpu_server_{self.replica_rank}"
        path = omega_conf_to_dataclass(self.model_config).local_path
        self.servers = [CpuServer.options(name=name).remote(path)]
        await asyncio.gather(*[server.clear_kv_cache.remote() for server in self.servers])
        self._server_handle, self._server_address = self.servers[0], name


class CpuAdapter(BaseRollout):
    """Sends the weights of a worker to its server."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        whole = {name: value.detach().clone() for name, value in weights}
        await ray.get_actor(f"cpu_server_{os.environ['RANK']}").load.remote(whole, global_steps)


RolloutReplicaRegistry.register("cpu", lambda: CpuReplica)
_ROLLOUT_REGISTRY["cpu", "async"] = "verl_worker.CpuAdapter"  # verl has no function for this one
