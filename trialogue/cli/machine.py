"""The verbs about machines: plan what a run needs, look at what is there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trialogue.cli.options import Asked, Whole, find_ask, find_keys, in_domain
from trialogue.output import echo, echo_json

if TYPE_CHECKING:
    from trialogue.plan.machine import Finding


@click.command("plan")
@click.option("--gpus", type=Whole(1), help="Number of GPUs. Default: 8.")
@click.option("--gpu", help="Kind of GPU: a100-80g, h100, …, here, or a TOML file. Default: h100.")
@click.option("--like", metavar="RUN", help="Take turns, lengths and latencies from recorded conversations.")
@click.option("--no-table", is_flag=True, help="Only the run as configured, no other sizes.")
@in_domain("user", "split", "seed", "data", "config", "json")
def plan_verb(
    asked: Asked, gpus: int | None, gpu: str | None, like: str | None, no_table: bool, as_json: bool
) -> None:
    """Plan the `train` of a DOMAIN before it is paid for: memory of a GPU, seconds, requests, money.

    \b
    trialogue plan --config configs/paper-8b.toml --gpus 8 --gpu h100
    trialogue plan shop learner.model=smollm2 --gpus 1 --gpu here
    """
    import json

    from trialogue.config import PlanConfig
    from trialogue.plan.plan import make_plan
    from trialogue.plan.text import to_lines

    given = {"plan.gpus": gpus, "plan.gpu": gpu, "plan.like": like}
    words = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    config = replace(asked, settings=(*words, *asked.settings)).to_config(PlanConfig)
    plan = make_plan(config, table=not no_table)
    if as_json:
        echo_json(plan.to_data())
        return
    for line in to_lines(plan):
        echo(line)


@click.command("doctor")
@click.option("--exported", metavar="DIR", help="A folder of `export verl`; words after it are verl's own.")
@click.option(
    "--probes",
    type=Whole(-1),
    default=16,
    show_default=True,
    help="Requests to each endpoint at once, at most; -1 asks nobody.",
)
@click.option(
    "--smoke", is_flag=True, help="Then train the built-in shop for some minutes and write a report."
)
@click.option("--minutes", type=click.FloatRange(0.5), default=3.0, show_default=True, help="Of --smoke.")
@click.option("--out", default="runs/smoke", show_default=True, help="Folder for everything --smoke writes.")
@in_domain("user", "split", "seed", "data", "config", "trust", "json")
def doctor_verb(
    asked: Asked,
    exported: str | None,
    probes: int,
    smoke: bool,
    minutes: float,
    out: str,
    as_json: bool,
) -> None:
    """Look at what a run needs before anything is spent: packages, GPUs, disk, keys, endpoints, the cluster.
    Without a DOMAIN it looks at this machine alone. Exits with 1 if something is missing.

    \b
    trialogue doctor
    trialogue doctor --config configs/paper-8b.toml --data DIR
    trialogue doctor --smoke
    """
    from trialogue.config import TrainConfig
    from trialogue.plan.cluster import read_words
    from trialogue.plan.doctor import examine, read_exported
    from trialogue.score.resume import refuse_claims

    def tell(text: str) -> None:
        echo(text, err=True)

    words: dict[str, object] = {}
    folder = None
    if exported is not None:
        folder = Path(exported).expanduser().resolve()
        config = read_exported(folder)
        if not asked.trust:
            refuse_claims(folder, config, set(), find_ask())
        words = read_words(tuple(filter(None, [asked.domain, *asked.settings])))
    elif asked.domain or asked.file or "domain" in find_keys(asked.settings):
        config = asked.to_config(TrainConfig)
    elif asked.settings:
        raise click.UsageError("name a DOMAIN for these settings", click.get_current_context(silent=True))
    else:
        config = None
    found = examine(config, probes, tell, folder, words)
    failed = [one for one in found if one.state == "fail"]
    if not as_json:
        for one in found:
            echo(one.to_line())
    report = run_smoke(Path(out), minutes, found, as_json) if smoke and not failed else None
    if as_json:
        echo_json(
            {
                "ok": not failed,
                "findings": [
                    {"name": one.name, "state": one.state, "found": one.found, "remedy": one.remedy}
                    for one in found
                ],
                **({"smoke": report} if report is not None else {}),
            }
        )
    elif failed:
        echo(f"{len(failed)} problems: {', '.join(one.name for one in failed)}")
    else:
        echo("nothing is missing")
    sys.exit(1 if failed else 0)


def run_smoke(out: Path, minutes: float, found: list[Finding], quiet: bool) -> dict[str, Any]:
    """Train for some minutes; an earlier report is moved aside."""
    import asyncio
    from functools import partial

    from trialogue.plan.smoke import smoke
    from trialogue.run import set_aside
    from trialogue.view.live import show_steps

    set_aside(out)
    with show_steps(quiet=quiet) as watch:
        report = asyncio.run(smoke(out, minutes, found, partial(echo, err=quiet), watch))
    if not quiet:
        echo(f"report: {out / 'report.md'}")
    return report
