"""`report.md` of a run: the result in a sentence, tables with intervals, settings, how to repeat it."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from trialogue.config import EvalConfig, Section, SynthesizeConfig, difference_from_defaults, to_config
from trialogue.digests import relisting
from trialogue.durable import write
from trialogue.errors import RunError
from trialogue.foreign import show_cell, show_code, show_markdown
from trialogue.reading import reading
from trialogue.run import read_about, read_trajectories
from trialogue.trajectory import Trajectory, tell_near_calls, tell_no_success
from trialogue.view.export import write_export
from trialogue.view.learning import (
    join_sections,
    to_curves,
    to_learning_report,
    to_origin_section,
    to_settings_section,
)
from trialogue.view.terminal import tell_failed, tell_user_faults, tell_wordings

EMBEDDED = 40
"""Maximum number of conversations in the page beside the report."""
LISTED = 50
"""Maximum length of lists whose names come from models or tasks."""


def write_report(path: Path) -> Path:
    """Write the report of a run directory and return its path."""
    texts = to_texts(path)
    with relisting(path):
        for name, text in texts.items():
            write(path / name, text)
        write_export(path, path / "report.html", most=EMBEDDED)
    return path / "report.md"


def to_texts(path: Path) -> dict[str, str]:
    """The text files of a run's report, by name. The page is written apart."""
    if read_about(path).get("kind") in ("train", "sft"):
        return {"report.md": to_learning_report(path), "curves.svg": to_curves(path)}
    return {"report.md": to_report(path)}


def find_changes(path: Path) -> list[str]:
    """The places where a report differs from what the run's records give."""
    if read_about(path).get("state") == "running":  # the report was written earlier
        return []
    there = [name for name in ("report.md", "curves.svg") if (path / name).is_file()]
    texts = to_texts(path) if there else {}
    changes: list[str] = []
    for name in there:
        with reading(path / name, RunError):
            found = (path / name).read_text(encoding="utf-8").split("\n")
        made = texts.get(name, "").split("\n")
        pairs = enumerate(zip_longest(found, made), 1)
        changes += [f"{name}, line {line}: differs from the records" for line, (a, b) in pairs if a != b][:1]
    return changes


def read_result(path: Path) -> dict[str, Any]:
    """Read `result.json` of a finished run. Raise an error that says how to resume an unfinished one."""
    about = read_about(path)
    kind, state = about.get("kind"), about.get("state")
    try:
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        result = None
    except ValueError as error:
        raise RunError(f"{path / 'result.json'} is not JSON: {error}") from None
    if result is None or state != "finished":
        raise RunError(
            f"{path} is not finished (its state is '{state}'), so there is nothing to report yet; "
            f"resume it with: trialogue {kind} --resume {path}"
        )
    return result


def to_report(path: Path) -> str:
    """The report of a run directory as Markdown."""
    about = read_about(path)
    result = read_result(path)
    if about["kind"] == "synthesize":
        return join_sections(
            f"# synthesize of {show_markdown(result['domain'])}",
            _corpus(result),
            _ledger(result),
            _settings(path, SynthesizeConfig),
            to_origin_section(about, result),
        )
    held = [item for item in read_trajectories(path) if item.reward is not None]
    return join_sections(
        f"# {show_markdown(about['kind'])} of {show_markdown(result['domain'])}",
        _sentence(result),
        _figures_table(result),
        _policy(result),
        _ends(result),
        _spending(result),
        _tools(result),
        _losses(held),
        _settings(path, EvalConfig),
        to_origin_section(about, result),
    )


def _corpus(result: dict[str, Any]) -> str:
    """Number of accepted conversations by family, and of rejected ones by reason."""
    judge = f", judged by **{show_markdown(result['judge'])}**" if result["judge"] else ""
    parts = [
        f"**{result['accepted']}** of {result['held']} conversations were accepted.",
        f"{result['train']} are to train on, {result['validation']} for validation.",
        f"Agent: **{show_markdown(result['agent'])}**, user: **{show_markdown(result['user'])}**{judge}.",
        "## Rejected, by reason",
        _counts_table(result["reasons"]) if result["reasons"] else "None.",
        "## Accepted, by family",
        _counts_table({family or "none": count for family, count in result["families"].items()}),
    ]
    return "\n\n".join(parts)


def _counts_table(counts: dict[str, int]) -> str:
    rows = [_row([show_cell(name), str(count)]) for name, count in counts.items()]
    return "\n".join([_row(["", "conversations"]), "|---|---:|", *rows])


def _sentence(result: dict[str, Any]) -> str:
    if "pass^1" not in result:
        return "No conversation could be graded."
    return (
        f"**{show_markdown(result['agent'])}** with user **{show_markdown(result['user'])}** solves "
        f"**{result['pass^1']:.1%}** of {result['tasks']} tasks of split {show_code(result['split'])} "
        f"(95 % interval {result['pass^1_low']:.1%} to {result['pass^1_high']:.1%}, "
        f"{result['trials']} conversation{'s' if result['trials'] > 1 else ''} per task)."
    )


