"""A run directory: open, append, resume. Its files are the only interface between rooms and to the viewer.

run.json            kind, domain, seed, versions, command, state
config.json         the resolved configuration
prompts.json        what both sides are told: policies, user prompts, tools
metrics.jsonl       one line per step (or one for an evaluation)
index.jsonl         one short line per conversation
timings.jsonl       seconds, kept apart so that equal seeds give equal trajectories, byte by byte
result.json         the figures of a finished evaluation
recordings/*.jsonl  every reply of a model that has to be asked, to play back
ledger.jsonl        what endpoints used: tokens, money and seconds by role, model and step
trajectories/*.jsonl
digests.json        what all this was like when it was written
report.md, report.html

Every file is appended to by whole lines or replaced as a whole, and one process at a time may write: see
`durable` for how, `digests` for how an injured file is found, and `mark` and `rewind` for how a run goes on
from a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, Literal, cast

from pydantic import ValidationError

from trialogue.config import C, RendererSettings, RunSettings, Section, SftConfig, TrainConfig, to_config
from trialogue.digests import (
    describe,
    list_files,
    list_now,
    read_listed,
    write_listed,
    write_stamped,
)
from trialogue.durable import MANIFEST, lock_folder, mend, saving, sync, take_name, write_json
from trialogue.errors import ConfigError, RunError, suggest
from trialogue.reading import reading
from trialogue.records import append_records, is_listed, read_lines, remake_index, to_index, write_records
from trialogue.seams import split_reference
from trialogue.settings import MODELS
from trialogue.trajectory import Trajectory, Usage

Kind = Literal["eval", "rollout", "train", "sft", "synthesize"]
LEARNING = ("train", "sft", "verl")
"""Kinds of runs that end with a model; verl is driven by its own trainer."""
State = Literal["running", "finished", "stopped", "failed"]

_log = logging.getLogger("trialogue")


class Run:
    """A run directory that this process writes. A second process is refused."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self._unsynced: set[Path] = set()

    @classmethod
    def create(
        cls,
        settings: RunSettings,
        kind: Kind,
        domain: str,
        config: Section,
        seed: int,
        marks: Sequence[str] = (),
    ) -> Run:
        """Create a run directory. An existing one of that name is never overwritten. `marks` are warnings
        that all its results carry."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(domain).stem if "/" in domain else domain).strip("-")
        name = settings.name or f"{kind}-{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        path = _place(settings, name)
        if settings.name and path.exists():
            raise _to_taken(path)
        others = () if settings.name else (path.with_name(f"{name}-{number}") for number in count(2))
        # The directory gets its name when it is whole: what has the name can be resumed.
        partial = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}")
        run = None
        try:
            with saving(path):
                (partial / "trajectories").mkdir(parents=True)
                run = cls(partial, lock_folder(partial))
                write_json(partial / "config.json", config.model_dump(mode="json"))
                write_listed(partial, {"config.json": describe(partial, "config.json")})
                run._describe(
                    kind=kind,
                    domain=domain,
                    seed=seed,
                    state="running",
                    created=datetime.now(UTC).isoformat(timespec="seconds"),
                    folder=str(Path.cwd()),
                    command=[Path(sys.argv[0]).name, *sys.argv[1:]],
                    versions=find_versions(),
                    **({"marks": list(marks)} if marks else {}),
                )
                taken = take_name(partial, chain((path,), others))
                if taken is None:
                    raise _to_taken(path)
        except BaseException:
            if run is not None:
                run._lock.close()
            shutil.rmtree(partial, ignore_errors=True)
            raise
        run.path = taken
        return run

    @classmethod
    def resume(cls, path: Path) -> Run:
        """Open an existing run directory to resume it. Call `refuse_injured` first. A line cut off by a crash
        is dropped."""
        about = read_about(path)
        run = cls(path, lock_folder(path))
        for folder in (path, path / "trajectories", path / "recordings"):
            for file in folder.glob("*.jsonl"):
                if cut := mend(file):
                    _log.warning("%s: %d bytes of a line cut off by a crash were dropped", file, cut)
            for file in folder.glob("*.partial"):
                file.unlink()
        run._describe(state="running")
        run._list(name for name in read_listed(path) if name != "tokenizer.json" and run._is_steady(name))
        if about.get("kind") not in LEARNING and not is_listed(path):  # those rewind to a mark instead
            write_records(path / "index.jsonl", list(remake_index(find_files(path))))
        return run

    def _is_steady(self, name: str) -> bool:
        """Whether a file stays as it is, or is only appended to, until the run ends."""
        logs = ("ledger.jsonl", "verdicts.jsonl", "timings.jsonl")
        growing = name in logs or name.startswith(("trajectories/", "recordings/"))
        if read_about(self.path).get("kind") in LEARNING and name.startswith(("trajectories/", "timings")):
            return False  # rewound with the checkpoint, which notes how far they reached
        return growing or name in ("config.json", "prompts.json", "tokenizer.json")

    def _list(self, names: Iterable[str]) -> None:
        """Write `digests.json` anew: the present state of these files and no others."""
        write_listed(self.path, {name: describe(self.path, name) for name in names})

    @contextmanager
    def setting_up(self) -> Generator[None]:
        """Set the run's state to failed if an exception is raised here, so that it can be resumed."""
        try:
            yield
        except BaseException:
            self.close("failed")
            raise
        self._list(filter(self._is_steady, list_files(self.path)))

    def extend(self, steps: int) -> None:
        """Raise the number of steps of a run that learns. `model/` is removed, because it is no longer the
        final model; the last checkpoint holds the same weights."""
        file = self.path / "config.json"
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if config["training"]["steps"] < steps:
            config["training"]["steps"] = steps
            self._list(name for name in read_listed(self.path) if name != "config.json")
            write_json(file, config)
            shutil.rmtree(self.path / "model", ignore_errors=True)

    def add_prompts(self, prompts: dict[str, Any]) -> None:
        """Record the prompts of both sides. A resumed run keeps its original prompts."""
        if not (self.path / "prompts.json").exists():
            write_json(self.path / "prompts.json", prompts)

    def append(self, file: str, *lines: str) -> list[int]:
        """Append JSON objects to a file of the run, one per line. Returns the lengths of the lines."""
        if not lines:
            return []
        self._unsynced.add(self.path / file)
        return append_records(self.path / file, lines)

    def add_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Append conversations to `trajectories/NAME.jsonl`, and their seconds to `timings.jsonl`."""
        items = list(trajectories)
        file = self.path / "trajectories" / f"{name}.jsonl"
        at = file.stat().st_size if file.exists() else 0
        lengths = self.append(f"trajectories/{name}.jsonl", *(item.to_json() for item in items))
        self.append("index.jsonl", *to_index(name, items, at, lengths))
        self._add_timings(items)

    def write_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Write all conversations of `trajectories/NAME.jsonl` at once; append their seconds."""
        items = list(trajectories)
        file = self.path / "trajectories" / f"{name}.jsonl"
        lengths = write_records(file, [item.to_json() for item in items])
        self.append("index.jsonl", *to_index(name, items, 0, lengths))
        self._add_timings(items)

    def _add_timings(self, items: Sequence[Trajectory]) -> None:
        self.append(
            "timings.jsonl",
            *(json.dumps({"id": item.id, **to_timings(item)}) for item in items),
        )

    def add_seconds(self, wall: float) -> None:
        """Record how long this process worked on the run."""
        self.append("timings.jsonl", json.dumps({"wall": round(wall, 3)}))

    def add_ledger(self, lines: Iterable[dict[str, Any]], step: int | None = None) -> None:
        """Record what endpoints used, also for a step that is repeated later: it was spent."""
        known = {} if step is None else {"step": step}
        self.append("ledger.jsonl", *(json.dumps({**known, **line}) for line in lines))

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        self.append("metrics.jsonl", json.dumps(metrics))

    def add_timings(self, step: int, **figures: float) -> None:
        """Record the seconds that the parts of a step took, and speeds."""
        rounded = {name: round(value, 3) for name, value in figures.items()}
        self.append("timings.jsonl", json.dumps({"step": step, **rounded}))

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Replace the one line of figures of a finished evaluation."""
        write_records(self.path / "metrics.jsonl", [json.dumps(metrics)])

    def sync(self) -> None:
        """Flush everything appended so far to the disk."""
        with saving(self.path):
            for file in self._unsynced:
                sync(file)
        self._unsynced.clear()

    def mark(self) -> dict[str, int]:
        """The sizes of the run's records. A checkpoint keeps them for `rewind`."""
        return {file.relative_to(self.path).as_posix(): file.stat().st_size for file in self._records()}

    def rewind(self, mark: dict[str, int]) -> None:
        """Drop what was recorded after a mark, so that a resumed run records no step twice."""
        known = {self.path / name: size for name, size in mark.items()}
        for file, size in known.items():
            if not file.is_file() or file.stat().st_size < size:
                raise RunError(f"{file} is shorter than when the checkpoint was made: part of it is lost")
        with saving(self.path):
            for file in self._records():
                if file in known:
                    os.truncate(file, known[file])
                else:
                    file.unlink()
                    self._unsynced.discard(file)

    def _records(self) -> list[Path]:
        """The records of steps, without recordings and ledgers: requests cannot be undone."""
        lines = [self.path / f"{name}.jsonl" for name in ("metrics", "timings", "index")]
        return [file for file in (*lines, *find_files(self.path)) if file.is_file()]

    def close(self, state: State) -> None:
        try:
            self.sync()
            list_now(self.path)
            self._describe(state=state, ended=datetime.now(UTC).isoformat(timespec="seconds"))
        except RunError:
            if state != "failed":  # its cause is raised instead, and the run can be resumed
                raise
        finally:
            self._lock.close()

    def _describe(self, **facts: Any) -> None:
        path = self.path / "run.json"
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_stamped(path, {**about, **facts})


