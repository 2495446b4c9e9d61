"""Ways to start an exported folder on a cluster: Slurm, machines with Ray, Kubernetes with KubeRay."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path
from string import Template
from typing import Literal

from trialogue.config import TrainConfig
from trialogue.durable import write
from trialogue.hosts.export import flatten
from trialogue.hosts.ray_nodes import count_needed

Launcher = Literal["slurm", "ray", "k8s"]
FILES: dict[Launcher, tuple[str, ...]] = {
    "slurm": ("slurm.sh",),
    "ray": ("ray.sh",),
    "k8s": ("rayjob.yaml", "Containerfile"),
}
RAY, VERL = "2.60.0", "0.9.1"
"""The versions that were tested together."""
MEMORY_OF_GPU = 128
"""GiB of a machine's memory for each of its GPUs: offloaded weights, checkpoints, Ray's objects."""


class Slots(Template):
    """A template whose slots are §{name}: shell scripts are full of dollars."""

    delimiter = "§"


def write_launcher(config: TrainConfig, folder: Path, launcher: Launcher) -> list[str]:
    """Write what starts an exported folder, beside its launch.sh. Returns the names of the files."""
    folder = folder.expanduser().resolve()
    given = {key.lstrip("+"): value for key, value in flatten(config.engine.verl).items()}
    nodes, gpus, cpus = count_needed(given)
    name = re.sub(r"[^a-z0-9-]+", "-", folder.name.lower()).strip("-")[:40].strip("-") or "trialogue"
    slots = {
        "name": name if name[0].isalpha() else f"run-{name}",
        "folder": folder,
        "parent": folder.parent,
        "nodes": nodes,
        "gpus": gpus,
        "cpus": max(8 * gpus, ceil(cpus / nodes)),
        "memory": MEMORY_OF_GPU * gpus,
        "key": config.user.api_key_env,
        "image": f"trialogue-verl:{VERL}",
        "ray": RAY,
        "verl": VERL,
    }
    for file in FILES[launcher]:
        text = (Path(__file__).parent / "verl_launchers" / file).read_text(encoding="utf-8")
        write(folder / file, Slots(text).substitute(slots))
        if file.endswith(".sh"):
            (folder / file).chmod(0o755)
    return list(FILES[launcher])
