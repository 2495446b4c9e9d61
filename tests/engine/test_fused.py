"""The sampler's shorter way through a model, against the model itself."""

from __future__ import annotations

import copy
import ctypes
import platform
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trialogue.engine import Row, SamplingParams
from trialogue.engine.attention import ModelAdapter
from trialogue.engine.cache import Piece, Prefix, Slab, StepPlan
from trialogue.engine.cpu import fused, kernels, linear
from trialogue.engine.cpu.decoder import Decoder
from trialogue.engine.plan import Layout, ShapeRecorder
from trialogue.engine.torch_engine import keep_freed_memory

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def load_kernels(*, is_half: bool = False) -> kernels.Kernels:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    found = kernels.load_kernels(is_half=is_half)
    assert found is not None
    return found


@pytest.fixture(params=["compiled", "oneDNN", "plain"])
def product(request, monkeypatch) -> str:
    """How products are computed: all three ways, whatever the size of the matrix."""
    monkeypatch.setattr(linear, "SMALL", linear.SMALL if request.param == "plain" else 0)
    if request.param == "compiled":
        load_kernels()
    else:
        monkeypatch.setattr(linear, "load_kernels", lambda **_: None)
    return request.param


@pytest.mark.parametrize("rows", [1, 7, kernels.FEW_ROWS, kernels.FEW_ROWS + 8])
def test_hidden_states_and_logits_are_those_of_the_model(kind, rows, product, make_model, monkeypatch):
    used: list[int] = []
    compute = fused.FusedModel.hidden
    monkeypatch.setattr(
        fused.FusedModel,
        "hidden",
        lambda self, tokens, *more: used.append(len(tokens)) or compute(self, tokens, *more),
    )
    adapted = ModelAdapter(make_model(kind))
    assert adapted.fast.fused is not None
    tokens, positions = torch.arange(rows) * 7 % 300, torch.arange(rows)
    with torch.no_grad():
        output = make_model(kind)(tokens[None], output_hidden_states=True)  # transformers alone
    expected, logits = output.hidden_states[-1][0], output.logits[0]
    with torch.no_grad(), adapted.using(ShapeRecorder()):
        assert torch.allclose(adapted.hidden(tokens, positions), expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode(), adapted.using(ShapeRecorder()):
        found = adapted.hidden(tokens, positions)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert used[-1] == rows
        assert torch.allclose(adapted.logits(expected), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [48, 45], ids=["whole panels", "a part of one"])
def test_biases_are_added(outputs, product):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(64, 32), torch.nn.Linear(64, outputs, bias=False)
    inputs = torch.randn(5, 64)
    with torch.inference_mode():
        found = linear.FusedLinear(first, second)(inputs)
        assert torch.allclose(found, torch.cat([first(inputs), second(inputs)], 1), atol=1e-6)


@pytest.mark.parametrize("is_quicker", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_linear_layer_of_an_update_is_linear(bias, trained, is_quicker, monkeypatch):
    if is_quicker and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(linear, "is_onednn_quicker", lambda: is_quicker)
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 40, bias=bias).requires_grad_(trained)
    exact = copy.deepcopy(layer).double()
    inputs, grad_output = torch.randn(2, 7, 24, requires_grad=True), torch.randn(2, 7, 40)
    other = inputs.detach().double().requires_grad_()
    found, expected = linear.compute_linear(layer, inputs), exact(other)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(linear.compute_linear(layer, inputs), found)
    found.backward(grad_output)
    expected.backward(grad_output.double())
    pairs = [(inputs, other), *zip(layer.parameters(), exact.parameters(), strict=True)]
    for one, same in pairs if trained else pairs[:1]:
        assert torch.allclose(one.grad.double(), same.grad, atol=1e-5)
    assert trained or all(parameter.grad is None for parameter in layer.parameters())


def test_an_update_takes_the_quicker_products(make_model, make_rows, open_engine, loss, monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    gradients = {}
    for is_quicker in (False, True):
        monkeypatch.setattr(linear, "is_onednn_quicker", lambda value=is_quicker: value)
        used: list[int] = []

        def multiply(inputs, weight, bias, used=used, plain=linear.multiply_by_onednn):
            used.append(1)
            return plain(inputs, weight, bias)

        with monkeypatch.context() as patch:
            patch.setattr(linear, "multiply_by_onednn", multiply)
            engine = open_engine(make_model("llama"))
            engine.update.forward_backward(make_rows(1, 6), loss, 1.0)
        gradients[is_quicker] = {name: value.grad for name, value in engine.model.named_parameters()}
        assert bool(used) == is_quicker
    for name, grad in gradients[True].items():
        assert torch.allclose(grad, gradients[False][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", range(1, kernels.FEW_ROWS + 1))
def test_the_compiled_product_is_the_product(rows, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = load_kernels()
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 37, generator=generator)
    weight = torch.randn(5 * compiled.lanes, 37, generator=generator)
    found = kernels.multiply(compiled, inputs, kernels.to_panels(compiled, weight))
    assert torch.allclose(found, inputs @ weight.T, atol=1e-5)


precisions = pytest.mark.parametrize(
    "is_half",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not torch.cpu._is_avx512_bf16_supported(), reason="this processor does not multiply bfloat16"
            ),
        ),
    ],
    ids=["float32", "bfloat16"],
)


def hold(layout: Layout, keys: torch.Tensor, values: torch.Tensor) -> kernels.SampleCache:
    return kernels.SampleCache.pack(layout, keys, values)


@pytest.mark.parametrize("outputs", [32, 45])
@precisions
def test_panels_are_the_matrix_laid_out(is_half, outputs):
    compiled = load_kernels(is_half=is_half)
    weight = torch.randn(outputs, 134, generator=torch.Generator().manual_seed(0))
    panels = kernels.to_panels(compiled, weight)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % compiled.lanes))
    assert panels.equal(compiled.layout.pack_keys(padded))
    assert compiled.layout.unpack_keys(panels)[:outputs].equal(weight.to(panels.dtype))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("width", "room", "known"), [(2, 3, [0]), (2, 3, [45, 0, 3]), (10, 5, [16, 45]), (16, 20, [300])]
)
@pytest.mark.parametrize(("rows", "heads", "kept"), [(1, 2, 2), (3, 9, 3), (40, 4, 1), (5, 36, 1)])
@precisions
def test_the_compiled_attention_is_attention(
    rows, heads, kept, width, room, known, threads, is_half, monkeypatch
):
    """New tokens in any slots, some of them several, that look at one of several prefixes or at none."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = load_kernels(is_half=is_half)
    layout = compiled.layout
    width, capacity = width * compiled.lanes, room * compiled.lanes
    chance = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, width, generator=chance).to(layout.dtype).float()

    # Scores of all sizes, so that some weights are nearly one and others as good as nothing.
    queries = (draw(rows, heads) * torch.logspace(-2, 0.5, heads)[:, None]).to(layout.dtype).float()
    held = [draw(rows + 2, kept, capacity) for _ in range(2)]
    prefixes = [[draw(kept, length) for _ in range(2)] for length in known]
    slots: list[int] = []
    for slot in torch.randperm(rows + 2, generator=chance).tolist():
        slots += [slot] * int(torch.randint(1, 4, (1,), generator=chance))
    slots = slots[:rows]
    places = torch.randint(0, capacity, (rows,), generator=chance).tolist()
    groups = [slot % len(known) for slot in slots]
    given = kernels.Rows(slots, places, groups, known, rows + 2, capacity)
    batch = kernels.DecodeBatch(
        compiled,
        given,
        hold(layout, *held),
        [hold(layout, *pair) if len(pair[0][0]) else None for pair in prefixes],
    )
    scaling = 1.0 if width == 2 * compiled.lanes else 0.5  # nothing is rounded by it
    found = batch.attend(0, queries, scaling)
    for row, (slot, place, group) in enumerate(zip(slots, places, groups, strict=True)):
        keys, values = (
            torch.cat([prefix, own[slot, :, : place + 1]], 1)[None].double()
            for prefix, own in zip(prefixes[group], held, strict=True)
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries[row][None, :, None].double(), keys, values, scale=scaling, enable_gqa=True
        )
        assert torch.allclose(found[row].double(), expected[0, :, 0], atol=2e-2 if is_half else 5e-5)


def make_biased() -> Qwen2ForCausalLM:
    """Layers with biases, of which some begin as nothing."""
    torch.manual_seed(0)
    model = make_qwen2()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("model", ["llama", "qwen3", "lfm2", "biased"])
@pytest.mark.parametrize("count", [17, 250])  # and as many rows as there may be
@precisions
def test_all_layers_at_once_are_the_layers_one_by_one(
    model, count, threads, is_half, make_model, monkeypatch
):
    """Of a step in which conversations with two prefixes or none have one new token or several."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = load_kernels(is_half=is_half)
    adapted = ModelAdapter(make_biased() if model == "biased" else make_model(model))
    assert adapted.fast.fused is not None
    if is_half:
        adapted.round()
    torch.manual_seed(1)
    prefixes = [make_prefix(adapted, compiled, length) for length in (5, 40)]
    pieces = [
        Piece(3, 0, 4, None),
        Piece(0, 2, 1, prefixes[0]),
        Piece(1, 20, 1, prefixes[1]),
        Piece(4, 0, count, prefixes[0]),
    ]
    slabs = [Slab(adapted.shapes, 5, 256, torch.device("cpu"), compiled) for _ in range(2)]
    for store in ("keys", "values", "inputs"):
        for layer, tensor in getattr(slabs[0], store).items():
            tensor.normal_()
            getattr(slabs[1], store)[layer].copy_(tensor)
    count = sum(piece.count for piece in pieces)
    tokens, positions = torch.arange(count) * 7 % 300, torch.arange(count) * 3
    found: list[torch.Tensor] = []
    for slab, is_decoded in zip(slabs, (True, False), strict=True):
        adapted.fast.fused.is_decoded = is_decoded
        plan = StepPlan(slab, pieces)
        with torch.inference_mode(), adapted.using(plan):
            found.append(adapted.hidden(tokens, positions))
    assert adapted.fast.fused.decoder is not None
    assert fused.is_near(*found, 1e-2 if is_half else 1e-5)
    for store in ("keys", "values", "inputs"):
        for layer, tensor in getattr(slabs[0], store).items():
            other = getattr(slabs[1], store)[layer].float()
            assert (tensor.float() - other).norm() <= (1e-2 if is_half else 1e-5) * other.norm()


