"""Read the files of a run directory as they grow. Nothing is written.

Only index entries stay in memory; a conversation is read from disk when it is shown.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from trialogue.digests import DIGESTS, inspect, list_files
from trialogue.records import Entry, to_entry, unstamp
from trialogue.trajectory import Trajectory

RUN = "run.json"
_DEEPEST = 3
"""How many levels below the folder runs are searched; a demonstration has its runs one level down."""


def find_run_file(run: Path, name: str) -> Path | None:
    """A file of a run that may be read and shown. None if it is missing, is not a regular file (opening a
    pipe would block), or is a link that leads out of the run: the run may come from someone else."""
    try:
        found = (run / name).resolve(strict=True)
        return found if found.is_file() and found.is_relative_to(run.resolve()) else None
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return None


class Tail:
    """A file of lines that another process may still be appending to."""

    def __init__(self, run: Path, name: str) -> None:
        self.run, self.name = run, name
        self.at = 0
        self._node = 0

    def read(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Whether the file was replaced, and the complete lines added since the last call, with offsets."""
        try:
            path = find_run_file(self.run, self.name)
            status = path.stat() if path is not None else None
        except OSError:
            path = status = None
        if path is None or status is None:
            anew = self.at > 0
            self.at = self._node = 0
            return anew, []
        anew = self.at > 0 and (status.st_size < self.at or status.st_ino != self._node)
        if anew:
            self.at = 0
        self._node = status.st_ino
        lines: list[tuple[int, bytes]] = []
        if status.st_size > self.at:
            with path.open("rb") as source:
                source.seek(self.at)
                for line in source:
                    if not line.endswith(b"\n"):
                        break
                    lines.append((self.at, line))
                    self.at += len(line)
        return anew, lines


class Place(NamedTuple):
    """The part of a run that a file of conversations belongs to: a step, an evaluation, or the whole run."""

    part: str
    step: int | None


@lru_cache(maxsize=4096)
def to_place(file: str) -> Place:
    """`step-000012` is step 12 of the training, `eval-000010` the evaluation after step 10."""
    found = re.fullmatch(r"(.+)-(\d+)", file)
    return Place(found[1], int(found[2])) if found else Place(file, None)


@dataclass(slots=True)
class _File:
    """One file of conversations, as far as it was read."""

    entries: list[Entry] = field(default_factory=list[Entry])
    covered: int = 0
    """Number of bytes that the entries cover."""
    broken: int = 0
    """Number of lines that are not conversations."""


