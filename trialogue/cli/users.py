"""The verbs around simulated users: compare several, audit those of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trialogue.cli.options import Asked, in_domain, offer
from trialogue.output import echo, echo_json


@click.group("users")
def users_verb() -> None:
    """Simulated users: compare several, audit those of a run."""


@users_verb.command("compare")
@click.option(
    "--user", "users", multiple=True, required=True, help="A user to compare; give the option for each."
)
@in_domain("agent", "reward", "split", "tasks", "trials", "seed", "data", "config", "json")
def compare_verb(asked: Asked, users: tuple[str, ...], as_json: bool) -> None:
    """Let several users talk with the same agent about the same tasks of a DOMAIN, and compare the figures.

    \b
    trialogue users compare shop --user agenda --user openai:gpt-4.1-mini --tasks 50
    trialogue users compare shop --user agenda --user local:runs/user --agent runs/agent user.prompt=card
    """
    import asyncio

    from trialogue.config import EvalConfig
    from trialogue.score.compare import compare_users
    from trialogue.view.terminal import show_progress, show_users

    config = asked.to_config(EvalConfig)
    with show_progress(quiet=as_json):
        result = asyncio.run(compare_users(list(users), config))
    if as_json:
        echo_json(result)
    else:
        show_users(result)


@users_verb.command("audit")
@click.argument("path", type=click.Path(exists=True))
@click.argument("domain", required=False)
@offer("data", "trust", "json")
def audit_verb(path: str, domain: str | None, data: str | None, trust: bool, as_json: bool) -> None:
    """Say what the users of recorded conversations did wrong, from a run directory or a JSONL file alone. The
    DOMAIN is the recorded one, where no other is named.

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
