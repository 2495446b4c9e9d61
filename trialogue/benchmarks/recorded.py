"""Grade conversations that were recorded by other programs, in the formats of their benchmarks.

Every recorded call is executed again. Results that differ from the record are reported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trialogue.errors import ConfigError

FORMATS = {
    "ace": "trialogue.benchmarks.ace.recorded:score_ace_file",
    "tau": "trialogue.benchmarks.tau.tau1.recorded:score_tau1_file",
    "tau2": "trialogue.benchmarks.tau.tau2.recorded:score_tau2_file",
}
"""Benchmark → function of (file, name after the colon, data folder)."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded conversation and its grade."""

    id: str
    reward: float | None
    reward_breakdown: dict[str, float] | None
    db_match: bool | None
    initial_db_hash: str | None
    final_db_hash: str | None
    tool_mismatches: list[dict[str, Any]] = field(default_factory=lambda: [])
    more: dict[str, Any] = field(default_factory=lambda: {})
    """Fields that only some benchmarks have, such as the hashes of the user's database."""

    def to_data(self) -> dict[str, Any]:
        shape = asdict(self)
        more = shape.pop("more")
        return {**shape, **more}

    def to_line(self) -> str:
        value = "unscored" if self.reward is None else f"{self.reward:.2f}"
        parts = " ".join(f"{name}={part:g}" for name, part in (self.reward_breakdown or {}).items())
        line = f"{self.id}  {value}  db_match={self.db_match}  {parts}".rstrip()
        if self.tool_mismatches:
            first = self.tool_mismatches[0]
            line += f"  {first['tool']}: recorded {first['recorded']!r}, now {first['now']!r}"
        return line


def score_recorded(path: str | Path, benchmark: str, data: str | None = None) -> list[Recorded]:
    """Grade a file of conversations by the rules of a benchmark such as `tau2:retail`."""
    kind, _, name = benchmark.partition(":")
    if kind not in FORMATS:
        raise ConfigError(f"there is no benchmark '{benchmark}' to grade by; known are {', '.join(FORMATS)}")
    module, _, function = FORMATS[kind].partition(":")
    score: Callable[[Path, str, str | None], list[Recorded]] = getattr(
        importlib.import_module(module), function
    )
    return score(Path(path), name, data)
