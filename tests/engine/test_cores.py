"""How many threads compute: what affinity, quota and load leave. Results do not depend on the load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from trialogue.engine import cores
from trialogue.engine.api import EngineSettings, SamplingParams
from trialogue.engine.cpu.kernels import load_kernels
from trialogue.engine.models import find_model_folder
from trialogue.engine.torch_engine import TorchEngine

REPORT = """
import os, trialogue
from trialogue.engine.cores import describe_threads
print(describe_threads())
print(os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT"))
"""


def run(script: str, **environment: str) -> str:
    known = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=known | environment
    )
    return found.stdout


def test_threads_sleep_while_they_wait_and_their_number_is_said_with_how_to_change_it() -> None:
    first = min(os.sched_getaffinity(0))
    told, policy = run(f"import os; os.sched_setaffinity(0, {{{first}}})\n{REPORT}").splitlines()
    assert told.startswith("computing with 1 thread on 1 core, ")
    assert "OMP_NUM_THREADS=N" in told
    assert policy == "passive 1000"


def test_the_user_chooses_how_many_threads_compute_and_how_they_wait() -> None:
    told, policy = run(REPORT, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="active").splitlines()
    assert told == "computing with 1 thread (OMP_NUM_THREADS)"
    assert policy == "active None"


WAITING = """
import time, trialogue, torch
torch.set_num_threads(2)
chunk = torch.ones(1 << 20)
began, used = time.monotonic(), time.process_time()
for _ in range(60):
    torch.sin(chunk)
    time.sleep(0.005)
print(time.process_time() - used, time.monotonic() - began)
"""


@pytest.mark.speed
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to spin on")
def test_a_thread_that_waits_costs_little_processor_time() -> None:
    """Between two pieces of work the second thread waits for the first one's next."""
    spinning = float(run(WAITING, OMP_WAIT_POLICY="active").split()[0])
    sleeping = float(run(WAITING).split()[0])
    assert sleeping < spinning / 1.5, (sleeping, spinning)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 1),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "half of it"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_either_version_counts(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "find_cores", lambda: set(range(8)))
    is_old = "cpu.cfs_quota_us" in files
    groups = tmp_path / "groups"
    folder = groups / "cpu,cpuacct" / "box" if is_old else groups / "box"
    (folder / "inner").mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    own = tmp_path / "cgroup"
    own.write_text("4:cpu,cpuacct:/box/inner\n3:memory:/box\n" if is_old else "0::/box/inner\n")
    assert cores.count_allowed(own, groups) == (expected or 8)
    assert cores.count_allowed(tmp_path / "none", groups) == 8


def test_only_the_cores_of_the_process_are_looked_at() -> None:
    stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 100 100 4 5 6 0 0\ncpu1 10 0 0 1 1 0 0 0 0 0\nintr 5\n"
    assert cores.read_busy(stat, {0}) == 21
    assert cores.read_busy(stat, {0, 1}) == 31
    assert cores.read_busy("", {0}) is None


def test_a_busy_process_takes_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "EVERY", 1.0)
    [core, *_] = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "find_cores", lambda: {core})
    load = cores.Load()
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as busy:
        try:
            until = monotonic() + 20
            while load.count_free() and monotonic() < until:
                sleep(0.2)
        finally:
            busy.kill()
    assert load.count_free() == 0


async def test_what_is_sampled_does_not_depend_on_how_many_threads_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal by the bit with one, two and three threads, and with a number that changes under way."""
    if load_kernels(is_half=False) is None:
        pytest.skip("there is no C compiler")
    found: list[object] = []
    for way in ((1,), (2,), (3,), (1, 2, 3, 1)):
        calls = 0

        def count(way: tuple[int, ...] = way) -> int:
            nonlocal calls
            calls += 1
            return way[calls % len(way)]

        for module in ("cpu.kernels", "cpu.decoder", "cpu.compiled"):
            monkeypatch.setattr(f"trialogue.engine.{module}.count_free", count)
        engine = TorchEngine(find_model_folder("tiny"), EngineSettings(seed=1))
        params = SamplingParams(max_tokens=24, temperature=1.0)
        completions = await engine.sample([[5, 6, 7, 8], [9, 10], list(range(20, 60))], params)
        found.append([(item.tokens, item.logprobs) for item in completions])
        engine.close()
        assert calls
    assert all(item == found[0] for item in found)
