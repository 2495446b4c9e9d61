"""What all tests share."""

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Say in the last line how many tests were skipped because there is no benchmark data."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of xdist
        return
    skipped = sum(NO_DATA in str(report.longrepr) for report in reporter.getreports("skipped"))
    if skipped:
        reporter.write_line(f"{skipped} tests were skipped: no benchmark data in {DATA}; set TRIALOGUE_DATA")
