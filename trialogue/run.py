"""A run directory: open, append, resume. Its files are the only interface between rooms and to the viewer.

run.json            kind, domain, seed, versions, command, state
config.json         the resolved configuration
prompts.json        what both sides are told: policies, user prompts, tools
metrics.jsonl       one line per step (or one for an evaluation)
index.jsonl         one short line per conversation
timings.jsonl       seconds, kept apart so that equal seeds give equal trajectories, byte by byte
result.json         the figures of a finished evaluation
recordings/*.jsonl  every reply of an endpoint's model, to play back
trajectories/*.jsonl
report.md
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal, cast

from pydantic import ValidationError

from trialogue.config import C, RunSettings, Section, to_config
from trialogue.errors import RunError
from trialogue.index import to_entry
from trialogue.trajectory import Trajectory, Usage

Kind = Literal["eval", "rollout", "train", "sft", "synthesize"]
State = Literal["running", "finished", "stopped", "failed"]


class Run:
    """A directory being written. One process at a time: a second one is refused."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

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
        """A new run directory. An existing one of that name is never overwritten. `marks` is what everybody
        who looks at its results has to know."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(domain).stem if "/" in domain else domain).strip("-")
        name = settings.name or f"{kind}-{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        path = Path(settings.directory) / name
        number = 1
        while settings.name is None and path.exists():
            number += 1
            path = Path(settings.directory) / f"{name}-{number}"
        try:
            (path / "trajectories").mkdir(parents=True, exist_ok=False)
        except OSError as error:
            if not isinstance(error, FileExistsError) or not path.is_dir():
                raise RunError(f"cannot make the run directory {path}: {error.strerror}") from None
            raise RunError(
                f"{path} exists; resume it with --resume {path}, or choose another run.name"
            ) from None
        run = cls(path, _lock(path))
        write_json(path / "config.json", config.model_dump(mode="json"))
        run._describe(
            kind=kind,
            domain=domain,
            seed=seed,
            state="running",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            versions=find_versions(),
            **({"marks": list(marks)} if marks else {}),
        )
        return run

    @classmethod
    def resume(cls, path: Path, kind: Kind | None = None) -> Run:
        """An existing run directory, to go on with. A line cut off by a crash is dropped."""
        about = read_about(path)
        if kind is not None and about.get("kind") != kind:
            raise RunError(f"{path} is a run of kind '{about.get('kind')}', not '{kind}'")
        run = cls(path, _lock(path))
        for folder in (path, path / "trajectories", path / "recordings"):
            for file in folder.glob("*.jsonl"):
                mend(file)
        run._describe(state="running")
        return run

    def add_prompts(self, prompts: dict[str, Any]) -> None:
        """Keep what both sides are told."""
        write_json(self.path / "prompts.json", prompts)

    def append(self, file: str, *lines: str) -> None:
        """Append whole lines to a file of the run."""
        if not lines:
            return
        with (self.path / file).open("a", encoding="utf-8") as target:
            target.write("".join(line + "\n" for line in lines))
            target.flush()

    def add_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Write conversations to `trajectories/NAME.jsonl`, and their seconds beside."""
        items = list(trajectories)
        file = self.path / "trajectories" / f"{name}.jsonl"
        at = file.stat().st_size if file.exists() else 0
        lines = [item.to_json() for item in items]
        self.append(f"trajectories/{name}.jsonl", *lines)
        entries: list[str] = []
        for item, line in zip(items, lines, strict=True):
            length = len(line.encode()) + 1
            entries.append(to_entry(item, name, at, length).model_dump_json(exclude_defaults=True))
            at += length
        self.append("index.jsonl", *entries)
        self.append(
            "timings.jsonl",
            *(json.dumps({"id": item.id, **to_timings(item)}) for item in items),
        )

    def add_seconds(self, wall: float) -> None:
        """Note how long this process worked on the run."""
        self.append("timings.jsonl", json.dumps({"wall": round(wall, 3)}))

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        self.append("metrics.jsonl", json.dumps(metrics))

    def add_timings(self, step: int, **seconds: float) -> None:
        """Where the time of a step went."""
        self.append(
            "timings.jsonl", json.dumps({"step": step, **{k: round(v, 3) for k, v in seconds.items()}})
        )

    def forget_after(self, step: int) -> None:
        """Drop what was written after a step, so that going on from its checkpoint repeats nothing."""
        for name in ("metrics.jsonl", "timings.jsonl"):
            file = self.path / name
            if file.exists():
                kept = [line for _, line in read_lines(file) if int(line.get("step", 0)) <= step]
                file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        for file in (self.path / "trajectories").glob("*-*.jsonl"):
            number = file.stem.rsplit("-", 1)[1]
            if number.isdigit() and int(number) > step:
                file.unlink()
        index = self.path / "index.jsonl"
        if index.exists():
            left = {file.stem for file in (self.path / "trajectories").glob("*.jsonl")}
            lines = index.read_text(encoding="utf-8").splitlines(keepends=True)
            index.write_text("".join(line for line in lines if json.loads(line)["file"] in left), "utf-8")

    def close(self, state: State) -> None:
        self._describe(state=state, ended=datetime.now(UTC).isoformat(timespec="seconds"))
        self._lock.close()

    def _describe(self, **facts: Any) -> None:
        path = self.path / "run.json"
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_json(path, {**about, **facts})


