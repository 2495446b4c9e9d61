"""How long the demonstration takes to reach 85 % on held-out tasks, out of its finished runs (`--demo DIR`).

Counted are the seconds of the cold start and of every phase of reinforcement up to the first check that
shows 85 % or more. These checks are on 100 dev tasks, every 12 steps; the test tasks are asked only before
and after. The first version of the demonstration never came there: after 765.9 s it solved 45.7 % of the test
tasks and 64 % of the dev tasks, so that the ratio is a bound from below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speed.measure import Figure, Options, compare, find_rates
from trialogue.run import read_lines

GOAL = 0.85
FIRST_VERSION = 765.9


def measure(options: Options) -> list[Figure]:
    demos = sorted(path.parent for path in Path(options.demo).rglob("summary.json")) if options.demo else []
    if not demos:
        print("reach: left out, name a folder of finished demonstrations by --demo")
        return []
    flops = find_rates()["flops"]
    reached: list[tuple[float, float]] = []
    least: list[float] = []
    for demo in demos:
        summary: dict[str, Any] = json.loads((demo / "summary.json").read_text(encoding="utf-8"))
        seconds, step, solved = find_goal(demo, summary)
        final = summary["after_rl"]["pass^1"]
        if seconds is None:
            print(f"reach: seed {summary['seed']} never showed {GOAL:.0%}; {final:.1%} of test in the end")
            continue
        print(
            f"reach: seed {summary['seed']}: {solved:.0%} of dev at step {step} after {seconds:.0f} s; "
            f"{final:.1%} of test in the end, after {summary['seconds']['total']:.0f} s"
        )
        reached.append((seconds, FIRST_VERSION))
        least.append(count_flops(demo / "rl", step) / flops)
    if not reached:
        return []
    return [
        compare(
            f"time to {GOAL:.0%} of the demonstration's dev tasks ({len(reached)} of {len(demos)} seeds)",
            "s",
            reached,
            "its first version, which ended at 45.7 % without reaching it",
            bound=max(least),
            bounded_by="what reinforcement sampled and learned from, at GEMM speed",
        )
    ]


def find_goal(demo: Path, summary: dict[str, Any]) -> tuple[float | None, int, float]:
    """Seconds until the first check that shows the goal, its step and what it showed."""
    checks = [line for _, line in read_lines(demo / "rl" / "metrics.jsonl") if line.get("kind") == "eval"]
    shown = next((check for check in checks if check["pass^1"] >= GOAL), None)
    if shown is None:
        return None, 0, 0.0
    phases = [line for _, line in read_lines(demo / "rl" / "timings.jsonl") if "step" in line]
    spent = sum(
        seconds
        for line in phases
        if line["step"] <= shown["step"]
        for name, seconds in line.items()
        if name != "step"
    )
    return summary["seconds"]["sft"] + spent, shown["step"], shown["pass^1"]


def count_flops(run: Path, last: int) -> float:
    """Two operations for each weight and token to sample, six to learn, over the steps up to `last`."""
    weights = (run / "model" / "model.safetensors").stat().st_size / 4
    tokens = 0
    for step in range(1, last + 1):
        for _, line in read_lines(run / "trajectories" / f"step-{step:06d}.jsonl"):
            for turn in line["turns"]:
                held = turn.get("tokens") or {}
                tokens += len(held.get("prompt", ())) + len(held.get("reply", ()))
    return (2 + 6) * weights * tokens
