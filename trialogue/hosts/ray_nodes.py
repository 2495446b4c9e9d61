# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What verl asks Ray for, and waiting until Ray has so many nodes: `python -m trialogue.hosts.ray_nodes`.

The launchers of `export verl` call it in place of a sleep of so many seconds.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Mapping
from time import monotonic, sleep
from typing import Any

from trialogue.output import echo

CPUS_OF_GPU = 3
"""verl's placement groups ask for three processors beside each GPU (max_colocate_count)."""
STORAGE_UNITS = 8
"""Processes of verl's transfer queue, each of which waits for a processor of its own."""
OTHERS = 2
"""The queue's controller and verl's main process."""
PAUSE = 2.0


def count_needed(given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Nodes, GPUs of each, and processors altogether that verl asks Ray for, by verl's settings as dotted
    keys. With fewer processors it waits without a word."""
    nodes, gpus = int(given.get("trainer.nnodes", 1)), int(given.get("trainer.n_gpus_per_node", 8))
    units = given.get("transfer_queue.backend.SimpleStorage.num_data_storage_units", STORAGE_UNITS)
    return nodes, gpus, CPUS_OF_GPU * nodes * gpus + int(units) + OTHERS


def is_listening(address: str, seconds: float = 5.0) -> bool:
    """Whether somebody listens at HOST:PORT. Ray itself tries for minutes where nobody does."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return True  # a word of Ray's own, such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError:
        return False
    return True


def count_nodes(address: str) -> int:
    """Nodes that are alive; 0 where nobody answers."""
    import ray

    if not is_listening(address):
        return 0
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except Exception:  # noqa: BLE001 - Ray raises errors of many kinds until it is up
        return 0
    try:
        return sum(bool(node["Alive"]) for node in ray.nodes())
    finally:
        ray.shutdown()


def wait_for_nodes(
    count: Callable[[], int],
    wanted: int,
    seconds: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = monotonic,
    pause: Callable[[float], None] = sleep,
) -> bool:
    """Wait until there are so many nodes; False where they are not there in time."""
    end, before = clock() + seconds, -1
    while (now := count()) < wanted:
        if now != before:
            tell(f"{now} of {wanted} nodes of Ray are there")
            before = now
        if clock() >= end:
            tell(f"only {now} of {wanted} nodes of Ray are there after {seconds:g} s")
            return False
        pause(PAUSE)
    tell(f"{now} of {wanted} nodes of Ray are there")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trialogue.hosts.ray_nodes")
    parser.add_argument("--address", default="auto")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    are_there = wait_for_nodes(
        lambda: count_nodes(given.address), given.nodes, given.seconds, lambda text: echo(text, err=True)
    )
    sys.exit(0 if are_there else 1)


if __name__ == "__main__":
    main()