def set_aside(path: Path) -> Path | None:
    """Rename an existing folder, so that nothing in it is lost. Returns its new path. A folder in which a run
    is being written is refused."""
    if not path.exists():
        return None
    with suppress(FileNotFoundError):  # another process was first
        for lock in (path / ".lock", *path.glob("*/.lock")):
            if lock.exists():
                lock_folder(lock.parent).close()
        return take_name(path, (path.with_name(f"{path.name}-{number}") for number in count(1)))
    return None


def list_checkpoints(path: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(item for item in (path / "checkpoints").glob("step-*") if (item / MANIFEST).is_file())


def find_weights(path: Path) -> Path:
    """The folder with the newest weights of a run, or the folder itself."""
    if not (path / "run.json").is_file():
        if not (path / "config.json").is_file() and (runs := tell_runs(path)):
            raise RunError(f"{path} has no weights{runs}")
        return path
    if (path / "model").is_dir():
        return path / "model"
    found = list_checkpoints(path)
    if not found:
        raise RunError(f"{path} has no weights: no model/ and no checkpoint")
    return found[-1]


def tell_runs(path: Path) -> str:
    """The runs in a folder, for an error message: the caller may have meant one of them."""
    runs = sorted(file.parent.name for file in path.glob("*/run.json"))
    return f": name one of the runs in it ({', '.join(runs[:5])}), such as {path / runs[0]}" if runs else ""


def read_settings(path: Path) -> Any:
    """The plain settings of a run directory. Relative paths are found from where the run was begun."""
    file = path / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is no run directory: it has no config.json") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is not JSON: {error}") from None
    about = read_about(path) if (path / "run.json").is_file() else {}
    folder = about.get("folder")
    return _find_again(data, Path(folder)) if folder else data


