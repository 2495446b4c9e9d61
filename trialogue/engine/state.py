# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""An engine on disk: a folder any transformers program can load, with the optimizer beside the weights.

    config.json, model.safetensors     save_pretrained (or adapter_config.json, adapter_model.safetensors)
    optimizer.safetensors              AdamW's moments by parameter name
    random.safetensors                 torch's generators
    engine.json                        weight version and counters

Written to a neighbouring folder first and renamed, so a folder of that name is always complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from trialogue.durable import put_in_place
from trialogue.engine.model_folder import check_adapter, load_weights
from trialogue.engine.update import Update
from trialogue.errors import EngineError

FORMAT = 1


def save_engine(
    path: Path, model: PreTrainedModel, adapter: Any, update: Update, counters: dict[str, int]
) -> None:
    """Save everything needed to continue. `adapter` is the peft model around `model`, or None; `counters` are
    written to engine.json unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        if adapter is None:
            model.save_pretrained(folder)
        else:
            adapter.save_pretrained(folder, save_embedding_layers=False)
        save_file(_optimizer_tensors(update), folder / "optimizer.safetensors")
        save_file(_random_tensors(), folder / "random.safetensors")
        record = {"format": FORMAT, "adapter": adapter is not None, **counters}
        (folder / "engine.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        folder.chmod(0o755)
        put_in_place(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_engine(path: Path, model: PreTrainedModel, adapter: Any, update: Update) -> dict[str, int]:
    """Put weights, optimizer and generators back as they were saved; returns the counters."""
    record_path = path / "engine.json"
    if not record_path.is_file():
        raise EngineError(
            f"{path} holds no engine state (no engine.json); give a folder that save_state wrote"
        )
    record: dict[str, int] = json.loads(record_path.read_text(encoding="utf-8"))
    if record.pop("format") != FORMAT:
        raise EngineError(f"{record_path} has another format than {FORMAT}, the one this version reads")
    if bool(record.pop("adapter")) != (adapter is not None):
        raise EngineError(
            f"{path} was saved {'without' if adapter is not None else 'with'} LoRA; use the same settings"
        )
    if adapter is None:
        model.load_state_dict(load_weights(path, model.dtype).state_dict())
    else:
        from peft import load_peft_weights, set_peft_model_state_dict

        check_adapter(path)
        set_peft_model_state_dict(adapter, load_peft_weights(os.fspath(path), device="cpu"))
    _load_optimizer(update, load_file(path / "optimizer.safetensors"))
    _load_random(load_file(path / "random.safetensors"))
    return record


def export_weights(path: Path, model: PreTrainedModel, adapter: Any, dtype: torch.dtype) -> dict[str, float]:
    """Write what another program needs to sample: the adapter, or all weights in `dtype`. Returns the sum of
    each matrix written, which tells what has changed."""
    if adapter is not None:
        adapter.save_pretrained(path, save_embedding_layers=False)
        return {}
    written: dict[int, Tensor] = {}  # by place: tied weights stay one tensor
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        place = value.data_ptr()
        if place not in written or written[place].shape != value.shape:
            written[place] = value.to(dtype).cpu()
        state[name] = written[place]
    model.save_pretrained(path, state_dict=state)
    return {name: float(value.sum(dtype=torch.float64)) for name, value in state.items() if value.ndim > 1}


def _optimizer_tensors(update: Update) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in update.parameters.items():
        for key, value in update.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}:{name}"] = torch.as_tensor(value).contiguous()
    return tensors


def _load_optimizer(update: Update, tensors: dict[str, Tensor]) -> None:
    update.optimizer.state.clear()
    update.optimizer.zero_grad(set_to_none=True)
    for key, value in tensors.items():
        part, name = key.split(":", 1)
        parameter = update.parameters.get(name)
        if parameter is None or (value.ndim and value.shape != parameter.shape):
            raise EngineError(
                f"the saved optimizer has {name}, which this model does not: it is of another model"
            )
        # Fused AdamW expects even the step count on the parameter's device.
        update.optimizer.state.setdefault(parameter, {})[part] = value.to(parameter.device)


def _random_tensors() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _load_random(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for name, state in states.items():
        number = int(name.removeprefix("cuda")) if name != "cpu" else -1
        if 0 <= number < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, number)
