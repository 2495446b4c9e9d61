"""One GPU that is none: a torch device whose numbers are computed on the CPU (`fake_gpu.cpp`).

It refuses tensors of mixed devices and counts kernels, copies, synchronisations of the host and bytes. It
shows that code for a GPU is right and how often it waits. It cannot show that CUDA's own kernels work, or how
fast they are.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import types
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from trialogue.durable import find_cache_folder

NAME = "fakegpu"
SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O0", "-std=c++20", "-shared", "-fPIC", "-w")


@dataclass(slots=True)
class Counts:
    """What a piece of code asked of the device."""

    kernels: int = 0
    to_device: int = 0
    to_host: int = 0
    syncs: int = 0
    used: int = 0
    peak: int = 0
    names: dict[str, int] = field(default_factory=dict[str, int])
    """How often each kernel, copy and synchronisation was counted."""


class FakeGpu:
    device = torch.device("privateuseone", 0)

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def read(self) -> Counts:
        values = (ctypes.c_int64 * 6)()
        self.library.fake_gpu_read(values)
        text = ctypes.create_string_buffer(1 << 16)
        length = self.library.fake_gpu_names(text, ctypes.c_int64(len(text)))
        lines = text.raw[:length].decode().splitlines()
        names = {name: int(number) for name, _, number in (line.partition("\t") for line in lines)}
        return Counts(*values, names)

    @contextmanager
    def counting(self) -> Generator[Counts]:
        """Count what happens inside; the result is filled in at the end."""
        self.library.fake_gpu_clear()
        found = Counts()
        yield found
        now = self.read()
        for part in fields(Counts):
            setattr(found, part.name, getattr(now, part.name))

    @contextmanager
    def shapes_only(self) -> Generator[None]:
        """Compute no numbers and take no memory, but count it: for models of any size."""
        self.library.fake_gpu_shapes(1)
        try:
            yield
        finally:
            self.library.fake_gpu_shapes(0)

    @contextmanager
    def memory(self, more: int) -> Generator[None]:
        """Let only `more` bytes be taken beside those in use."""
        gc.collect()  # what is freed later would be room for more
        self.library.fake_gpu_limit(ctypes.c_int64(more))
        try:
            yield
        finally:
            self.library.fake_gpu_limit(ctypes.c_int64(0))


@functools.cache
def find_fake_gpu() -> FakeGpu | None:
    """The device, registered with torch in this process; None without a C++ compiler."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if os.name != "posix" or not compiler or shutil.which(compiler[0]) is None:
        return None
    path = compile_library(compiler)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, make_module())
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    library.fake_gpu_names.restype = ctypes.c_int64
    library.fake_gpu_begin()
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])
    return FakeGpu(library)


def compile_library(compiler: list[str]) -> Path:
    """Compile once for each torch, source and compiler, kept where the project keeps its own kernels."""
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), version, torch.__version__.encode()])).hexdigest()
    folder = (find_cache_folder() or Path(tempfile.gettempdir())) / "tests"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"fake_gpu-{key[:32]}.so"
    if not path.is_file():
        torch_folder = Path(torch.__file__).parent
        partial = path.with_suffix(f".{os.getpid()}")
        include = torch_folder / "include"
        command = [*compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
        command += [str(SOURCE), "-o", str(partial), f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        partial.rename(path)
    return path


def make_module() -> Any:
    """What torch asks of `torch.NAME`."""
    module = types.ModuleType(f"torch.{NAME}")
    state = torch.zeros(8, dtype=torch.uint8)
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda device=0: state,
        "set_rng_state": lambda new, device=0: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
