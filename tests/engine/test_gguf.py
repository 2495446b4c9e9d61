# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""GGUF files become model folders: same values, tied again, converted once, refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.torch import load_file

from trialogue.engine.gguf import convert_gguf
from trialogue.engine.models import find_model_folder
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import ConfigError, TrialogueError

gguf = pytest.importorskip("gguf")

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96


def write_gguf(file: Path, architecture: str = "qwen2", tied: bool = True) -> dict[str, Any]:
    """A small model of random weights. Its head is in the file too, in eight bits, as llama.cpp writes it."""
    draw = numpy.random.default_rng(7)
    writer = gguf.GGUFWriter(file, architecture)
    letters = [chr(number) for number in range(33, 127)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "Ċ", *letters, "he"]
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * (len(tokens) - 3))])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(0)
    written: dict[str, Any] = {}

    def add(name: str, *shape: int) -> None:
        written[name] = draw.normal(0, 0.05, shape).astype(numpy.float32)
        writer.add_tensor(name, written[name])

    add("token_embd.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for name in ("attn_norm.weight", "ffn_norm.weight", "attn_q.bias"):
            add(block + name, WIDTH)
        for name in ("attn_k.bias", "attn_v.bias"):
            add(block + name, WIDTH * KV_HEADS // HEADS)
        for name in ("attn_q.weight", "attn_output.weight"):
            add(block + name, WIDTH, WIDTH)
        for name in ("attn_k.weight", "attn_v.weight"):
            add(block + name, WIDTH * KV_HEADS // HEADS, WIDTH)
        for name in ("ffn_gate.weight", "ffn_up.weight"):
            add(block + name, INNER, WIDTH)
        add(block + "ffn_down.weight", WIDTH, INNER)
    head = written["token_embd.weight"] if tied else draw.normal(0, 0.05, (len(tokens), WIDTH)).astype("f4")
    eight = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(head, eight)
    writer.add_tensor("output.weight", packed, raw_dtype=eight)
    written["output.weight"] = gguf.quants.dequantize(packed, eight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trialogue" / "gguf"


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "small.gguf")
    folder = find_model_folder(str(tmp_path / "small.gguf"))
    saved = load_file(Path(folder) / "model.safetensors")
    same = saved["model.layers.1.mlp.down_proj.weight"].numpy() == written["blk.1.ffn_down.weight"]
    assert same.all()
    assert (saved["model.layers.0.self_attn.k_proj.bias"].numpy() == written["blk.0.attn_k.bias"]).all()
    engine = TorchEngine(folder)
    assert engine.adapted.vocabulary == written["token_embd.weight"].shape[0]


def test_head_and_embedding_are_one_matrix_again(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "small.gguf")
    folder = convert_gguf(tmp_path / "small.gguf")
    saved = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is True
    assert "lm_head.weight" not in saved
    assert (saved["model.embed_tokens.weight"].numpy() == written["output.weight"]).all()


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "small.gguf", tied=False)
    folder = convert_gguf(tmp_path / "small.gguf")
    saved = load_file(folder / "model.safetensors")
    assert (saved["lm_head.weight"].numpy() == written["output.weight"]).all()
    assert (saved["model.embed_tokens.weight"].numpy() == written["token_embd.weight"]).all()


def test_converted_once_and_again_when_the_file_changes(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "small.gguf"
    write_gguf(file)
    folder = convert_gguf(file)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    os.utime(file, (1, 1))
    assert convert_gguf(file) != folder
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("injury", ["cut", "text", "architecture", "absent"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, cache: Path, injury: str) -> None:
    file = tmp_path / "bad.gguf"
    if injury == "text":
        file.write_text("no weights at all", encoding="utf-8")
    elif injury != "absent":
        write_gguf(file, "clip" if injury == "architecture" else "qwen2")
        if injury == "cut":
            file.write_bytes(file.read_bytes()[:20_000])
    with pytest.raises(TrialogueError) as caught:
        find_model_folder(str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "small.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        convert_gguf(tmp_path / "small.gguf")
