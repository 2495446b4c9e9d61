# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportPrivateUsage=false
"""A fused forward pass on a CPU, for sampling and updates, of models like Llama and LFM2.

A decode step of a small model is about a hundred small matmuls. transformers surrounds them with ten thousand
tiny operations, which take a quarter of the time or more. Here query, key and value are one matmul, gate and
up projection are one, and each norm is one operation. An update uses the same layers with gradients of their
own (`layers`). There is no list of supported models: layers must have exactly the parts named below, and the
result must equal that of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trialogue.engine.cpu.decoder import CLayer, Decoder, fits
from trialogue.engine.cpu.kernels import CCache, DecodeBatch, Kernels
from trialogue.engine.cpu.layers import (
    GatedLinear,
    LayerKernels,
    NormLinear,
    RmsNorm,
    Rotary,
    apply_norm,
    apply_rotary,
    find_layer_kernels,
    gate,
    to_dtype,
)
from trialogue.engine.cpu.linear import FusedLinear, compute_matmul
from trialogue.engine.plan import AttentionPlan, convolve

LARGEST = 1 << 32
"""Bytes of weights up to which a second copy is made."""


@dataclass(frozen=True, slots=True)
class PartNames:
    """The names of an architecture's modules."""

    before: str
    after: str
    feed_forward: str
    linears: tuple[str, str, str]
    output: str
    head_norms: tuple[str, str]
    last: str


ARCHITECTURES = (
    PartNames(
        "input_layernorm",
        "post_attention_layernorm",
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "o_proj",
        ("q_norm", "k_norm"),
        "norm",
    ),
    PartNames(
        "operator_norm",
        "ffn_norm",
        "feed_forward",
        ("w1", "w3", "w2"),
        "out_proj",
        ("q_layernorm", "k_layernorm"),
        "embedding_norm",
    ),
)


class UnsupportedModel(Exception):
    """The model has other parts than a fused one."""


