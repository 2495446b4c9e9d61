# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Look at everything a run needs before anything is spent: `trialogue doctor`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trialogue.config import TrainConfig
from trialogue.plan.cluster import look_at_ray
from trialogue.plan.layout import read_verl
from trialogue.plan.machine import Finding, find_version, look_at_machine, look_at_run
from trialogue.plan.probe import look_at_keys, probe_endpoints

Tell = Callable[[str], None]


def examine(
    config: TrainConfig | None,
    probes: int,
    tell: Tell,
    exported: Path | None = None,
    words: dict[str, Any] | None = None,
) -> list[Finding]:
    """Look at this machine, and at what a run of this configuration needs. `exported` is a folder of
    `export verl`, `words` what was appended to its launch.sh. Endpoints get at most 1 + `probes` requests."""
    kind = "verl" if exported is not None else find_kind(config)
    wants_gpu = find_wish(config, exported)
    found = list(look_at_machine(kind, wants_gpu=wants_gpu))
    if config is None:
        return found
    found += look_at_run(config, out=exported, gigabytes=find_memory())
    found += look_at_keys(config)
    if probes >= 0:
        found += asyncio.run(probe_endpoints(config, probes, tell))
    if exported is not None:
        found += look_at_ray(exported, {**read_verl(config), **(words or {})})
    return found


def find_kind(config: TrainConfig | None) -> str:
    """What trains: train, tinker or vllm."""
    name = config.engine.service if config is not None else "torch"
    return name if name in ("tinker", "vllm") else "train"


def find_wish(config: TrainConfig | None, exported: Path | None) -> bool:
    """Whether a GPU is asked for. With a platform of one's own, verl needs none that torch knows."""
    if exported is not None:
        return not os.environ.get("VERL_PLATFORM")
    return config is not None and config.learner.device.startswith("cuda")


def find_memory() -> float | None:
    """GB of the first GPU; None where there is none."""
    if find_version("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    facts: Any = torch.cuda.get_device_properties(0)
    return facts.total_memory / 1e9


def read_exported(folder: Path) -> TrainConfig:
    """The settings of a folder of `export verl`, with what its workers share put together again."""
    from trialogue.errors import RunError
    from trialogue.plan.layout import to_workers
    from trialogue.run import read_config

    if not (folder / "launch.sh").is_file():
        raise RunError(f"{folder} is no folder of `trialogue export verl`: it has no launch.sh")
    config = read_config(TrainConfig, folder)
    workers = to_workers(config)
    user = config.user.model_copy(update={"concurrency": config.user.concurrency * workers})
    return config.model_copy(update={"user": user})