def _lock(path: Path) -> IO[str]:
    lock = (path / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise RunError(f"another process is writing to {path}") from None
    return lock


def mend(file: Path) -> None:
    """Cut off a last line that was not written to its end."""
    with file.open("rb+") as target:
        content = target.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            target.truncate(end)


def write_json(path: Path, data: Any) -> None:
    """Write a file so that a crash leaves either the old one or the new one."""
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("w", encoding="utf-8") as target:
        target.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        target.flush()
        os.fsync(target.fileno())
    partial.replace(path)


def set_aside(path: Path) -> Path | None:
    """Give an existing folder another name, so that nothing in it is lost. Returns where it is now."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def list_checkpoints(path: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(item for item in (path / "checkpoints").glob("step-*") if (item / "trainer.json").is_file())


def find_weights(path: Path) -> Path:
    """The folder with the newest weights of a run, or the folder itself."""
    if not (path / "run.json").is_file():
        return path
    if (path / "model").is_dir():
        return path / "model"
    found = list_checkpoints(path)
    if not found:
        raise RunError(f"{path} has no weights: no model/ and no checkpoint")
    return found[-1]


def read_config(kind: type[C], path: Path) -> C:
    """The resolved configuration of a run directory."""
    file = path / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is no run directory: it has no config.json") from None
    except ValueError as error:
        raise RunError(f"{file} is not JSON: {error}") from None
    return to_config(kind, data, str(file))


def read_about(path: Path) -> dict[str, Any]:
    """`run.json` of a run directory."""
    try:
        about: Any = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is no run directory: it has no run.json") from None
    except ValueError as error:
        raise RunError(f"{path / 'run.json'} is not JSON: {error}") from None
    if not isinstance(about, dict):
        raise RunError(f"{path / 'run.json'} holds no JSON object")
    return cast("dict[str, Any]", about)


def read_marks(path: Path) -> list[str]:
    """The marks of the run that a folder is, or belongs to; none for what belongs to no run."""
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "run.json").is_file():
            return [str(mark) for mark in read_about(folder).get("marks", ())]
    return []


def read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; a last line cut off by a crash is left out."""
    try:
        source = file.open("rb")
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}") from None
    with source:
        for number, line in enumerate(source, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise RunError(f"{file}, line {number}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise RunError(f"{file}, line {number}: not a JSON object")
            yield number, value


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The conversations of a run directory or of one JSONL file."""
    folder = path / "trajectories"
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [path]
    if path.is_dir() and not files:
        raise RunError(f"{path} holds no trajectories")
    for file in files:
        for number, value in read_lines(file):
            try:
                yield Trajectory.model_validate(value)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(str(part) for part in first["loc"])
                raise RunError(f"{file}, line {number}: no trajectory: {where}: {first['msg']}") from None


def judge_file(path: Path) -> Path:
    """Where a run directory keeps what its judge has answered."""
    return path / "recordings" / "judge.jsonl"


def read_usage(file: Path) -> list[Usage]:
    """What the replies of a recording were billed for."""
    lines = read_lines(file) if file.exists() else ()
    return [Usage.model_validate(line["usage"]) for _, line in lines if line.get("usage")]


def to_timings(trajectory: Trajectory) -> dict[str, Any]:
    """Seconds of a conversation: by who spent them, and turn by turn."""
    seconds = {"agent": 0.0, "user": 0.0, "tools": 0.0}
    for turn in trajectory.turns:
        seconds["tools" if turn.message.role == "tool" else turn.side] += turn.seconds
    parts = {who: round(value, 4) for who, value in seconds.items()}
    return {"seconds": parts, "turns": [round(turn.seconds, 4) for turn in trajectory.turns]}


def read_seconds(path: Path) -> tuple[float, dict[str, dict[str, float]]]:
    """Wall-clock seconds of all processes that worked on a run, and the seconds of each conversation."""
    file = path / "timings.jsonl"
    wall, parts = 0.0, dict[str, dict[str, float]]()
    for _, line in read_lines(file) if file.exists() else ():
        if "wall" in line:
            wall += line["wall"]
        elif "id" in line:
            parts[line["id"]] = line["seconds"]
    return wall, parts


def find_versions() -> dict[str, str]:
    """Versions of Python and of what could change a result."""
    found = {"python": platform.python_version()}
    for package in ("trialogue", "pydantic", "openai", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