def read_config(kind: type[C], path: Path) -> C:
    """The resolved configuration of a run directory."""
    data = read_settings(path)
    own = str(read_about(path).get("kind", "")) if (path / "run.json").is_file() else ""
    try:
        return to_config(kind, data, str(path / "config.json"))
    except ConfigError:
        if own and kind.__name__ != f"{own.capitalize()}Config":
            raise RunError(f"{path} is a run of `trialogue {own}`, and only that goes on with it") from None
        raise


def refuse_taken(settings: RunSettings) -> None:
    """Refuse a name that another run has, before anything is loaded."""
    if settings.name and (path := _place(settings, settings.name)).exists():
        raise _to_taken(path)


def _place(settings: RunSettings, name: str) -> Path:
    """The path of a run of that name, which must be directly in the folder of runs."""
    if name == ".." or Path(name).name != name:
        raise ConfigError(f"run.name: '{name}' is no name of one folder; run.directory says where it goes")
    return Path(settings.directory) / name


def _to_taken(path: Path) -> RunError:
    return RunError(f"{path} exists; resume it with --resume {path}, or choose another run.name")


_PLACES = ("domain", "data", "model", "otherwise", "examples", "prompt", "personas")
"""Settings that may name a file or folder. Every other one may name code in a file."""
WORDS = (
    "domain",
    "house",
    "scenario",
    "card",
    "oracle",
    "teacher",
    "naive",
    "gold",
    "agenda",
    "human",
    *MODELS,
)
"""Values of these settings that are not paths."""


