"""What the engine takes and what it refuses, and what importing its seam costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trialogue.engine import Engine, SamplingParams
from trialogue.engine.models import find_model_folder
from trialogue.errors import ConfigError, EngineError
from trialogue.talk.render.load import load_renderer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def mamba() -> MambaForCausalLM:
    config = MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4)
    return MambaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (mamba, "linear_attention"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8)), "sliding"),
        (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)), "sliding"),
        (lambda: GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=8, num_local_experts=4)), "sliding"),
        (
            lambda: GptOssForCausalLM(
                GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, layer_types=["full_attention"] * 2)
            ),
            "s_aux",
        ),
        (lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)), "differ"),
    ],
)
def test_architectures_it_cannot_honour_are_refused(make, reason, open_engine):
    torch.manual_seed(0)
    with pytest.raises(EngineError, match=f"(?s){reason}.*Supported are"):
        open_engine(make)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
        lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
            )
        ),
        lambda: GraniteForCausalLM(GraniteConfig(**SIZES)),
    ],
)
async def test_other_plain_transformers_are_taken(make, open_engine):
    engine = open_engine(make)
    assert isinstance(engine, Engine)
    (completion,) = await engine.sample([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert len(completion.tokens) == 3


def test_the_model_alone_can_no_longer_be_called(open_engine):
    engine = open_engine("lfm2")
    with pytest.raises(EngineError, match="belongs to a TorchEngine"):
        engine.model(torch.tensor([[1, 2]]))


def test_the_seam_imports_no_torch():
    code = "import sys, trialogue.engine, trialogue.engine.api; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["runs/cold", "here/gone", "./cold", "cold"])
def test_a_model_that_is_not_there_is_no_name_for_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no model at '{name}'"):
        find_model_folder(name)
    assert find_model_folder("some/model") == "some/model"


def test_a_folder_without_a_tokenizer_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the model") as caught:
        load_renderer(str(tmp_path))
    assert "\n" not in str(caught.value)
