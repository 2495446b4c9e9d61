"""Compare two runs task by task, with a paired interval."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from trialogue.errors import RunError
from trialogue.foreign import show_cell, show_code, show_markdown
from trialogue.records import Entry
from trialogue.view.run_reader import RunRecords

_LISTED = 5
_DRAWS = 2000


def compare_runs(one: Path, other: Path) -> dict[str, Any]:
    """The difference `other - one` on the tasks both runs share, with a 95 % paired bootstrap interval."""
    before, after = _read(one), _read(other)
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise RunError(
            f"{one} and {other} have no graded task in common; compare runs of the same split and seed"
        )
    differences = [_mean(after[task]) - _mean(before[task]) for task in shared]
    chance = random.Random(0)
    means = sorted(fmean(chance.choices(differences, k=len(differences))) for _ in range(_DRAWS))
    order = sorted(zip(differences, shared, strict=True))

    def to_pairs(found: list[tuple[float, str]]) -> list[dict[str, Any]]:
        return [
            {"task": task, "difference": value, "one": before[task][0].id, "other": after[task][0].id}
            for value, task in found
        ]

    return {
        "one": str(one),
        "other": str(other),
        "tasks": len(shared),
        "only_one": len(before.keys() - after.keys()),
        "only_other": len(after.keys() - before.keys()),
        "reward_one": fmean(_mean(before[task]) for task in shared),
        "reward_other": fmean(_mean(after[task]) for task in shared),
        **_compare_compliance(before, after, shared),
        "difference": fmean(differences),
        "difference_low": means[int(0.025 * _DRAWS)],
        "difference_high": means[int(0.975 * _DRAWS) - 1],
        "better": sum(value > 0 for value in differences),
        "worse": sum(value < 0 for value in differences),
        "gains": to_pairs([pair for pair in reversed(order) if pair[0] > 0][:_LISTED]),
        "losses": to_pairs([pair for pair in order if pair[0] < 0][:_LISTED]),
    }


def _compare_compliance(
    before: dict[str, list[Entry]], after: dict[str, list[Entry]], shared: list[str]
) -> dict[str, float]:
    """Outcome and compliance of both runs, where both have them."""
    found: dict[str, float] = {}
    for key in ("without_rules", "compliance"):
        means: list[float] = []
        for tasks in (before, after):
            values = [getattr(entry, key) for task in shared for entry in tasks[task]]
            known = [value for value in values if value is not None]
            if known:
                means.append(fmean(known))
        if len(means) == 2:
            found |= {f"{key}_one": means[0], f"{key}_other": means[1]}
    return found


def _read(path: Path) -> dict[str, list[Entry]]:
    """The graded conversations, by task, of an evaluation run or of a training run's last evaluation."""
    records = RunRecords(path)
    if not records.about:
        raise RunError(f"{path} is not a run directory: it has no run.json")
    records.refresh()
    records.wait()
    checks = [name for name in sorted(records.files) if name.startswith("eval-")]
    tasks: dict[str, list[Entry]] = defaultdict(list)
    for entry in records.files[checks[-1]].entries if checks else records.entries():
        if entry.reward is not None and not entry.excluded:
            tasks[entry.task].append(entry)
    return tasks


def _mean(entries: list[Entry]) -> float:
    return fmean(entry.reward or 0.0 for entry in entries)


def to_comparison(compared: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    low, high = compared["difference_low"], compared["difference_high"]
    verdict = "no clear difference" if low <= 0 <= high else "better" if low > 0 else "worse"
    even = compared["tasks"] - compared["better"] - compared["worse"]
    sentence = f"On {compared['tasks']} common tasks the second run is **{compared['difference']:+.3f}**"
    keys = [key for key in ("reward", "without_rules", "compliance") if f"{key}_one" in compared]

    def to_row(run: str) -> str:
        figures = [f"{compared[f'{key}_{run}']:.3f}" for key in keys]
        return f"| {' | '.join([show_cell(compared[run]), *figures])} |"

    counts = f"Better on {compared['better']} tasks, worse on {compared['worse']}, the same on {even}."
    lines = [
        f"# {show_markdown(compared['one'])} against {show_markdown(compared['other'])}",
        "",
        f"{sentence} ({low:+.3f} to {high:+.3f}): {verdict}.",
        "",
        f"| | {' | '.join(key.replace('_', ' ') for key in keys)} |",
        f"|---|{'---:|' * len(keys)}",
        *(to_row(run) for run in ("one", "other")),
        "",
        f"{counts} The interval is a 95 % percentile bootstrap over the differences of tasks.",
    ]
    for title, key in (("Best gains", "gains"), ("Worst losses", "losses")):
        if compared[key]:
            lines += ["", f"## {title}", ""]
            lines += [
                f"- {show_code(item['task'])}: {item['difference']:+.2f} "
                f"({show_code(item['one'])} against {show_code(item['other'])})"
                for item in compared[key]
            ]
    return "\n".join(lines)
