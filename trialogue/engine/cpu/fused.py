# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false, reportPrivateUsage=false
"""A forward pass in few operations on a CPU, to sample and to learn, for models of Llama's and LFM2's kinds.

A decoding step of a small model is some hundred small products; transformers' modules surround them with ten
thousand tiny operations, which take a quarter of the time and more. Here the same layers are computed with
one product for query, key and value, one for both halves of the feed-forward layer, and one operation for
each norm. An update goes the same way through parts whose gradients are written out (`layers`). Which models
this holds for is not read from a list: layers must have the parts named below and no other, and the whole
must compute what the model itself computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trialogue.engine.cpu.decoder import CLayer, Decoder, fits
from trialogue.engine.cpu.kernels import Few, Kernels, Memory
from trialogue.engine.cpu.layers import (
    GatedProduct,
    LayerKernels,
    Normed,
    NormedProduct,
    Turned,
    find_layer_kernels,
    gate,
    normalize,
    to_numbers,
    turn_apart,
)
from trialogue.engine.cpu.linear import Joined, compute_product

if TYPE_CHECKING:
    from trialogue.engine.attention import Plan

LARGEST = 1 << 32
"""Bytes of weights up to which a second copy is kept."""


@dataclass(frozen=True, slots=True)
class Names:
    """What an architecture calls its parts."""

    before: str
    after: str
    feed: str
    halves: tuple[str, str, str]
    output: str
    head_norms: tuple[str, str]
    last: str


KINDS = (
    Names(
        "input_layernorm",
        "post_attention_layernorm",
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "o_proj",
        ("q_norm", "k_norm"),
        "norm",
    ),
    Names(
        "operator_norm",
        "ffn_norm",
        "feed_forward",
        ("w1", "w3", "w2"),
        "out_proj",
        ("q_layernorm", "k_layernorm"),
        "embedding_norm",
    ),
)


class Unfit(Exception):
    """A model that is built otherwise."""


def refuse_others(module: nn.Module, *names: str, optional: tuple[str, ...] = ()) -> None:
    """A module must have these parts and no other."""
    found = {name for name, _ in module.named_children()}
    if not set(names) <= found <= {*names, *optional}:
        raise Unfit


def make_product(*layers: nn.Module) -> Joined:
    """A layer with an adapter, or one that is quantized, is no plain product."""
    if any(type(layer) is not nn.Linear for layer in layers):
        raise Unfit
    return Joined(*cast("tuple[nn.Linear, ...]", layers))


def multiply_learned(inputs: Tensor, product: Joined, kernels: LayerKernels) -> Tensor:
    (weight,), bias, numbers = product.weights, product.find_bias(), kernels.numbers
    return compute_product(inputs.to(numbers), weight.to(numbers), to_numbers(bias, numbers))


class Norm:
    """RMS norm over the last dimension."""

    def __init__(self, module: Any) -> None:
        if not hasattr(module, "variance_epsilon"):
            raise Unfit
        self.module, self.eps = module, module.variance_epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, kernels = self.module.weight, find_layer_kernels(torch.float32)
        if kernels is None:
            return nn.functional.rms_norm(hidden, weight.shape, weight, self.eps)
        return normalize(kernels, hidden.contiguous(), weight, self.eps)[0]

    def learn(self, hidden: Tensor, kernels: LayerKernels) -> Tensor:
        flat = hidden.float().flatten(0, -2).contiguous()
        return cast(Tensor, Normed.apply(flat, self.module.weight, self.eps, kernels)).view(hidden.shape)

    def multiply(self, hidden: Tensor, product: Joined, kernels: LayerKernels) -> Tensor:
        """The norm times weights, to learn from."""
        given = (self.module.weight, product.find_bias(), self.eps, kernels, *product.weights)
        return cast(Tensor, NormedProduct.apply(hidden, *given))


class Attention:
    def __init__(self, module: Any, names: Names) -> None:
        refuse_others(module, "q_proj", "k_proj", "v_proj", names.output, optional=names.head_norms)
        self.layer, self.scaling, self.width = module.layer_idx, module.scaling, module.head_dim
        self.heads = module.q_proj.out_features // self.width
        self.kept = module.k_proj.out_features // self.width
        self.joined = make_product(module.q_proj, module.k_proj, module.v_proj)
        self.output = make_product(getattr(module, names.output))
        self.norms = [Norm(getattr(module, name)) for name in names.head_norms if hasattr(module, name)]

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan) -> Tensor:
        joined = self.joined(hidden).view(len(hidden), -1, self.width)
        joined = self.normalize_heads(joined, Norm.__call__)
        apart = turn(joined.contiguous(), rotation, self.heads)
        query, key, value = (tensor.transpose(0, 1) for tensor in apart)
        output = plan.attend(self.layer, query, key, value, self.scaling)
        return self.output(output.reshape(len(hidden), -1))

    def learn(
        self, hidden: Tensor, norm: Norm, rotation: tuple[Tensor, Tensor], plan: Plan, kernels: LayerKernels
    ) -> Tensor:
        joined = norm.multiply(hidden, self.joined, kernels).view(len(hidden), -1, self.width)
        joined = self.normalize_heads(joined, lambda own, part: own.learn(part, kernels))
        apart = cast("tuple[Tensor, ...]", Turned.apply(joined, *rotation, self.heads, kernels))
        query, key, value = (tensor.transpose(0, 1) for tensor in apart)
        output = plan.attend(self.layer, query, key, value, self.scaling)
        return multiply_learned(output.flatten(1), self.output, kernels)

    def normalize_heads(self, joined: Tensor, normalize: Callable[[Norm, Tensor], Tensor]) -> Tensor:
        """Queries and keys of the models that have norms for them."""
        if not self.norms:
            return joined
        *parts, value = joined.split([self.heads, self.kept, self.kept], 1)
        return torch.cat([*map(normalize, self.norms, parts), value], 1)

    def tell(self, told: CLayer, decoder: Decoder) -> None:
        told.kept = Memory(self.heads, self.kept, self.width, self.scaling)
        if self.norms:
            told.query, told.key = map(decoder.tell_norm, self.norms)


def turn(joined: Tensor, rotation: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values out of [N, heads + 2 * kept, width], the first two turned by their angles."""
    kernels, (cosine, sine) = find_layer_kernels(torch.float32), rotation
    if kernels is not None:
        return turn_apart(kernels, joined, cosine, sine, heads)
    kept, width = (joined.shape[1] - heads) // 2, joined.shape[2]
    both, value = joined.split([heads + kept, kept], 1)
    turned = (both * cosine).addcmul_(both.roll(width // 2, 2), sine)
    return *turned.split([heads, kept], 1), value


class Convolution:
    def __init__(self, module: Any) -> None:
        self.layer, self.taps = module.layer_idx, module.conv
        self.joined, self.output = make_product(module.in_proj), make_product(module.out_proj)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan) -> Tensor:
        return self.output(convolve(self.taps, self.layer, self.joined(hidden), plan))

    def learn(
        self, hidden: Tensor, norm: Norm, rotation: tuple[Tensor, Tensor], plan: Plan, kernels: LayerKernels
    ) -> Tensor:
        mixed = convolve(self.taps, self.layer, norm.multiply(hidden, self.joined, kernels), plan)
        return multiply_learned(mixed, self.output, kernels)

    def tell(self, told: CLayer, decoder: Decoder) -> None:
        told.reach = self.taps.weight.shape[2]
        told.taps = decoder.keep(self.taps.weight[:, 0].t())
        told.taps_bias = decoder.keep(self.taps.bias)


def convolve(module: nn.Conv1d, layer: int, projected: Tensor, plan: Plan) -> Tensor:
    """LFM2's gated short convolution, with each token's predecessors supplied by the plan."""
    gate_in, gate_out, values = projected.chunk(3, dim=-1)
    inputs = gate_in * values
    taps = module.weight[:, 0].unbind(-1)  # the last tap multiplies the token itself
    mixed = inputs * taps[-1]
    for distance, earlier in enumerate(plan.look_back(layer, inputs, len(taps)), start=1):
        mixed = torch.addcmul(mixed, earlier, taps[-1 - distance])
    if module.bias is not None:
        mixed = mixed + module.bias
    return gate_out * mixed


class Layer:
    def __init__(self, module: nn.Module, names: Names) -> None:
        parts: dict[str, Any] = dict(module.named_children())
        kind = "self_attn" if "self_attn" in parts else "conv"
        refuse_others(module, names.before, names.after, names.feed, kind)
        self.before, self.after = Norm(parts[names.before]), Norm(parts[names.after])
        mixer = parts[kind]
        self.mixer = Attention(mixer, names) if kind == "self_attn" else Convolution(mixer)
        feed = parts[names.feed]
        refuse_others(feed, *names.halves, optional=("act_fn",))
        some = torch.linspace(-3, 3, 7)
        if not getattr(feed, "act_fn", nn.functional.silu)(some).equal(nn.functional.silu(some)):
            raise Unfit
        first, second, third = (getattr(feed, name) for name in names.halves)
        self.halves, self.feed = make_product(first, second), make_product(third)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan) -> Tensor:
        hidden = self.mixer(self.before(hidden), rotation, plan).add_(hidden)
        both = self.halves(self.after(hidden))
        return self.feed(open_gate(both)).add_(hidden)

    def learn(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan, kernels: LayerKernels
    ) -> Tensor:
        hidden = hidden + self.mixer.learn(hidden, self.before, rotation, plan, kernels)
        both = self.after.multiply(hidden, self.halves, kernels)
        (weight,) = self.feed.weights
        return hidden + cast(Tensor, GatedProduct.apply(both, weight, self.feed.find_bias(), kernels))

    def products(self) -> list[Joined]:
        return [self.mixer.joined, self.mixer.output, self.halves, self.feed]


