"""A local Ray for a busy machine: its parts are given more than half a minute to find one another.

ray_head.py PORT, stopped by ending the process. The ports of the agents are fixed, for Ray's core gives up
when they take long to say which they chose.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import ray._private.node as node
from ports import find_port
from ray.scripts.scripts import main

if __name__ == "__main__":
    node.time = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() / 20})
    agents = ["dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent"]
    sys.argv = [
        "ray",
        "start",
        "--head",
        "--block",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--port={sys.argv[1]}",
        *(f"--{name}-port={find_port()}" for name in agents),
    ]
    main()
