# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportPrivateUsage=false
"""The adapter around a transformers causal model: an `AttentionPlan` decides what its tokens attend to.

The model runs on flat packed tokens [1, N] with explicit positions and without a mask or cache of its own.
Each attention layer, and each short convolution of LFM2, passes its inputs to the plan in use: the sampler's
plan reads and writes caches, the update's plan follows a prefix tree.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from trialogue.engine.blocks import attend_block, is_for_flash, multiply_in_float32, to_chunks
from trialogue.engine.cpu.fast_path import find_fast_path
from trialogue.engine.plan import AttentionPlan, LayerShapes, ShapeRecorder, convolve
from trialogue.errors import EngineError

IMPLEMENTATION = "trialogue"
SUPPORTED = (
    "Supported are decoder-only transformers models with full causal attention in every layer "
    "(Llama, SmolLM2, Qwen2, Qwen3, Mistral without sliding window, …) and LFM2 (short convolutions with "
    "attention)."
)


class ModelAdapter:
    """A model whose layers ask `self.plan`. The modules hold the adapter, so that recomputation in a backward
    pass, which may run on another thread, finds the same plan."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.autocast_dtype: torch.dtype | None = None
        self.plan: AttentionPlan | None = None
        AttentionInterface.register(IMPLEMENTATION, planned_attention)
        try:
            model.set_attn_implementation(IMPLEMENTATION)
        except (ValueError, ImportError) as error:
            raise EngineError(
                f"{type(model).__name__} cannot take another attention: {error}. {SUPPORTED}"
            ) from error
        self.body = model.base_model
        head = model.get_output_embeddings()
        if head is None:
            raise EngineError(f"{type(model).__name__} has no output embeddings. {SUPPORTED}")
        if type(head) is not nn.Linear:
            raise EngineError(
                f"the output embeddings of {type(model).__name__} are a {type(head).__name__}, not Linear"
            )
        self.head = head
        self.vocabulary: int = head.weight.shape[0]
        self.fast = find_fast_path(model)
        self.rounded: list[RoundedLinear] = []
        for module in self.body.modules():
            if hasattr(module, "layer_idx"):
                cast(Any, module).adapted = self
            if is_short_convolution(module):
                cast(Any, module).forward = MethodType(planned_convolution, module)
            if self.fast is not None:
                self.fast.replace_forward(module)
        self.shapes = self.probe()
        if self.fast is not None:
            self.fast.fuse(self._compute)

    def round(self) -> None:
        """Compute in bfloat16 from now on; the weights stay in float32."""
        self.autocast_dtype = torch.bfloat16
        if self.fast is not None and self.fast.fused is not None:
            self.fast.fused.round()
        else:
            self.shapes = self.probe()
        if self.fast is None:
            for module in (*self.body.modules(), self.head):
                if type(module) is nn.Linear and module.weight.dtype == torch.float32:
                    self.rounded.append(RoundedLinear(module))

    def forget(self) -> None:
        """Drop the copies of weights that sampling made."""
        if self.fast is not None:
            self.fast.forget()
        for linear in self.rounded:
            linear.copies = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matmuls."""
        return self.autocast_dtype or self.shapes.dtype

    @contextmanager
    def using(self, plan: AttentionPlan) -> Generator[None]:
        self.plan = plan
        try:
            yield
        finally:
            self.plan = None

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Final hidden states [N, width] of packed tokens under the plan in use."""
        if self.fast is not None and self.fast.fused is not None and self.plan is not None:
            compute = self.fast.find_pass(self.dtype)
            if compute is not None:
                return compute(tokens, positions, self.plan)
        with self._autocast(tokens.device.type):
            output = self.body(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def _compute(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        with self.using(plan):
            return self.hidden(tokens, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.head
        if self.fast is not None and self.fast.fused is not None and torch.is_inference_mode_enabled():
            head = self.fast.fused.head
        with self._autocast(hidden.device.type):
            return head(hidden)[..., : self.vocabulary]

    def output(self) -> tuple[Tensor, Tensor | None]:
        """The output matrix and bias, without padding of the vocabulary."""
        weight, bias = self.head.weight, cast("Tensor | None", self.head.bias)
        if self.vocabulary < weight.shape[0]:
            return weight[: self.vocabulary], None if bias is None else bias[: self.vocabulary]
        return weight, bias

    def _autocast(self, device: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast_dtype is None else torch.autocast(device, self.autocast_dtype)

    def probe(self) -> LayerShapes:
        """Find what each layer caches by a forward pass of two tokens, without reading the configuration."""
        recorder = ShapeRecorder()
        device = next(self.model.parameters()).device
        with torch.no_grad(), self.using(recorder):
            self.hidden(torch.zeros(2, dtype=torch.long, device=device), torch.arange(2, device=device))
        layers = self.model.config.get_text_config().num_hidden_layers
        found = len(recorder.attention) + len(recorder.convolution)
        if found != layers:
            raise EngineError(
                f"{type(self.model).__name__} has {layers} layers, of which only {found} look back through "
                f"attention or short convolutions that this engine knows. {SUPPORTED}"
            )
        return LayerShapes(recorder.attention, recorder.convolution, recorder.dtype)


class RoundedLinear:
    """A linear layer off the CPU whose weights autocast rounds. Sampling makes the rounded copy once, rather
    than in every step; an update needs the gradient of the float32 weights."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.copies: tuple[Tensor, Tensor | None] | None = None
        cast(Any, module).forward = self.compute

    def compute(self, inputs: Tensor) -> Tensor:
        weight, bias = self.module.weight, cast("Tensor | None", self.module.bias)
        if torch.is_inference_mode_enabled():
            if self.copies is None:
                dtype = torch.get_autocast_dtype(inputs.device.type)
                self.copies = weight.to(dtype), None if bias is None else bias.to(dtype)
            weight, bias = self.copies
        return nn.functional.linear(inputs, weight, bias)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise for models with state or with attention that a plan cannot reproduce."""
    config = model.config.get_text_config()
    name = type(model).__name__
    layers = getattr(config, "layer_types", None) or ()
    kinds = set(layers) - {"full_attention", "conv"}
    if kinds:
        raise EngineError(f"{name} has layers of kind {', '.join(sorted(kinds))}. {SUPPORTED}")
    if getattr(model, "_is_stateful", False):
        raise EngineError(f"{name} keeps recurrent state. {SUPPORTED}")
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(f"{name} is an encoder-decoder. {SUPPORTED}")
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if windowed and not layers:
        raise EngineError(f"{name} uses a sliding window of {config.sliding_window} tokens. {SUPPORTED}")
    for setting in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, setting, None) is not None:
            raise EngineError(f"{name} caps logits ({setting}). {SUPPORTED}")


def planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every attention layer: query [1, H, N, D], key and value [1, KV, N, D]."""
    for option in ("sliding_window", "softcap", "s_aux"):
        if options.get(option) is not None:
            raise EngineError(f"{type(module).__name__} asks for `{option}` in its attention. {SUPPORTED}")
    plan = find_plan(module)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast, rotary embeddings give float32 queries and keys while values are in half precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = plan.attend(cast(Any, module).layer_idx, query[0], key[0], value[0], factor)
    return output[None], None


def find_plan(module: nn.Module) -> AttentionPlan:
    adapted = cast("ModelAdapter | None", getattr(module, "adapted", None))
    if adapted is None or adapted.plan is None:
        raise EngineError("this model belongs to a TorchEngine: call the engine, not the model")
    return adapted.plan


def is_short_convolution(module: nn.Module) -> bool:
    return type(module).__name__.endswith("ShortConv") and isinstance(
        getattr(module, "conv", None), nn.Conv1d
    )


def planned_convolution(module: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Called by LFM2 in every layer with a short convolution."""
    plan = find_plan(module)
    mixed = convolve(module.conv, module.layer_idx, module.in_proj(hidden_states[0]), plan)
    return module.out_proj(mixed)[None]


def attend_with_sum(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, so that parts over different keys can be merged.

    query [B, H, Q, D], key and value [B, KV, T, D], bias like [B, 1, Q, T] → [B, H, Q, D], [B, H, Q]; the
    log-sums are in float32.
    """
    if query.device.type == "cpu" and query.shape[2] > 1 and key.shape[3] == value.shape[3]:
        if bias is not None:
            bias = bias.expand(query.shape[0], 1, query.shape[2], key.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias, scale=scaling
        )
    if bias is None and is_for_flash(query, value):
        return attend_block(query, key, value, scaling=scaling, causal=False)
    parts: list[tuple[Tensor, Tensor]] = []
    for part in to_chunks(query, key.shape[2]):
        shift = bias if bias is None or bias.shape[2] == 1 else bias[:, :, part]
        parts.append(_attend_by_matmuls(query[:, :, part], key, value, scaling, shift))
    return (
        parts[0]
        if len(parts) == 1
        else (torch.cat([output for output, _ in parts], 2), torch.cat([sums for _, sums in parts], 2))
    )


def _attend_by_matmuls(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    # The queries that share a KV head are rows of one matmul.
    grouped = query.reshape(batch, key.shape[1], groups * queries, width)
    scores = multiply_in_float32(grouped, key.transpose(2, 3), scaling)
    if bias is not None:
        scores += (
            bias if queries == 1 else bias.expand(batch, 1, queries, key.shape[2]).repeat(1, 1, groups, 1)
        )
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    output = torch.matmul(weights.to(value.dtype), value).div_(total)
    summed = total.log_().add_(top)
    return output.view(batch, heads, queries, value.shape[3]), summed.view(batch, heads, queries)


def merge_parts(
    first: Tensor, first_sum: Tensor, second: Tensor, second_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: outputs [..., D], log-sums [...]."""
    share = torch.sigmoid(first_sum - second_sum).unsqueeze(-1).to(first.dtype)
    return torch.lerp(second, first, share), torch.logaddexp(first_sum, second_sum)
