"""The tables of ACEBench: what its tools answer in both languages, and what its worlds hold at the start."""

from __future__ import annotations

from typing import Any

from trialogue.reading import read_table

TEXTS: dict[str, tuple[str, str]] = read_table(__file__, "texts.toml")
WORLD: dict[str, Any] = read_table(__file__, "world.toml")


def say(language: str, key: str, *values: object) -> str:
    """One answer of a tool, with the values filled in."""
    return TEXTS[key][language == "zh"].format(*values)
