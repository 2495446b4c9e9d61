"""`trialogue verify`: is a run as it was written, and do its figures follow from its conversations?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trialogue.cli.options import JSON
from trialogue.output import echo, echo_json


@click.command("verify")
@click.argument("run", type=click.Path(file_okay=False))
@click.option(
    "--drop",
    is_flag=True,
    help="First take out what does not agree, so that the run can be resumed; it is kept in RUN/injured.",
)
@JSON
def verify_verb(run: str, drop: bool, as_json: bool) -> None:
    """Prove a RUN directory: its files are as they were written, and every figure in result.json,
    metrics.jsonl and the report follows from the recorded conversations. Exit status 1 if not.

    Rewards are taken as recorded: `trialogue score RUN` grades again.
    """
    from trialogue.corpus.figures import derive
    from trialogue.digests import has_digests, inspect
    from trialogue.durable import find_damage
    from trialogue.errors import RunError, TrialogueError
    from trialogue.reading import reading
    from trialogue.repair import drop_injured
    from trialogue.run import read_about, refuse_missing
    from trialogue.view.report import find_changes

    path = Path(run)
    refuse_missing(path)
    read_about(path)
    taken_out = drop_injured(path) if drop else []
    injuries = inspect(path)
    lines = [injury.to_line() for injury in injuries]
    folders = [*sorted((path / "checkpoints").glob("step-*")), path / "model"]
    damages = {item.relative_to(path).as_posix(): find_damage(item) for item in folders if item.is_dir()}
    lines += [f"{name}: {damage}" for name, damage in damages.items() if damage is not None]
    found: dict[str, Any] = {"compared": 0, "differences": [], "not_derived": []}
    try:
        derived = derive(path)
        lines += [difference.to_line() for difference in derived.differences]
        found["compared"] = derived.compared
        found["differences"] = [difference.to_data() for difference in derived.differences]
        found["not_derived"] = sorted(derived.taken)
        with reading(path, RunError):
            changes = find_changes(path)
        for change in changes:
            lines.append(change)
            found["differences"].append({"file": change.partition(",")[0], "figure": change})
    except TrialogueError as error:
        lines.append(f"figures were not derived: {error}")
    result = {
        "run": run,
        "sound": not lines,
        "digests": has_digests(path),
        "injuries": [injury.to_data() for injury in injuries],
        "weights": {name: damage for name, damage in damages.items() if damage is not None},
        **found,
        "problems": lines,
        "dropped": [injury.to_data() for injury in taken_out],
    }
    if as_json:
        echo_json(result)
        sys.exit(1 if lines else 0)
    for injury in taken_out:
        echo(f"dropped: {injury.to_line()}")
    for line in lines:
        echo(line)
    if not result["digests"]:
        echo("written by an earlier version, without digests: only the figures were compared")
    echo(f"{found['compared']} figures derived again from the conversations and compared")
    if found["not_derived"]:
        echo(f"taken as recorded: {', '.join(found['not_derived'])}")
    echo("sound" if not lines else f"{len(lines)} problems")
    sys.exit(1 if lines else 0)
