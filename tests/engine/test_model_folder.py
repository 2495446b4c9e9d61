"""Broken and hostile model folders, made of the tiny base: one line that names the file, no memory taken."""

from __future__ import annotations

import importlib
import json
import math
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trialogue.engine.api import EngineSettings
from trialogue.engine.model_folder import load_weights
from trialogue.engine.models import BASES
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import ConfigError, EngineError
from trialogue.talk.render.load import load_renderer

PICKLE = b"cos\nsystem\n(S'touch hacked'\ntR."
Spoil = Callable[[Path], object]


def put(name: str, content: str | bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def cut(size: int) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return spoil


def set_config(**more: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    return spoil


def set_header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Another header before the same numbers."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return spoil


def set_shape(shape: list[Any]) -> Spoil:
    return set_header(lambda header: header["model.embed_tokens.weight"].update(shape=shape))


def divide(named: object, **more: bytes) -> Spoil:
    """Two shards and an index; the second shard goes by the name given."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        first, second = names[::2], names[1::2]
        save_file({name: tensors[name] for name in first}, folder / "a.safetensors", {"format": "pt"})
        save_file({name: tensors[name] for name in second}, folder / "b.safetensors", {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(first, "a.safetensors")}
        if named is not None:
            index["weight_map"] |= dict.fromkeys(second, named)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, content in more.items():
            (folder / name.replace("_", ".")).write_bytes(content)

    return spoil


def only(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(PICKLE)

    return spoil


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["unused"] = tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


INDEX = "model.safetensors.index.json"
BROKEN: dict[str, tuple[Spoil, str]] = {
    "cut off": (cut(100_000), "model.safetensors is no whole safetensors file"),
    "cut in the header": (cut(50), "model.safetensors is no whole safetensors file"),
    "empty weights": (cut(0), "model.safetensors is no whole safetensors file"),
    "a shape of NaN": (set_shape([math.nan, 128]), "model.safetensors is no whole safetensors file"),
    "a negative shape": (set_shape([-1, 128]), "model.safetensors is no whole safetensors file"),
    "a huge shape": (set_shape([10**18, 10**18]), "model.safetensors is no whole safetensors file"),
    "a pickle by that name": (put("model.safetensors", PICKLE), "model.safetensors is no whole safetensors"),
    "absurd width": (set_config(hidden_size=10**9), "config.json"),
    "absurd vocabulary": (set_config(vocab_size=10**9), "config.json.*describes a model of"),
    "absurd feed forward": (set_config(intermediate_size=10**12), "config.json.*describes a model of"),
    "absurd layers": (set_config(num_hidden_layers=10**9), "config.json: num_hidden_layers is 1000000000"),
    "absurd labels": (set_config(num_labels=10**9), "config.json: num_labels is 1000000000"),
    "more layers": (
        set_config(num_hidden_layers=900, layer_types=["conv"] * 900),
        "config.json.*900 layers, but the weights have",
    ),
    "no heads": (set_config(num_attention_heads=0), "config.json"),
    "other heads": (set_config(num_key_value_heads=2), "its weights lack 4 tensors .*k_proj"),
    "a negative width": (set_config(hidden_size=-1), "config.json"),
    "a width of NaN": (set_config(hidden_size=math.nan), "config.json"),
    "a width of text": (set_config(hidden_size="wide"), "config.json"),
    "an unknown architecture": (set_config(model_type="nonesuch"), "config.json.*nonesuch"),
    "code of its own": (
        set_config(model_type="own", auto_map={"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.C"}),
        "config.json",
    ),
    "a kernel of a hub": (
        set_config(attn_implementation="org/kernel"),
        "attn_implementation is 'org/kernel'",
    ),
    "a kernel of a hub inside": (
        set_config(text_config={"_attn_implementation": {"": "org/kernel"}}),
        "_attn_implementation is",
    ),
    "experts of a hub": (set_config(experts_implementation="org/kernel"), "experts_implementation is"),
    "quantized": (set_config(quantization_config={"quant_method": "fp8"}), "quantization_config is set"),
    "an empty config": (put("config.json", ""), "config.json: not JSON"),
    "a config that is a list": (put("config.json", "[]"), "config.json: must hold a JSON object"),
    "a deep config": (
        put("config.json", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        "config.json: nested",
    ),
    "weights elsewhere": (set_config(transformers_weights="../x.safetensors"), "transformers_weights"),
    "an empty tokenizer": (put("tokenizer.json", ""), "tokenizer.json: not JSON"),
    "a tokenizer of nothing": (put("tokenizer.json", "{}"), "tokenizer.json"),
    "half a tokenizer": (put("tokenizer.json", '{"model": {"type": "BPE"'), "tokenizer.json: not JSON"),
    "a tokenizer of bytes": (put("tokenizer.json", b"\xff\xfe"), "tokenizer.json: not UTF-8"),
    "an odd tokenizer config": (put("tokenizer_config.json", "[1]"), "tokenizer_config.json: must hold"),
    "an empty renderer": (put("renderer.json", "{}"), "renderer.json: renderer must be a name"),
    "no renderer": (put("renderer.json", ""), "renderer.json: not JSON"),
    "an index to a .bin": (divide("x.bin", x_bin=PICKLE), f"{INDEX}: it names 'x.bin'"),
    "an index out of the folder": (divide("../x.safetensors"), f"{INDEX}: it names '../x.safetensors'"),
    "an index to a full path": (divide("/x.safetensors"), f"{INDEX}: it names '/x.safetensors'"),
    "an index to a number": (divide(7), f"{INDEX}: it names 7"),
    "a missing shard": (divide("gone.safetensors"), "gone.safetensors is missing"),
    "an index of half": (divide(None), "config.json.*describes a model of"),
    "a lost tensor": (drop_tensor, "its weights lack 1 tensors .*k_proj"),
    "pytorch_model.bin": (
        only("pytorch_model.bin"),
        "pytorch_model.bin: weights are read as safetensors only",
    ),
    "model.pt": (only("model.pt"), "model.pt: weights are read as safetensors only"),
    "model.gguf": (only("model.gguf"), "model.gguf: weights are read as safetensors only"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
}


def load(folder: Path) -> None:
    load_renderer(str(folder))
    TorchEngine.load(folder)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    spoil, told = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(BASES["tiny"], folder)
    spoil(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((EngineError, ConfigError), match=told) as caught:
        load(folder)
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 700
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes
    assert not Path("hacked").exists()


def test_sound_shards_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BASES["tiny"], folder)
    divide("b.safetensors")(folder)
    whole, divided = (load_weights(place, torch.float32).state_dict() for place in (BASES["tiny"], folder))
    assert whole.keys() == divided.keys()
    assert all(torch.equal(whole[name], divided[name]) for name in whole)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"r": 10**9}, "ranks"),
        ({"rank_pattern": {"k_proj": 10**9}}, "ranks"),
        ({"peft_type": "PREFIX_TUNING"}, "only LORA is read"),
        ({"layer_replication": [[0, 900]]}, "remove layer_replication"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path must name"),
        ({"base_model_name_or_path": "nowhere/at/all"}, "cannot load nowhere/at/all"),
    ],
)
def test_a_broken_adapter_is_told_in_one_line(
    tmp_path: Path, settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trialogue.engine.api import LoraSettings
    from trialogue.engine.torch_engine import add_adapter, load_model

    folder = tmp_path / "adapter"
    adapter = add_adapter(load_weights(BASES["tiny"], torch.float32), LoraSettings(r=4, alpha=8))
    adapter.save_pretrained(folder)
    file = folder / "adapter_config.json"
    config = {**json.loads(file.read_text()), "base_model_name_or_path": str(BASES["tiny"])}
    file.write_text(json.dumps(config))
    load_model(folder, EngineSettings())
    file.write_text(json.dumps({**config, **settings}))
    with pytest.raises(EngineError, match=told) as caught:
        load_model(folder, EngineSettings())
    assert "\n" not in str(caught.value)


def test_an_adapter_that_names_a_module_is_refused_before_peft_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of peft import the module that megatron_core names."""
    from peft import PeftModel

    from trialogue.engine.api import LoraSettings
    from trialogue.engine.torch_engine import add_adapter, load_model

    folder = tmp_path / "adapter"
    add_adapter(load_weights(BASES["tiny"], torch.float32), LoraSettings(r=4, alpha=8)).save_pretrained(
        folder
    )
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    named = {
        "base_model_name_or_path": str(BASES["tiny"]),
        "megatron_config": {"x": 1},
        "megatron_core": "stranger",
    }
    file.write_text(json.dumps({**config, **named}))
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def read(*_: object, **__: object) -> None:
        importlib.import_module(json.loads(file.read_text())["megatron_core"])

    monkeypatch.setattr(PeftModel, "from_pretrained", read)
    with pytest.raises(EngineError, match="remove megatron_config"):
        load_model(folder, EngineSettings())
    assert not (tmp_path / "ran").exists()


def test_usual_settings_of_attention_are_read(tmp_path: Path) -> None:
    """Versions of transformers have written these."""
    folder = tmp_path / "model"
    shutil.copytree(BASES["tiny"], folder)
    set_config(_attn_implementation_autoset=True, attn_implementation="sdpa", quantization_config=None)(
        folder
    )
    assert load_weights(folder, torch.float32).config._attn_implementation == "sdpa"


def test_a_base_is_not_loaded_through_an_adapter_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(BASES["tiny"], folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x/y"}')
    with pytest.raises(EngineError, match="would load this adapter"):
        load_weights(folder, torch.float32)