class RunRecords:
    """One run directory. `refresh` reads only what was written since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics: list[dict[str, Any]] = []
        self.seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Seconds of each step by part: agent, user, tools, rollout, update, evaluate."""
        self.timings: dict[str, int] = {}
        """Offset of each conversation's line in `timings.jsonl`."""
        self.files: dict[str, _File] = {}
        self.decisions: dict[str, dict[str, Any]] = {}
        """The decision about each synthesised conversation."""
        self.version = 0
        """Changes whenever something new was read."""
        self._versions = count(1)
        self.scanning = False
        self._scanner: Thread | None = None
        self.injuries: list[str] = []
        """One line for each record that is not as it was written."""
        self._inspected: tuple[Any, ...] = ()
        self._inspector: Thread | None = None
        self._listed: dict[str, dict[int, Entry]] = defaultdict(dict)
        self._ids: dict[str, Entry] | None = None
        self._groups: dict[tuple[str, str], list[Entry]] | None = None
        self._lock = Lock()
        self._metrics_lock = Lock()  # the list of runs needs metrics and must not wait for conversations
        names = ("metrics", "timings", "index", "decisions")
        self._tails = {name: Tail(path, f"{name}.jsonl") for name in names}

    # -- small files ---------------------------------------------------------------------------------------

    def read_json(self, name: str) -> dict[str, Any]:
        """A small JSON file of the run; empty if it is missing or incomplete."""
        file = find_run_file(self.path, name)
        if file is None:
            return {}
        try:
            value: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

    @property
    def about(self) -> dict[str, Any]:
        return self.read_json("run.json")

    def written(self) -> float:
        """Time of the last write, in seconds since the epoch."""
        names = ("metrics.jsonl", "timings.jsonl", "index.jsonl", "run.json", "trajectories")
        return max(
            (file.lstat().st_mtime for name in names if os.path.lexists(file := self.path / name)),
            default=0.0,
        )

    # -- growing files -------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of training steps."""
        return [line for line in self.metrics if "kind" not in line and "step" in line]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of held-out evaluations."""
        return [line for line in self.metrics if line.get("kind") == "eval"]

    def refresh_metrics(self) -> None:
        """Read the new lines of `metrics.jsonl`."""
        with self._metrics_lock:
            anew, lines = self._tails["metrics"].read()
            if anew:
                self.metrics.clear()
            for _, line in lines:
                if value := _to_object(line):
                    self.metrics.append(value)
            if anew or lines:
                self.version = next(self._versions)

    def refresh(self) -> None:
        """Read whatever is new. Conversations missing from the index are scanned in the background."""
        self.refresh_metrics()
        self._refresh_injuries()
        with self._lock:
            self._refresh_timings()
            self._refresh_decisions()
            sizes = self._refresh_index()
            if self.scanning or all(self.files[name].covered >= size for name, size in sizes.items()):
                return
            self.scanning = True
            scanner = Thread(target=self._scan, daemon=True, name=f"scan {self.path.name}")
            scanner.start()
            self._scanner = scanner  # set when it runs: another thread may join it at once

    def wait(self) -> None:
        """Wait until the background scans are done."""
        for thread in (self._scanner, self._inspector):
            if thread is not None:
                thread.join()

    def _refresh_injuries(self) -> None:
        """Look for injured records in the background when the run is opened, when its state changes, and when
        a file of a finished run changes."""
        with self._metrics_lock:
            if self.is_inspecting:
                return
            state = self._sign()
            if state == self._inspected:
                return
            self._inspected = state
            inspector = Thread(target=self._inspect, daemon=True, name=f"inspect {self.path.name}")
            inspector.start()
            self._inspector = inspector

    @property
    def is_inspecting(self) -> bool:
        return self._inspector is not None and self._inspector.is_alive()

    def _sign(self) -> tuple[Any, ...]:
        """Size and time of the run's records: these change when a record does."""
        names = [RUN, DIGESTS]
        if self.about.get("state") != "running":
            names += list_files(self.path)
        signs: list[Any] = []
        for name in names:
            try:
                status = (self.path / name).stat()
                signs.append((name, status.st_size, status.st_mtime_ns))
            except OSError:
                signs.append((name,))
        return tuple(signs)

    def _inspect(self) -> None:
        try:
            found = [injury.to_line() for injury in inspect(self.path)]
        except OSError as error:
            found = [f"cannot be read: {error.strerror}"]
        if found != self.injuries:
            self.injuries = found
            self.version = next(self._versions)

    def _refresh_timings(self) -> None:
        anew, lines = self._tails["timings"].read()
        if anew:
            self.timings.clear()
            self.seconds.clear()
        for at, line in lines:
            # The seconds of single turns are most of the line and not needed yet.
            cut = line.find(b', "turns": [')
            value = _to_object(line if cut < 0 else line[:cut] + b"}")
            identity, step = value.get("id"), value.get("step")
            if isinstance(identity, str):
                self.timings[identity] = at
                head = identity.partition("/")[0].partition(".")[0]
                if head.isdigit():
                    spent = self.seconds[int(head)]
                    for name, seconds in _to_seconds(value.get("seconds")).items():
                        spent[name] += seconds
            elif isinstance(step, int):
                del value["step"]
                for name, seconds in _to_seconds(value).items():
                    self.seconds[step][name] += seconds

    def _refresh_decisions(self) -> None:
        anew, lines = self._tails["decisions"].read()
        if anew:
            self.decisions.clear()
        for _, line in lines:
            if isinstance(identity := (value := _to_object(line)).get("id"), str):
                self.decisions[identity] = value
        if anew or lines:
            self._forget()

    def _refresh_index(self) -> dict[str, int]:
        """Read the new lines of `index.jsonl`; returns the sizes of the files it should cover."""
        anew, lines = self._tails["index"].read()
        if anew:
            self._listed.clear()
            self.files.clear()
        for _, line in lines:
            try:
                entry = Entry.model_validate_json(unstamp(line))
            except ValidationError:
                continue
            self._listed[entry.file][entry.at] = entry
        sizes = self._find_sizes()
        changed = bool(anew or lines)
        for name in [
            name for name in self.files if name not in sizes or self.files[name].covered > sizes[name]
        ]:
            del self.files[name]
            changed = True
        for name, size in sizes.items():
            known = self.files.setdefault(name, _File())
            listed = self._listed[name]
            # Accept entries only without gaps between them and inside the file.
            while (entry := listed.pop(known.covered, None)) is not None and entry.at + entry.bytes <= size:
                known.entries.append(entry)
                known.covered += entry.bytes
                changed = True
        if changed:
            self._forget()
        return sizes

    def _forget(self) -> None:
        self._ids = self._groups = None
        self.version = next(self._versions)

    def _find_sizes(self) -> dict[str, int]:
        """Size of each file of conversations, by name. Links are not followed, not even for the folder."""
        folder = self.path / "trajectories"
        try:
            if folder.is_symlink():
                return {}
            with os.scandir(folder) as found:
                return {
                    item.name.removesuffix(".jsonl"): item.stat().st_size
                    for item in sorted(found, key=lambda item: item.name)
                    if item.name.endswith(".jsonl") and item.is_file(follow_symlinks=False)
                }
        except OSError:
            return {}

    def _scan(self) -> None:
        """Create missing entries by reading the conversations themselves."""
        try:
            for name in self._find_sizes():
                known = self.files.get(name)
                if known is None:
                    continue
                with (self.path / "trajectories" / f"{name}.jsonl").open("rb") as source:
                    source.seek(known.covered)
                    batch: list[Entry | None] = []
                    at = known.covered
                    for line in source:
                        if not line.endswith(b"\n"):
                            break
                        batch.append(_scan_line(line, name, at))
                        at += len(line)
                        if len(batch) == 64:
                            self._keep(known, batch, at)
                            batch = []
                    self._keep(known, batch, at)
        finally:
            self.scanning = False

    def _keep(self, known: _File, batch: list[Entry | None], at: int) -> None:
        with self._lock:
            if batch and at > known.covered:
                known.entries += [entry for entry in batch if entry is not None]
                known.broken += sum(entry is None for entry in batch)
                known.covered = at
                self._forget()

    # -- conversations -------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """All conversations, the newest step last."""
        for name in sorted(self.files):
            yield from list(self.files[name].entries)

    def count(self) -> int:
        return sum(len(file.entries) for file in self.files.values())

    def find(self, identity: str) -> Entry | None:
        """The conversation with an id."""
        if self._ids is None:
            self._ids = {entry.id: entry for entry in self.entries()}
        return self._ids.get(identity)

    def siblings(self, entry: Entry) -> list[Entry]:
        """The conversations of the same task in the same file."""
        return self.groups().get((entry.file, entry.task), [entry])

    def groups(self) -> dict[tuple[str, str], list[Entry]]:
        if self._groups is None:
            groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
            for entry in self.entries():
                groups[entry.file, entry.task].append(entry)
            self._groups = {
                key: sorted(items, key=lambda item: (item.trial, item.id)) for key, items in groups.items()
            }
        return self._groups

    def read(self, entry: Entry) -> bytes:
        """The line of a conversation."""
        with (self.path / "trajectories" / f"{entry.file}.jsonl").open("rb") as source:
            source.seek(entry.at)
            return source.read(entry.bytes)

    def read_seconds(self, identity: str) -> list[float]:
        """Seconds of each turn of a conversation; empty if not recorded."""
        at, file = self.timings.get(identity), find_run_file(self.path, "timings.jsonl")
        if at is None or file is None:
            return []
        with file.open("rb") as source:
            source.seek(at)
            turns: Any = _to_object(source.readline()).get("turns")
        listed = cast("list[Any]", turns) if isinstance(turns, list) else []
        return [seconds for seconds in listed if isinstance(seconds, int | float)]


def _to_seconds(value: Any) -> dict[Any, float]:
    """The numeric values; others are ignored."""
    known = cast("dict[Any, Any]", value) if isinstance(value, dict) else {}
    return {name: seconds for name, seconds in known.items() if isinstance(seconds, int | float)}


def _to_object(line: bytes) -> dict[str, Any]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _scan_line(line: bytes, file: str, at: int) -> Entry | None:
    try:
        return to_entry(Trajectory.model_validate_json(unstamp(line)), file, at, len(line))
    except ValidationError:
        return None


def find_runs(root: Path) -> dict[str, Path]:
    """The run directories in a folder, by name, or the folder itself if it is one. Links are not followed."""
    if (root / "run.json").is_file():
        return {root.resolve().name: root}
    found: dict[str, Path] = {}
    for folder, names, files in os.walk(root):
        here = Path(folder)
        depth = len(here.relative_to(root).parts)
        if "run.json" in files:
            found[here.relative_to(root).as_posix()] = here
            names.clear()
        elif depth >= _DEEPEST:
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]
    return found