def map_places(value: Any, find: Callable[[Path], Path | None], key: str = "") -> Any:
    """Plain settings with every path replaced by what `find` returns; None keeps the path."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: map_places(inner, find, name) for name, inner in items}
    if isinstance(value, list):
        return [map_places(inner, find, key) for inner in cast("list[Any]", value)]
    if not isinstance(value, str) or value in WORDS:
        return value
    if value.startswith("guided:"):
        return f"guided:{map_places(value.removeprefix('guided:'), find, key)}"
    code = split_reference(value)
    if code is not None and code.place.endswith(".py"):
        place = find(Path(os.path.expanduser(code.place)))
        return value if place is None else f"{place}:{code.name}"
    if key not in _PLACES:
        return value
    kind, sign, rest = value.rpartition(":")
    place = find(Path(rest).expanduser()) if rest else None
    return value if place is None else f"{kind}{sign}{place}"


def _find_again(data: Any, folder: Path) -> Any:
    """Resolve relative paths that do not exist here against the directory where the run was begun."""
    return map_places(
        data, lambda path: folder / path if not path.exists() and (folder / path).exists() else None
    )


def read_about(path: Path) -> dict[str, Any]:
    """`run.json` of a run directory."""
    try:
        about: Any = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is no run directory: it has no run.json{tell_runs(path)}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path / 'run.json'} is not JSON: {error}") from None
    if not isinstance(about, dict):
        raise RunError(f"{path / 'run.json'} holds no JSON object")
    return cast("dict[str, Any]", about)


def refuse_missing(path: Path, what: str = "run") -> None:
    """Refuse a run, or another path, that does not exist, and suggest similar names."""
    if not path.exists():
        place = path if len(path.parts) > 1 else Path("runs") / path
        known = [str(file.parent) for file in sorted(place.parent.glob("*/run.json"))]
        told = "; name a run or a folder of runs" if what == "folder" else ""
        raise ConfigError(f"there is no {what} {path}{told}{suggest(str(place), known)}")


def read_marks(model: str | Path) -> list[str]:
    """The marks of the run that a model or file is, or belongs to; none for what belongs to no run."""
    run = find_run(model)
    marks: Any = read_about(run).get("marks", []) if run is not None else []
    if not isinstance(marks, list):
        raise RunError(f"{run}/run.json: its marks are no list")
    return [str(mark) for mark in cast("list[Any]", marks)]


def collect_marks(origins: Iterable[str | Path], renderer: RendererSettings) -> list[str]:
    """The marks of a new run: those of the models and files it starts from, and of how replies are read."""
    return list(
        dict.fromkeys([*(mark for origin in origins for mark in read_marks(origin)), *renderer.marks])
    )


def find_run(model: str | Path) -> Path | None:
    """The run that a model or file is, or belongs to."""
    path = Path(str(model).removeprefix("local:")).expanduser().resolve()
    folders = (path, *path.parents) if path.exists() else ()
    return next((folder for folder in folders if (folder / "run.json").is_file()), None)


def read_learned(model: str) -> TrainConfig | SftConfig | None:
    """The settings of the run that a model has learned in, where it is of such a run."""
    run = find_run(model)
    if run is None:
        return None
    kind = read_about(run).get("kind")
    return read_config(SftConfig if kind == "sft" else TrainConfig, run) if kind in LEARNING else None


def find_files(path: Path) -> list[Path]:
    """The files of conversations of a run directory."""
    return sorted((path / "trajectories").glob("*.jsonl"))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The conversations of a run directory or of one JSONL file."""
    folder = path / "trajectories"
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [path]
    if path.is_dir() and not files:
        raise RunError(f"{path} holds no trajectories")
    for file in files:
        for number, value in read_lines(file):
            yield to_trajectory(file, number, value)


