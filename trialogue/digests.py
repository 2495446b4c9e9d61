"""Digests: how the records of a run show that they are as they were written.

- A line of a JSONL file ends with its digest (see `records`), which holds its number: a changed, missing,
  repeated or displaced line is found and named.
- `run.json` and `digests.json` end with a digest of their own text.
- `digests.json` lists the other files: how far a JSONL file reached at least, size and SHA-256 of the rest. A
  file is taken off the list before it is replaced, so a crash never makes a sound run look injured.

Digests find accidents and edits. They are no signature: whoever edits a record can compute them anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trialogue.durable import hash_file, is_json, lock_folder, write
from trialogue.errors import RunError
from trialogue.records import check_line, to_digest
from trialogue.secrets import redact

DIGESTS = "digests.json"
LINES = tuple(
    f"{name}.jsonl"
    for name in (
        *("metrics", "index", "timings", "ledger"),
        *("accepted", "rejected", "decisions", "verdicts"),
    )
)
"""Files of lines in a run directory, besides those in FOLDERS."""
FOLDERS = ("trajectories", "recordings")
WHOLE = (
    *("config.json", "prompts.json", "tokenizer.json", "result.json"),
    *("train.parquet", "validation.parquet"),
)
"""Files that are written as a whole."""
REPORTS = ("report.md", "report.html", "curves.svg")
"""What can be made again from the rest."""
_OWN = re.compile(rb',\n  "digest": "([0-9a-f]{16})"\n\}\n\Z')
_END = "\n}"
_ID = re.compile(rb'\{"id":("(?:[^"\\]|\\.)*")')
_TOLD = 3


# -- whole files -------------------------------------------------------------------------------------------


def write_stamped(path: Path, data: dict[str, Any]) -> None:
    """Write a file of JSON that ends with a digest of its own text."""
    plain = {key: value for key, value in data.items() if key != "digest"}
    text = redact(json.dumps(plain, indent=2, ensure_ascii=False))
    own = to_digest(text.encode())
    write(path, f'{text.removesuffix(_END)},\n  "digest": "{own}"{_END}\n')


def _read_stamped(path: Path) -> tuple[dict[str, Any], str]:
    """What a file with a digest of its own says, and what is wrong with it."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}, "is missing"
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"
    found = _OWN.search(raw)
    if found is None:
        return {}, "has no digest of its own: it was changed after it was written"
    if to_digest(raw[: found.start()] + b"\n}").encode() != found[1]:
        return {}, "was changed after it was written: its digest does not agree"
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, "is not JSON"
    return (cast("dict[str, Any]", value), "") if isinstance(value, dict) else ({}, "holds no JSON object")


def has_digests(run: Path) -> bool:
    """Whether a run directory keeps digests. An earlier version of the package kept none."""
    try:
        return (run / DIGESTS).exists() or b'\n  "digest": "' in (run / "run.json").read_bytes()
    except OSError:
        return False


Listed = dict[str, dict[str, Any]]
"""What `digests.json` knows of each file: `bytes`, and `sha256` of a file that is written as a whole."""


def read_listed(run: Path) -> Listed:
    """The files that `digests.json` lists; none where it cannot be read."""
    data, _ = _read_stamped(run / DIGESTS)
    return _to_listed(data)


def _to_listed(data: dict[str, Any]) -> Listed:
    files: Any = data.get("files")
    items = cast("dict[str, Any]", files).items() if isinstance(files, dict) else ()
    return {name: known for name, known in items if isinstance(known, dict) and "bytes" in known}


def write_listed(run: Path, listed: Listed) -> None:
    """Write `digests.json`."""
    write_stamped(run / DIGESTS, {"files": dict(sorted(listed.items()))})


def list_files(run: Path) -> list[str]:
    """The records that are in a run directory, by their path in it. Links are not followed."""
    known = [run / name for name in (*LINES, *WHOLE)]
    known += [file for folder in FOLDERS for file in sorted((run / folder).glob("*.jsonl"))]
    return [file.relative_to(run).as_posix() for file in known if file.is_file() and not file.is_symlink()]


def find_links(run: Path) -> list[str]:
    """Links that lead out of a run directory, by their path in it. The run may come from others: who goes on
    with it would write to files elsewhere."""
    root = run.resolve()
    inside = (Path(folder) / name for folder, names, files in os.walk(run) for name in (*names, *files))
    links = (path for path in inside if path.is_symlink() and not _leads_into(path, root))
    return sorted(path.relative_to(run).as_posix() for path in links)


