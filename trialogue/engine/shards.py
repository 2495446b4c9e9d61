# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateImportUsage=false
"""One model on several GPUs of one machine, started by torchrun: FSDP2 shards, updates in step.

The first process runs everything as if it were alone. Whatever all must do together (updates, publishing,
saving) it announces to the others, who follow; each computes the gradient of its share of the rows. Sampling
is the first process's own affair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trialogue.engine.attention import Wiring
from trialogue.errors import EngineError

Item = TypeVar("Item")
CLOSE = "close"


@cache
def find_world() -> World | None:
    """The processes torchrun started, or None for one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "LOCAL_RANK" not in os.environ:
        return None
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return World(device)


class World:
    """Who else computes, and how they are told what to do. Engines are counted in the order they were made,
    which is the same in every process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,))
        self.engines: list[dict[str, Callable[..., Any]]] = []
        self.dismissed = False

    def join(self, verbs: dict[str, Callable[..., Any]]) -> int:
        """Count an engine in by what it can be told to do."""
        self.engines.append(verbs)
        return len(self.engines) - 1

    def together(self, engine: int, verb: str, *arguments: Any) -> Any:
        """Do something with all processes; only the first one may call this."""
        dist.broadcast_object_list([(engine, verb, arguments)], src=0)
        return self.engines[engine][verb](*arguments)

    def follow(self) -> None:
        """What the others do: as they are told, until the first process is done."""
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0)
            engine, verb, arguments = told[0]
            if verb == CLOSE:
                leave()
                return
            self.engines[engine][verb](*arguments)

    def dismiss(self) -> None:
        """Let the others go."""
        if self.rank == 0 and not self.dismissed:
            self.dismissed = True
            dist.broadcast_object_list([(0, CLOSE, ())], src=0)
            leave()

    def gather(self, item: Item) -> list[Item]:
        """What each process has, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, item)
        return found

    def deal(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[int]]:
        """Indices for each process: neighbours in the order stay together, and shares are about as long."""
        shares: list[list[int]] = [[] for _ in range(self.size)]
        total, passed = sum(lengths), 0
        for index in order:
            middle = passed + lengths[index] / 2
            shares[min(self.size - 1, int(middle * self.size / max(total, 1)))].append(index)
            passed += lengths[index]
        return shares


def leave() -> None:
    """Part when all are ready to: threads that still listen when a process ends would abort it."""
    dist.barrier()
    dist.destroy_process_group()


class Shards:
    """A model whose weights lie spread over the world. Every forward pass goes through `Wiring.call`."""

    def __init__(self, model: PreTrainedModel, wiring: Wiring, world: World) -> None:
        self.model, self.world = model, world
        policy = MixedPrecisionPolicy()
        if wiring.compute is not None:
            policy = MixedPrecisionPolicy(param_dtype=wiring.compute, reduce_dtype=torch.float32)
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise EngineError(f"{type(model).__name__} has no layers to spread over processes")
        for layer in layers:
            fully_shard(layer, mesh=world.mesh, mp_policy=policy)
        # Work is done inside a forward pass of the root, whose hooks bring its own weights together.
        cast(Any, model).forward = _do
        fully_shard(model, mesh=world.mesh, mp_policy=policy)
        wiring.root = model
        self.parts = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def unfold(self) -> None:
        """Bring all weights together where sampling happens; elsewhere they are let go at once."""
        for part in self.parts:
            part.unshard()
            if self.world.rank == 0:
                part.set_reshard_after_forward(False, recurse=False)
            else:
                part.reshard()

    def fold(self) -> None:
        """Back to shards, for an update."""
        for part in self.parts:
            part.reshard()
            part.set_reshard_after_forward(part is not cast(Any, self.model), recurse=False)

    def weights(self) -> dict[str, Tensor]:
        """All weights on the CPU of the first process, nothing elsewhere."""
        self.fold()
        own = dict(self.model.named_parameters())
        tied = dict(self.model.named_parameters(remove_duplicate=False)).keys() - own.keys()
        named = {name: value for name, value in self.model.state_dict().items() if name not in tied}
        found = {name: self.whole(value) for name, value in named.items()}
        return {name: full for name, full in found.items() if full is not None}

    def whole(self, value: Any) -> Tensor | None:
        """A tensor brought together on the first process."""
        full = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
        return full.detach().cpu().contiguous() if self.world.rank == 0 else None

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over weights that every process has read."""
        self.fold()
        for name, value in self.model.state_dict().items():
            with torch.no_grad():
                value.copy_(to_shard(weights[name], value))


def _do(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def to_shard(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor laid out as another one is."""
    if not isinstance(like, DTensor):
        return full.to(like.device)
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements)


def get_norm(gradients: list[Tensor]) -> tuple[Tensor, float]:
    """The norm of all gradients, to clip with and to read."""
    norm = nn.utils.get_total_norm(gradients)
    return norm, float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
