"""Plain lines of progress on stderr where nothing else was shown for a while: no command is silent.

It runs on a thread of its own: computing, reading and generating tasks may hold the event loop.
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

SECONDS = 8.0
"""Longest silence; TRIALOGUE_PROGRESS_SECONDS sets another. Under ten, as a busy machine adds to it."""


def find_seconds() -> float:
    try:
        return max(0.05, float(os.environ.get("TRIALOGUE_PROGRESS_SECONDS", "")))
    except ValueError:
        return SECONDS


@contextmanager
def heartbeat() -> Generator[None]:
    """Show what the process is doing, as long as it does something that takes a while."""
    if not sys.stderr.isatty():
        os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # libraries' own bars
    over = Event()
    thread = Thread(target=_beat, args=(over, find_seconds()), daemon=True, name="heartbeat")
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
            say(line)
        noticed = len(ACTIVITY.notices)
        if monotonic() - ACTIVITY.said < seconds:
            continue
        if (line := ACTIVITY.describe(turns, tokens)) is not None:
            say(line)


def say(line: str) -> None:
    """Show a line on stderr. A closed stderr does not stop the work."""
    ACTIVITY.said = monotonic()
    with suppress(OSError, ValueError):
        echo(line, err=True)
