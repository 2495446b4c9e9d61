"""Help is instant: every verb answers `--help` in under 0.3 s of CPU and imports neither torch nor openai."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import click
import pytest

from trialogue.cli.main import main

LIMIT = 0.3
TRIES = 3  # the best one counts, so that a busy machine does not matter
RUNNER = """
import sys
try:
    from trialogue.cli.main import main
    main()
finally:
    heavy = {"torch", "transformers", "openai"} & set(sys.modules)
    print("heavy:", *sorted(heavy), file=sys.stderr)
"""


def find_verbs(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, name
            yield from find_verbs(child, (*words, name))


@dataclass(frozen=True)
class Answer:
    status: int
    output: str
    errors: str
    cpu_seconds: float


def ask(program: str, *words: str) -> Answer:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([sys.executable, "-c", program, *words], stdout=output, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)  # already reaped: Popen must not wait again
        output.seek(0)
        errors.seek(0)
        seconds = usage.ru_utime + usage.ru_stime
        return Answer(child.returncode, output.read(), errors.read(), seconds)


def test_the_verbs_are_found() -> None:
    assert len(list(find_verbs(main))) > 1


@pytest.mark.parametrize("words", list(find_verbs(main)), ids=lambda words: " ".join(words) or "trialogue")
def test_help_is_instant(words: tuple[str, ...]) -> None:
    fastest = float("inf")
    for _ in range(TRIES):
        answer = ask(RUNNER, *words, "--help")
        assert answer.status == 0, answer.errors
        assert "Usage:" in answer.output
        assert answer.errors.splitlines()[-1].strip() == "heavy:"
        fastest = min(fastest, answer.cpu_seconds)
        if fastest < LIMIT:
            break
    assert fastest < LIMIT


def test_a_slow_program_is_noticed() -> None:
    answer = ask("import time\nwhile time.process_time() < 0.4: pass\nraise SystemExit(3)")
    assert answer.status == 3
    assert answer.cpu_seconds > LIMIT