def refuse_others(module: nn.Module, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Refuse a module that has other parts than these."""
    found = {name for name, _ in module.named_children()}
    if not set(names) <= found <= {*names, *optional}:
        raise UnsupportedModel


def make_linear(*layers: nn.Module) -> FusedLinear:
    """Fuse plain linear layers; one with an adapter, or a quantized one, has another type."""
    if any(type(layer) is not nn.Linear for layer in layers):
        raise UnsupportedModel
    return FusedLinear(*cast("tuple[nn.Linear, ...]", layers))


def apply_linear(inputs: Tensor, linear: FusedLinear, kernels: LayerKernels) -> Tensor:
    (weight,), bias, dtype = linear.weights, linear.find_bias(), kernels.dtype
    return compute_matmul(inputs.to(dtype), weight.to(dtype), to_dtype(bias, dtype))


class Norm:
    """RMS norm over the last dimension."""

    def __init__(self, module: Any) -> None:
        if not hasattr(module, "variance_epsilon"):
            raise UnsupportedModel
        self.module, self.eps = module, module.variance_epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, kernels = self.module.weight, find_layer_kernels(torch.float32)
        if kernels is None:
            return nn.functional.rms_norm(hidden, weight.shape, weight, self.eps)
        return apply_norm(kernels, hidden.contiguous(), weight, self.eps)[0]

    def learn(self, hidden: Tensor, kernels: LayerKernels) -> Tensor:
        flat = hidden.float().flatten(0, -2).contiguous()
        return cast(Tensor, RmsNorm.apply(flat, self.module.weight, self.eps, kernels)).view(hidden.shape)

    def multiply(self, hidden: Tensor, linear: FusedLinear, kernels: LayerKernels) -> Tensor:
        """The norm, then a linear layer, with a gradient."""
        given = (self.module.weight, linear.find_bias(), self.eps, kernels, *linear.weights)
        return cast(Tensor, NormLinear.apply(hidden, *given))


class Attention:
    def __init__(self, module: Any, names: PartNames) -> None:
        refuse_others(module, "q_proj", "k_proj", "v_proj", names.output, optional=names.head_norms)
        self.layer, self.scaling, self.width = module.layer_idx, module.scaling, module.head_dim
        self.heads = module.q_proj.out_features // self.width
        self.kv_heads = module.k_proj.out_features // self.width
        self.projection = make_linear(module.q_proj, module.k_proj, module.v_proj)
        self.output = make_linear(getattr(module, names.output))
        self.norms = [Norm(getattr(module, name)) for name in names.head_norms if hasattr(module, name)]

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        qkv = self.projection(hidden).view(len(hidden), -1, self.width)
        qkv = self.normalize_heads(qkv, Norm.__call__)
        rotated = rotate_heads(qkv.contiguous(), rotation, self.heads)
        query, key, value = (tensor.transpose(0, 1) for tensor in rotated)
        output = plan.attend(self.layer, query, key, value, self.scaling)
        return self.output(output.reshape(len(hidden), -1))

    def learn(
        self,
        hidden: Tensor,
        norm: Norm,
        rotation: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        kernels: LayerKernels,
    ) -> Tensor:
        qkv = norm.multiply(hidden, self.projection, kernels).view(len(hidden), -1, self.width)
        qkv = self.normalize_heads(qkv, lambda own, part: own.learn(part, kernels))
        rotated = cast("tuple[Tensor, ...]", Rotary.apply(qkv, *rotation, self.heads, kernels))
        query, key, value = (tensor.transpose(0, 1) for tensor in rotated)
        output = plan.attend(self.layer, query, key, value, self.scaling)
        return apply_linear(output.flatten(1), self.output, kernels)

    def normalize_heads(self, qkv: Tensor, apply_norm: Callable[[Norm, Tensor], Tensor]) -> Tensor:
        """Apply the norms of queries and keys, if the model has any."""
        if not self.norms:
            return qkv
        *parts, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return torch.cat([*map(apply_norm, self.norms, parts), value], 1)

    def fill(self, struct: CLayer, decoder: Decoder) -> None:
        struct.cache = CCache(self.heads, self.kv_heads, self.width, self.scaling)
        if self.norms:
            struct.query, struct.key = map(decoder.to_norm, self.norms)


def rotate_heads(qkv: Tensor, rotation: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, ...]:
    """Split [N, heads + 2 * kv_heads, width] into queries, keys and values; rotary embeddings on the first
    two."""
    kernels, (cosine, sine) = find_layer_kernels(torch.float32), rotation
    if kernels is not None:
        return apply_rotary(kernels, qkv, cosine, sine, heads)
    kv_heads, width = (qkv.shape[1] - heads) // 2, qkv.shape[2]
    query_key, value = qkv.split([heads + kv_heads, kv_heads], 1)
    rotated = (query_key * cosine).addcmul_(query_key.roll(width // 2, 2), sine)
    return *rotated.split([heads, kv_heads], 1), value


class Convolution:
    def __init__(self, module: Any) -> None:
        self.layer, self.taps = module.layer_idx, module.conv
        self.projection, self.output = make_linear(module.in_proj), make_linear(module.out_proj)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        return self.output(convolve(self.taps, self.layer, self.projection(hidden), plan))

    def learn(
        self,
        hidden: Tensor,
        norm: Norm,
        rotation: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        kernels: LayerKernels,
    ) -> Tensor:
        mixed = convolve(self.taps, self.layer, norm.multiply(hidden, self.projection, kernels), plan)
        return apply_linear(mixed, self.output, kernels)

    def fill(self, struct: CLayer, decoder: Decoder) -> None:
        struct.kernel = self.taps.weight.shape[2]
        struct.taps = decoder.keep(self.taps.weight[:, 0].t())
        struct.taps_bias = decoder.keep(self.taps.bias)


class Layer:
    def __init__(self, module: nn.Module, names: PartNames) -> None:
        parts: dict[str, Any] = dict(module.named_children())
        kind = "self_attn" if "self_attn" in parts else "conv"
        refuse_others(module, names.before, names.after, names.feed_forward, kind)
        self.before, self.after = Norm(parts[names.before]), Norm(parts[names.after])
        mixer = parts[kind]
        self.mixer = Attention(mixer, names) if kind == "self_attn" else Convolution(mixer)
        feed = parts[names.feed_forward]
        refuse_others(feed, *names.linears, optional=("act_fn",))
        sample = torch.linspace(-3, 3, 7)
        if not getattr(feed, "act_fn", nn.functional.silu)(sample).equal(nn.functional.silu(sample)):
            raise UnsupportedModel
        gate, up, down = (getattr(feed, name) for name in names.linears)
        self.gates, self.down = make_linear(gate, up), make_linear(down)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        hidden = self.mixer(self.before(hidden), rotation, plan).add_(hidden)
        gate_up = self.gates(self.after(hidden))
        return self.down(apply_gate(gate_up)).add_(hidden)

    def learn(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan, kernels: LayerKernels
    ) -> Tensor:
        hidden = hidden + self.mixer.learn(hidden, self.before, rotation, plan, kernels)
        gate_up = self.after.multiply(hidden, self.gates, kernels)
        (weight,) = self.down.weights
        return hidden + cast(Tensor, GatedLinear.apply(gate_up, weight, self.down.find_bias(), kernels))

    def matmuls(self) -> list[FusedLinear]:
        return [self.mixer.projection, self.mixer.output, self.gates, self.down]


def apply_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [N, 2 * width] → [N, width]"""
    kernels = find_layer_kernels(torch.float32)
    if kernels is not None:
        return gate(kernels, gate_up.contiguous())
    first, second = gate_up.chunk(2, 1)
    return nn.functional.silu(first).mul_(second)


class FusedModel:
    """Hidden states and logits of packed tokens. Copies of the weights are kept until `forget`, which must be
    called when the weights have changed."""

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.base_model
        names = next((kind for kind in ARCHITECTURES if hasattr(body, kind.last)), None)
        if names is None or not all(map(is_float32_on_cpu, model.parameters())):
            raise UnsupportedModel
        self.embed, self.angles = body.embed_tokens, body.rotary_emb
        self.layers = [Layer(module, names) for module in body.layers]
        self.last = Norm(getattr(body, names.last))
        self.head = make_linear(cast(nn.Module, model.get_output_embeddings()))
        self.decoder: Decoder | None = None
        self.is_decoded: bool | None = None  # whether the decoder is right; None until it was tried

    def hidden(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        hidden = self.embed(tokens)
        rotation = self.find_rotation(hidden, positions)
        batch = plan.decode_batch
        if batch is None or not self.is_decoded or len(batch.rows) > batch.kernels.most_rows:
            return self.last(self.advance(hidden, rotation, plan))
        self.find_decoder(batch.kernels).advance(batch, hidden, rotation)
        return self.last(hidden)

    def advance(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        """Compute layer by layer."""
        for layer in self.layers:
            hidden = layer(hidden, rotation, plan)
        return hidden

    def try_decoder(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan, batch: DecodeBatch) -> None:
        """Find out whether the decoder agrees with the layers one by one."""
        if not fits(self.layers, batch.kernels):
            self.is_decoded = False
            return
        hidden = self.embed(tokens)
        rotation = self.find_rotation(hidden, positions)
        expected = self.advance(hidden, rotation, plan)
        self.find_decoder(batch.kernels).advance(batch, hidden, rotation)
        if bool(expected.isfinite().all()):  # diverged weights tell nothing
            self.is_decoded = is_near(hidden, expected, 1e-2 if self.head.is_half else 1e-4)

    def find_decoder(self, kernels: Kernels) -> Decoder:
        if self.decoder is None:
            self.decoder = Decoder(self.layers, kernels)
        return self.decoder

    def learn(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan, kernels: LayerKernels) -> Tensor:
        """Hidden states with a gradient, from the current weights."""
        hidden = self.embed(tokens)
        rotation = self.find_rotation(hidden, positions)
        for layer in self.layers:
            hidden = layer.learn(hidden, rotation, plan, kernels)
        return self.last.learn(hidden, kernels)

    def find_rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token [N, 1, width]; the sines of the first half are negated."""
        cosine, sine = self.angles(hidden[None], position_ids=positions[None])
        first, second = sine[0].chunk(2, 1)
        return cosine[0][:, None].contiguous(), torch.cat([-first, second], 1)[:, None]

    def matmuls(self) -> list[FusedLinear]:
        return [self.head, *(linear for layer in self.layers for linear in layer.matmuls())]

    def round(self) -> None:
        """Compute matmuls in bfloat16 from now on."""
        for linear in self.matmuls():
            linear.is_half = True
        self.is_decoded = None
        self.forget()

    def forget(self) -> None:
        """Drop the copies of the weights."""
        self.decoder = None
        for linear in self.matmuls():
            linear.forget()


def is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Compare by token: single numbers near zero carry the rounding errors of large ones."""
    relative_error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    return bool((relative_error < tolerance).all())


def is_float32_on_cpu(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, which may read or change its inputs and outputs."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or bool(module._backward_pre_hooks)


def is_changed(module: nn.Module) -> bool:
    """Whether a module may compute something else than its class."""
    return is_hooked(module) or "forward" in vars(module)


def fuse(model: PreTrainedModel, agrees: Callable[[FusedModel], bool]) -> FusedModel | None:
    """The fused model, or None if the model is large, not in float32 on the CPU, has other parts or other
    results."""
    if sum(weight.numel() * weight.element_size() for weight in model.parameters()) > LARGEST:
        return None
    try:
        fused = FusedModel(model)
        return fused if agrees(fused) else None
    except (
        UnsupportedModel,
        AttributeError,
        RuntimeError,
        ValueError,
    ):  # parts are missing or have other shapes
        return None
