# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportPrivateUsage=false
"""One hook into any transformers causal model: what its tokens look back at is decided by a plan.

The model runs on flat packed tokens [1, N] with explicit positions and no mask or cache of its own. Each
attention layer, and each short convolution of LFM2, hands its inputs to the plan of the moment: the
sampler's plan reads and writes kept caches, the update's plan follows a prefix tree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from trialogue.engine.cpu.fused import Fused, convolve, fuse, is_changed, is_hooked, is_near
from trialogue.engine.cpu.kernels import FEW_ROWS, Few
from trialogue.engine.cpu.layers import LayerKernels, find_layer_kernels
from trialogue.engine.cpu.linear import compute_linear, suits_onednn
from trialogue.errors import EngineError

IMPLEMENTATION = "trialogue"
SUPPORTED = (
    "Supported are decoder-only transformers models with full causal attention in every layer "
    "(Llama, SmolLM2, Qwen2, Qwen3, Mistral without sliding window, …) and LFM2 (short convolutions with "
    "attention)."
)


class Plan(Protocol):
    """What the N packed tokens of one forward pass look back at."""

    few: Few | None
    """Where they lie, if they are few and kernels can take them."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [H, N, D], key and value [KV, N, D] → [N, H, D]."""
        ...

    def look_back(self, layer: int, inputs: Tensor, kernel: int) -> list[Tensor]:
        """inputs [N, C] → the inputs of the token `k` places before each token, k = 1 … kernel-1."""
        ...


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """What each layer keeps for a token: (KV heads, key width, value width), or (channels, kernel)."""

    attention: dict[int, tuple[int, int, int]]
    convolution: dict[int, tuple[int, int]]
    dtype: torch.dtype


