"""What a command shows in the terminal: live progress, then a table. Plain lines where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trialogue.trajectory import Group


@contextmanager
def show_progress(what: str, quiet: bool = False) -> Generator[Callable[[Group, int, int], None]]:
    """A progress bar on a terminal; elsewhere a plain line every few seconds; nothing where quiet."""
    console = Console(stderr=True)
    good = failed = 0
    if quiet or not console.is_terminal:
        last = monotonic()

        def plain(group: Group, done: int, total: int) -> None:
            nonlocal good, failed, last
            good += sum(item.reward is not None and item.reward.value >= 1 for item in group.trajectories)
            failed += len(group.failed)
            if not quiet and (monotonic() - last > 5 or done == total):
                last = monotonic()
                print(
                    f"{what} done={done} of={total} won={good} failed={failed}", file=sys.stderr, flush=True
                )

        yield plain
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        row = bar.add_task(what, total=None)

        def live(group: Group, done: int, total: int) -> None:
            nonlocal good, failed
            good += sum(item.reward is not None and item.reward.value >= 1 for item in group.trajectories)
            failed += len(group.failed)
            text = f"{what} · won {good / max(done, 1):.0%} · failed {failed}"
            bar.update(row, completed=done, total=total, description=text)

        yield live


def show_result(result: dict[str, Any], console: Console | None = None) -> None:
    """An evaluation as a table: overall, by family, by level, and how conversations ended."""
    console = console or Console()
    title = f"{result['domain']} · {result['split']} · agent {result['agent']} · user {result['user']}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("tasks", "pass^1", "95 %", "turns", "tool calls"):
        table.add_column(heading, justify="right")
    _add_row(table, "all", result)
    for part in ("families", "levels"):
        if result[part]:
            table.add_section()
        for name, figures in result[part].items():
            _add_row(table, name if part == "families" else f"level {name}", figures)
    console.print(table)
    ends = ", ".join(f"{end} {count}" for end, count in result["ends"].items())
    console.print(f"ends: {ends}")
    if result["failed"]:
        blame = ", ".join(f"{who} {count}" for who, count in result["blame"].items())
        console.print(f"failed and never scored: {result['failed']} (blame: {blame})")
    for name, note in result.get("notes", {}).items():
        console.print(f"{name}: {note}")
    console.print(f"run: {result['run']}", soft_wrap=True)


def _add_row(table: Table, name: str, figures: dict[str, Any]) -> None:
    if "pass^1" not in figures:
        table.add_row(name, str(figures["tasks"]), "–", "–", "–", "–")
        return
    table.add_row(
        name,
        str(figures["tasks"]),
        f"{figures['pass^1']:.3f}",
        f"{figures['pass^1_low']:.3f}–{figures['pass^1_high']:.3f}",
        f"{figures['turns']:.1f}",
        f"{figures['tool_calls']:.1f}",
    )
