"""Time until the demonstration reaches 85 % on held-out tasks, from its finished runs (`--demo DIR`).

Counted are the seconds of the cold start and of reinforcement learning up to the first check with 85 % or
more. A seed without such a check counts with all its seconds of learning, which is less than it would need.
The checks use 100 dev tasks, every 12 steps; the test tasks are evaluated only before and after. The first
version of the demonstration never reached 85 %: after 765.9 s it solved 45.7 % of the test tasks and 64 % of
the dev tasks. So the ratio is a lower bound.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from speed.measure import Figure, Options, compare, find_rates
from trialogue.run import read_lines

GOAL = 0.85
FIRST_VERSION = 765.9


def measure(options: Options) -> list[Figure]:
    demos = sorted(path.parent for path in Path(options.demo).rglob("summary.json")) if options.demo else []
    if not demos:
        told = f"{options.demo} holds no summary.json; " if options.demo else ""
        print(f"reach: left out: {told}name a folder of finished demonstrations by --demo, such as runs")
        return []
    flops = find_rates()["flops"]
    spent: list[tuple[float, float]] = []
    least: list[float] = []
    missed = 0
    for demo in demos:
        summary: dict[str, Any] = json.loads((demo / "summary.json").read_text(encoding="utf-8"))
        step, solved, seconds = find_goal(demo, summary)
        missed += solved < GOAL
        final = summary["after_rl"]["pass^1"]
        print(
            f"reach: seed {summary['seed']}: {solved:.0%} of dev at step {step} after {seconds:.0f} s; "
            f"{final:.1%} of test in the end, after {summary['seconds']['total']:.0f} s"
        )
        spent.append((seconds, FIRST_VERSION))
        least.append(count_flops(demo / "rl", step) / flops)
    return [
        compare(
            f"time to {GOAL:.0%} of the demonstration's dev tasks",
            "s",
            spent,
            "its first version, which ended at 45.7 % without reaching it",
            bound=median(least),
            bounded_by="what reinforcement sampled and learned from, at GEMM speed",
            note=f"{missed} of {len(demos)} seeds missed it",
        )
    ]


def find_goal(demo: Path, summary: dict[str, Any]) -> tuple[int, float, float]:
    """The first check that reaches the goal, or else the last one: its step, its value, the seconds until
    then."""
    checks = [line for _, line in read_lines(demo / "rl" / "metrics.jsonl") if line.get("kind") == "eval"]
    shown = next((check for check in checks if check["pass^1"] >= GOAL), checks[-1])
    phases = [line for _, line in read_lines(demo / "rl" / "timings.jsonl") if "step" in line]
    spent = sum(
        seconds
        for line in phases
        if line["step"] <= shown["step"]
        for name, seconds in line.items()
        if name != "step"
    )
    return shown["step"], shown["pass^1"], summary["seconds"]["sft"] + spent


def count_flops(run: Path, last: int) -> float:
    """Operations up to step `last`: two per weight and token to sample, six to learn."""
    weights = (run / "model" / "model.safetensors").stat().st_size / 4
    tokens = 0
    for step in range(1, last + 1):
        for _, line in read_lines(run / "trajectories" / f"step-{step:06d}.jsonl"):
            for turn in line["turns"]:
                held: dict[str, list[int]] = turn.get("tokens") or {}
                tokens += len(held.get("prompt", ())) + len(held.get("reply", ()))
    return (2 + 6) * weights * tokens
