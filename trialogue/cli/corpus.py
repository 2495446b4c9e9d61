"""The verbs around a corpus of conversations: draft a scenario, synthesise, review."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trialogue.cli.options import SETTINGS, Asked, Whole, in_domain, offer, refuse_files, resumable
from trialogue.output import echo, echo_json


@click.command("draft")
@click.argument("folder")
@SETTINGS
@click.option("--brief", help="A file that says what a new scenario is about.")
@click.option("--model", "drafter", help="Who drafts: openai:NAME.")
@click.option("--tasks", type=Whole(0), help="Number of tasks to draft, besides those there are.")
@offer("seed", "config", "json")
def draft_verb(folder: str, settings: tuple[str, ...], file: str | None, as_json: bool, **given: Any) -> None:
    """Draft a scenario into FOLDER with a language model; or further tasks, where it is there already.

    \b
    trialogue draft library --brief brief.md --model openai:gpt-4.1 --tasks 20
    trialogue draft my_mcp_server --model openai:gpt-4.1 --tasks 50
    """
    import asyncio
    import json

    from trialogue.config import DraftConfig, load_config
    from trialogue.corpus.draft import draft
    from trialogue.errors import ConfigError
    from trialogue.talk.model import close_source
    from trialogue.talk.openai import OpenAIModel

    refuse_files(folder, *settings)
    keys = {"brief": "brief", "drafter": "drafter.model", "tasks": "tasks", "seed": "seed"}
    overrides = [f"{keys[name]}={json.dumps(value)}" for name, value in given.items() if value is not None]
    config = load_config(DraftConfig, file, [f"folder={json.dumps(folder)}", *overrides, *settings])
    kind, _, name = config.drafter.model.partition(":")
    if kind != "openai" or not name:
        raise ConfigError("a scenario is drafted by a language model: --model openai:NAME")

    async def work() -> dict[str, Any]:
        model = OpenAIModel(name, "user", config.drafter, config.reply_tokens, config.seed)
        try:
            return await draft(config, model, lambda text: echo(text, err=True))
        finally:
            await close_source(model)

    result = asyncio.run(work())
    if as_json:
        echo_json(result)
        return
    echo(f"{result['folder']}: {result['tools']} tools, {result['tasks']} tasks; read and correct it, then")
    echo(f"  trialogue check {folder}")


@click.command("synthesize")
@in_domain(
    *("agent", "user", "reward", "judge", "count", "split", "seed", "data"),
    *("config", "resume", "trust", "json"),
)
def synthesize_verb(asked: Asked, as_json: bool) -> None:
    """Make a corpus to imitate: a teacher's conversations in a DOMAIN, verified, without doubles.

    \b
    trialogue synthesize shop --count 5000
    trialogue synthesize shop --agent openai:gpt-4.1 --user openai:gpt-4.1 --judge openai:o3
    """
    import asyncio

    from trialogue.config import SynthesizeConfig
    from trialogue.corpus.synthesize import synthesize
    from trialogue.view.report import write_report
    from trialogue.view.terminal import show_corpus, show_progress

    config = asked.to_config(SynthesizeConfig)
    run: list[Path] = []
    with resumable("synthesize", run, config), show_progress(quiet=as_json):
        result = asyncio.run(synthesize(config, resume=asked.resume, started=run.append))
    write_report(Path(result["run"]))
    if as_json:
        echo_json(result)
    else:
        show_corpus(result)
    if result["accepted"] < result["wanted"]:
        echo(f"only {result['accepted']} of {result['wanted']} conversations were accepted", err=True)
        sys.exit(1)


@click.command("review")
@click.argument("path", type=click.Path(exists=True))
@click.option("--rejected", is_flag=True, help="Those that were rejected, to take some of them in after all.")
@click.option("--by", help="Who decides; your name on this machine otherwise.")
@offer("trust", "json")
def review_verb(path: str, rejected: bool, by: str | None, trust: bool, as_json: bool) -> None:
    """Decide about conversations yourself: accept, reject, annotate. PATH is a synthesis run or a JSONL file.

    A person has the last word. The corpus of a run is written anew when you stop.
    """
    import getpass

    from trialogue.corpus.review import Verdicts, review, write_reviewed
    from trialogue.corpus.synthesize import decide_again, read_decided
    from trialogue.digests import refuse_injured
    from trialogue.run import read_trajectories
    from trialogue.screen import Screen
    from trialogue.talk.human import ask_aside
    from trialogue.view.terminal import show_conversation, show_corpus

    place = Path(path)
    is_run = place.is_dir()
    if is_run:  # what is refused is refused before a person has decided anything
        refuse_injured(place)
        read_decided(place, trust=trust)
    file = place / ("rejected.jsonl" if rejected else "accepted.jsonl") if is_run else place
    items = list(read_trajectories(file))
    console = Screen(stderr=as_json)
    decided = review(
        items,
        Verdicts(place),
        lambda item, where: show_conversation(item, where, console),
        ask_aside if as_json else input,
        by or getpass.getuser(),
    )
    if not is_run:
        result = write_reviewed(place, items)
        line = f"{decided} decided; accepted {result['accepted']}, rejected {result['rejected']}"
        echo_json({"decided": decided, **result}) if as_json else echo(line)
        return
    from trialogue.view.report import write_report

    result = decide_again(place, trust=trust)
    write_report(place)
    if as_json:
        echo_json({"decided": decided, **result})
    else:
        echo(f"{decided} decided")
        show_corpus(result)
