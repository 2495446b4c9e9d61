"""What `trialogue plan` assumes: every figure it cannot know is a setting, `plan.KEY=VALUE`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trialogue.settings import Section


class PlanSettings(Section):
    """What a plan assumes about hardware, conversations, latencies and efficiency."""

    gpus: int = Field(default=8, ge=1)
    """How many GPUs."""
    gpu: str = "h100"
    """Kind of GPU: a100-40g, a100-80g, h100, h200, b200, l40s, rtx4090; here (this machine, measured for a
    second); or a TOML file with the keys of a row of that table."""
    route: Literal["auto", "train", "verl"] = "auto"
    """train: our own engine on one device; verl: FSDP2 with vLLM on the same GPUs; auto: train on one device,
    verl on more."""
    gpu_usd_per_hour: float = Field(default=0.0, ge=0)
    """Money for an hour of one GPU; 0 leaves it out."""
    like: str = ""
    """A run whose recorded conversations give turns, lengths and latencies, in place of those below."""

    prompt_tokens: int = Field(default=4500, ge=1)
    """Tokens of the policy and the tools, which all conversations share."""
    user_turns: float = Field(default=10.0, gt=0)
    """Messages of the user in a conversation, the mean."""
    tool_calls: float = Field(default=11.0, ge=0)
    """Tool calls of the agent in a conversation, the mean."""
    reply_tokens: float = Field(default=80.0, ge=1)
    """Tokens of a reply or call of the agent, the mean."""
    user_tokens: float = Field(default=40.0, ge=1)
    """Tokens of a message of the user, the mean."""
    tool_tokens: float = Field(default=250.0, ge=1)
    """Tokens of a tool's result, the mean."""
    scenario_tokens: int = Field(default=600, ge=0)
    """Tokens of the user's own instructions, which each call to its endpoint sends."""
    spread: float = Field(default=0.5, ge=0)
    """How much numbers of turns and lengths vary: the sigma of a log-normal distribution."""

    user_seconds: float | None = Field(default=None, ge=0)
    """Seconds until a user answers, the median; where empty 2 for an endpoint, 0 for a rule-based user."""
    user_spread: float = Field(default=0.8, ge=0)
    """The sigma of these seconds, log-normal."""
    tool_seconds: float = Field(default=0.01, ge=0)
    """Seconds of a tool call that no processor of ours is busy with."""
    turn_seconds: float = Field(default=0.001, ge=0)
    """Processor time of a turn outside the model: rendering, parsing, the tool, the records."""

    decode_efficiency: float = Field(default=0.6, gt=0, le=1)
    """Share of the memory bandwidth, or of the products, that a decode step reaches."""
    decode_seconds: float | None = Field(default=None, ge=0)
    """Seconds of a decode step besides reading memory and computing; where empty 0.003 on a GPU, 0.0005 on a
    CPU."""
    prefill_efficiency: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU's products that reading a prompt reaches."""
    update_efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's products that an update reaches (MFU, recomputed layers counted); where empty 0.4
    on a GPU, 0.65 on a CPU."""
    link_efficiency: float = Field(default=0.7, gt=0, le=1)
    """Share of the links' bandwidth that collectives reach."""
    step_seconds: float | None = Field(default=None, ge=0)
    """Seconds of a step that belong to nothing else; where empty 10 for verl, 0 for train."""

    logit_bytes: float = Field(default=8.0, gt=0)
    """verl: bytes of one logit at the peak: bfloat16, float32 for the softmax, and a gradient in place."""
    layer_bytes: float = Field(default=34.0, gt=0)
    """Bytes kept of one layer, for each token and unit of width, without gradient checkpointing."""
    reserve_gigabytes: float = Field(default=6.0, ge=0)
    """Memory of a GPU that nothing may count on: CUDA context, communication buffers, fragmentation."""
    simulated: int = Field(default=1000, ge=16)
    """Conversations that are simulated one by one at most; with more, each stands for several."""
