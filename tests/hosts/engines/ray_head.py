"""A local Ray for a busy machine: its parts are given more than half a minute to find one another.

ray_head.py PORT, stopped by ending the process. The ports of the agents are fixed, for Ray's core gives up
after 15 seconds when it has to wait for them to say which they chose; one of them it would not be told.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import ray._private.node as node
import ray._private.services as services
from ports import find_port
from ray.scripts.scripts import main

if __name__ == "__main__":
    node.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / 20})
    listen = find_port()
    start = services.start_ray_process

    def tell(command: list[str], kind: str, *arguments: Any, **options: Any) -> Any:
        told = [f"--dashboard_agent_listen_port={listen}"] if kind == "raylet" else []
        return start([*command, *told], kind, *arguments, **options)

    services.start_ray_process = tell
    agents = ["dashboard-agent-grpc", "metrics-export", "runtime-env-agent"]
    sys.argv = [
        "ray",
        "start",
        "--head",
        "--block",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--port={sys.argv[1]}",
        f"--dashboard-agent-listen-port={listen}",
        *(f"--{name}-port={find_port()}" for name in agents),
    ]
    main()
