"""What all tests share."""

import signal
from collections.abc import Callable
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