def to_trajectory(file: Path, number: int, value: dict[str, Any]) -> Trajectory:
    """A conversation from its line in a file."""
    try:
        return Trajectory.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{file}, line {number}: no trajectory: {where}: {first['msg']}") from None


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's ledger: what endpoints used."""
    file = path / "ledger.jsonl"
    return [line for _, line in read_lines(file)] if file.exists() else []


def read_prompts(path: Path) -> dict[str, Any]:
    """`prompts.json` of a run directory."""
    file = path / "prompts.json"
    with reading(file, RunError):
        return {"hash": None, "tasks_hash": None, **json.loads(file.read_text(encoding="utf-8"))}


def judge_file(path: Path) -> Path:
    """The file of a run directory with its judge's answers."""
    return path / "recordings" / "judge.jsonl"


def read_usage(file: Path) -> list[Usage]:
    """The billed usage of a recording's replies."""
    lines = read_lines(file) if file.exists() else ()
    with reading(file, RunError):
        return [Usage.model_validate(line["usage"]) for _, line in lines if line.get("usage")]


def to_timings(trajectory: Trajectory) -> dict[str, Any]:
    """Seconds of a conversation, by agent, user and tools, and of each turn."""
    seconds = {"agent": 0.0, "user": 0.0, "tools": 0.0}
    for turn in trajectory.turns:
        seconds["tools" if turn.message.role == "tool" else turn.side] += turn.seconds
    parts = {who: round(value, 4) for who, value in seconds.items()}
    return {"seconds": parts, "turns": [round(turn.seconds, 4) for turn in trajectory.turns]}


def read_seconds(path: Path) -> tuple[float, dict[str, dict[str, float]]]:
    """Wall-clock seconds of a run over all its processes, and the seconds of each conversation."""
    file = path / "timings.jsonl"
    wall, parts = 0.0, dict[str, dict[str, float]]()
    for number, line in read_lines(file) if file.exists() else ():
        with reading(f"{file}, line {number}", RunError):
            if "wall" in line:
                wall += float(line["wall"])
            elif "id" in line:
                seconds = {str(who): float(value) for who, value in line["seconds"].items()}
                parts[str(line["id"])] = seconds
    return wall, parts


def find_versions() -> dict[str, str]:
    """Versions of Python and of the packages that may change a result."""
    found = {"python": platform.python_version()}
    for package in ("trialogue", "pydantic", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