def make_prefix(adapted: ModelAdapter, compiled: kernels.Kernels, length: int) -> Prefix:
    slab = Slab(adapted.shapes, 1, length, torch.device("cpu"), compiled)
    for tensor in (*slab.keys.values(), *slab.values.values(), *slab.inputs.values()):
        tensor.normal_()
    return slab.to_prefix(0, list(range(length)))


async def test_a_decoder_that_computes_something_else_is_not_used(make_model, open_engine, monkeypatch):
    load_kernels()
    params, prompts = SamplingParams(max_tokens=8, seed=1), [[1, 2, 3], [4, 5]]
    plain = open_engine(make_model("llama"))
    plain.adapted.fast.fused.is_decoded = False  # nor is it tried
    expected = await plain.sample(prompts, params)
    advance = Decoder.advance

    def spoiled(self, batch, hidden, rotation) -> None:
        advance(self, batch, hidden, rotation)
        for tensor in (hidden, *batch.slots.keys.values()):
            tensor.mul_(1.01)

    monkeypatch.setattr(Decoder, "advance", spoiled)
    engine = open_engine(make_model("llama"))
    assert await engine.sample(prompts, params) == expected
    assert engine.adapted.fast.fused.is_decoded is False


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_are_no_kernels(compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert kernels.load_kernels.__wrapped__(is_half=False) is None


def test_kernels_that_compute_something_else_are_refused():
    compiled = load_kernels()
    assert kernels.are_decode_kernels_right(compiled)

    def spoil(name: str, output: int):
        def kernel(*arguments: int) -> int:
            getattr(compiled, name)(*arguments)
            ctypes.memset(arguments[output], 0, 4)  # the first number
            return 0

        return replace(compiled, **{name: kernel})

    assert not kernels.are_decode_kernels_right(spoil("lay_out", 1))
    assert not kernels.are_decode_kernels_right(spoil("product", 2))
    assert not kernels.are_decode_kernels_right(spoil("attend", 3))


def test_kernels_are_not_given_what_they_would_misread():
    compiled = load_kernels()
    lanes, layout = compiled.lanes, compiled.layout
    panels = kernels.to_panels(compiled, torch.zeros(2 * lanes, 8))
    for inputs in (torch.zeros(2, 8).half(), torch.zeros(2, 9), torch.zeros(8, 2).T):
        with pytest.raises(ValueError, match="a kernel cannot take"):
            kernels.multiply(compiled, inputs, panels)
    for weight in (torch.zeros(4, 8).half(), torch.zeros(8, 4).T):
        with pytest.raises(ValueError, match="a kernel cannot take"):
            kernels.to_panels(compiled, weight)
    queries, kept = torch.zeros(2, 4, lanes), torch.zeros(3, 2, lanes, lanes)
    rows = kernels.Rows([0, 2], [5, 1], [0, 0], [3], 3, lanes)
    held, prefix = hold(layout, kept, kept), hold(layout, torch.zeros(2, 3, lanes), torch.zeros(2, 3, lanes))
    half = torch.zeros(3, 2, lanes, lanes // 2)
    kernels.DecodeBatch(compiled, rows, held, [prefix]).attend(0, queries, 1.0)
    for others, given in (
        ((rows, held, [prefix]), queries.half()),
        ((rows, held, [prefix]), queries.transpose(0, 1)),
        ((rows, held, [prefix]), queries[:1]),
        ((rows, held, [prefix]), torch.zeros(2, 4, 2 * lanes)),
        ((rows, held, [prefix]), torch.zeros(2, 5, lanes)),
        ((rows, hold(layout, half, half), [prefix]), torch.zeros(2, 4, lanes // 2)),
        ((rows, hold(layout, kept[:2], kept[:2]), [prefix]), queries),
        ((rows, hold(layout, kept, torch.zeros(3, 2, 2 * lanes, lanes)), [prefix]), queries),
        ((rows, kernels.SampleCache({0: kept}, {0: kept}, {}), [prefix]), queries),
        ((rows, held, [None]), queries),
        ((rows, held, []), queries),
        ((rows, held, [held]), queries),
        ((kernels.Rows([0, 2], [5, 1], [0, 0], [3], 3, lanes - 1), held, [prefix]), queries),
    ):
        with pytest.raises(ValueError, match="a kernel cannot take"):
            kernels.DecodeBatch(compiled, *others).attend(0, given, 1.0)


@pytest.mark.parametrize(
    ("slots", "places", "groups"),
    [
        ([-1, 2], [4, 1], [0, 0]),
        ([0, 3], [4, 1], [0, 0]),
        ([0, 2], [5, 1], [0, 0]),
        ([0, 2], [-1, 1], [0, 0]),
        ([0, 2], [4, 1], [0, 1]),
        ([0, 2], [4], [0, 0]),
    ],
)
def test_rows_look_at_nothing_outside(slots, places, groups):
    kernels.Rows([0, 2], [4, 1], [0, 0], [0], 3, 5)
    with pytest.raises(ValueError, match="a kernel cannot take"):
        kernels.Rows(slots, places, groups, [0], 3, 5)


def test_changed_weights_count_from_when_they_are_published(make_model, monkeypatch):
    monkeypatch.setattr(linear, "SMALL", 0)
    adapted = ModelAdapter(make_model("llama"))
    assert adapted.fast.fused is not None
    tokens = torch.arange(4)

    def compute() -> torch.Tensor:
        with torch.inference_mode(), adapted.using(ShapeRecorder()):
            return adapted.hidden(tokens, tokens)

    before = compute()
    with torch.no_grad():
        adapted.model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert compute().equal(before)
    adapted.fast.fused.forget()
    assert not compute().equal(before)


def make_qwen2() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def make_mistral() -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(sliding_window=None, **SIZES))


@pytest.mark.parametrize("make", [make_qwen2, make_mistral])
def test_relatives_of_llama_go_the_shorter_way(make):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for weight in model.parameters():  # biases begin as nothing
            weight.add_(0.1 * torch.randn_like(weight))
    assert ModelAdapter(model).fast.fused is not None


def make_gelu() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(hidden_act="gelu", **SIZES))


def make_granite() -> GraniteForCausalLM:
    return GraniteForCausalLM(GraniteConfig(residual_multiplier=0.5, **SIZES))


def make_half() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)


def make_adapted() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))  # which begins as nothing
    return model


