"""The verbs around simulated users: compare several, audit those of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trialogue.cli.options import DATA, JSON, TRUST, Whole, to_config
from trialogue.output import echo, echo_json


@click.group("users")
def users_verb() -> None:
    """Simulated users: compare several, audit those of a run."""


@users_verb.command("compare")
@click.argument("users", nargs=-1, required=True)
@click.option("--domain", default="shop", show_default=True, help="Where they are compared.")
@click.option("--agent", help="Who plays the agent: oracle, openai:NAME, a checkpoint, …")
@click.option("--split", help="Which split of the tasks.")
@click.option("--tasks", type=Whole(1), help="How many tasks.")
@click.option("--trials", type=Whole(1), help="Conversations per task.")
@click.option("--seed", type=int, help="Seed of every random choice.")
@DATA
@click.option("--config", "file", type=click.Path(dir_okay=False), help="A TOML file of settings.")
@JSON
def compare_verb(users: tuple[str, ...], domain: str, file: str | None, as_json: bool, **given: Any) -> None:
    """Let USERS talk with the same agent about the same tasks, and see whether one stands for another.

    Settings such as run.name=trial may stand among the users.

    \b
    trialogue users compare agenda openai:gpt-4.1-mini openai:gpt-4.1 --tasks 50
    trialogue users compare agenda local:runs/user --agent runs/agent user.prompt=card
    """
    import asyncio

    from trialogue.config import EvalConfig
    from trialogue.score.compare import compare_users
    from trialogue.view.terminal import show_progress, show_users

    settings = tuple(word for word in users if "=" in word)
    names = [word for word in users if "=" not in word]
    if not names:
        raise click.UsageError("name at least one user, such as agenda or openai:NAME")
    config = to_config(EvalConfig, domain, settings, file, given)
    with show_progress(quiet=as_json):
        result = asyncio.run(compare_users(names, config))
    if as_json:
        echo_json(result)
    else:
        show_users(result)


@users_verb.command("audit")
@click.argument("path", type=click.Path(exists=True))
@click.option("--domain", help="The domain, where it is not built in, or is another now.")
@TRUST
@DATA
@JSON
def audit_verb(path: str, domain: str | None, trust: bool, data: str | None, as_json: bool) -> None:
    """Say what the users of recorded conversations did wrong, from a run directory or a JSONL file alone.

    Exits with 1 where something was found.
    """
    from trialogue.score.compare import audit_file

    rows = audit_file(Path(path), domain, data, trust=trust)
    found = [row for row in rows if row["findings"]]
    if as_json:
        echo_json(rows)
    else:
        for row in found:
            for finding in row["findings"]:
                echo(f"{row['id']}  [{finding['turn']}] {finding['kind']}: {finding['evidence']}")
        echo(f"{len(found)} of {len(rows)} conversations have findings")
    sys.exit(1 if found else 0)
