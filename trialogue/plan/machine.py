# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""What `doctor` looks at here: Python, processor, compiler, GPUs, packages, disk, model, domain."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from trialogue.config import PlanConfig, TrainConfig
from trialogue.errors import ConfigError, TrialogueError
from trialogue.settings import MODELS

State = Literal["ok", "warn", "fail"]
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Instructions that the compiled kernels, or torch's products, use."""
NEEDED = {
    "train": ("torch", "transformers", "tokenizers", "safetensors", "numpy"),
    "verl": ("verl", "torch", "transformers", "ray", "TransferQueue"),
    "tinker": ("tinker", "torch", "transformers", "tokenizers"),
    "vllm": ("torch", "transformers", "tokenizers", "safetensors"),
}
"""Packages that are needed in this environment, by what trains."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: how it stands, and what to do where it does not stand well."""

    name: str
    state: State
    found: str
    remedy: str = ""

    def to_line(self) -> str:
        line = f"{self.state:<4}  {self.name}: {self.found}"
        return f"{line}. {self.remedy}" if self.remedy else line


@cache
def read_tested() -> dict[str, dict[str, str]]:
    """The versions that the tests ran with, by what they are needed for."""
    return tomllib.loads((Path(__file__).parent / "versions.toml").read_text(encoding="utf-8"))


def look_at_machine(kind: str, *, wants_gpu: bool) -> Iterator[Finding]:
    """Python, processor, compiler, GPUs, packages. `kind` is what trains: train, verl, tinker, vllm."""
    yield look_at_python(sys.version_info[:3], kind)
    yield look_at_processor()
    yield look_at_compiler()
    yield from look_at_packages(kind)
    yield look_at_gpus(wants_gpu=wants_gpu)


def look_at_python(version: tuple[int, ...], kind: str) -> Finding:
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("Python", "fail", found, "trialogue needs 3.11 or newer")
    if kind == "verl" and version >= (3, 13):
        return Finding(
            "Python", "fail", found, "verl needs Python below 3.13: make its environment with 3.12"
        )
    return Finding("Python", "ok", found)


def look_at_processor() -> Finding:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    words = set(text.split())
    features = [name for name in FEATURES if name in words]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{platform.machine()}, {threads} threads, {' '.join(features) or 'no known features'}"
    if platform.machine() in ("x86_64", "AMD64") and text and "avx2" not in features:
        return Finding("processor", "warn", found, "Without AVX2 the embedded engine is several times slower")
    return Finding("processor", "ok", found)


def look_at_compiler() -> Finding:
    """The compiler of the kernels, without which sampling on a CPU is slower."""
    words = shlex.split(os.environ.get("CC", "cc"))
    place = shutil.which(words[0]) if words else None
    if place is None:
        remedy = "On a CPU the embedded engine is slower without one: install gcc or clang, or set CC"
        return Finding("C compiler", "warn", "none", remedy)
    return Finding("C compiler", "ok", place)


def find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def look_at_packages(kind: str) -> Iterator[Finding]:
    """Needed packages, beside the versions that were tested."""
    extra = "verl" if kind == "verl" else "train"
    tested = {**read_tested()["train"], **read_tested().get(kind, {})}
    for package in NEEDED[kind]:
        found = find_version(package)
        if found is None:
            yield Finding(package, "fail", "not installed", f"pip install 'trialogue[{extra}]'")
        elif package in tested and found.partition("+")[0] != tested[package]:
            yield Finding(package, "warn", found, f"The tests ran with {tested[package]}")
        else:
            yield Finding(package, "ok", found)


def look_at_gpus(*, wants_gpu: bool) -> Finding:
    """The GPUs that torch sees."""
    if find_version("torch") is None:
        return Finding("GPUs", "warn", "not looked for without torch")
    import torch

    if torch.cuda.is_available():
        facts: list[Any] = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        names = ", ".join(f"{fact.name} ({fact.total_memory / 1e9:.0f} GB)" for fact in facts)
        return Finding("GPUs", "ok", f"{names}; CUDA {torch.version.cuda}")
    built = "torch is built for CUDA but sees none" if torch.version.cuda else "torch is built for the CPU"
    if not wants_gpu:
        return Finding("GPUs", "ok", f"none, and none is asked for ({built})")
    remedy = "Install a driver and torch for CUDA, or set learner.device=cpu"
    return Finding("GPUs", "fail", f"none ({built})", remedy)


