"""The sampler's shorter way through a model, against the model itself."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from trialogue.engine import fused, linear
from trialogue.engine.attention import Recorder, Wiring

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


@pytest.fixture(params=["compiled", "oneDNN", "plain"])
def product(request, monkeypatch) -> str:
    """How products are computed: all three ways, whatever the size of the matrix."""
    monkeypatch.setattr(linear, "SMALL", linear.SMALL if request.param == "plain" else 0)
    if request.param == "compiled":
        assert linear.load_kernel() is not None, "this machine has a compiler"
    else:
        monkeypatch.setattr(linear, "load_kernel", lambda: None)
    return request.param


@pytest.mark.parametrize("rows", [1, 7, linear.FEW_ROWS, linear.FEW_ROWS + 8])
def test_hidden_states_and_logits_are_those_of_the_model(kind, rows, product, make_model):
    wiring = Wiring(make_model(kind))
    assert wiring.fused is not None
    tokens, positions = torch.arange(rows) * 7 % 300, torch.arange(rows)
    with torch.no_grad(), wiring.using(Recorder()):
        expected = wiring.hidden(tokens, positions)
        logits = wiring.logits(expected)
    with torch.inference_mode(), wiring.using(Recorder()):
        found = wiring.hidden(tokens, positions)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert not found.equal(expected) or rows == 1  # computed another way, so rounded another way
        assert torch.allclose(wiring.logits(expected), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [48, 45], ids=["whole panels", "a part of one"])
def test_biases_are_added(outputs, product):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(64, 32), torch.nn.Linear(64, outputs, bias=False)
    inputs = torch.randn(5, 64)
    with torch.inference_mode():
        found = linear.Joined(first, second)(inputs)
        assert torch.allclose(found, torch.cat([first(inputs), second(inputs)], 1), atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", range(1, linear.FEW_ROWS + 1))
def test_the_compiled_product_is_the_product(rows, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    kernel = linear.load_kernel()
    assert kernel is not None
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 37, generator=generator)
    weight = torch.randn(5 * linear.LANES, 37, generator=generator)
    panels = weight.view(5, linear.LANES, 37).transpose(1, 2).contiguous()
    found = linear.multiply(kernel, inputs, panels)
    assert torch.allclose(found, inputs @ weight.T, atol=1e-5)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_is_no_compiled_product(compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert linear.load_kernel.__wrapped__() is None


def test_changed_weights_count_from_when_they_are_published(make_model, monkeypatch):
    monkeypatch.setattr(linear, "SMALL", 0)
    wiring = Wiring(make_model("llama"))
    assert wiring.fused is not None
    tokens = torch.arange(4)

    def compute() -> torch.Tensor:
        with torch.inference_mode(), wiring.using(Recorder()):
            return wiring.hidden(tokens, tokens)

    before = compute()
    with torch.no_grad():
        wiring.model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert compute().equal(before)
    wiring.fused.forget()
    assert not compute().equal(before)


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


@pytest.mark.parametrize("make", [make_gelu, make_granite, make_half, make_adapted])
def test_what_computes_otherwise_goes_the_long_way(make):
    assert Wiring(make().eval()).fused is None


def test_large_models_are_not_kept_twice(make_model, monkeypatch):
    monkeypatch.setattr(fused, "LARGEST", 1000)
    assert Wiring(make_model("llama")).fused is None