def _figures_table(result: dict[str, Any]) -> str:
    hats = [key for key in result if key.startswith("pass^") and "_" not in key]
    has_tokens, has_cost = bool(result["tokens"]["prompt"]), result["cost"] is not None
    headings = ["", "tasks", *hats, "reward", "turns", "tool calls"]
    headings += ["tokens"] * has_tokens + ["cost"] * has_cost + ["seconds"]
    lines = [_row(headings), "|---|" + "---:|" * (len(headings) - 1)]
    rows = [("all", result)]
    rows += [(show_cell(name), figures) for name, figures in result["families"].items()]
    rows += [(f"level {show_cell(name)}", figures) for name, figures in result["levels"].items()]
    for name, figures in rows:
        cells = [name, str(figures["tasks"])]
        cells += [
            f"{figures[key]:.3f} ({figures[key + '_low']:.3f}–{figures[key + '_high']:.3f})"
            if key in figures
            else "–"
            for key in hats
        ]
        cells += [_number(figures.get(key), 2) for key in ("reward", "turns", "tool_calls")]
        if has_tokens:
            cells.append(str(figures["tokens"]["prompt"] + figures["tokens"]["completion"]))
        if has_cost:
            cells.append(_number(figures["cost"], 4))
        cells.append(_number(figures["seconds"], 1))
        lines.append(_row(cells))
    mean = result["family_mean"]
    extra = "" if mean is None else f"The unweighted mean of the families' pass^1 is {mean:.3f}. "
    note = (
        extra + "Intervals are 95 % percentile bootstraps over tasks, exact binomial ones at 0 and 100 %. "
        "Seconds are summed over conversations."
    )
    return "## Result\n\n" + "\n".join(lines) + f"\n\n{note}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _policy(result: dict[str, Any]) -> str:
    """Outcome, compliance and broken rules, overall and by family; empty where the policy has no rules."""
    if "compliant" not in result:
        return ""
    lines = ["| | outcome without rules | rules kept | keep every rule |", "|---|---:|---:|---:|"]
    for name, figures in (("all", result), *result["families"].items()):
        cells = [_number(figures.get(key), 3) for key in ("outcome", "compliance", "compliant")]
        lines.append(_row([show_cell(name), *cells]))
    if result["breaches"]:
        lines += ["", "| rule | conversations that break it |", "|---|---:|"]
        lines += [_row([show_cell(rule), str(count)]) for rule, count in result["breaches"].items()]
    return "## Policy\n\n" + "\n".join(lines)


def _ends(result: dict[str, Any]) -> str:
    lines = [f"- {show_markdown(end)}: {count}" for end, count in result["ends"].items()]
    if failed := tell_failed(result):
        lines.append(f"- {show_markdown(failed)}")
        errors = list(result.get("errors", {}).items())
        lines += [f"  - {count} × {show_markdown(error)}" for error, count in errors[:LISTED]]
        lines += [f"  - and {len(errors) - LISTED} other errors"] * (len(errors) > LISTED)
    if result.get("near_calls"):
        lines.append(f"- {tell_near_calls(result['near_calls'])}")
    if result.get("no_success"):
        lines.append(f"- {tell_no_success(*result['no_success'])}")
    told = [*tell_user_faults(result).splitlines(), tell_wordings(result)]
    lines += [f"- {show_markdown(line)}" for line in told if line]
    return "## How conversations ended\n\n" + "\n".join(lines)


def _spending(result: dict[str, Any]) -> str:
    lines = ["| | model calls | prompt tokens | completion tokens | cached | cost | seconds |"]
    lines.append("|---|" + "---:|" * 6)
    for side, used in result["sides"].items():
        counts = [str(used[key]) for key in ("calls", "prompt", "completion", "cached")]
        lines.append(_row([show_cell(side), *counts, _number(used["cost"], 4), _number(used["seconds"], 1)]))
    wall = f"The whole took {result['wall_seconds']:.1f} s on the wall clock."
    return "## What it took\n\n" + "\n".join(lines) + f"\n\n{wall}"


def _ledger(result: dict[str, Any]) -> str:
    """What the endpoints charged, by role."""
    if not result.get("ledger"):
        return ""
    lines = ["| | model | calls | prompt tokens | completion tokens | dollars |", "|---|---|" + "---:|" * 4]
    for used in result["ledger"]:
        counts = [str(used[key]) for key in ("calls", "prompt", "completion")]
        lines.append(
            _row([show_cell(used["role"]), show_cell(used["model"]), *counts, _number(used["usd"], 4)])
        )
    return "## What it took\n\n" + "\n".join(lines)


def _tools(result: dict[str, Any]) -> str:
    if not result["tools"]:
        return ""
    tools = list(result["tools"].items())
    lines = [f"- {show_code(name)}: {count}" for name, count in tools[:LISTED]]
    lines += [f"- and {len(tools) - LISTED} other names"] * (len(tools) > LISTED)
    return "## Tool calls of the agent\n\n" + "\n".join(lines)


def _losses(held: list[Trajectory]) -> str:
    """Ids of lost conversations, grouped by reason, the most frequent reason first."""
    reasons: dict[str, list[Trajectory]] = defaultdict(list)
    for item in held:
        if item.reward is not None and not item.is_success:
            failed = [name for name, value in item.reward.parts.items() if value < 1]
            usual = "not graded" if item.end in ("max_turns", "too_long", "stuck") else "no success"
            reasons[f"{item.end}: {' and '.join(failed) or usual}"].append(item)
    if not reasons:
        return ""
    parts: list[str] = []
    for reason, items in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        parts.append(f"**{show_markdown(reason)}** ({len(items)})\n")
        for item in items[:5]:
            why = item.reward.why[0] if item.reward and item.reward.why else ""
            parts.append(f"- {show_code(item.id)}: {show_markdown(why) if why else ''}".rstrip())
        parts.append("")
    return "## Lost conversations\n\nUp to five of each kind.\n\n" + "\n".join(parts).rstrip()


def _settings(path: Path, kind: type[Section]) -> str:
    data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return to_settings_section(difference_from_defaults(to_config(kind, data, "config.json")))
