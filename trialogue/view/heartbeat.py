"""Write a plain line of progress to stderr when a command has shown nothing for a while.

It runs in its own thread because computing, reading and generating tasks can block the event loop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic

from trialogue.activity import ACTIVITY
from trialogue.output import echo

MAX_SILENCE = 6.0
"""Longest silence in seconds; TRIALOGUE_PROGRESS_SECONDS overrides it. A busy machine adds to it: while a
large library is loaded, no other thread runs."""


def find_max_silence() -> float:
    try:
        return max(0.05, float(os.environ.get("TRIALOGUE_PROGRESS_SECONDS", "")))
    except ValueError:
        return MAX_SILENCE


@contextmanager
def heartbeat() -> Generator[None]:
    """Show what the process is doing while it does something that takes long."""
    if not sys.stderr.isatty():
        os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # libraries' own bars
    over = Event()
    thread = Thread(target=_beat, args=(over, find_max_silence()), daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(over: Event, seconds: float) -> None:
    ACTIVITY.said = monotonic()
    turns, tokens, noticed = ACTIVITY.turns, ACTIVITY.tokens, len(ACTIVITY.notices)
    while not over.wait(min(0.5, seconds / 4)):
        if ACTIVITY.silent:
            continue
        for line in ACTIVITY.notices[noticed:]:
            _say(line)
        noticed = len(ACTIVITY.notices)
        if monotonic() - ACTIVITY.said < seconds:
            continue
        if (line := ACTIVITY.describe(turns, tokens)) is not None:
            _say(line)


def _say(line: str) -> None:
    """Write a line to stderr. A closed stderr does not stop the work."""
    ACTIVITY.said = monotonic()
    with suppress(OSError, ValueError):
        echo(line, err=True)
