"""Help is instant: every verb answers `--help` in under 0.3 s of CPU and imports neither torch nor openai."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from trialogue.cli.main import main
from trialogue.cli.options import OPTIONS, offer

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


def test_the_table_of_verbs_is_what_the_command_line_offers() -> None:
    @click.command()
    @offer(*OPTIONS)
    def every() -> None: ...

    shared = {(option.name, option.help) for option in every.params if isinstance(option, click.Option)}
    text = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    table: dict[str, tuple[str, list[str]]] = {}
    for row in re.findall(r"(?m)^\| \[`.*$", text):
        verbs, arguments, _, _, options = (cell.strip() for cell in row.strip("|").split("|"))
        for verb in re.findall(r"\[`([^`]*)`\]", verbs):
            table[verb] = arguments.strip("`"), options.strip("`").split()
    offered: dict[str, tuple[str, list[str]]] = {}
    for words in find_verbs(main):
        command: click.Command = main
        for word in words:
            assert isinstance(command, click.Group)
            command = command.commands[word]
        if isinstance(command, click.Group):
            continue
        options = [option for option in command.params if isinstance(option, click.Option)]
        names = [option.opts[0] for option in options if (option.name, option.help) in shared]
        assert names.pop() == "--json", words
        pieces = command.collect_usage_pieces(click.Context(command))
        offered[" ".join(words)] = " ".join(pieces[1:]).replace("...", "…"), names
    assert table == offered
