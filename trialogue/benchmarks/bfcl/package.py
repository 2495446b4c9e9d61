"""The files of the package bfcl-eval, found without importing it. Its classes are loaded module by module.

Each module gets a unique name, so that two generations of the package can be used at the same time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trialogue.benchmarks.folder import VARIABLE, find_data, read_json_lines, read_texts
from trialogue.benchmarks.toolkit import Plain
from trialogue.errors import ConfigError
from trialogue.reading import reading

HELP = (
    "Get it with `pip install --no-deps bfcl-eval mpmath` (bfcl-eval==2025.8.6 has the data of v3), or "
    "unpack its wheel and name that folder"
)
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
GENERATIONS = ("v4", "v3")
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""Class → module of the class and of the descriptions of its functions."""
SHARED = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context"
"""A module that the modules of the classes import."""


def find_package(data: str | None) -> Path:
    """The folder `bfcl_eval` of the installed package or below the named folder."""
    places = ["bfcl_eval", "data/multi_turn_func_doc"]
    named = data or os.environ.get(VARIABLE)
    installed = importlib.util.find_spec("bfcl_eval") if data is None else None
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parent
    if data is None and named is not None and not any((Path(named) / place).is_dir() for place in places):
        raise ConfigError(f"bfcl needs the package bfcl-eval. {HELP}")
    found = find_data(data, places, "bfcl", HELP)
    return found if found.name == "bfcl_eval" else found.parent.parent


def find_generation(package: Path, wanted: str) -> str:
    """The requested generation, or the newest one available."""
    there = [
        item for item in GENERATIONS if (package / "data" / f"BFCL_{item}_multi_turn_base.json").is_file()
    ]
    if not there:
        raise ConfigError(f"{package} holds no data of the multi-turn categories. {HELP}")
    if wanted and wanted not in there:
        raise ConfigError(f"{package} holds generation {', '.join(there)} and not '{wanted}'. {HELP}")
    return wanted or there[0]


def find_entries(package: Path, generation: str, category: str) -> Path:
    return package / "data" / f"BFCL_{generation}_multi_turn_{category}.json"


def read_entries(package: Path, generation: str, category: str) -> list[Plain]:
    """The entries of a category, each with its `ground_truth`."""
    entries = find_entries(package, generation, category)
    answers = entries.parent / "possible_answer" / entries.name
    with reading(answers, ConfigError):
        truth = {item["id"]: item["ground_truth"] for item in read_json_lines(answers)}
    with reading(entries, ConfigError):
        return [{**item, "ground_truth": truth[item["id"]]} for item in read_json_lines(entries)]


@lru_cache(maxsize=32)
def read_functions(package: Path, kind: str) -> tuple[Plain, ...]:
    """The descriptions of a class's functions."""
    return tuple(read_json_lines(package / "data" / "multi_turn_func_doc" / f"{MODULES[kind]}.json"))


def read_added_sentence(package: Path) -> str | None:
    """The benchmark's sentence about added functions, read without running code."""
    path = package / "constants" / "default_prompts.py"
    texts = read_texts(path) if path.is_file() else {}
    return texts.get("DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC")


@lru_cache(maxsize=32)
def load_class(package: Path, kind: str) -> type[Any]:
    """Load one API class. Its module gets a unique name."""
    if kind not in MODULES:
        raise ConfigError(f"bfcl has no class '{kind}'; known are {', '.join(MODULES)}")
    folder = package / "eval_checker" / "multi_turn_eval" / "func_source_code"
    before = sys.modules.get(SHARED)
    try:
        if (folder / "long_context.py").is_file():
            sys.modules[SHARED] = _load(folder / "long_context.py")
        return getattr(_load(folder / f"{MODULES[kind]}.py"), kind)
    except ImportError as error:
        raise ConfigError(f"{kind} of bfcl cannot be loaded: {error}. {HELP}") from None
    finally:
        sys.modules.pop(SHARED, None)
        if before is not None:
            sys.modules[SHARED] = before


@lru_cache(maxsize=64)
def _load(path: Path) -> ModuleType:
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"trialogue_bfcl_{mark}_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None or not path.is_file():
        raise ConfigError(f"{path} is missing. {HELP}")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
