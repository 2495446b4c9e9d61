"""What all tests share."""

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from trialogue.digests import write_listed, write_stamped
from trialogue.run import read_about

# A shell's background job ignores SIGINT and hands that down to its children; with a handler here they get
# the default again, so that tests which press Ctrl-C mean the same everywhere.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def crash() -> Callable[[Path], None]:
    """Make a finished run look as `kill -9` leaves one: running, and nothing tells how far files reached."""

    def crash(run: Path) -> None:
        write_stamped(run / "run.json", {**read_about(run), "state": "running"})
        write_listed(run, {})

    return crash


DATA = Path(os.environ.get("TRIALOGUE_DATA") or Path(__file__).parents[2] / "shared" / "benchmarks")
"""Where the benchmarks' data lies: beside the repository, or where TRIALOGUE_DATA says."""
NO_DATA = "no benchmark data"


@pytest.fixture(scope="session")
def data() -> Path:
    if not (DATA / "tau2-bench").is_dir():
        pytest.skip(f"{NO_DATA}: {DATA} has no tau2-bench; set TRIALOGUE_DATA")
    return DATA


NO_COMPILER = "no C++ compiler"


@pytest.fixture
def gpu() -> Generator[Any]:
    """One GPU that is none: `tests/parts/fake_gpu.py`. Its engines are opened with device="fakegpu"."""
    import torch
    from fake_gpu import find_fake_gpu

    found = find_fake_gpu()
    if found is None:
        pytest.skip(f"{NO_COMPILER}: the fake GPU cannot be built")
    # A parameter that moves to the device stays the same object, as on CUDA, so that tied ones stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield found
    torch.__future__.set_swap_module_params_on_conversion(False)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the fake GPU before the first test: torch counts devices when it first computes a gradient."""
    if any("gpu" in getattr(item, "fixturenames", ()) for item in session.items):
        from fake_gpu import find_fake_gpu

        find_fake_gpu()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Say in the last lines how many tests were skipped because something is missing."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of xdist
        return
    remedies = {NO_DATA: f"{NO_DATA} in {DATA}; set TRIALOGUE_DATA", NO_COMPILER: f"{NO_COMPILER}; set CXX"}
    for reason, remedy in remedies.items():
        skipped = sum(reason in str(report.longrepr) for report in reporter.getreports("skipped"))
        if skipped:
            reporter.write_line(f"{skipped} tests were skipped: {remedy}")
