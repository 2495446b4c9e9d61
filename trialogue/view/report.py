"""`report.md` of a run: the result in a sentence, tables with intervals, what was set, how to repeat it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trialogue.config import EvalConfig, difference_from_defaults, to_config
from trialogue.errors import RunError
from trialogue.run import read_about, read_trajectories


def write_report(path: Path) -> Path:
    """Write the report of a run directory and say where it is."""
    target = path / "report.md"
    target.write_text(to_report(path), encoding="utf-8")
    return target


def to_report(path: Path) -> str:
    """The report of a run directory as Markdown."""
    about = read_about(path)
    result_file = path / "result.json"
    if not result_file.exists():
        raise RunError(f"{path} has no result.json yet: the run is {about.get('state')}")
    result = json.loads(result_file.read_text(encoding="utf-8"))
    parts = [
        f"# {about['kind']} of {result['domain']}",
        _sentence(result),
        _figures_table(result),
        _ends(result),
        _examples(path),
        _settings(path),
        _origin(about, result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sentence(result: dict[str, Any]) -> str:
    if "pass^1" not in result:
        return "No conversation could be graded."
    return (
        f"**{result['agent']}** with user **{result['user']}** solves "
        f"**{result['pass^1']:.1%}** of {result['tasks']} tasks of split `{result['split']}` "
        f"(95 % interval {result['pass^1_low']:.1%} to {result['pass^1_high']:.1%}, "
        f"{result['trials']} conversation{'s' if result['trials'] > 1 else ''} per task)."
    )


def _figures_table(result: dict[str, Any]) -> str:
    hats = [key for key in result if key.startswith("pass^") and "_" not in key]
    lines = [
        "| | tasks | " + " | ".join(hats) + " | reward | turns | tool calls |",
        "|---|" + "---:|" * (len(hats) + 4),
    ]
    rows = [("all", result)]
    rows += [(name, figures) for name, figures in result["families"].items()]
    rows += [(f"level {name}", figures) for name, figures in result["levels"].items()]
    for name, figures in rows:
        cells = [
            f"{figures[key]:.3f} ({figures[key + '_low']:.3f}–{figures[key + '_high']:.3f})"
            if key in figures
            else "–"
            for key in hats
        ]
        more = [
            f"{figures[key]:.2f}" if figures.get(key) is not None else "–"
            for key in ("reward", "turns", "tool_calls")
        ]
        lines.append(f"| {name} | {figures['tasks']} | " + " | ".join([*cells, *more]) + " |")
    return "## Result\n\n" + "\n".join(lines)


def _ends(result: dict[str, Any]) -> str:
    lines = [f"- {end}: {count}" for end, count in result["ends"].items()]
    if result["failed"]:
        blame = ", ".join(f"{who} {count}" for who, count in result["blame"].items())
        lines.append(f"- failed conversations, never scored: {result['failed']} (blame: {blame})")
    tokens = result["tokens"]
    if tokens["prompt"]:
        lines.append(f"- tokens: {tokens['prompt']} prompt, {tokens['completion']} completion")
    if result.get("cost") is not None:
        lines.append(f"- money: {result['cost']:.4f}")
    return "## How conversations ended\n\n" + "\n".join(lines)


def _examples(path: Path) -> str:
    lost = [item for item in read_trajectories(path) if item.reward is not None and item.reward.value < 1]
    if not lost:
        return ""
    lines = [f"- `{item.id}` ({item.end}): {item.reward.why[0] if item.reward else ''}" for item in lost[:5]]
    return f"## Lost conversations\n\nThe first {len(lines)} of {len(lost)}:\n\n" + "\n".join(lines)


def _settings(path: Path) -> str:
    data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    changed = difference_from_defaults(to_config(EvalConfig, data, "config.json"))
    if not changed:
        return "## Settings\n\nAll defaults."
    lines = [f"- `{key} = {json.dumps(value, ensure_ascii=False)}`" for key, value in changed.items()]
    return "## Settings that are not the default\n\n" + "\n".join(lines)


def _origin(about: dict[str, Any], result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [f"- seed: {about['seed']}", f"- versions: {versions}"]
    lines += [f"- {name}: {note}" for name, note in result.get("notes", {}).items()]
    lines.append(f"- command: `{' '.join(about['command'])}`")
    return "## Origin\n\n" + "\n".join(lines)
