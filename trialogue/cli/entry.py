"""How every command begins and ends: arguments that are text, one line for an error, an exit status.

Exit status: 0 ok, 1 failed, 2 wrong usage, 128 + the number of the signal that ended it.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from errno import ENAMETOOLONG, EPIPE
from types import FrameType
from typing import Any

import click

from trialogue.output import BrokenOutput, drop_output, echo, open_output, printing

FOR_PEOPLE = {"review", "view"}
"""Verbs that wait for somebody nearly all the time: they show no progress of their own."""


class Verbs(click.Group):
    """Turns errors into one readable line and an exit status."""

    def main(self, *args: Any, **extra: Any) -> Any:
        open_output()
        with ending_by_signal() as received:
            try:
                return super().main(*args, **extra)
            except SystemExit as error:
                if received and error.code == 128 + signal.SIGINT:
                    raise SystemExit(128 + received[-1]) from None
                raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _telling_os_error(ctx), _telling_usage(ctx):
            for word in args:
                if not _is_text(word):
                    raise click.UsageError(f"the argument '{word}' is not UTF-8 text; write it in UTF-8", ctx)
            with printing():  # --help and --version
                return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        from trialogue.errors import ConfigError, TrialogueError
        from trialogue.view.heartbeat import heartbeat

        debug = ctx.params.get("debug")
        try:
            with _telling_os_error(ctx), _telling_usage(ctx), heartbeat():
                return super().invoke(ctx)
        except TrialogueError as error:
            if debug:
                raise
            echo(f"trialogue: {error}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except KeyboardInterrupt:
            echo("trialogue: stopped", err=True)
            ctx.exit(128 + signal.SIGINT)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from trialogue.activity import phase

        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name not in FOR_PEOPLE:
            ctx.with_resource(phase(name))
        return name, command, rest


@contextmanager
def _telling_usage(ctx: click.Context) -> Generator[None]:
    """Wrong usage is told in one line, whatever was given."""
    try:
        yield
        return
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # of click 8.2 and newer
            raise
        where = error.ctx.command_path if error.ctx is not None else ctx.command_path
        text = " ".join(error.format_message().split()).rstrip(".")
    except OSError as error:
        if error.errno != ENAMETOOLONG:
            raise
        where, text = ctx.command_path, f"the name is too long: {str(error.filename)[:60]}…"
    echo(f"{where}: {text} (see {where} --help)", err=True)
    ctx.exit(2)


@contextmanager
def ending_by_signal() -> Generator[list[int]]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, with what is finished saved. Yields those received."""
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop = signal.getsignal(signal.SIGINT)
        (stop if callable(stop) else signal.default_int_handler)(signal.SIGINT, frame)

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not the main thread: whoever owns it decides
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP, and so do we then
                before[number] = signal.signal(number, end)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _telling_os_error(ctx: click.Context) -> Generator[None]:
    """What the system refused is told in one line."""
    try:
        yield
    except OSError as error:
        if ctx.params.get("debug") or error.errno == EPIPE:  # click ends quietly when nobody reads any more
            raise
        if isinstance(error, BrokenOutput):
            drop_output()
        text = error.strerror or str(error)
        with suppress(OSError):  # standard error may be on the same disk
            echo(f"trialogue: {text if error.filename is None else f'{error.filename}: {text}'}", err=True)
        ctx.exit(1)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
