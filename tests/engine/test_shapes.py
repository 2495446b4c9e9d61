"""Shapes of models: counted from a configuration, from weights, from the table; GPUs by name and by file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trialogue.engine.hardware import GPUS, REPORTED, find_gpu, find_peak
from trialogue.engine.shapes import QWEN3, find_shape, to_shape
from trialogue.errors import ConfigError

PUBLISHED = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
}
"""Billions of parameters, by the models' own cards."""


def test_the_table_agrees_with_what_is_published() -> None:
    assert set(QWEN3) == set(PUBLISHED)
    for name, billions in PUBLISHED.items():
        assert round(find_shape(f"Qwen/{name}").parameters / 1e9, 1) == billions


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        num_hidden_layers=3,
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=211,
        tie_word_embeddings=tied,
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = find_shape(str(tmp_path))
    assert shape.parameters == sum(value.numel() for value in model.parameters())
    assert shape.cache_numbers == 2 * 3 * 2 * 16
    assert shape.matrices == shape.parameters - (0 if tied else 211 * 96)


def test_other_families_are_counted_in_their_weights() -> None:
    shape = find_shape("tiny")
    assert shape.parameters == 1_333_888
    assert (shape.layers, shape.attention_layers) == (4, 2)
    with pytest.raises(ConfigError, match="give a folder that holds its weights"):
        to_shape(
            "x", {"model_type": "lfm2", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 9, **SIZES}
        )


SIZES = {"intermediate_size": 16, "num_attention_heads": 2}


def test_adapters_and_operations_by_hand() -> None:
    known = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 10, **SIZES}
    shape = to_shape("x", known)
    # Queries, keys, values and output are 8 by 8, the MLP has three matrices of 8 by 16.
    assert shape.count_lora(4) == 2 * 4 * (4 * 16 + 3 * 24)
    assert shape.parameters == 2 * (4 * 64 + 3 * 128 + 16) + 80 + 8
    assert shape.count_operations(100) == 2 * shape.parameters + 4 * 2 * 8 * 100


def test_what_is_not_known_is_an_error_that_says_what_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shape of 'Qwen/Qwen3-9B' is not known.*Qwen3-8B"):
        find_shape("Qwen/Qwen3-9B")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": -1}))
    with pytest.raises(ConfigError, match="no usable num_hidden_layers"):
        find_shape(str(tmp_path))


def test_a_gpu_is_a_name_or_a_file(tmp_path: Path) -> None:
    assert find_gpu("h100") is GPUS["h100"]
    with pytest.raises(ConfigError, match=r"no GPU 'h10' is known.*h100"):
        find_gpu("h10")
    file = tmp_path / "mine.toml"
    file.write_text("gigabytes = 96\ntflops = 148\nbandwidth = 4000\nlink = 450\n")
    assert (find_gpu(str(file)).name, find_gpu(str(file)).gigabytes) == ("mine", 96)
    file.write_text("gigabytes = 96\ntflop = 148\n")
    with pytest.raises(ConfigError, match=r"its keys are .*tflops"):
        find_gpu(str(file))
    with pytest.raises(ConfigError, match=r"no\.toml: No such file"):
        find_gpu(str(tmp_path / "no.toml"))


def test_the_peak_of_a_gpu_is_found_by_what_its_driver_calls_it() -> None:
    assert find_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert find_peak("NVIDIA H100 PCIe") == 0
    assert set(REPORTED.values()) == set(GPUS)


def test_this_machine_can_be_measured() -> None:
    here = find_gpu("here")
    assert here.gigabytes > 1
    assert here.tflops > 1e-4
    assert here.bandwidth > 0.1
