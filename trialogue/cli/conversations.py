"""The verbs that hold conversations: evaluate, collect, take part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trialogue.cli.options import DATA, JSON, SETTINGS, TRUST, Whole, to_chat, to_config, to_resume
from trialogue.output import echo, echo_json


def _evaluate(
    kind: Any,
    as_json: bool,
    resume: str | None,
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    given: dict[str, Any],
    *,
    trust: bool,
) -> None:
    import asyncio

    from trialogue.config import EvalConfig
    from trialogue.errors import BudgetError
    from trialogue.score.evaluate import evaluate
    from trialogue.view.report import write_report
    from trialogue.view.terminal import show_progress, show_result, tell_failed

    config = to_config(EvalConfig, domain, settings, file, given, resume, trust=trust)
    run: list[Path] = []
    try:
        with show_progress(quiet=as_json or "human" in (config.agent.model, config.user.model)):
            resumed = Path(resume) if resume else None
            result = asyncio.run(evaluate(config, kind=kind, resume=resumed, started=run.append))
    except BudgetError as error:
        echo(f"trialogue: {error}; what was finished is in {run[0]}. Go on with more:", err=True)
        echo(f"  {to_resume(kind, run[0], config)} budget.usd=… or budget.tokens=…", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        if not run:
            raise
        echo(f"stopped; what was finished is in {run[0]}. Go on with:", err=True)
        echo(f"  {to_resume(kind, run[0], config)}", err=True)
        sys.exit(130)
    write_report(Path(result["run"]))
    if as_json:
        echo_json({"pass^1": None, "pass^1_low": None, "pass^1_high": None, **result})
    else:
        show_result(result)
    if result["conversations"] < result["asked"]:
        if as_json:
            echo(tell_failed(result), err=True)
        sys.exit(1)


def _eval_options(function: Any) -> Any:
    options = [
        click.argument("domain", required=False),
        SETTINGS,
        click.option("--agent", help="Who plays the agent: oracle, naive, openai:NAME, a checkpoint, …"),
        click.option("--user", help="Who plays the user: agenda, openai:NAME, human, …"),
        click.option("--split", help="Which split of the tasks."),
        click.option("--tasks", type=Whole(1), help="How many tasks."),
        click.option("--trials", type=Whole(1), help="Conversations per task."),
        click.option("--seed", type=int, help="Seed of every random choice."),
        DATA,
        click.option("--config", "file", type=click.Path(dir_okay=False), help="A TOML file of settings."),
        click.option("--resume", metavar="RUN", help="Go on with a run directory, with its own settings."),
        TRUST,
        JSON,
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command("eval")
@_eval_options
def eval_verb(
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    resume: str | None,
    trust: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Evaluate an agent with a user on a DOMAIN: conversations, rewards, pass^k with intervals.

    \b
    trialogue eval shop --agent oracle --user agenda --split test --tasks 100
    trialogue eval shop --agent openai:gpt-4.1 --user openai:gpt-4.1 limits.observations=40
    """
    _evaluate("eval", as_json, resume, domain, settings, file, given, trust=trust)


@click.command("rollout")
@_eval_options
def rollout_verb(
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    resume: str | None,
    trust: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Hold conversations and write them down: as eval does, for collecting data rather than a score."""
    _evaluate("rollout", as_json, resume, domain, settings, file, given, trust=trust)


@click.command("play")
@click.argument("domain", default="shop")
@SETTINGS
@click.option(
    "--as", "side", type=click.Choice(["agent", "user"]), default="agent", help="Which side you take."
)
@click.option("--task", help="Id of the task; one chosen by the seed otherwise.")
@click.option("--split", help="Which split the task is from.")
@click.option("--seed", type=int, help="Seed of every random choice.")
@click.option("--agent", help="Who plays the agent, when you are the user.")
@click.option("--user", help="Who plays the user, when you are the agent.")
@DATA
@JSON
def play_verb(
    domain: str,
    settings: tuple[str, ...],
    side: Any,
    task: str | None,
    as_json: bool,
    calls: bool = False,
    **given: Any,
) -> None:
    """Sit on one side of a conversation in a DOMAIN: type text, or a call such as get_order order_id=W1.

    \b
    trialogue play shop
    trialogue play shop --as user --agent openai:gpt-4.1
    """
    import asyncio

    from trialogue.config import EvalConfig
    from trialogue.score.play import find_task, play
    from trialogue.screen import Screen
    from trialogue.talk.human import HumanModel, ask_aside
    from trialogue.view.terminal import show_why
    from trialogue.world.find import find_domain

    patient = ("limits.seconds=86400", *settings)
    config = to_config(EvalConfig, domain, patient, None, given)
    found = find_domain(config.domain, config.data)
    chosen = find_task(found, config, task, any_split=given["split"] is None)
    console = Screen(stderr=as_json)
    person = HumanModel(side, found, chosen, console, ask_aside if as_json else input, shows_calls=calls)
    try:
        played = asyncio.run(play(found, chosen, config, person))
    except KeyboardInterrupt:
        console.print()
        console.print("You left; the conversation is not graded.")
        sys.exit(130 if not person.left else 1)
    if as_json:
        echo_json(played.to_data())
    else:
        show_why(played.trajectory, played.ended, played.changes, console)
    if played.trajectory.end == "error":
        sys.exit(1)


@click.command("chat")
@click.argument("run")
@click.argument("domain", required=False)
@SETTINGS
@click.option("--seed", type=int, help="Seed of every random choice.")
@TRUST
@JSON
@click.pass_context
def chat_verb(
    ctx: click.Context,
    run: str,
    domain: str | None,
    settings: tuple[str, ...],
    seed: int | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Talk to a trained agent as the user: RUN is a run directory or a folder of weights. The DOMAIN is the
    one it has learned in, or shop."""
    ctx.invoke(
        play_verb,
        **to_chat(run, domain, settings, trust=trust),
        side="user",
        task=None,
        as_json=as_json,
        split=None,
        seed=seed,
        agent=run,
        user=None,
        calls=True,
    )
