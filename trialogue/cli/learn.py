"""The verbs that learn: fine-tune, train, export the settings to another trainer, demonstrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trialogue.cli.options import JSON, SETTINGS, TRUST, to_config, to_resume, with_trust
from trialogue.output import echo, echo_json


@click.command("sft")
@click.argument("file", required=False, metavar="[CONFIG]")
@SETTINGS
@click.option("--side", type=click.Choice(["agent", "user"]), help="Whose turns are learned.")
@click.option("--resume", metavar="RUN", help="Go on with a run directory.")
@TRUST
@JSON
def sft_verb(
    file: str | None,
    settings: tuple[str, ...],
    side: str | None,
    resume: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Fine-tune a model on recorded conversations, or on those of a domain's oracle.

    \b
    trialogue sft sft.count=2000 sft.faults=0.25
    trialogue sft sft.examples=runs/rollout-shop-1 learner.model=smollm2
    """
    from trialogue.config import SftConfig
    from trialogue.learn.sft import sft

    extra = [] if side is None else [f"sft.side={side}"]
    _learn(sft, SftConfig, file, (*extra, *settings), resume, as_json, trust=trust)


@click.command("train")
@click.argument("file", required=False, metavar="[CONFIG]")
@SETTINGS
@click.option("--resume", metavar="RUN", help="Go on with a run directory.")
@TRUST
@JSON
def train_verb(
    file: str | None, settings: tuple[str, ...], resume: str | None, trust: bool, as_json: bool
) -> None:
    """Train an agent by reinforcement learning with a user in the loop.

    \b
    trialogue train learner.model=runs/sft-shop-1 training.steps=100
    trialogue train configs/shop-smollm2.toml optimizer.learning_rate=1e-5
    """
    from trialogue.config import TrainConfig
    from trialogue.learn.train import train

    _learn(train, TrainConfig, file, settings, resume, as_json, trust=trust)


def _learn(
    verb: Any,
    kind: Any,
    file: str | None,
    settings: tuple[str, ...],
    resume: str | None,
    as_json: bool,
    *,
    trust: bool,
) -> None:
    import asyncio
    from contextlib import closing

    from trialogue.run import read_about
    from trialogue.view.live import show_steps
    from trialogue.view.report import write_report
    from trialogue.view.trackers import Trackers

    if file is not None and "=" in file:
        settings, file = (file, *settings), None
    config = to_config(kind, None, settings, file, {}, resume, trust=trust)
    title = f"trialogue {verb.__name__} · {config.domain} · {config.learner.model}"
    steps = config.training.steps if verb.__name__ == "train" else None
    trackers = Trackers(config.run.track)
    run: list[Path] = []
    try:
        with closing(trackers), show_steps(as_json, title, steps) as shown:

            def started(path: Path) -> None:
                run.append(path)
                shown.started(path)
                trackers.started(path)

            def watch(step: int, metrics: dict[str, Any]) -> None:
                shown(step, metrics)
                trackers(step, metrics)

            resumed = Path(resume) if resume else None
            path = asyncio.run(verb(config, resume=resumed, watch=watch, started=started))
    except KeyboardInterrupt:
        if run:
            again = to_resume(verb.__name__, run[0], config)
            echo(f"stopped at once; go on from the last checkpoint, if any, with: {again}", err=True)
        raise
    write_report(path)
    about = read_about(path)
    state, marks = about["state"], about.get("marks", [])
    for mark in marks:
        echo(f"marked: {mark}", err=as_json)
    if (fault := shown.find_fault()) is not None:
        echo(fault, err=True)
    if resume and not shown.durations:
        echo(f"{path} had nothing left to do", err=True)
    if as_json:
        echo_json({"run": str(path), "state": state, **({"marks": marks} if marks else {})})
    elif state == "stopped":
        echo(f"stopped and saved; go on with: {to_resume(verb.__name__, path, config)}")
    else:
        echo(f"model: {path / 'model'}")
        if verb.__name__ == "sft" and config.sft.side == "user":
            echo(f"let it play: trialogue eval {config.domain} --user local:{path} user.prompt=card")
        else:
            levels = config.tasks.levels
            same = "" if levels == type(config.tasks)().levels else f' "tasks.levels={list(levels)}"'
            echo(f"evaluate it: trialogue eval {config.domain} --agent {path}{same}")
            echo(f"talk to it: trialogue chat {with_trust(path, config)}")
        echo(f"look at it: trialogue view {path}")


@click.command("export")
@click.argument("host", type=click.Choice(["verl"]))
@click.argument("file", required=False, metavar="[CONFIG]")
@SETTINGS
@click.option("--out", required=True, help="Folder for everything it writes.")
@JSON
def export_verb(host: str, file: str | None, settings: tuple[str, ...], out: str, as_json: bool) -> None:
    """Write the settings of `train` as another trainer reads them: data, agent loop, launch script.

    \b
    trialogue export verl configs/paper-8b.toml data=DIR --out runs/paper-8b
    """
    from trialogue.config import TrainConfig, load_config
    from trialogue.hosts.export import export_verl

    if file is not None and "=" in file:
        settings, file = (file, *settings), None
    written = export_verl(load_config(TrainConfig, file, settings), Path(out))
    if as_json:
        echo_json(written)
        return
    for mark in written.get("marks", ()):
        echo(f"marked: {mark}")
    echo(f"{written['train']} tasks to train on, {written['dev']} to watch, {written['steps']} steps")
    echo(f"start: {written['out']}/launch.sh")


@click.command("demo")
@click.option("--out", default="runs/demo", show_default=True, help="Folder for everything it writes.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every random choice.")
@click.option(
    "--minutes", type=click.FloatRange(0.5), help="Shorten it to about so many; the whole takes six."
)
@JSON
def demo_verb(out: str, seed: int, minutes: float | None, as_json: bool) -> None:
    """Train the built-in shop's agent on this machine's CPU: cold start, then learning from users.

    \b
    trialogue demo
    trialogue demo --minutes 1
    """
    import asyncio
    from functools import partial

    from trialogue.learn.demo import Size, demonstrate
    from trialogue.run import set_aside
    from trialogue.view.live import show_steps
    from trialogue.view.terminal import show_demo

    directory = Path(out)
    earlier = set_aside(directory)
    if earlier is not None:
        echo(f"the demonstration before this one is now at {earlier}", err=True)
    with show_steps(quiet=as_json) as watch:
        size = Size() if minutes is None else Size.fit(minutes)
        told = partial(echo, err=as_json)
        result = asyncio.run(demonstrate(directory, seed, told, watch, size))
    if as_json:
        echo_json(result["summary"])
    else:
        show_demo(result["before"], result["after"], result["summary"], directory)
