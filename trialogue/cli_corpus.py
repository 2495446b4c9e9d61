"""The verbs around a corpus of conversations: draft a scenario, synthesise, review."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trialogue.cli_options import DATA, JSON, SETTINGS, print_json, to_config


@click.command("synthesize")
@click.argument("domain", required=False)
@SETTINGS
@click.option("--agent", help="The teacher: oracle, openai:NAME, a checkpoint, …")
@click.option("--user", help="Who plays the user: agenda, openai:NAME, …")
@click.option("--judge", help="Who scores what was verified: openai:NAME; nobody by default.")
@click.option("--count", type=click.IntRange(1), help="Distinct, verified conversations to end up with.")
@click.option("--split", help="Which split of the tasks.")
@click.option("--seed", type=int, help="Seed of every random choice.")
@DATA
@click.option("--config", "file", type=click.Path(dir_okay=False), help="A TOML file of settings.")
@click.option("--resume", metavar="RUN", help="Go on with a run directory, with its own settings.")
@JSON
def synthesize_verb(
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    resume: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Make a corpus to imitate: a teacher's conversations in a DOMAIN, verified, without doubles.

    \b
    trialogue synthesize shop --count 5000
    trialogue synthesize shop --agent openai:gpt-4.1 --user openai:gpt-4.1 --judge openai:o3
    """
    import asyncio

    from trialogue.config import SynthesizeConfig
    from trialogue.learn.synthesize import synthesize
    from trialogue.view.report import write_report
    from trialogue.view.terminal import show_corpus, show_synthesis

    config = to_config(SynthesizeConfig, domain, settings, file, given, resume)
    run: list[Path] = []
    try:
        with show_synthesis(quiet=as_json) as watch:
            resumed = Path(resume) if resume else None
            result = asyncio.run(synthesize(config, resume=resumed, started=run.append, watch=watch))
    except KeyboardInterrupt:
        if not run:
            raise
        click.echo(f"stopped; go on with: trialogue synthesize --resume {run[0]}", err=True)
        sys.exit(130)
    write_report(Path(result["run"]))
    if as_json:
        print_json(result)
    else:
        show_corpus(result)
    if result["accepted"] < result["wanted"]:
        click.echo(f"only {result['accepted']} of {result['wanted']} conversations were accepted", err=True)
        sys.exit(1)