def make_scaled_by_position() -> Ministral3ForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 64
    config = Ministral3Config(**SIZES, head_dim=16, max_position_embeddings=1024, rope_parameters=rope)
    return Ministral3ForCausalLM(config)


def make_parallel() -> CohereForCausalLM:
    return CohereForCausalLM(CohereConfig(logit_scale=1.0, **SIZES))


def make_ungated() -> ArceeForCausalLM:
    return ArceeForCausalLM(ArceeConfig(hidden_act="silu", **SIZES))


def make_hooked() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


@pytest.mark.parametrize(
    "make",
    [
        make_gelu,
        make_granite,
        make_half,
        make_adapted,
        make_scaled_by_position,
        make_parallel,
        make_ungated,
        make_hooked,
    ],
)
def test_what_computes_otherwise_goes_the_long_way(make):
    assert ModelAdapter(make().eval()).fast.fused is None


def test_rounding_in_large_hidden_states_is_no_difference(make_model):
    """As in SmolLM2, where numbers near zero stand beside others that are a thousand times as large."""
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(1e4)
    assert ModelAdapter(model).fast.fused is not None


def test_large_models_are_not_kept_twice(make_model, monkeypatch):
    monkeypatch.setattr(fused, "LARGEST", 1000)
    assert ModelAdapter(make_model("llama")).fast.fused is None


async def test_scaled_matrices_count_at_once(make_model, open_engine):
    engine = open_engine("llama")
    prompt, params = list(range(5)), SamplingParams(max_tokens=4, seed=1)
    await engine.sample([prompt], params)
    await engine.scale_matrices(0.5)
    (found,) = await engine.sample([prompt], params)
    row = Row([*prompt, *found.tokens], [0] * 9, [0.0] * 9, [0.0] * 9)
    engine.adapted.fast.learns_fused = False  # what transformers computes
    (expected,) = await engine.forward([row])
    assert found.logprobs == pytest.approx(expected[5:], abs=1e-4)


def test_glibc_keeps_what_is_freed():
    if platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 36):
        pytest.skip("another C library, or one that refuses")
    assert keep_freed_memory()