def look_at_disk(folder: Path, needed: float, kept: int) -> Finding:
    """Room for checkpoints: `needed` GB."""
    place = folder.expanduser().resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    found = f"{free:.1f} GB free at {place}, about {needed:.1f} GB needed for {kept} checkpoints"
    if not os.access(place, os.W_OK):
        return Finding(
            "disk", "fail", f"{place} cannot be written", "Set run.directory, or --out of the export"
        )
    if free < needed:
        remedy = "Free some room, set run.directory elsewhere, or lower training.keep_checkpoints"
        return Finding("disk", "fail", found, remedy)
    return Finding("disk", "ok", found)


def look_at_run(
    config: TrainConfig, *, out: Path | None = None, gigabytes: float | None = None
) -> Iterator[Finding]:
    """Domain, model and disk of a run, and whether it fits on a GPU of so many GB."""
    yield look_at_domain(config)
    from trialogue.engine.shapes import find_shape

    model = config.learner.model
    is_here = model in MODELS or Path(model).expanduser().is_dir()
    is_hub = not is_here and model.count("/") == 1 and not model.startswith((".", "/", "~", "runs/"))
    try:
        shape = find_shape(model)
    except TrialogueError as error:
        if is_hub:
            yield Finding("model", "warn", f"{model} is not here, and its size is not known to plan with")
        else:
            yield Finding("model", "fail", str(error), "Set learner.model")
        return
    if is_hub:
        yield Finding("model", "warn", f"{model} will be downloaded from a hub")
    else:
        yield Finding("model", "ok", f"{shape.name}, {shape.parameters / 1e9:.3g} billion parameters")
    kept = config.training.keep_checkpoints + 1  # a new one is written before the oldest is removed
    trained = shape.count_lora(config.learner.lora_rank) if config.learner.lora_rank else shape.parameters
    yield look_at_disk(out or Path(config.run.directory), trained * 12 / 1e9 * kept, kept)
    if gigabytes is not None:
        yield look_at_fit(config, gigabytes, out is not None)


def look_at_fit(config: TrainConfig, gigabytes: float, is_exported: bool) -> Finding:
    """Whether the run fits on GPUs of this size, as `plan` calculates it."""
    from trialogue.engine.hardware import GPUS
    from trialogue.engine.shapes import find_shape
    from trialogue.plan.layout import read_verl, to_layout
    from trialogue.plan.memory import find_smallest_change, measure_memory
    from trialogue.plan.text import to_words

    given = read_verl(config)
    number = int(given.get("trainer.nnodes", 1)) * int(given.get("trainer.n_gpus_per_node", 8))
    gpus = number if is_exported else 1
    data = config.model_dump(mode="json")
    route = "verl" if is_exported else "train"
    planned = PlanConfig.model_validate({**data, "plan": {"gpus": gpus, "route": route}})
    gpu = GPUS["h100"].model_copy(update={"gigabytes": gigabytes, "name": "this one"})
    shape = find_shape(config.learner.model)
    memory = measure_memory(planned, to_layout(planned), shape, gpu)
    found = f"{memory.peak:.1f} GB of {memory.room:.1f} GB on each GPU, calculated"
    if memory.fits:
        return Finding("memory", "ok", found)
    remedy = find_smallest_change(planned, gpus, shape, gpu)
    if remedy is None:
        return Finding("memory", "warn", found, "See trialogue plan")
    count, settings = remedy
    return Finding(
        "memory", "warn", found, f"Fits with {to_words(settings) if count == gpus else f'{count} GPUs'}"
    )


def look_at_domain(config: TrainConfig) -> Finding:
    """Whether the domain opens and has the tasks of a step."""
    from trialogue.world.find import find_domain

    wanted, size = config.tasks, config.training.tasks_per_step
    try:
        domain = find_domain(config.domain, config.data)
        count = size if domain.endless else wanted.count
        found = domain.tasks(wanted.split, count, config.seed, levels=wanted.levels, families=wanted.families)
    except TrialogueError as error:
        remedy = "" if isinstance(error, ConfigError) else "See trialogue check"
        return Finding("domain", "fail", str(error), remedy)
    told = f"{domain.name}, {'endless' if domain.endless else len(found)} tasks in '{wanted.split}'"
    if len(found) < size:
        remedy = f"A step takes {size}: lower training.tasks_per_step"
        return Finding("domain", "fail", told, remedy)
    return Finding("domain", "ok", told)