def _leads_into(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return False


def list_now(run: Path) -> None:
    """Have `digests.json` list every record as it is now."""
    write_listed(run, {name: describe(run, name) for name in list_files(run)})


@contextmanager
def relisting(run: Path) -> Generator[None]:
    """Write the reports of a run in here: `digests.json` lists the new ones. Those of a run that another
    process is still writing are not listed."""
    try:
        lock = lock_folder(run) if (run / DIGESTS).is_file() else None
    except RunError:
        lock = None
    if lock is None:
        yield
        return
    with lock:
        listed = {name: known for name, known in read_listed(run).items() if name not in REPORTS}
        write_listed(run, listed)
        yield
        made = [name for name in REPORTS if (run / name).is_file()]
        write_listed(run, listed | {name: describe(run, name) for name in made})


def describe(run: Path, name: str) -> dict[str, Any]:
    """What `digests.json` is to know of a file as it is now."""
    file = run / name
    size = {"bytes": file.stat().st_size}
    return size if name.endswith(".jsonl") else {**size, "sha256": hash_file(file)}


# -- looking for injuries ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Injury:
    """A record that is not as it was written."""

    file: str
    line: int | None
    what: str

    def to_line(self) -> str:
        return f"{self.file}, line {self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"

    def to_data(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "what": self.what}


def inspect(run: Path) -> list[Injury]:
    """Everything in a run directory that is not as it was written. What a crash leaves at the end of a file
    is no injury while the run is unfinished. Of a run without digests only links can be told."""
    injuries = [Injury(name, None, "is a link that leads out of the run") for name in find_links(run)]
    if not has_digests(run):
        return injuries
    about, wrong = _read_stamped(run / "run.json")
    if wrong:
        injuries.append(Injury("run.json", None, wrong))
    data, missing = _read_stamped(run / DIGESTS)
    if missing:
        injuries.append(Injury(DIGESTS, None, missing))
    listed = _to_listed(data)
    is_open = about.get("state") == "running"
    ids: dict[bytes, str] = {}
    there = list_files(run)
    for name in sorted({*there, *listed}):
        known = listed.get(name)
        try:
            if name not in there and not (name in REPORTS and (run / name).is_file()):
                injuries.append(Injury(name, None, "is missing"))
            elif name.endswith(".jsonl"):
                reach = 0 if known is None else int(known["bytes"])
                injuries += _inspect_lines(run, name, reach, is_open, ids)
            elif known is not None and describe(run, name) != known:
                injuries.append(Injury(name, None, "was changed after it was written"))
        except OSError as error:
            injuries.append(Injury(name, None, f"cannot be read: {error.strerror}"))
            continue
        is_late = known is None and not is_open and not missing and name != "verdicts.jsonl"
        if is_late:
            injuries.append(Injury(name, None, "was added after the run had ended"))
    return injuries


def _inspect_lines(
    run: Path, name: str, reach: int, is_open: bool, ids: dict[bytes, str]
) -> Iterator[Injury]:
    """What is wrong with a file of lines that reached at least so far when it was listed."""
    torn: list[Injury] = []
    seen: set[int] = set()
    last = at = 0
    with (run / name).open("rb") as source:
        for place, line in enumerate(source, 1):
            number, agrees = check_line(line)
            what = _find_flaw(line, number, agrees, seen, last)
            if what and is_open and at >= reach and not (line.endswith(b"\n") and is_json(line)):
                torn.append(Injury(name, place, what))  # unless whole lines follow
            else:
                yield from torn
                torn = []
                if number is None or not agrees:
                    last += 1
                else:
                    seen.add(number)
                    last = max(last, number)
                if not what and name.startswith("trajectories/") and (found := _ID.match(line)):
                    here = f"{name}, line {place}"
                    if (first := ids.setdefault(found[1], here)) != here:
                        what = f"repeats the conversation of {first}"
                if what:
                    yield Injury(name, place, what)
            at += len(line)
    if at < reach:
        yield Injury(name, None, f"is too short: {reach - at} of its {reach} bytes are missing")


def _find_flaw(line: bytes, number: int | None, agrees: bool, seen: set[int], last: int) -> str:
    if not line.strip():
        return "is empty"
    if not line.endswith(b"\n"):
        return "is cut off"
    if number is None:
        return "has no digest: it was changed after it was written, or added"
    if not agrees:
        return "was changed after it was written: its digest does not agree"
    if number in seen:
        return f"repeats line {number}"
    if number < last:
        return f"was line {number}: it is not in its place"
    if number > last + 1:
        return f"was line {number}: {number - last - 1} before it missing"
    return ""


def refuse_injured(run: Path) -> None:
    """Raise an error that names the injured records of a run and says how to go on. Reports do not matter:
    they are made again."""
    injuries = [injury for injury in inspect(run) if injury.file not in REPORTS]
    if not injuries:
        return
    told = "; ".join(injury.to_line() for injury in injuries[:_TOLD])
    more = f"; and {len(injuries) - _TOLD} more" if len(injuries) > _TOLD else ""
    raise RunError(
        f"{run} is not as it was written: {told}{more}. `trialogue verify {run}` lists everything. Put the "
        f"files back from a copy, or leave out what does not agree with `trialogue verify {run} --drop`"
    )
