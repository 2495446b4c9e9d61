# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
"""A model's folder, checked before transformers is asked to load it.

The folder may come from anybody. Weights are read as safetensors and in no other format. Sizes in config.json
are compared with the headers of the weights before memory is taken. No weight may be missing or of another
shape: transformers would put random numbers in its place. Errors are one line that names the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trialogue.errors import EngineError, TrialogueError
from trialogue.reading import explain, reading

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SAFE: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
"""Weights are numbers: nothing that comes with a model is ever run."""
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OTHER_FORMATS = frozenset(
    (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".pkl", ".pickle", ".npz", ".onnx")
)
_AGAIN = "copy or download it again"
_COUNTED = ("layer", "label", "expert", "head", "block", "stage", "group")
"""In names of settings: what is made one by one, before anything can be compared with the weights."""
_MOST_COUNTED = 10_000
_IMPLEMENTATIONS = ("eager", "sdpa", "batched_mm", "grouped_mm")
"""Of attention and experts. transformers downloads and runs a kernel for any other name."""
_QUANTIZED = ("quantization_config", "compression_config")
"""Settings that make transformers import another package or run kernels from a hub."""
# fmt: off
_LORA_KEYS = frozenset((
    "peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules",
    "target_parameters", "fan_in_fan_out", "bias", "lora_bias", "use_rslora", "use_dora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "trainable_token_indices", "ensure_weight_tying",
))
# fmt: on
"""Settings of an adapter that only describe its weights. Others may name a module that peft imports."""


def load_weights(source: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder, or of a hub's name, after all checks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = find_local(source)
    if (folder / ADAPTER_CONFIG).exists():
        raise EngineError(
            f"{folder / ADAPTER_CONFIG}: transformers would load this adapter too; move it elsewhere"
        )
    check_code(folder / "config.json")
    tensors = read_headers(find_weight_files(folder))
    check_counts(folder / "config.json")
    with reading(f"{folder / 'config.json'} (if it is not as it was published, {_AGAIN})", EngineError):
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if layers > len(tensors):
            raise ValueError(f"{layers} layers, but the weights have {len(tensors)} tensors")
        with torch.device("meta"):  # takes no memory
            check_sizes(AutoModelForCausalLM.from_config(config, trust_remote_code=False), tensors, dtype)
    with reading(f"cannot load {folder}", EngineError):
        model, told = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True, **SAFE
            ),
        )
    lacking = sorted([*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])])
    if lacking:
        raise EngineError(
            f"{folder}: its weights lack {len(lacking)} tensors of the shape that config.json asks for, such "
            f"as {lacking[0]}; {_AGAIN}"
        )
    return model


def find_local(source: str | Path) -> Path:
    """The folder itself, or the one a hub's model is downloaded to: only what is read later."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    with reading(f"cannot load {source}", EngineError):
        wanted = ["*.safetensors", "*.json"]
        return Path(snapshot_download(str(source), allow_patterns=wanted, ignore_patterns=["*/*"]))


def read_object(file: Path, kind: type[TrialogueError] = EngineError) -> dict[str, Any]:
    """A JSON object of a model's folder."""
    with reading(file, kind):
        value: Any = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise kind(f"{file}: must hold a JSON object; {_AGAIN}")
    return cast("dict[str, Any]", value)


def find_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's model."""
    if "transformers_weights" in read_object(folder / "config.json"):
        raise EngineError(f"{folder / 'config.json'}: remove transformers_weights; weights are in {WEIGHTS}")
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        others = sorted(item.name for item in folder.iterdir() if item.suffix in OTHER_FORMATS)
        if others:
            raise EngineError(
                f"{folder / others[0]}: weights are read as safetensors only; if you trust the file, load it "
                "with transformers and save it with save_pretrained"
            )
        raise EngineError(f"{folder} has no {WEIGHTS}; give a folder that save_pretrained wrote")
    index = folder / INDEX
    named = read_object(index).get("weight_map")
    names = set(cast("dict[str, Any]", named).values()) if isinstance(named, dict) else set[Any]()
    if not names:
        raise EngineError(f"{index}: its weight_map names no file; {_AGAIN}")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise EngineError(
                f"{index}: it names {name!r}, but weights are read only from .safetensors files beside it"
            )
        if not (folder / name).is_file():
            raise EngineError(f"{folder / name} is missing, and {INDEX} names it; {_AGAIN}")
    return [folder / name for name in sorted(names)]


