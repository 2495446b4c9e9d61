"""How many threads compute on a CPU: what the process may use, and what other processes leave of it.

Sums of an update depend on how many threads share them, so that number is chosen once and stays: equal seeds
give equal runs on a busy machine too. What the kernels of sampling compute does not depend on it, so there
the number follows the load. Torch's threads sleep while they wait for each other (`trialogue/__init__.py`).
"""

from __future__ import annotations

import os
from functools import cache
from math import ceil
from pathlib import Path
from time import monotonic, process_time

import torch

EVERY = 5.0
"""Seconds between two looks at the load."""


@cache
def limit_threads() -> int:
    """Let torch compute with as many threads as the process may use, and return their number. Call it on the
    thread that computes. A number that the user chose (OMP_NUM_THREADS, torch.set_num_threads) stays."""
    number = torch.get_num_threads()
    allowed = min(number, count_allowed(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))
    if not is_chosen() and allowed < number:
        torch.set_num_threads(allowed)
    return torch.get_num_threads()


def is_chosen() -> bool:
    return "OMP_NUM_THREADS" in os.environ


def describe_threads() -> str:
    """One line for the user: the number of threads, where it comes from, and how to change it."""
    number, cores = limit_threads(), len(find_cores())
    threads = f"{number} thread{'s' if number > 1 else ''}"
    if is_chosen():
        return f"computing with {threads} (OMP_NUM_THREADS)"
    return (
        f"computing with {threads} on {cores} core{'s' if cores > 1 else ''}, sampling with fewer beside "
        "busy processes; OMP_NUM_THREADS=N sets another number"
    )


def count_free() -> int:
    """Threads for work whose results do not depend on their number: as many as cores are free now."""
    number = torch.get_num_threads()
    if number == 1 or is_chosen():
        return number
    return max(1, min(number, find_load().count_free()))


def find_cores() -> set[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def count_allowed(own: Path, groups: Path) -> int:
    """Cores of the affinity, but no more than the container's quota of processor time comes to."""
    quotas = [quota for folder in find_groups(own, groups) if (quota := read_quota(folder)) is not None]
    return max(1, min([len(find_cores()), *(ceil(quota) for quota in quotas)]))


def find_groups(own: Path, groups: Path) -> list[Path]:
    """The folders of the process's control groups and of all above them, of version 1 and 2."""
    found: list[Path] = []
    for line in read_or_empty(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            found.append(folder)
            folder = folder.parent
    return found


def read_quota(folder: Path) -> float | None:
    """Cores' worth of processor time that a control group may use, where it is limited."""
    words = read_or_empty(folder / "cpu.max").split()  # version 2: "200000 100000" or "max 100000"
    if not words:
        words = (
            read_or_empty(folder / "cpu.cfs_quota_us") + " " + read_or_empty(folder / "cpu.cfs_period_us")
        ).split()
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def read_or_empty(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


class Load:
    """What other processes use of the cores this one may run on, measured again now and then."""

    def __init__(self) -> None:
        self.cores = find_cores()
        self.free = len(self.cores)
        self.began, self.before = monotonic(), self._read()

    def count_free(self) -> int:
        passed = monotonic() - self.began
        if passed >= EVERY:
            now = self._read()
            if self.before is not None and now is not None:
                self.free = len(self.cores) - round(max(0.0, now - self.before) / passed)
            self.began, self.before = monotonic(), now
        return self.free

    def _read(self) -> float | None:
        """Seconds the cores were busy without this process; None where the system does not tell."""
        busy = read_busy(read_or_empty(Path("/proc/stat")), self.cores)
        return None if busy is None else busy / os.sysconf("SC_CLK_TCK") - process_time()


def read_busy(stat: str, cores: set[int]) -> float | None:
    """Clock ticks that some cores were busy, of /proc/stat: user, nice, system, irq, softirq and steal."""
    ticks: list[int] = []
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores and len(numbers) >= 8:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, numbers[:8])
            ticks.append(user + nice + system + irq + softirq + steal)
    return sum(ticks) if ticks else None


@cache
def find_load() -> Load:
    return Load()
