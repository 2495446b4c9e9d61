"""What `learn` tells at its end: on the terminal, and as `report.md` beside the runs of the course."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trialogue.activity import to_duration
from trialogue.durable import write
from trialogue.foreign import show_cell, show_code, show_markdown
from trialogue.screen import Screen

Rows = list[tuple[str, str, str]]


def show_course(summary: Mapping[str, Any], directory: Path, console: Screen | None = None) -> None:
    """Show the result of a course."""
    console = console or Screen()
    console.print_table(
        f"{summary['test_tasks']} test tasks, users it has never met",
        ("", "after the cold start", "at the end"),
        list_rows(summary),
    )
    for line in list_words(summary, directory):
        console.print(line, soft_wrap=True, highlight=False)


def write_course_report(summary: Mapping[str, Any], directory: Path) -> Path:
    """Write `report.md` to the folder of a course and return its path."""
    rows = [f"| {show_cell(name)} | {before} | {after} |" for name, before, after in list_rows(summary)]
    parts = [f"| {show_cell(name)} | {seconds:.0f} |" for name, seconds in summary["seconds"].items()]
    found = [f"- {show_markdown(text)}" for text in summary["findings"]]
    lines = [
        f"# learn {show_markdown(summary['domain'])}",
        "",
        f"{summary['test_tasks']} test tasks, one greedy conversation each, 95 % intervals:",
        "",
        "| | after the cold start | at the end |",
        "| --- | ---: | ---: |",
        *rows,
        "",
        "## What is still wrong",
        "",
        *(list_mistake_lines(summary["mistakes"]) or ["Nothing: every test task was solved."]),
        *(f"- {show_markdown(text)}" for text in summary["advice"]),
        "",
        *(["## What was found before it began", "", *found, ""] if found else []),
        "## Time",
        "",
        "| Part | Seconds |",
        "| --- | ---: |",
        *parts,
        "",
        "## Look at it",
        "",
        f"- {show_code(f'trialogue view {shlex.quote(str(directory))}')} shows every conversation.",
        f"- the runs, each with a report of its own: {', '.join(map(show_code, summary['runs']))}",
    ]
    write(directory / "report.md", "\n".join(lines) + "\n")
    return directory / "report.md"


def list_rows(summary: Mapping[str, Any]) -> Rows:
    """Success before and after, as a whole and by family; where a policy has rules, what they change."""
    before, after = summary["after_sft"], summary["after_rl"]
    has_rules = "outcome" in before and "outcome" in after
    rows = [("solved, policy kept" if has_rules else "solved", to_rate(before), to_rate(after))]
    for name, key in (("solved", "outcome"), ("policy kept", "compliant")) if has_rules else ():
        rows.append((name, f"{before[key]:.1%}", f"{after[key]:.1%}"))
    families: Mapping[str, Sequence[Any]] = summary["families"]
    return rows + [(name, to_rate(old), to_rate(new)) for name, (old, new) in families.items()]


def to_rate(figures: Mapping[str, float]) -> str:
    return f"{figures['pass^1']:.1%} ({figures['low']:.0%}–{figures['high']:.0%})"


def list_mistake_lines(mistakes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each kind of mistake: how often, in which families, an example, what would help."""
    lines: list[str] = []
    for mistake in mistakes:
        families = ", ".join(
            f"{show_markdown(name)} {number}" for name, number in list(mistake["families"].items())[:5]
        )
        examples = "; ".join(
            f"{show_code(name)}: {show_code(detail[:80])}" if detail else show_code(name)
            for name, detail in mistake["examples"]
        )
        lines += [
            f"- **{mistake['conversations']} × {mistake['what']}** ({families})",
            f"  - such as {examples}",
            f"  - what would help: {mistake['helps']}",
        ]
    return lines


def list_words(summary: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """What stands under the table."""
    if summary["mistakes"]:
        yield "What is still wrong:"
    for mistake in summary["mistakes"]:
        families = ", ".join(f"{name} {number}" for name, number in list(mistake["families"].items())[:4])
        yield f"  {mistake['conversations']} × {mistake['what']} ({families})"
        name, detail = mistake["examples"][0]
        yield f"      such as {name}{': ' + detail[:90] if detail else ''}"
        yield f"      what would help: {mistake['helps']}"
    yield from summary["advice"]
    if summary["base"] in ("tiny", "tiny-desk"):
        yield (
            "This was a rehearsal with the tiny model: it shows whether tasks, tools, users and rewards are "
            "sound. Give --model for a real one"
        )
    yield f"{to_duration(summary['seconds']['total'])} in all; report: {directory / 'report.md'}"
    yield f"talk to it: trialogue chat {shlex.quote(summary['model'])} {shlex.quote(summary['domain'])}"
    yield f"look at every conversation: trialogue view {shlex.quote(str(directory))}"
