"""A port nobody uses, and waiting until somebody answers there."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from pathlib import Path

PATIENCE = 1500
"""Seconds a server gets to start; on a busy machine its imports alone take minutes."""


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not answers(url):
        time.sleep(1)
        said = log.read_text()[-3000:]
        assert process.poll() is None, said
        assert time.monotonic() < until, said


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True
