"""The command line, `trialogue VERB`: one file for each group of verbs.

Heavy imports stand inside each verb, so that `--help` answers at once.
"""

from __future__ import annotations

import json

import click

from trialogue.cli.conversations import chat_verb, eval_verb, play_verb, rollout_verb
from trialogue.cli.corpus import draft_verb, review_verb, synthesize_verb
from trialogue.cli.domains import check_verb, init_verb
from trialogue.cli.entry import Verbs
from trialogue.cli.learn import demo_verb, export_verb, learn_verb, sft_verb, train_verb
from trialogue.cli.machine import doctor_verb, plan_verb
from trialogue.cli.options import offer
from trialogue.cli.records import report_verb, score_verb, verify_verb, view_verb
from trialogue.cli.users import users_verb
from trialogue.output import echo, echo_json


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="trialogue")
def main(debug: bool) -> None:
    """Train language-model agents that talk with users and use tools."""


@main.command("config")
@click.argument(
    "verb",
    required=False,
    type=click.Choice(["draft", "eval", "synthesize", "sft", "train", "plan"]),
    metavar="[VERB]",
)
@offer("json")
def config_verb(verb: str | None, as_json: bool) -> None:
    """List the settings of a VERB (draft, eval, synthesize, sft, train, plan), or of all: key, default,
    meaning."""
    from trialogue.config import KINDS, list_keys

    keys = {name: list(list_keys(kind)) for name, kind in KINDS.items() if verb in (None, name)}
    if as_json:
        echo_json([{"verb": name, **key._asdict()} for name, found in keys.items() for key in found])
        return
    for name, found in keys.items():
        echo(f"# trialogue {name}")
        for key in found:
            echo(f"{key.key} = {json.dumps(key.default, ensure_ascii=False)}")
            echo(f"    {' '.join(key.meaning.split())}")


for verb in (
    *(init_verb, check_verb),
    *(eval_verb, rollout_verb, play_verb, chat_verb),
    *(draft_verb, synthesize_verb, review_verb),
    *(learn_verb, sft_verb, train_verb, export_verb, demo_verb, plan_verb, doctor_verb),
    *(score_verb, report_verb, verify_verb, view_verb, users_verb),
):
    main.add_command(verb)
