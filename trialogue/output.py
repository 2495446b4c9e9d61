"""Everything that commands print goes through this module, or through `screen` where it is drawn by rich.

Text may hold words of models, endpoints and files, so one call of `echo` prints one line, whatever is in it.
Secrets are masked. An output that cannot write a character gets a plain one or an escape instead.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from errno import EPIPE
from traceback import format_exception
from types import TracebackType
from typing import Any

import click

from trialogue.foreign import show_json, show_line
from trialogue.secrets import redact

_ASCII = {"–": "-", "—": "-", "·": "|", "…": "...", "×": "x", "✓": "+", "✗": "x", "↳": ">", "→": "->"}
"""What we write ourselves, for an output that has only ASCII."""


class BrokenOutput(OSError):
    """Standard output or error cannot be written, such as on a full disk."""


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print one line; line breaks in the text are shown as escapes."""
    _print(show_line(redact(text)), err, nl)


def echo_lines(text: str, *, err: bool = False) -> None:
    """Print a text of ours that has several lines. What others wrote in it must have been made one line."""
    _print("\n".join(show_line(line) for line in redact(text).split("\n")), err)


def echo_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    _print(show_json(value, plain=not _is_unicode(sys.stdout)))


def confirm(question: str) -> bool:
    """Ask a person on standard error; no is the default."""
    return click.confirm(show_line(redact(question)), default=False, err=True)


def open_output() -> None:
    """Make standard output and error, warnings of loggers and tracebacks safe to print to."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="trialogue")
    root = logging.getLogger()
    if not any(isinstance(handler, _EchoHandler) for handler in root.handlers):
        root.addHandler(_EchoHandler())
    logging.captureWarnings(True)  # Python's own warnings may quote others too
    sys.excepthook = show_traceback


@contextmanager
def printing() -> Generator[None]:
    """Tell an output that cannot be written from other faults of the system."""
    try:
        yield
    except OSError as error:
        if error.errno == EPIPE:  # click ends quietly when nobody reads any more
            raise
        raise BrokenOutput(error.errno, f"cannot write the output: {error.strerror}") from error


def drop_output() -> None:
    """Write nothing more to standard output: what is left in its buffer cannot be written either."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback; made to be `sys.excepthook`. All lines but the first are indented: the text of an
    error may have several."""
    echo_lines("".join(format_exception(kind, error, trace)).rstrip("\n").replace("\n", "\n  "), err=True)


class _EchoHandler(logging.Handler):
    """Prints what loggers warn of, with a traceback where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        echo(record.getMessage(), err=True)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            show_traceback(type(error), error, error.__traceback__)


def _print(text: str, err: bool = False, nl: bool = True) -> None:
    with printing():
        click.echo(text, file=sys.stderr if err else sys.stdout, nl=nl)


def _is_unicode(stream: Any) -> bool:
    return str(getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _replace(error: UnicodeError) -> tuple[str, int]:
    """What is printed in place of characters that an output cannot write."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_ASCII.get(letter) or _to_escape(letter) for letter in letters), error.end


def _to_escape(letter: str) -> str:
    return letter.encode("ascii", "backslashreplace").decode()


codecs.register_error("trialogue", _replace)
