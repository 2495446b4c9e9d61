"""Find the engine that `engine.name` names: auto, torch, tinker, vllm, or your own as `module:name`."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

from trialogue.config import EngineChoice
from trialogue.engine.api import Engine, EngineSettings
from trialogue.errors import ConfigError
from trialogue.seams import check_signature, describe_value, load_seam, loading

LARGE = 1_000_000_000
"""Weights of a model above which sampling on a GPU is vLLM's work."""

_log = logging.getLogger("trialogue")


def find_engine(choice: EngineChoice, folder: str, settings: EngineSettings) -> Engine:
    """The engine, with the weights in a folder (or of a hub name)."""
    if choice.name == "auto":
        choice = choice.model_copy(update={"name": choose_name(choice, folder, settings.device)})
    if choice.name in ("tinker", "vllm") and not choice.url:
        raise ConfigError(f"engine.name={choice.name} needs the address of its service: engine.url=URL")
    if choice.name == "tinker":
        from trialogue.engine.tinker import TinkerEngine

        rank = settings.lora.r if settings.lora is not None else 32
        return TinkerEngine(folder, choice.url, reduction=choice.reduction, rank=rank, seed=settings.seed)
    if choice.name in ("torch", "vllm"):
        from trialogue.engine.torch_engine import TorchEngine

        engine = TorchEngine.load(folder, settings)
        if choice.name == "torch":
            return engine
        from trialogue.engine.vllm import VllmEngine

        return VllmEngine(engine, choice.url, Path(choice.weights))
    return _find_own(choice.name, folder, settings)


def choose_name(choice: EngineChoice, folder: str, device: str) -> str:
    """The engine of `engine.name=auto`: torch, or a vLLM server that samples where the model is large."""
    from trialogue.engine.model_folder import count_weights
    from trialogue.engine.torch_engine import find_device

    if choice.url:
        return "vllm"
    weights = count_weights(folder)
    if weights <= LARGE:
        return "torch"
    what = f"{folder} has {weights / 1e9:.1f} billion weights"
    if find_device(device).type == "cpu":
        _log.warning("%s, and there is no GPU: sampling it here takes very long", what)
        return "torch"
    raise ConfigError(
        f"{what}, and above {LARGE / 1e9:g} billion a vLLM server samples: start one and set engine.url=URL "
        "(docs/cluster.md), or sample here, more slowly, with engine.name=torch"
    )


def _find_own(name: str, folder: str, settings: EngineSettings) -> Engine:
    """An engine from outside the package: an object, a class with `load`, or a function that makes one."""
    found: Any = load_seam(name, "engine")
    what = f"engine {describe_value(found)}"
    if inspect.isclass(found) or inspect.isroutine(found):
        make: Any = getattr(found, "load", found)
        check_signature(make, ("folder", "settings"), "engine")
        with loading(what):
            found = make(folder, settings)
    if not isinstance(found, Engine):
        verbs = [verb for verb in vars(Engine) if not verb.startswith("_")]
        missing = [verb for verb in verbs if not hasattr(found, verb)]
        raise ConfigError(f"{what}: {type(found).__name__} is no Engine, it lacks {', '.join(missing)}")
    return found
