"""Train language-model agents that talk with users and use tools.

An agent, a simulated user and a set of tools over a database hold a conversation; the outcome is graded; the
agent's own tokens are reinforced. The public names are listed in `__init__.pyi`.
"""

from __future__ import annotations

import ast
import os
from importlib import import_module
from pathlib import Path
from typing import Any

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    # OpenMP reads this when torch is loaded. Threads that wait for each other spin a moment, then sleep:
    # beside another process on the same cores, endless spinning makes an update take three times as long.
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def find_homes() -> dict[str, str]:
    """The module that each public name comes from."""
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = [node for node in listed.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in found for alias in node.names}


_HOMES = find_homes()
__all__ = sorted(_HOMES)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for, so that the command line starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trialogue' has no attribute '{name}'")
    home = import_module(_HOMES[name])
    return getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
