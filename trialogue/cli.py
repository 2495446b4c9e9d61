"""The verbs of the command line. Heavy imports stand inside each verb, so `--help` answers at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one machine-readable value and nothing else."
)
SETTINGS = click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")


class Verbs(click.Group):
    """Turns our errors into one readable line and the house's exit status: 1 failed, 2 wrong usage."""

    def invoke(self, ctx: click.Context) -> Any:
        from trialogue.errors import ConfigError, TrialogueError

        try:
            return super().invoke(ctx)
        except TrialogueError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"trialogue: {error}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except KeyboardInterrupt:
            click.echo("trialogue: stopped; what was finished is saved", err=True)
            ctx.exit(130)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="trialogue")
def main(debug: bool) -> None:
    """Train language-model agents that talk with users and use tools."""


def _evaluate(kind: Any, as_json: bool, resume: str | None, config: Any) -> None:
    import asyncio

    from trialogue.score.evaluate import evaluate
    from trialogue.view.terminal import show_progress, show_result

    with show_progress(kind, quiet=as_json) as progress:
        result = asyncio.run(
            evaluate(config, kind=kind, resume=Path(resume) if resume else None, progress=progress)
        )
    from trialogue.view.report import write_report

    write_report(Path(result["run"]))
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
    else:
        show_result(result)
    if not result["conversations"]:
        sys.exit(1)


def _eval_options(function: Any) -> Any:
    options = [
        click.argument("domain", required=False),
        SETTINGS,
        click.option("--agent", help="Who plays the agent: oracle, naive, openai:NAME, a checkpoint, …"),
        click.option("--user", help="Who plays the user: agenda, openai:NAME, human, …"),
        click.option("--split", help="Which split of the tasks."),
        click.option("--tasks", type=click.IntRange(1), help="How many tasks."),
        click.option("--trials", type=click.IntRange(1), help="Conversations per task."),
        click.option("--seed", type=int, help="Seed of every random choice."),
        click.option("--data", help="Folder with a benchmark's data."),
        click.option("--config", "file", type=click.Path(dir_okay=False), help="A TOML file of settings."),
        click.option("--resume", metavar="RUN", help="Go on with a run directory."),
        JSON,
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _to_eval_config(
    domain: str | None, settings: tuple[str, ...], file: str | None, given: dict[str, Any]
) -> Any:
    from trialogue.config import EvalConfig, load_config

    if domain is not None and "=" in domain:
        settings, domain = (domain, *settings), None
    keys = {
        "agent": "agent.model",
        "user": "user.model",
        "split": "tasks.split",
        "tasks": "tasks.count",
        "trials": "tasks.trials",
        "seed": "seed",
        "data": "data",
    }
    overrides = [f"domain={json.dumps(domain)}"] if domain is not None else []
    overrides += [f"{keys[name]}={json.dumps(value)}" for name, value in given.items() if value is not None]
    return load_config(EvalConfig, file, [*overrides, *settings])


@main.command("eval")
@_eval_options
def eval_verb(
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    resume: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Evaluate an agent with a user on a DOMAIN: conversations, rewards, pass^k with intervals.

    \b
    trialogue eval shop --agent oracle --user agenda --split test --tasks 100
    trialogue eval shop --agent openai:gpt-4.1 --user openai:gpt-4.1 limits.observations=40
    """
    _evaluate("eval", as_json, resume, _to_eval_config(domain, settings, file, given))


@main.command("rollout")
@_eval_options
def rollout_verb(
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    resume: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Hold conversations and write them down: as eval does, for collecting data rather than a score."""
    _evaluate("rollout", as_json, resume, _to_eval_config(domain, settings, file, given))


@main.command("score")
@click.argument("path", type=click.Path(exists=True))
@click.option("--domain", help="The domain, where the file does not name one that can be found.")
@click.option("--data", help="Folder with a benchmark's data.")
@JSON
def score_verb(path: str, domain: str | None, data: str | None, as_json: bool) -> None:
    """Grade recorded conversations again, from a run directory or a JSONL file alone."""
    from trialogue.score.rescore import rescore

    rows = rescore(Path(path), domain, data)
    if as_json:
        click.echo(json.dumps([row.to_data() for row in rows], ensure_ascii=False))
    else:
        for row in rows:
            click.echo(row.to_line())
        click.echo(f"{len(rows)} conversations, {sum(row.same for row in rows)} graded as recorded")
    sys.exit(0 if all(row.same for row in rows) else 1)


@main.command("config")
@JSON
def config_verb(as_json: bool) -> None:
    """List every setting: key, default and meaning."""
    from trialogue.config import EvalConfig, list_keys

    keys = list(list_keys(EvalConfig))
    if as_json:
        rows = [{"key": key.key, "default": key.default, "meaning": key.meaning} for key in keys]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    for key in keys:
        click.echo(f"{key.key} = {json.dumps(key.default, ensure_ascii=False)}")
        click.echo(f"    {key.meaning}")


if __name__ == "__main__":
    main()
