"""The tables of ACEBench: the answers of its tools in both languages, and its initial data."""

from __future__ import annotations

from typing import Any

from trialogue.reading import read_table

TEXTS: dict[str, tuple[str, str]] = read_table(__file__, "texts.toml")
WORLD: dict[str, Any] = read_table(__file__, "world.toml")


def say(language: str, key: str, *values: object) -> str:
    """One answer of a tool, with the values filled in."""
    return TEXTS[key][language == "zh"].format(*values)
