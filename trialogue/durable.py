"""Atomic file writes: after a crash, a power cut or a full disk, a file has its old or its new content.

Lines are appended whole or not at all. Files and folders get their name when they are complete. The manifest
of a sealed folder holds the hashes of its files, so that damage is found.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from trialogue.errors import RunError
from trialogue.secrets import redact

MANIFEST = "manifest.json"
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_ROOM_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large")


@contextmanager
def saving(what: Path) -> Generator[None]:
    """Turn disk errors into one readable error. A full disk has its own message."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if is_no_room(error):
            raise RunError(
                f"no room left on the disk to write {what}; make some and go on with --resume"
            ) from error
        if isinstance(error, OSError):
            raise RunError(f"cannot write {what}: {error.strerror or error}") from error
        raise


def is_no_room(error: BaseException) -> bool:
    """Whether a disk was full. Some libraries report this only in the text of the error."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return True
    return any(text in str(error) for text in _NO_ROOM_TEXTS)


def append(path: Path, text: str) -> None:
    """Append whole lines to a file. If they do not fit, the file stays unchanged."""
    append_bytes(path, redact(text).encode("utf-8"))


def append_bytes(path: Path, content: bytes) -> None:
    """Append bytes without secrets to a file. If they do not fit, the file stays unchanged."""
    rest = memoryview(content)
    with saving(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


def write(path: Path, text: str) -> None:
    """Replace a file. A crash leaves either the old or the new content."""
    if path.exists() and not path.is_file():
        raise RunError(f"cannot write {path}: it is not a file")
    partial = path.with_name(path.name + ".partial")
    try:
        with saving(path):
            with partial.open("w", encoding="utf-8") as target:
                target.write(redact(text))
                target.flush()
                os.fsync(target.fileno())
            partial.replace(path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def lock_folder(path: Path) -> IO[str]:
    """Lock a folder for writing by this process. The operating system releases the lock when the process
    ends."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # the folder may come from others
    lock = os.fdopen(os.open(path / ".lock", flags, 0o644), "a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read(20).strip()
        lock.close()
        known = f" (process {holder})" if holder.isdigit() else ""
        raise RunError(f"another process{known} is writing to {path}") from None
    with suppress(OSError):  # on a full disk the lock holds without a process id
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), str(os.getpid()).encode())
    return lock


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mend(file: Path) -> int:
    """Cut off trailing lines that a crash or power cut left incomplete: without a line end, or not JSON.
    Returns the number of bytes removed."""
    with file.open("rb+") as target:
        size = end = target.seek(0, os.SEEK_END)
        while end:
            start = _find_line(target, end)
            target.seek(start)
            line = target.read(end - start)
            if line.endswith(b"\n") and is_json(line):
                break
            end = start
        if end < size:
            target.truncate(end)
            os.fsync(target.fileno())
        return size - end


def _find_line(source: Any, end: int) -> int:
    """The start of the line that ends at `end`."""
    position, block = end - 1, 1 << 16
    while position > 0:
        first = max(0, position - block)
        source.seek(first)
        found = source.read(position - first).rfind(b"\n")
        if found >= 0:
            return first + found + 1
        position = first
    return 0


def is_json(line: bytes) -> bool:
    """Whether a line is JSON, or empty."""
    try:
        json.loads(line)
    except RecursionError:
        return True  # complete, but too deep: its reader reports it
    except ValueError:
        return not line.strip()
    return True


def seal(folder: Path) -> None:
    """Write a manifest with size and hash of every file in a folder, and flush all to the disk."""
    with saving(folder):
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)
        listed: dict[str, dict[str, Any]] = {}
        for file in files:
            sync(file)
            listed[file.relative_to(folder).as_posix()] = {
                "bytes": file.stat().st_size,
                "sha256": hash_file(file),
            }
        write_json(folder / MANIFEST, {"files": listed})


def find_damage(folder: Path) -> str | None:
    """Describe what is wrong with a sealed folder; None if every file is unchanged."""
    try:
        listed: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, known in listed.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != known["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {known['bytes']}"
            if hash_file(file) != known["sha256"]:
                return f"{name} has changed"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def hash_file(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def take_name(folder: Path, names: Iterable[Path]) -> Path | None:
    """Rename a folder to the first of these names that is free. The rename is atomic, so two processes never
    get the same name. Returns the new name, or None if all are taken."""
    for name in names:
        if name.exists():  # a rename would replace an empty folder
            continue
        try:
            folder.rename(name)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        else:
            return name
    return None


_ASIDE = ".aside-"


def put_in_place(partial: Path, target: Path) -> None:
    """Rename a complete folder to its final name. An existing folder of that name is removed only after that;
    if the process is killed in between, `put_back` restores it."""
    aside = target.with_name(_ASIDE + target.name)
    with saving(target):
        put_back(target.parent)
        if target.exists():
            target.rename(aside)
        partial.rename(target)
        sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Restore folders that `put_in_place` moved aside without replacing them."""
    for aside in folder.glob(_ASIDE + "*"):
        target = folder / aside.name.removeprefix(_ASIDE)
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(target)


def find_cache_folder() -> Path | None:
    """The folder for files that can be computed again; None without a home directory."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "trialogue"
    except RuntimeError:
        return None
