# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
"""What `doctor` looks at before verl starts: Ray's processors and GPUs, the folder as every node sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from trialogue.hosts.ray_nodes import count_needed, is_listening
from trialogue.plan.machine import Finding, find_version

NOTE = Path("/tmp/ray/ray_current_cluster")
SECONDS = 60.0
"""How long Ray's nodes may take to answer."""


def read_words(words: tuple[str, ...]) -> dict[str, Any]:
    """What was appended to launch.sh, as far as it is key=value."""
    found: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if sign:
            found[key.lstrip("+")] = value.strip("'\"")
    return found


def look_at_ray(folder: Path, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Ray's resources, and the folder on every node."""
    if find_version("ray") is None:
        return
    nodes, each, cpus = count_needed(given)
    gpus = nodes * each
    address = os.environ.get("RAY_ADDRESS") or read_address()
    if address and not is_listening(address):
        if os.environ.get("RAY_ADDRESS"):
            yield Finding("Ray", "fail", f"nobody listens at {address}", "Correct RAY_ADDRESS, or start Ray")
            return
        remedy = f"Remove {NOTE}, or set RAY_ADDRESS"
        yield Finding("Ray", "warn", f"the Ray noted at {address} is gone", remedy)
        address = ""
    if not address:
        here = str(given.get("ray_kwargs.ray_init.num_cpus"))
        number = int(here) if here.isdigit() else os.cpu_count() or 1
        yield Finding("Ray", "ok", "no cluster is running; verl starts one on this machine")
        yield compare_cpus(number, cpus)
        return
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except Exception as error:  # noqa: BLE001 - whatever Ray raises, it cannot be reached
        yield Finding("Ray", "fail", f"cannot be reached: {error}", "Check RAY_ADDRESS, or run `ray start`")
        return
    try:
        yield from look_at_nodes(ray, folder, gpus, cpus)
    finally:
        ray.shutdown()


def read_address() -> str:
    """Where the Ray that was last started on this machine noted its address."""
    with suppress(OSError):
        return NOTE.read_text(encoding="utf-8").strip()
    return ""


def compare_cpus(number: int, needed: int) -> Finding:
    found = f"{number} processors, {needed} asked for"
    if number >= needed:
        return Finding("Ray's processors", "ok", found)
    remedy = (
        "With too few verl's queue waits without a word: append "
        f"ray_kwargs.ray_init.num_cpus={needed} (they are only counted), or start Ray with --num-cpus"
    )
    return Finding("Ray's processors", "fail", found, remedy)


def look_at_nodes(ray: Any, folder: Path, gpus: int, cpus: int) -> Iterator[Finding]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    total = ray.cluster_resources()
    yield Finding("Ray", "ok", f"{len(nodes)} nodes")
    yield compare_cpus(int(total.get("CPU", 0)), cpus)
    there = int(total.get("GPU", 0))
    if there < gpus:
        remedy = "Start more nodes, or lower trainer.nnodes and trainer.n_gpus_per_node"
        yield Finding("Ray's GPUs", "fail", f"{there}, {gpus} asked for", remedy)
    else:
        yield Finding("Ray's GPUs", "ok", f"{there}, {gpus} asked for")
    yield from look_at_folder(ray, folder, nodes)


def look_at_folder(ray: Any, folder: Path, nodes: list[Any]) -> Iterator[Finding]:
    """Write a word into the folder and let every node read it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def read(path: str) -> str:
        with open(path, encoding="utf-8") as file:
            return file.read()

    word, file = token_hex(8), folder / f".doctor-{os.getpid()}"
    file.write_text(word, encoding="utf-8")
    try:
        asked = {
            f"{node['NodeManagerHostname']} {node['NodeID'][:8]}": ray.remote(read)
            .options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            )
            .remote(str(file))
            for node in nodes
        }
        blind: dict[str, str] = {}
        for host, answer in asked.items():
            try:
                if ray.get(answer, timeout=SECONDS) != word:
                    blind[host] = "reads something else"
            except Exception as error:  # noqa: BLE001 - a node's error can be anything
                blind[host] = str(error).strip().splitlines()[-1][:200]
    finally:
        file.unlink(missing_ok=True)
    if not blind:
        yield Finding("shared folder", "ok", f"{folder} is seen by all {len(nodes)} nodes")
        return
    told = "; ".join(f"{host}: {why}" for host, why in blind.items())
    remedy = "Export into a folder that all nodes mount under the same path"
    yield Finding(
        "shared folder", "fail", f"{folder} is not seen by {len(blind)} of {len(nodes)}: {told}", remedy
    )
