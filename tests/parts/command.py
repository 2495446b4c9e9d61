"""Verbs in this process, as if in one of their own: quick, where the process itself is not what is tested."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from subprocess import CompletedProcess

from click.testing import CliRunner

from trialogue.cli.main import main


def run_verb(folder: Path, *words: str, said: str = "", **environment: str) -> CompletedProcess[str]:
    """Run `trialogue WORDS` in a folder, whose code is loaded anew. An error that no verb tells is raised."""
    modules, places = set(sys.modules), list(sys.path)
    environment = {"TRIALOGUE_PROGRESS_SECONDS": "600", **environment}  # a busy machine adds no lines
    try:
        with contextlib.chdir(folder):
            done = CliRunner().invoke(main, words, input=said, env=environment, prog_name="trialogue")
    finally:
        sys.path[:] = places
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    return CompletedProcess(words, done.exit_code, done.stdout_bytes.decode(), done.stderr_bytes.decode())
