"""Find the engine that `engine.name` names: torch, tinker, vllm, or one of your own as `module:name`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from trialogue.config import EngineChoice
from trialogue.engine.api import Engine, EngineSettings
from trialogue.errors import ConfigError
from trialogue.seams import check_signature, describe_value, load_seam, loading


def find_engine(choice: EngineChoice, folder: str, settings: EngineSettings) -> Engine:
    """The engine, with the weights in a folder (or of a hub name)."""
    if choice.name in ("tinker", "vllm") and not choice.url:
        raise ConfigError(f"engine.name={choice.name} needs the address of its service: engine.url=URL")
    if choice.name == "tinker":
        from trialogue.engine.tinker import TinkerEngine

        rank = settings.lora.r if settings.lora is not None else 32
        return TinkerEngine(folder, choice.url, reduction=choice.reduction, rank=rank, seed=settings.seed)
    if choice.name == "vllm" and settings.lora is not None:
        raise ConfigError("engine.name=vllm takes whole weights; set learner.lora_rank=0")
    if choice.name in ("torch", "vllm"):
        from trialogue.engine.torch_engine import TorchEngine

        engine = TorchEngine.load(folder, settings)
        if choice.name == "torch":
            return engine
        from trialogue.engine.vllm import VllmEngine

        return VllmEngine(engine, choice.url, Path(choice.weights))
    return _find_own(choice.name, folder, settings)


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
