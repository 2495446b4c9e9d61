"""The interface between algorithms and engines: a few methods on plain lists of ints and floats.

Nothing here knows a tokenizer or a template, or imports torch, so the core install and clients of remote
engines can use it. `TorchEngine` is the embedded engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

StopReason = Literal["stop", "length"]
Precision = Literal["auto", "float32", "bfloat16"]
"""dtype of the matmuls; weights, gradients and moments are always float32. auto is bfloat16 on a GPU and
float32 on a CPU."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw a completion. Temperature 0 is greedy.

    Log-probabilities come from the tempered distribution (logits divided by the temperature, or by 1 when
    greedy), before top-p truncation. With `top_p=1` that is exactly the distribution sampled from, as an
    importance ratio needs when the trainer divides by the same temperature.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled reply; `tokens` ends with the stop token if `stop_reason` is "stop"."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    weight_version: int


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence; every list has the length of `tokens`.

    mask is 1 where the policy sampled the token (never at position 0, which has no context); logprobs are the
    sampler's at these positions. `turns` optionally numbers the turn of each token. Rows with the same `id`
    are one conversation, whose template rewrote its history; a row without an id is a conversation of its
    own.
    """

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    advantages: list[float]
    reference_logprobs: list[float] | None = None
    id: str = ""
    turns: list[int] | None = None
    elsewhere: float | None = None
    """Sum of the log-ratios of the masked tokens in the conversation's other rows, for a loss that needs the
    ratio of the whole conversation (`trialogue.learn.losses.add_elsewhere`)."""


def find_conversations(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of the rows of each conversation, in the order of its first row."""
    found: dict[str | int, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(row.id or number, []).append(number)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The masked tokens of one micro-batch, flat, with totals of the whole call. Rows are never split.

    A loss divides by `conversation_tokens`, `total_conversations` or `total_tokens`, never by local counts.
    Then the losses of micro-batches add up to the loss of the step, however the rows were divided.
    """

    old_logprobs: Tensor
    advantages: Tensor
    reference_logprobs: Tensor | None
    entropy: Tensor  # of the distribution each token was drawn from; without gradient
    row: Tensor  # index of the row here (0 … rows-1) each token belongs to
    turns: Tensor | None
    conversation_tokens: Tensor  # for each row here, the masked tokens of its conversation in the whole call
    elsewhere: Tensor  # `Row.elsewhere` of each row here: 0 if it is its whole conversation; NaN if unknown
    rows: int
    total_conversations: int
    total_tokens: int


class LossFunction(Protocol):
    """Maps new log-probabilities [N] to a scalar that is summed over micro-batches.

    Metrics are summed, too, so divide them by totals; those whose names end in `_max` or `_min` are reduced
    by the maximum or minimum instead.
    """

    def __call__(
        self, new_logprobs: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Tensor | float]]: ...


@dataclass(frozen=True, slots=True)
class Outputs:
    """`logprobs[i]` are the new log-probabilities at the masked positions of row i, in order."""

    logprobs: list[list[float]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class OptimParams:
    """AdamW for one step; weight decay touches matrices only. `grad_clip` 0 means no clipping."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine supports."""

    trains: Literal["full", "lora", "none"]
    max_length: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Train low-rank adapters instead of all weights."""

    r: int = 16
    alpha: int = 32
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the embedded engine. The defaults suit a small model on a CPU."""

    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto takes a GPU when there is one
    precision: Precision = "auto"
    lora: LoraSettings | None = None
    gradient_checkpointing: bool = False
    max_tokens_per_micro_batch: int = 16384
    cache_bytes: int = 4 << 30  # for keys and values of conversations
    prefill_chunk: int = 4096  # most new tokens in one sampler step
    keep_sessions: bool = True  # off: every turn is computed from its first token
    share_prefixes: bool = True
    vocabulary: int | None = None  # ids from here on pad the matrices: they are never sampled
    seed: int = 0


@runtime_checkable
class Engine(Protocol):
    """Weights that can be sampled from and updated. One engine is used from one event loop at a time."""

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        ...

    @property
    def weight_version(self) -> int:
        """How often weights were published; each completion carries the version that sampled it."""
        ...

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        """One completion for each prompt. A session, which takes one prompt, keeps its cache for the next
        turn."""
        ...

    async def end_session(self, session: str) -> None:
        """Free the cache of a conversation that has ended."""
        ...

    async def forward(self, rows: Sequence[Row], temperature: float = 1.0) -> list[list[float]]:
        """Log-probability of every token given those before it; 0.0 at position 0."""
        ...

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossFunction, *, temperature: float = 1.0
    ) -> Outputs:
        """Accumulate the gradient of the loss over these rows."""
        ...

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        """Apply and clear the accumulated gradient; a non-finite one is dropped and reported as `skipped`."""
        ...

    async def publish(self) -> int:
        """Sample from the current weights from now on; returns their version."""
        ...

    async def save_state(self, path: Path) -> None:
        """Write weights and optimizer to a folder."""
        ...

    async def load_state(self, path: Path) -> None:
        """Continue from what `save_state` wrote."""
        ...

    def close(self) -> None:
        """Close what is open: threads, connections, other processes."""
        ...
