"""The verbs that read what was recorded: grade again, report, verify, look."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trialogue.cli.options import Whole, offer
from trialogue.output import echo, echo_json, echo_lines


@click.command("score")
@click.argument("path", type=click.Path())
@click.argument("domain", required=False)
@click.option("--benchmark", help="Grade what a benchmark's own code recorded, such as tau2:retail.")
@offer("reward", "data", "trust", "json")
def score_verb(
    path: str,
    domain: str | None,
    benchmark: str | None,
    reward: str | None,
    data: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Grade recorded conversations again, from a run directory or a JSONL file alone. DOMAIN and reward are
    the recorded ones, where no others are named.

    \b
    trialogue score runs/agent
    trialogue score runs/bakery-1 bakery --reward mine.py:reward
    """
    from trialogue.errors import RunError
    from trialogue.run import refuse_missing

    refuse_missing(Path(path), "run or file")
    if benchmark is not None:
        if reward is not None:
            raise click.UsageError("--benchmark grades by the benchmark's own rules: leave --reward out")
        from trialogue.benchmarks.recorded import score_recorded

        graded = score_recorded(path, benchmark, data)
        if not graded:
            raise RunError(f"{path} holds no conversation to grade")
        if as_json:
            echo_json([row.to_data() for row in graded])
            return
        for row in graded:
            echo(row.to_line())
        return
    from trialogue.score.rescore import rescore

    rows = rescore(Path(path), domain, data, reward, trust=trust)
    if not rows:
        raise RunError(f"{path} holds no conversation to grade")
    if as_json:
        echo_json([row.to_data() for row in rows])
    else:
        for row in rows:
            echo(row.to_line())
        echo(f"{len(rows)} conversations, {sum(row.same for row in rows)} graded as recorded")
    sys.exit(0 if all(row.same for row in rows) else 1)


@click.command("report")
@click.argument("run", type=click.Path(file_okay=False))
@click.argument("other", required=False, type=click.Path(file_okay=False))
@offer("json")
def report_verb(run: str, other: str | None, as_json: bool) -> None:
    """Write report.md of a finished RUN directory, and print it; with OTHER, compare the two task by task."""
    from trialogue.digests import refuse_injured
    from trialogue.run import read_about, refuse_missing
    from trialogue.view.report import read_result, write_report

    path = Path(run)
    refuse_missing(path)
    refuse_injured(path)
    if other is not None:
        from trialogue.view.paired import compare_runs, to_comparison

        refuse_missing(Path(other))
        refuse_injured(Path(other))
        compared = compare_runs(path, Path(other))
        if as_json:
            echo_json(compared)
        else:
            echo_lines(to_comparison(compared))
        return
    target = write_report(path)
    text = target.read_text(encoding="utf-8")
    if as_json:
        about = read_about(path)
        facts = {key: about.get(key) for key in ("kind", "state", "created", "ended", "seed", "versions")}
        result = read_result(path) if (path / "result.json").exists() else None
        echo_json({"run": run, "report": str(target), **facts, "result": result, "markdown": text})
    else:
        echo_lines(text.rstrip("\n"))


@click.command("verify")
@click.argument("run", type=click.Path(file_okay=False))
@click.option(
    "--drop",
    is_flag=True,
    help="First take out what does not agree, so that the run can be resumed; it is kept in RUN/injured.",
)
@offer("json")
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


@click.command("view")
@click.argument("folder", default="runs", type=click.Path(file_okay=False))
@click.option("--port", type=Whole(0, 65535), default=7878, show_default=True, help="0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--export", "target", metavar="FILE.html", help="Instead, write one self-contained file.")
@click.option("--id", "identity", help="With --export: only this conversation and its siblings.")
@click.option("--most", type=Whole(1), default=300, show_default=True, help="With --export: conversations.")
@offer("json")
def view_verb(
    folder: str, port: int, host: str, target: str | None, identity: str | None, most: int, as_json: bool
) -> None:
    """Look at the runs in FOLDER (or at one run) in a browser; a run in progress is followed.

    \b
    trialogue view
    trialogue view runs/agent --export agent.html
    """
    from trialogue.run import refuse_missing

    refuse_missing(Path(folder), "folder")
    if target is not None:
        from trialogue.activity import phase
        from trialogue.view.export import write_export

        with phase("writing the page"):
            written = write_export(Path(folder), Path(target), identity, most=most)
        if as_json:
            echo_json(written)
        else:
            echo(f"wrote {target}: {written['conversations']} of {written['of']} conversations")
        for injury in written["injuries"]:
            echo(f"not as it was written: {injury}", err=True)
        return
    if identity is not None:
        raise click.UsageError("--id goes with --export FILE.html; the page shows every conversation")
    from contextlib import suppress

    from trialogue.view.server import open_server

    with open_server(Path(folder), host, port) as server:
        if as_json:
            echo_json({"address": server.address})
        else:
            echo(f"{server.address}  (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
