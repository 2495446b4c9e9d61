"""TAU2 from start to grade, and the memory of its open worlds; the peer's figures are recorded ones.

An episode opens a task's world, makes its gold calls and grades the result. Where the data is absent
(`--data` or TRIALOGUE_DATA) the measurement says so and is left out.
"""

from __future__ import annotations

from speed.benchmarks import DOMAINS, OFFICIAL
from speed.benchmarks import measure as play_all
from speed.measure import Figure, Options, compare
from trialogue.errors import TrialogueError

OFFICIAL_MEGABYTES = 12.8
"""Of one open retail environment of tau2-bench."""


def measure(options: Options) -> list[Figure]:
    figures: list[Figure] = []
    for name in ("tau2:retail", "tau2:airline", "tau2:telecom"):
        try:
            domain = DOMAINS[name](options.data)
            runs = [play_all(domain, "base", 1) for _ in range(2 if options.quick else options.repetitions)]
        except TrialogueError as error:
            print(f"episodes: {name} left out: {error}")
            continue
        figures.append(
            compare(
                f"{name}: open, gold calls, grade",
                "episodes/s",
                [(speed, OFFICIAL[name]) for speed, _, _ in runs],
                "tau2-bench, recorded on such a core",
                more_is_better=True,
            )
        )
        if name == "tau2:retail":
            figures.append(
                compare(
                    "1,000 open retail environments after their gold calls, each",
                    "KB",
                    [(after, OFFICIAL_MEGABYTES * 1024) for _, _, after in runs],
                    "tau2-bench, recorded",
                )
            )
    return figures
