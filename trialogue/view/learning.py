"""`report.md` of a training run: the result, the curves, which tasks were gained and lost."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from trialogue.foreign import show_code, show_markdown
from trialogue.records import Entry
from trialogue.trajectory import differs
from trialogue.view.api import find_changed, find_outcome, thin
from trialogue.view.curves import Curve, draw_curves
from trialogue.view.run_reader import RunRecords

_LISTED = 5


def to_learning_report(path: Path) -> str:
    """The report of `train` or `sft` as Markdown; `to_curves` is the picture beside it."""
    records = RunRecords(path)
    records.refresh()
    records.wait()
    about = records.about
    return join_sections(
        f"# {show_markdown(about['kind'])} of {show_markdown(about['domain'])}",
        _sentence(about, records.steps, records.evaluations),
        "![The curves of the run](curves.svg)",
        _checks(records.evaluations),
        _ends(records),
        _changes(records),
        to_settings_section(find_changed(records)),
        to_origin_section(about),
    )


def join_sections(*sections: str) -> str:
    """A Markdown document of those sections that are not empty."""
    return "\n\n".join(section for section in sections if section) + "\n"


def to_curves(path: Path) -> str:
    """Reward and held-out success, or the loss, over steps, as SVG."""
    records = RunRecords(path)
    records.refresh_metrics()
    steps, checks = records.steps, records.evaluations
    name, ceiling = ("reward", 1.0) if any("reward" in line for line in steps) else ("loss", None)
    shown = thin([line for line in steps if name in line], 400)
    curves = [Curve(f"{name} of a step", [line["step"] for line in shown], [line[name] for line in shown])]
    known = [line for line in checks if "pass^1" in line]
    if known:
        low, high = ([line[f"pass^1_{end}"] for line in known] for end in ("low", "high"))
        values = [line["pass^1"] for line in known]
        curves.append(Curve("held-out pass^1, 95 %", [line["step"] for line in known], values, low, high))
    held_out = [line for line in steps if "validation_loss" in line]
    if held_out:
        values = [line["validation_loss"] for line in held_out]
        curves.append(Curve("validation loss", [line["step"] for line in held_out], values))
    return draw_curves(curves, ceiling)


def _rate(line: dict[str, Any]) -> str:
    return f"{line['pass^1']:.1%} ({line['pass^1_low']:.1%}–{line['pass^1_high']:.1%})"


def _sentence(
    about: dict[str, Any], steps: Sequence[dict[str, Any]], checks: Sequence[dict[str, Any]]
) -> str:
    known = [line for line in checks if "pass^1" in line]
    taken = f"{steps[-1]['step']} steps" if steps else "no step"
    words = [f"State: {show_markdown(about['state'])}, after {taken}."]
    if about["state"] == "stopped":
        words.append(f"{show_code('trialogue ' + about['kind'] + ' --resume RUN')} goes on.")
    if known:
        last, first = known[-1], known[0]
        words.append(
            f"After step {last['step']} the agent solves **{_rate(last)}** of {last['tasks']} dev tasks"
        )
        words[-1] += f"; at step {first['step']} it was {_rate(first)}." if len(known) > 1 else "."
    rewards = [line["reward"] for line in steps[-10:] if "reward" in line]
    if rewards:
        mean = fmean(rewards)
        words.append(f"Mean reward of the last {len(rewards)} steps: {mean:.3f}.")
        successes = [line["success"] for line in steps[-10:] if "reward" in line and "success" in line]
        if successes and differs(mean, success := fmean(successes)):
            words.append(f"Share of successes: {success:.3f}.")
    losses = [line for line in steps if "validation_loss" in line]
    if losses:
        first, last = (losses[place]["validation_loss"] for place in (0, -1))
        words.append(f"Validation loss {last:.4f}, at first {first:.4f}.")
    return " ".join(words)


def _checks(checks: Sequence[dict[str, Any]]) -> str:
    known = [line for line in checks if "pass^1" in line]
    if not known:
        return ""
    lines = [
        "| step | tasks | pass^1 (95 %) | reward | turns | tool calls |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {line['step']} | {line['tasks']} | {_rate(line)} | {line['reward']:.3f} | {line['turns']:.1f} "
        f"| {line['tool_calls']:.1f} |"
        for line in known
    ]
    return "## Evaluations\n\n" + "\n".join(lines)


def _ends(records: RunRecords) -> str:
    ends = Counter(entry.end for entry in records.entries())
    blame = Counter(entry.blame for entry in records.entries() if entry.blame)
    if not ends:
        return ""
    lines = [f"- {show_markdown(end)}: {count}" for end, count in sorted(ends.items())]
    lines += [
        f"- to blame for what failed: {show_markdown(who)} {count}" for who, count in sorted(blame.items())
    ]
    return "## How conversations ended\n\n" + "\n".join(lines)


def _changes(records: RunRecords) -> str:
    """Dev tasks that the last evaluation solves and the first does not, and the reverse. Tasks that failed in
    either are left out."""
    files = [name for name in sorted(records.files) if name.startswith("eval-")]
    if len(files) < 2:
        return ""
    before, after = (
        {entry.task: entry for entry in records.files[name].entries} for name in (files[0], files[-1])
    )
    graded = [
        task
        for task in sorted(before.keys() & after.keys())
        if before[task].reward is not None and after[task].reward is not None
    ]
    won = {task: tuple(find_outcome(entry[task]) == "won" for entry in (before, after)) for task in graded}
    parts = ["## Gained and lost\n\nDev tasks, the first evaluation against the last."]
    for title, change in (("Gained", (False, True)), ("Lost", (True, False))):
        found = [after[task] for task in graded if won[task] == change]
        listed = "\n".join(f"- {_link(records, entry)}" for entry in found[:_LISTED])
        parts.append(f"**{title}** ({len(found)})" + (f"\n\n{listed}" if listed else ""))
    return "\n\n".join(parts)


def _link(records: RunRecords, entry: Entry) -> str:
    """The id of a conversation, linked to the page of `trialogue view`."""
    name = records.path.resolve().name
    address = f"http://127.0.0.1:7878/#/run/{quote(name, safe='')}/{quote(entry.id, safe='')}"
    return f"[{show_code(entry.id)}]({address})"


def to_settings_section(changed: Mapping[str, Any]) -> str:
    """The settings that differ from the defaults, as Markdown."""
    if not changed:
        return "## Settings\n\nAll defaults."
    lines = [
        f"- {show_code(f'{key} = {json.dumps(value, ensure_ascii=False)}')}" for key, value in changed.items()
    ]
    return "## Settings that are not the default\n\n" + "\n".join(lines)


def to_origin_section(about: Mapping[str, Any], result: Mapping[str, Any] | None = None) -> str:
    """What is needed to repeat a run, as Markdown: seed, versions, hashes, command."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"- seed: {about['seed']}",
        f"- versions: {show_markdown(versions)}",
        f"- begun: {show_markdown(about['created'])}",
    ]
    if result is not None:
        prompts, tasks = show_markdown(result["prompts"]), show_markdown(result["tasks_hash"])
        lines.append(f"- prompts: {prompts}, tasks: {tasks}")
    lines += [f"- marked: {show_markdown(mark)}" for mark in about.get("marks", ())]
    for name, note in (result or {}).get("notes", {}).items():
        lines.append(f"- {show_markdown(name)}: {show_markdown(note)}")
    lines.append(f"- command: {show_code(shlex.join(about['command']), 2000)}")
    return "## Origin\n\n" + "\n".join(lines)
