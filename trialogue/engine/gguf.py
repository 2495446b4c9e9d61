# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false
"""GGUF files, the format of llama.cpp: converted once to a folder of safetensors in the user's cache.

The weights of the folder are float32 and have exactly the values that the file's numbers stand for. Only
architectures that transformers knows can be converted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trialogue.activity import notify, phase
from trialogue.durable import find_cache_folder, saving
from trialogue.engine.model_folder import ADAPTER_CONFIG
from trialogue.errors import ConfigError, EngineError, RunError
from trialogue.foreign import show_line
from trialogue.reading import reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAME = 0.2
"""Two matrices that differ by less than this share of their norm are one, rounded in two ways."""


def convert_gguf(file: Path) -> Path:
    """The folder that holds the model of a GGUF file. It is made when it is first asked for, and again when
    the file has changed."""
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{file.name} is read with the package gguf: pip install gguf")
    kept = find_cache_folder()
    if kept is None:
        raise RunError(f"{file} is converted into the user's cache, and there is no home: set XDG_CACHE_HOME")
    state = file.stat()
    mark = hashlib.sha256(f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = kept / "gguf" / f"{file.stem}-{mark}"
    if not (folder / "config.json").is_file():
        with phase(f"converting {show_line(file.name)}"):
            _convert(file, folder)
        size = sum(item.stat().st_size for item in folder.iterdir())
        notify(f"converted {show_line(str(file))} once; the result is kept: {folder}, {size / 1e9:.1f} GB")
    return folder


def _convert(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (beside := file.parent / ADAPTER_CONFIG).exists():
        raise EngineError(f"{beside}: transformers would load this adapter too; move it elsewhere")
    with reading(f"cannot read {file} as GGUF", EngineError):
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True)
        )
        tie_again(model)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with saving(folder):
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def tie_again(model: PreTrainedModel) -> None:
    """Give head and embedding one matrix again where the file holds that matrix twice, rounded differently.
    The head's values are kept: they are rounded less."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    apart = (head.weight.detach() - embedding.weight.detach()).norm() / head.weight.detach().norm()
    if apart < SAME:
        model.config.tie_word_embeddings = True
        embedding.weight = head.weight
