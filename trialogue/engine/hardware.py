# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""What one GPU (or this machine) has: memory, operations a second, bandwidths."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import ValidationError

from trialogue.errors import ConfigError, suggest
from trialogue.settings import Section


class Gpu(Section):
    """One kind of GPU."""

    name: str = ""
    gigabytes: float
    """Memory, in 10^9 bytes."""
    tflops: float
    """10^12 operations a second of bfloat16 products."""
    bandwidth: float
    """GB a second read from its own memory."""
    link: float
    """GB a second to the other GPUs of its machine, in one direction."""
    network: float = 50.0
    """GB a second to other machines: 400 Gb/s for each GPU."""
    host: float = 25.0
    """GB a second to the memory of its machine."""
    per_machine: int = 8
    """GPUs in one machine."""
    number_bytes: int = 2
    """Bytes of the numbers that are multiplied."""
    is_cpu: bool = False


def _gpu(name: str, gigabytes: float, tflops: float, bandwidth: float, link: float, **more: float) -> Gpu:
    return Gpu.model_validate(
        {"name": name, "gigabytes": gigabytes, "tflops": tflops, "bandwidth": bandwidth, "link": link, **more}
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 42, 312, 1555, 300),
        _gpu("a100-80g", 85, 312, 2039, 300),
        _gpu("h100", 85, 989, 3350, 450, host=50),
        _gpu("h200", 150, 989, 4800, 450, host=50),
        _gpu("b200", 191, 2250, 7700, 900, host=50),
        _gpu("l40s", 47, 362, 864, 25),
        _gpu("rtx4090", 25, 165, 1008, 12, network=1.25),
    )
}
"""NVIDIA's data sheets: A100 SXM4, H100 SXM5, H200 SXM, B200 in HGX, L40S, RTX 4090 (products with float32
sums). `link` is half of NVLink's sum of both directions, or PCIe. Memory is what torch reports, in 10^9
bytes: the 80 GB of a data sheet are 79.2 GiB or 85.0 GB."""


REPORTED = {
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
"""What drivers call the GPUs whose peak is that of the table. An H100 on PCIe has another one."""


def find_peak(name: str) -> float:
    """Operations a second that a GPU of this name, as its driver reports it, computes at most in bfloat16;
    0 where that is not known."""
    known = REPORTED.get(name)
    return GPUS[known].tflops * 1e12 if known is not None else 0.0


def find_gpu(name: str) -> Gpu:
    """A GPU of the table, this machine (`here`), or the one that a TOML file describes."""
    if name in GPUS:
        return GPUS[name]
    if name == "here":
        return measure_here()
    path = Path(name).expanduser()
    if path.suffix != ".toml":
        allowed = ", ".join([*GPUS, "here"])
        raise ConfigError(f"no GPU '{name}' is known: {allowed}, or a .toml file{suggest(name, GPUS)}")
    try:
        return Gpu.model_validate({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        keys = ", ".join(Gpu.model_fields)
        [problem, *_] = error.errors(include_url=False)
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{path}: {where}: {problem['msg'].lower()}; its keys are {keys}") from None


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second."""

    operations: float
    bytes: float


def measure_here(seconds: float = 0.4) -> Gpu:
    """This machine's GPU, or else its CPU with the threads torch uses, measured for about a second."""
    try:
        import torch
    except ImportError:
        raise ConfigError("--gpu here measures with torch: pip install 'trialogue[train]'") from None
    if torch.cuda.is_available():
        facts: Any = torch.cuda.get_device_properties(0)
        rates = measure_rates("cuda", torch.bfloat16, seconds)
        return _gpu(facts.name, facts.total_memory / 1e9, rates.operations / 1e12, rates.bytes / 1e9, 12)
    rates = measure_rates("cpu", torch.float32, seconds)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return _gpu(
        f"this CPU, {torch.get_num_threads()} threads",
        *(memory, rates.operations / 1e12, rates.bytes / 1e9, rates.bytes / 1e9),
        per_machine=1,
        number_bytes=4,
        is_cpu=True,
        host=rates.bytes / 1e9,
    )


def measure_rates(device: str, dtype: Any, seconds: float) -> Rates:
    """Operations of a large matrix product and bytes read from memory, both by the fastest try."""
    import torch

    size = (1024, 576, 1536) if device == "cpu" else (8192, 8192, 8192)
    left = torch.randn(size[0], size[1], device=device).to(dtype)
    right = torch.randn(size[2], size[1], device=device).to(dtype)
    large = torch.randn(1 << 13, 1 << 13, device=device)

    def best(action: Callable[[], object]) -> float:
        found, started = float("inf"), perf_counter()
        while perf_counter() - started < seconds:
            begun = perf_counter()
            action()
            if device != "cpu":
                torch.cuda.synchronize()
            found = min(found, perf_counter() - begun)
        return found

    products = best(lambda: torch.nn.functional.linear(left, right))
    reading = best(large.sum)
    return Rates(2.0 * size[0] * size[1] * size[2] / products, large.numel() * 4 / reading)
