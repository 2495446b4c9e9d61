# pyright: reportUnknownMemberType=false
"""Code in C for this very machine: compiled when first needed, kept in the user's cache, run by threads.

What is in `c/` is called with addresses and sizes alone, so that whoever calls it checks what lies there.
Where there is no compiler callers do without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from trialogue.activity import phase
from trialogue.durable import find_cache_folder
from trialogue.engine.cores import count_free

FLAGS = ("-O3", "-march=native", "-fno-strict-aliasing", "-fwrapv")
SEAL = hashlib.sha256().digest_size
"""Bytes at the end of a kept library that tell whether the others are all there."""
WORKERS = 32
"""Threads beside the one that computes; more than ever meet."""
UNUSED = 30 * 24 * 3600
"""Seconds after which a library that nobody loaded goes, once another one takes its place."""


def compile_source(name: str, *flags: str) -> ctypes.CDLL | None:
    """One of the files in `c/`, or None where it cannot be compiled. What was compiled before is taken from
    the cache for as long as sources, compiler and processor stay the same."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if os.name != "posix" or not compiler or shutil.which(compiler[0]) is None:
        return None
    source, command = str(Path(__file__).parent / "c" / name), [*compiler, *FLAGS, *flags]
    try:
        # With all that it includes and all that is defined, which tells what the processor can do.
        whole = run_compiler(*command, "-E", "-dD", source)
        key = hashlib.sha256(" ".join(command).encode() + whole).hexdigest()[:32]
        folder = find_cache_folder()
        library = None if folder is None else folder / "kernels" / f"{Path(name).stem}-{key}.so"
        if library is not None and is_sound(library):
            return ctypes.CDLL(str(library))
        with phase(f"compiling {name}"), tempfile.TemporaryDirectory(prefix="trialogue-") as scratch:
            made = Path(scratch) / f"{key}.so"
            run_compiler(*command, "-shared", "-fPIC", "-o", str(made), source, "-lm")
            if library is not None:
                keep(made.read_bytes(), library)
            return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError):
        return None


def run_compiler(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def is_sound(library: Path) -> bool:
    """Whether a library is there as a whole, and nobody else could have put it there."""
    try:
        if not (is_own(library.parent) and is_own(library)):
            return False
        os.utime(library)  # used today: nobody removes it as old
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-SEAL]).digest() == content[-SEAL:]


def is_own(path: Path) -> bool:
    """Whether a file or folder is the user's, who alone can write to it."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def keep(content: bytes, library: Path) -> None:
    """Where that cannot be done it is compiled anew the next time."""
    with suppress(OSError):
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_own(library.parent):
            return
        descriptor, partial = tempfile.mkstemp(dir=library.parent)
        try:
            with os.fdopen(descriptor, "wb") as target:
                target.write(content + hashlib.sha256(content).digest())
                target.flush()
                os.fsync(target.fileno())
            os.replace(partial, library)
        except OSError:
            os.unlink(partial)
        else:
            remove_old(library)


def remove_old(library: Path) -> None:
    """What the same source became for other compilers or versions, where a month ago was the last time."""
    for other in library.parent.glob(f"{library.stem.rpartition('-')[0]}-*.so"):
        if time.time() - other.stat().st_mtime > UNUSED:
            other.unlink(missing_ok=True)


def find_function(
    library: ctypes.CDLL, name: str, places: int, *rest: Any, gives: Any = ctypes.c_int
) -> Callable[..., int]:
    """A function that takes so many addresses, and then other things."""
    function = library[name]
    function.restype = gives
    function.argtypes = [ctypes.c_void_p] * places + list(rest)
    return function


def require(condition: bool, otherwise: str) -> None:
    """A kernel is given addresses alone and would not notice."""
    if not condition:
        raise ValueError(f"a kernel cannot take {otherwise}")


def refuse_unreadable(*tensors: Tensor, numbers: torch.dtype = torch.float32) -> None:
    for tensor in tensors:
        require(tensor.dtype == numbers and tensor.is_contiguous(), "numbers that lie otherwise")


def share(
    work: Callable[[int, int, int], int],
    count: int,
    unit: int = 1,
    parts: int | None = None,
    *,
    meeting: bool = False,
) -> None:
    """Divide `count` pieces of work among the threads that are free, or into so many `parts`: each gets its
    number and a range. Where parts wait for each other (`meeting`) all of them begin or none does. Work whose
    sums depend on how it is divided names its parts: who is free changes with the load."""
    threads = min(count, parts or count_free())
    edges = [count * part // threads * unit for part in range(threads + 1)] if threads else []
    start = Barrier(threads) if meeting and threads > 1 else None

    def take_part(part: int) -> None:
        if start is not None:
            start.wait()
        if work(part, edges[part], edges[part + 1]):
            raise MemoryError("no memory for a kernel to work in")

    others: list[Future[None]] = []
    try:
        others.extend(find_pool().submit(take_part, part) for part in range(1, threads))
        if threads:
            take_part(0)
    except BaseException:
        if start is not None:
            start.abort()
        raise
    finally:
        if others:
            wait(others)  # they write to what is freed once this is left
    for future in others:
        future.result()


@cache
def find_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="kernel")
