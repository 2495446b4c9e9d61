"""Take injured records out of a run, so that it can be resumed: what is missing then is done again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from trialogue.digests import REPORTS, Injury, has_digests, inspect, list_now, write_stamped
from trialogue.durable import lock_folder
from trialogue.errors import RunError
from trialogue.records import check_line, unstamp, write_records
from trialogue.run import LEARNING, read_about

ASIDE = "injured"
"""The folder in a run in which the files are kept as they were found."""
NEEDED = ("run.json", "config.json")
MADE_AGAIN = ("index.jsonl", "metrics.jsonl", "result.json", *REPORTS)


def drop_injured(run: Path) -> list[Injury]:
    """Take out every record that does not agree with its digest, and write new digests. Returns what was
    wrong. The files as they were are kept in `injured`."""
    about = read_about(run)
    if not has_digests(run):
        raise RunError(f"{run} was written by an earlier version, without digests: nothing can be told apart")
    with lock_folder(run):
        injuries = inspect(run)
        if not injuries:
            return []
        if about.get("kind") in LEARNING:
            raise RunError(
                f"{run} has learned from its records, so none can be taken out: put the files back from a "
                f"copy, or begin a new run from its weights with learner.model={run}"
            )
        if lost := [injury.file for injury in injuries if injury.file in NEEDED]:
            raise RunError(f"{run} cannot do without {lost[0]}: put it back from a copy")
        for name in dict.fromkeys(injury.file for injury in injuries):
            if (run / name).is_symlink():
                (run / name).unlink()
            elif (run / name).is_file():
                _take_out(run, name)
        for name in MADE_AGAIN:
            (run / name).unlink(missing_ok=True)
        write_stamped(run / "run.json", {**about, "state": "stopped"})
        list_now(run)
        return injuries


def _take_out(run: Path, name: str) -> None:
    """Keep a copy of a file and leave its sound lines in it. A file that is not made of lines goes."""
    file = run / name
    copy = run / ASIDE / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
    if file.suffix == ".jsonl":
        write_records(file, list(_find_sound(file)))
    else:
        file.unlink()


def _find_sound(file: Path) -> Iterator[str]:
    """The lines of a file that are as they were written, each once."""
    seen: set[int] = set()
    with file.open("rb") as source:
        for line in source:
            number, agrees = check_line(line)
            if number is not None and agrees and number not in seen and line.endswith(b"\n"):
                seen.add(number)
                yield unstamp(line).decode().rstrip("\n")