class Wiring:
    """A model whose layers ask `self.plan`. Held by the modules themselves, so that recomputation in a
    backward pass, which may run on another thread, finds the same plan."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.compute: torch.dtype | None = None  # autocast to this type
        self.plan: Plan | None = None
        self.fused: Fused | None = None  # the sampler's shorter way
        self.learns_fused = False  # whether an update goes that way, too
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
        is_ordinary = not any(map(is_changed, cast(nn.Module, model).modules()))
        for module in self.body.modules():
            if hasattr(module, "layer_idx"):
                cast(Any, module).wiring = self
            if is_short_convolution(module):
                cast(Any, module).forward = MethodType(planned_convolution, module)
            if type(module) is nn.Linear and suits_onednn(module.weight, module.weight):
                cast(Any, module).forward = MethodType(compute_linear, module)
        self.shapes = self.probe()
        if is_ordinary:
            self.fused = fuse(model, lambda fused: self.agrees(fused.hidden))
        kernels = find_layer_kernels(torch.float32)
        if self.fused is not None and kernels is not None:
            self.learns_fused = self.agrees(partial(self.fused.learn, kernels=kernels))

    def round(self) -> None:
        """Compute in bfloat16 from now on; weights stay what they are."""
        self.compute = torch.bfloat16
        if self.fused is not None:
            self.fused.round()
        else:
            self.shapes = self.probe()

    @property
    def numbers(self) -> torch.dtype:
        """What products are computed of."""
        return self.compute or self.shapes.dtype

    @contextmanager
    def using(self, plan: Plan) -> Generator[None]:
        self.plan = plan
        try:
            yield
        finally:
            self.plan = None

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Final hidden states [N, width] of packed tokens under the plan in use."""
        if self.fused is not None and self.plan is not None:
            if torch.is_inference_mode_enabled():
                return self.fused.hidden(tokens, positions, self.plan)
            if (kernels := self._find_kernels()) is not None:
                return self.fused.learn(tokens, positions, self.plan, kernels)
        with self._autocast(tokens.device.type):
            output = self.body(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def _find_kernels(self) -> LayerKernels | None:
        """What an update in few operations needs; hooks that came later see what transformers computes."""
        is_hooked_now = any(map(is_hooked, cast(nn.Module, self.model).modules()))
        return find_layer_kernels(self.numbers) if self.learns_fused and not is_hooked_now else None

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.head
        if self.fused is not None and torch.is_inference_mode_enabled():
            head = self.fused.head
        with self._autocast(hidden.device.type):
            return head(hidden)[..., : self.vocabulary]

    def output(self) -> tuple[Tensor, Tensor | None]:
        """The matrix and bias that make logits of the ids there are."""
        weight, bias = self.head.weight, cast("Tensor | None", self.head.bias)
        if self.vocabulary < weight.shape[0]:
            return weight[: self.vocabulary], None if bias is None else bias[: self.vocabulary]
        return weight, bias

    def _autocast(self, device: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.compute is None else torch.autocast(device, self.compute)

    def probe(self) -> LayerShapes:
        """One tiny forward pass tells which layers keep what, without reading any configuration."""
        recorder = Recorder()
        device = next(self.model.parameters()).device
        with torch.no_grad(), self.using(recorder):
            self.hidden(torch.zeros(2, dtype=torch.long, device=device), torch.arange(2, device=device))
        layers = self.model.config.get_text_config().num_hidden_layers
        seen = len(recorder.attention) + len(recorder.convolution)
        if seen != layers:
            raise EngineError(
                f"{type(self.model).__name__} has {layers} layers, of which only {seen} look back through "
                f"attention or short convolutions that this engine knows. {SUPPORTED}"
            )
        return LayerShapes(recorder.attention, recorder.convolution, recorder.dtype)

    def agrees(self, compute: Callable[[Tensor, Tensor, Plan], Tensor]) -> bool:
        """Whether what is computed in few operations is what the model computes, at its first positions and
        at others up to its last. So many rows that large matrices are not laid out anew for this."""
        count = FEW_ROWS + 1
        tokens = torch.arange(count) % self.vocabulary
        last = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or count
        for positions in (torch.arange(count), torch.linspace(0, last - 1, count).long()):
            with torch.no_grad(), self.using(Recorder()):
                expected = self.hidden(tokens, positions)
                found = compute(tokens, positions, Recorder())
            if not is_near(found, expected, 1e-4):
                return False
        return True


class Recorder:
    """A plan for one sequence that notes the shapes of what passes through."""

    few: Few | None = None

    def __init__(self) -> None:
        self.attention: dict[int, tuple[int, int, int]] = {}
        self.convolution: dict[int, tuple[int, int]] = {}
        self.dtype = torch.float32

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.attention[layer] = (key.shape[0], key.shape[2], value.shape[2])
        self.dtype = value.dtype
        batch = (query[None], key[None], value[None])
        output = nn.functional.scaled_dot_product_attention(
            *batch, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output[0].transpose(0, 1)

    def look_back(self, layer: int, inputs: Tensor, kernel: int) -> list[Tensor]:
        self.convolution[layer] = (inputs.shape[1], kernel)
        padded = nn.functional.pad(inputs, (0, 0, kernel - 1, 0))
        return [padded[kernel - 1 - distance :][: len(inputs)] for distance in range(1, kernel)]


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise for models that keep state or shape attention in ways no plan honours."""
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
    """What transformers calls in every attention layer: query [1, H, N, D], key and value [1, KV, N, D]."""
    for option in ("sliding_window", "softcap", "s_aux"):
        if options.get(option) is not None:
            raise EngineError(f"{type(module).__name__} asks for `{option}` in its attention. {SUPPORTED}")
    wiring = cast("Wiring | None", getattr(module, "wiring", None))
    if wiring is None or wiring.plan is None:
        raise EngineError("this model belongs to a TorchEngine: call the engine, not the model")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast rotary embeddings leave queries and keys in float32 while values are half precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = wiring.plan.attend(cast(Any, module).layer_idx, query[0], key[0], value[0], factor)
    return output[None], None


def is_short_convolution(module: nn.Module) -> bool:
    return type(module).__name__.endswith("ShortConv") and isinstance(
        getattr(module, "conv", None), nn.Conv1d
    )


def planned_convolution(module: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """What LFM2 calls in every layer with a short convolution."""
    wiring = cast("Wiring | None", getattr(module, "wiring", None))
    if wiring is None or wiring.plan is None:
        raise EngineError("this model belongs to a TorchEngine: call the engine, not the model")
    mixed = convolve(module.conv, module.layer_idx, module.in_proj(hidden_states[0]), wiring.plan)
    return module.out_proj(mixed)[None]


def attend_with_sum(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and the log of its normaliser, so that parts over different keys can be merged.

    query [B, H, Q, D], key and value [B, KV, T, D], bias like [B, 1, Q, T] → [B, H, Q, D], [B, H, Q].
    """
    if query.device.type == "cpu" and query.shape[2] > 1 and key.shape[3] == value.shape[3]:
        if bias is not None:
            bias = bias.expand(query.shape[0], 1, query.shape[2], key.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=bias, scale=scaling
        )
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    # The queries that share a key head are rows of one matrix product.
    grouped = (query * scaling).reshape(batch, key.shape[1], groups * queries, width)
    scores = torch.matmul(grouped, key.transpose(2, 3))
    if bias is not None:
        scores += (
            bias if queries == 1 else bias.expand(batch, 1, queries, key.shape[2]).repeat(1, 1, groups, 1)
        )
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    output = torch.matmul(weights, value).div_(total)
    summed = total.log_().add_(top)
    return output.view(batch, heads, queries, value.shape[3]), summed.view(batch, heads, queries)


def merge_parts(
    first: Tensor, first_sum: Tensor, second: Tensor, second_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each: outputs [..., D], log-sums [...]."""
    share = torch.sigmoid(first_sum - second_sum).unsqueeze(-1).to(first.dtype)
    return torch.lerp(second, first, share), torch.logaddexp(first_sum, second_sum)
