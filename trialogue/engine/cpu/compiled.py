# pyright: reportUnknownMemberType=false
"""C code compiled for this machine on first use, kept in the user's cache, and run by several threads.

The functions in `c/` get only addresses and sizes, so their callers check dtypes and shapes. Without a
compiler callers use torch.
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
"""Bytes of the checksum at the end of a cached library."""
WORKERS = 32
"""Threads beside the one that computes: more than any call uses."""
UNUSED = 30 * 24 * 3600
"""Seconds after which an unused library is removed, when a new one of its source is cached."""


def compile_source(name: str, *flags: str) -> ctypes.CDLL | None:
    """Compile and load a file in `c/`; None where that fails. A cached library is used while sources,
    compiler and processor are the same."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if os.name != "posix" or not compiler or shutil.which(compiler[0]) is None:
        return None
    source, command = str(Path(__file__).parent / "c" / name), [*compiler, *FLAGS, *flags]
    try:
        # The preprocessed source with all macros, which name the processor's features, is the cache key.
        whole = run_compiler(*command, "-E", "-dD", source)
        key = hashlib.sha256(" ".join(command).encode() + whole).hexdigest()[:32]
        folder = find_cache_folder()
        library = None if folder is None else folder / "kernels" / f"{Path(name).stem}-{key}.so"
        if library is not None and is_trusted_library(library):
            return ctypes.CDLL(str(library))
        with phase(f"compiling {name}"), tempfile.TemporaryDirectory(prefix="trialogue-") as scratch:
            made = Path(scratch) / f"{key}.so"
            run_compiler(*command, "-shared", "-fPIC", "-o", str(made), source, "-lm")
            if library is not None:
                store_library(made.read_bytes(), library)
            return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError):
        return None


def run_compiler(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def is_trusted_library(library: Path) -> bool:
    """Whether a library is complete, and no other user could have written it."""
    try:
        if not (is_own(library.parent) and is_own(library)):
            return False
        os.utime(library)  # marks it as used
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-SEAL]).digest() == content[-SEAL:]


def is_own(path: Path) -> bool:
    """Whether a file or folder belongs to the user and only the user can write to it."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def store_library(content: bytes, library: Path) -> None:
    """Write a library to the cache. If that fails it is compiled again the next time."""
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
    """Remove libraries of the same source that were not used for a month."""
    for other in library.parent.glob(f"{library.stem.rpartition('-')[0]}-*.so"):
        if time.time() - other.stat().st_mtime > UNUSED:
            other.unlink(missing_ok=True)


def find_function(
    library: ctypes.CDLL, name: str, addresses: int, *rest: Any, result: Any = ctypes.c_int
) -> Callable[..., int]:
    """A function of a library that takes a number of addresses, then arguments of the types `rest`."""
    function = library[name]
    function.restype = result
    function.argtypes = [ctypes.c_void_p] * addresses + list(rest)
    return function


def require(condition: bool, otherwise: str) -> None:
    """Raise unless a kernel can read its arguments: it gets addresses and would read out of bounds."""
    if not condition:
        raise ValueError(f"a kernel cannot take {otherwise}")


def refuse_unreadable(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> None:
    for tensor in tensors:
        require(tensor.dtype == dtype and tensor.is_contiguous(), f"a tensor that is not contiguous {dtype}")


def share(
    work: Callable[[int, int, int], int],
    count: int,
    unit: int = 1,
    parts: int | None = None,
    *,
    meeting: bool = False,
) -> None:
    """Divide `count` pieces of work among the free threads, or into `parts`: each call gets its number and a
    range. With `meeting` the parts wait for each other, so either all start or none. Work whose sums depend
    on how it is divided must set `parts`, because the number of free threads changes with the load."""
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
            wait(others)  # they write to memory that the caller frees afterwards
    for future in others:
        future.result()


@cache
def find_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="kernel")