def open_gate(both: Tensor) -> Tensor:
    """Both halves of a feed-forward layer [N, 2 * width] → silu of the first times the second [N, width]"""
    kernels = find_layer_kernels(torch.float32)
    if kernels is not None:
        return gate(kernels, both.contiguous())
    first, second = both.chunk(2, 1)
    return nn.functional.silu(first).mul_(second)


class Fused:
    """Hidden states and logits of packed tokens, as the model would compute them. What is made of the weights
    is made once; `forget` after they have changed."""

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.base_model
        names = next((kind for kind in KINDS if hasattr(body, kind.last)), None)
        if names is None or not all(map(is_at_hand, model.parameters())):
            raise Unfit
        self.embed, self.angles = body.embed_tokens, body.rotary_emb
        self.layers = [Layer(module, names) for module in body.layers]
        self.last = Norm(getattr(body, names.last))
        self.head = make_product(cast(nn.Module, model.get_output_embeddings()))
        self.decoder: Decoder | None = None
        self.is_decoded: bool | None = None  # whether layers may go all at once, once that was tried

    def hidden(self, tokens: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        hidden = self.embed(tokens)
        rotation = self.find_rotation(hidden, positions)
        if plan.few is None or not self.is_decoded or len(plan.few.rows) > plan.few.kernels.most:
            return self.last(self.advance(hidden, rotation, plan))
        self.find_decoder(plan.few.kernels).advance(plan.few, hidden, rotation)
        return self.last(hidden)

    def advance(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan) -> Tensor:
        """Through layer after layer."""
        for layer in self.layers:
            hidden = layer(hidden, rotation, plan)
        return hidden

    def try_decoder(self, tokens: Tensor, positions: Tensor, plan: Plan, few: Few) -> None:
        """Find out whether layers all at once compute what they do one by one."""
        if not fits(self.layers, few.kernels):
            self.is_decoded = False
            return
        hidden = self.embed(tokens)
        rotation = self.find_rotation(hidden, positions)
        expected = self.advance(hidden, rotation, plan)
        self.find_decoder(few.kernels).advance(few, hidden, rotation)
        if bool(expected.isfinite().all()):  # nothing is known of weights that have diverged
            self.is_decoded = is_near(hidden, expected, 1e-2 if self.head.is_half else 1e-4)

    def find_decoder(self, kernels: Kernels) -> Decoder:
        if self.decoder is None:
            self.decoder = Decoder(self.layers, kernels)
        return self.decoder

    def learn(self, tokens: Tensor, positions: Tensor, plan: Plan, kernels: LayerKernels) -> Tensor:
        """The same with a gradient, from the weights as they are at the moment."""
        hidden = self.embed(tokens)
        rotation = self.find_rotation(hidden, positions)
        for layer in self.layers:
            hidden = layer.learn(hidden, rotation, plan, kernels)
        return self.last.learn(hidden, kernels)

    def find_rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token [N, 1, width], the sines of the first half negated."""
        cosine, sine = self.angles(hidden[None], position_ids=positions[None])
        first, second = sine[0].chunk(2, 1)
        return cosine[0][:, None].contiguous(), torch.cat([-first, second], 1)[:, None]

    def products(self) -> list[Joined]:
        return [self.head, *(product for layer in self.layers for product in layer.products())]

    def round(self) -> None:
        """Compute products in bfloat16 from now on."""
        for product in self.products():
            product.is_half = True
        self.is_decoded = None
        self.forget()

    def forget(self) -> None:
        """Let go of what was made of weights that have changed."""
        self.decoder = None
        for product in self.products():
            product.forget()


def is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Token by token: single numbers near zero carry the rounding of those that are large."""
    apart = (found - expected).norm(dim=1) / expected.norm(dim=1)
    return bool((apart < tolerance).all())


def is_at_hand(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at what passes through a module, or changes it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or bool(module._backward_pre_hooks)


def is_changed(module: nn.Module) -> bool:
    """Whether a module computes something else than its class does."""
    return is_hooked(module) or "forward" in vars(module)


def fuse(model: PreTrainedModel, agrees: Callable[[Fused], bool]) -> Fused | None:
    """The model in few operations, or None for one that is large, elsewhere, built or computed otherwise."""
    if sum(weight.numel() * weight.element_size() for weight in model.parameters()) > LARGEST:
        return None
    try:
        fused = Fused(model)
        return fused if agrees(fused) else None
    except (Unfit, AttributeError, RuntimeError, ValueError):  # parts are missing, or of other shapes
        return None
