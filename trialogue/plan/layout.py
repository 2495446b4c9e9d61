"""How a run is laid out over its GPUs: which of our settings, and of verl's, memory and time depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, cast

from trialogue.config import PlanConfig, TrainConfig
from trialogue.errors import ConfigError

Route = Literal["train", "verl"]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OFFLOAD_PARAMETERS = f"{ACTOR}.fsdp_config.param_offload"
OFFLOAD_MOMENTS = f"{ACTOR}.fsdp_config.optimizer_offload"
OFFLOAD_ALWAYS = f"{ACTOR}.fsdp_config.offload_policy"
SEQUENCE = f"{ACTOR}.ulysses_sequence_parallel_size"
TENSOR = f"{ROLLOUT}.tensor_model_parallel_size"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one run."""

    route: Route
    gpus: int
    tensor: int = 1
    """GPUs that hold one copy of the sampling weights."""
    sequence: int = 1
    """GPUs that share a row in the update."""
    share: float = 0.5
    """Share of a GPU's memory that verl's sampler may take."""
    tokens: int = 16384
    """Tokens of the update on one GPU at once."""
    checkpointing: bool = False
    """Layers are computed again in the backward pass instead of kept."""
    offload_parameters: bool = False
    """verl moves weights and gradients to the CPU outside the update."""
    offload_moments: bool = False
    """verl moves AdamW's moments to the CPU outside the update."""
    offload_always: bool = False
    """FSDP2 keeps weights, gradients and moments on the CPU, in the update too."""
    reference: bool = False
    """Whether the first weights are needed for a divergence."""
    lora_rank: int = 0
    cache_gigabytes: float = 4.0
    """train: memory of the sampler's cache."""
    workers: int = 1
    """Processes that hold conversations."""
    recomputed: bool = False
    """verl: log-probabilities of the rows are computed once more before the update."""

    @property
    def replicas(self) -> int:
        return max(1, self.gpus // self.tensor)


def read_verl(config: TrainConfig) -> dict[str, Any]:
    """verl's own settings as dotted keys, without hydra's plus signs."""
    from trialogue.hosts.export import flatten

    return {key.lstrip("+"): value for key, value in flatten(config.engine.verl).items()}


def to_workers(config: TrainConfig) -> int:
    """Processes of verl that hold conversations."""
    return int(read_verl(config).get(f"{ROLLOUT}.agent.num_workers", 8))


def to_route(config: PlanConfig, gpus: int) -> Route:
    wanted = config.plan.route
    return wanted if wanted != "auto" else "train" if gpus == 1 else "verl"


def to_layout(config: PlanConfig, gpus: int | None = None) -> Layout:
    """The layout that the settings ask for on so many GPUs (default: `plan.gpus`)."""
    count = gpus or config.plan.gpus
    route = to_route(config, count)
    learner = config.learner
    known = Layout(
        route,
        count,
        tokens=learner.micro_batch_tokens,
        checkpointing=learner.gradient_checkpointing,
        reference=config.loss.kl > 0,
        lora_rank=learner.lora_rank,
        cache_gigabytes=learner.cache_gigabytes,
    )
    if route == "train":
        if count != 1:
            raise ConfigError("plan.route=train is for one device; more GPUs are used through verl")
        return known
    given = read_verl(config)

    def number(key: str, usual: float) -> float:
        value = given.get(key, usual)
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"engine.verl.{key} must be a number above 0, not {value!r}")
        return value

    sequence = min(int(number(SEQUENCE, 1)), count)
    longest = ceil(config.limits.context_tokens / sequence)  # as hosts/export.py sets it
    return replace(
        known,
        tensor=min(int(number(TENSOR, 1)), count),
        sequence=sequence,
        share=float(number(SHARE, 0.5)),
        tokens=int(number(f"{ACTOR}.ppo_max_token_len_per_gpu", max(known.tokens, longest))),
        offload_parameters=bool(given.get(OFFLOAD_PARAMETERS)),
        offload_moments=bool(given.get(OFFLOAD_MOMENTS)),
        offload_always=bool(given.get(OFFLOAD_ALWAYS)),
        workers=to_workers(config),
        recomputed=not given.get("algorithm.rollout_correction.bypass_mode"),
    )


def change(config: PlanConfig, settings: Mapping[str, Any]) -> PlanConfig:
    """The same settings with some replaced, by dotted key; what is below engine.verl is verl's."""
    data = config.model_dump(mode="json")
    verl = dict(read_verl(config))
    for key, value in settings.items():
        if key.startswith("engine.verl."):
            verl[key.removeprefix("engine.verl.")] = value
            continue
        *sections, last = key.split(".")
        inside: dict[str, Any] = data
        for section in sections:
            inside = cast("dict[str, Any]", inside[section])
        inside[last] = value
    data["engine"]["verl"] = verl
    return PlanConfig.model_validate(data)
