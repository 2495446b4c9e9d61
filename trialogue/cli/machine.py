"""The verbs about machines: plan what a run needs, look at what is there."""

from __future__ import annotations

from dataclasses import replace

import click

from trialogue.cli.options import Asked, Whole, in_domain
from trialogue.output import echo, echo_json


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