def read_headers(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor. Only headers are read; safetensors compares them with the file's length."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError, ValueError) as error:
            raise EngineError(f"{file} is no whole safetensors file ({explain(error)}); {_AGAIN}") from error
    return shapes


def count_weights(source: str | Path) -> int:
    """Weights of a model, by the headers of its files; of an adapter, those of its base."""
    folder = Path(source)
    if (folder / "adapter_config.json").is_file():
        return count_weights(find_base(folder))
    shapes = read_headers(find_weight_files(find_local(source)))
    return sum(math.prod(shape) for shape in shapes.values())


def check_code(file: Path) -> None:
    """Refuse settings that make transformers run code from a hub or of another package."""
    for name, value in _list_settings(read_object(file)):
        if name in _QUANTIZED and value:
            raise EngineError(f"{file}: {name} is set, and quantized weights are not read")
        if "_implementation" in name:
            chosen = cast("dict[str, Any]", value).values() if isinstance(value, dict) else [value]
            if not all(item in _IMPLEMENTATIONS for item in chosen if isinstance(item, str)):
                raise EngineError(
                    f"{file}: {name} is {value!r}, which may run code from a hub; remove it, or use one of "
                    + ", ".join(_IMPLEMENTATIONS)
                )


def check_counts(file: Path) -> None:
    """Refuse numbers of layers and the like that would take for ever to make even without memory."""
    for name, value in _list_settings(read_object(file)):
        if isinstance(value, int) and value > _MOST_COUNTED and any(part in name for part in _COUNTED):
            raise EngineError(f"{file}: {name} is {value}, and at most {_MOST_COUNTED} is allowed; {_AGAIN}")


def _list_settings(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    waiting = [settings]
    while waiting:
        for name, value in waiting.pop().items():
            yield name, value
            if isinstance(value, dict):
                waiting.append(cast("dict[str, Any]", value))


def check_sizes(model: Any, tensors: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Refuse a model that is larger than its weights, or than the machine's memory."""
    wanted = sum(parameter.numel() for parameter in model.parameters())
    held = sum(math.prod(shape) for shape in tensors.values())
    if wanted > held:
        raise ValueError(f"it describes a model of {wanted:,} weights, but the files hold {held:,}")
    needed = wanted * dtype.itemsize + sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(f"the model takes {needed / 1e9:,.1f} GB; this machine has {memory / 1e9:,.1f} GB")


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that would be unpickled, may name code, or is larger than its weights."""
    from peft import LoraConfig

    if not (folder / ADAPTER).is_file():
        raise EngineError(f"{folder} has no {ADAPTER}; weights are read in no other format")
    file = folder / ADAPTER_CONFIG
    settings = read_object(file)
    largest = max((max(shape, default=0) for shape in read_headers([folder / ADAPTER]).values()), default=0)
    patterns = settings.get("rank_pattern") or {}
    ranks = [settings.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if settings.get("peft_type") != "LORA":
        raise EngineError(f"{file}: peft_type is {settings.get('peft_type')!r}, and only LORA is read")
    usual = LoraConfig()
    for name, value in settings.items():
        if name not in _LORA_KEYS and value and value != getattr(usual, name, None):
            raise EngineError(
                f"{file}: remove {name}: adapters are read without it, as it may name code to run"
            )
    if not all(isinstance(rank, int) and 0 < rank <= largest for rank in ranks):
        raise EngineError(f"{file}: its ranks {ranks} are not those of {ADAPTER}; {_AGAIN}")


def find_base(folder: Path) -> str:
    """The model that an adapter is of."""
    file = folder / ADAPTER_CONFIG
    base = read_object(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise EngineError(f"{file}: base_model_name_or_path must name the model that the adapter is of")
    return base
