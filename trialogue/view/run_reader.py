"""The files of a run directory, read as they grow. Nothing is ever written, and no run is held in memory:
of a conversation only its entry is kept, its words stay on disk until somebody looks at them.
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
from trialogue.index import Entry, to_entry
from trialogue.lines import unstamp
from trialogue.trajectory import Trajectory

RUN = "run.json"
_DEEPEST = 3
"""How far below the folder runs are looked for; a demonstration has its runs one level down."""


def find_file(run: Path, name: str) -> Path | None:
    """A file of a run that may be read and shown. None where it is missing, no regular file (opening a pipe
    would wait), or reached by a link that leads out of the run: whoever sent the run may have made it."""
    try:
        found = (run / name).resolve(strict=True)
        return found if found.is_file() and found.is_relative_to(run.resolve()) else None
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return None


class Tail:
    """A file of lines of a run that somebody may still be writing."""

    def __init__(self, run: Path, name: str) -> None:
        self.run, self.name = run, name
        self.at = 0
        self._node = 0

    def read(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Whether the file was begun anew, and the whole lines since the last look with their places."""
        try:
            path = find_file(self.run, self.name)
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
    """Which part of a run a file of conversations belongs to: steps, evaluations, or the whole."""

    part: str
    step: int | None


@lru_cache(maxsize=4096)
def to_place(file: str) -> Place:
    """`step-000012` is step 12 of the training, `eval-000010` the evaluation after step 10."""
    found = re.fullmatch(r"(.+)-(\d+)", file)
    return Place(found[1], int(found[2])) if found else Place(file, None)


@dataclass(slots=True)
class _File:
    """What is known of one file of conversations."""

    entries: list[Entry] = field(default_factory=list[Entry])
    covered: int = 0
    """Bytes that the entries account for."""
    broken: int = 0
    """Lines that are no conversation."""


class RunRecords:
    """One run directory. `refresh` brings everything up to date; it costs what was written since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics: list[dict[str, Any]] = []
        self.seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Where the time of each step went: agent, user, tools, rollout, update, evaluate."""
        self.timings: dict[str, int] = {}
        """Where the line of each conversation stands in `timings.jsonl`."""
        self.files: dict[str, _File] = {}
        self.decisions: dict[str, dict[str, Any]] = {}
        """Of synthesised conversations: which were taken, which were not, and why."""
        self.version = 0
        """Another one whenever something was read."""
        self._versions = count(1)
        self.scanning = False
        self._scanner: Thread | None = None
        self.injuries: list[str] = []
        """Which records are not as they were written, a line each."""
        self._inspected: tuple[Any, ...] = ()
        self._inspector: Thread | None = None
        self._listed: dict[str, dict[int, Entry]] = defaultdict(dict)
        self._ids: dict[str, Entry] | None = None
        self._groups: dict[tuple[str, str], list[Entry]] | None = None
        self._lock = Lock()
        self._metrics_lock = Lock()  # the list of runs shows metrics and need not wait for conversations
        names = ("metrics", "timings", "index", "decisions")
        self._tails = {name: Tail(path, f"{name}.jsonl") for name in names}

    # -- small files ---------------------------------------------------------------------------------------

    def read_json(self, name: str) -> dict[str, Any]:
        """A small file of the run; empty where it is missing or half written."""
        file = find_file(self.path, name)
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
        """When something was written last, as seconds since the epoch."""
        names = ("metrics.jsonl", "timings.jsonl", "index.jsonl", "run.json", "trajectories")
        return max(
            (file.lstat().st_mtime for name in names if os.path.lexists(file := self.path / name)),
            default=0.0,
        )

    # -- what grows ----------------------------------------------------------------------------------------

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
        """Read whatever is new. Conversations that no index lists are looked through in the background."""
        self.refresh_metrics()
        self._refresh_injuries()
        with self._lock:
            self._refresh_timings()
            self._refresh_decisions()
            sizes = self._refresh_index()
            if self.scanning or all(self.files[name].covered >= size for name, size in sizes.items()):
                return
            self.scanning = True
        self._scanner = Thread(target=self._scan, daemon=True, name=f"scan {self.path.name}")
        self._scanner.start()

    def wait(self) -> None:
        """Until every conversation that is there has been looked through."""
        for thread in (self._scanner, self._inspector):
            if thread is not None:
                thread.join()

    def _refresh_injuries(self) -> None:
        """Look for injured records in the background: when the run is opened, when its state has changed, and
        when a file of a run that has ended is no longer the same."""
        with self._metrics_lock:
            if self.is_inspecting:
                return
            state = self._sign()
            if state == self._inspected:
                return
            self._inspected = state
            self._inspector = Thread(target=self._inspect, daemon=True, name=f"inspect {self.path.name}")
            self._inspector.start()

    @property
    def is_inspecting(self) -> bool:
        return self._inspector is not None and self._inspector.is_alive()

    def _sign(self) -> tuple[Any, ...]:
        """What changes when a record does, as far as the file system tells."""
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
            # The seconds of single turns come last and are most of the line; nobody asks for them yet.
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
        """Read the new lines of `index.jsonl`; gives the sizes of the files it should account for."""
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
            # Entries count only where they follow each other without a gap and end inside the file.
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
        """Bytes of each file of conversations, by name. Links are not followed, not even one in place of the
        folder."""
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
        """Make the entries that are missing, by reading the conversations themselves."""
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
        """All conversations, newest step last."""
        for name in sorted(self.files):
            yield from list(self.files[name].entries)

    def count(self) -> int:
        return sum(len(file.entries) for file in self.files.values())

    def find(self, identity: str) -> Entry | None:
        """The conversation of that id."""
        if self._ids is None:
            self._ids = {entry.id: entry for entry in self.entries()}
        return self._ids.get(identity)

    def siblings(self, entry: Entry) -> list[Entry]:
        """The conversations of its group: the same task in the same file."""
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
        """Seconds of each turn of a conversation, where they are on record."""
        at, file = self.timings.get(identity), find_file(self.path, "timings.jsonl")
        if at is None or file is None:
            return []
        with file.open("rb") as source:
            source.seek(at)
            turns: Any = _to_object(source.readline()).get("turns")
        listed = cast("list[Any]", turns) if isinstance(turns, list) else []
        return [seconds for seconds in listed if isinstance(seconds, int | float)]


def _to_seconds(value: Any) -> dict[Any, float]:
    """What is a number of seconds; other things are passed over."""
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
    """The run directories in a folder, or the folder itself if it is one, by name. Links are not followed."""
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
