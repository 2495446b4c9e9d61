"""The verbs that learn: fine-tune, train, export the settings to another trainer, demonstrate."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from trialogue.cli.options import Asked, in_domain, offer, to_allowed, to_resume
from trialogue.output import echo, echo_json

if TYPE_CHECKING:
    from trialogue.config import TrainConfig

    Watch = Callable[[int, dict[str, Any]], None]


@click.command("learn")
@click.option(
    "--minutes", type=click.FloatRange(0.5), default=10.0, show_default=True, help="Time for everything."
)
@click.option("--model", default="tiny-desk", show_default=True, help="What learns: as in learner.model.")
@click.option("--from", "begin", metavar="RUN", help="Weights to begin with, in place of a cold start.")
@click.option(
    "--examples",
    default="teacher",
    show_default=True,
    help="What is imitated: teacher, oracle, or recorded conversations (a run or a file).",
)
@click.option("--out", help="Folder for everything it writes. Default: runs/learn-NAME.")
@in_domain("user", "reward", "seed", "data", "resume", "json")
def learn_verb(
    asked: Asked,
    minutes: float,
    model: str,
    begin: str | None,
    examples: str,
    out: str | None,
    as_json: bool,
) -> None:
    """From a DOMAIN to an evaluated agent: look at it, cold start, reinforcement, tests before and after.

    \b
    trialogue learn bakery
    trialogue learn bakery --minutes 30 --model smollm2
    trialogue learn bakery --resume runs/learn-bakery
    """
    from trialogue.learn.course import Course, learn
    from trialogue.run import refuse_missing

    words = [word for word in asked.to_words() if not word.startswith(("domain=", "seed="))]
    if wrong := [word for word in words if word.startswith(("run.", "tasks.split", "tasks.count"))]:
        raise click.UsageError(f"learn chooses {', '.join(wrong)} itself; leave it out")
    if any(word.startswith(("learner.model=", "agent.model=")) for word in words):
        raise click.UsageError(
            "the model changes in the course: name the one to begin with by --model or --from"
        )
    if asked.domain is None:
        raise click.UsageError("name a DOMAIN, such as shop (with --resume, too)")
    for path in filter(None, (begin, asked.resume)):
        refuse_missing(Path(path))
    course = Course(
        domain=asked.domain,
        directory=asked.resume or Path(out or f"runs/learn-{to_stem(asked.domain)}"),
        minutes=minutes,
        seed=asked.options.get("seed") or 0,
        model=model,
        begin=Path(begin) if begin else None,
        examples=examples,
        words=tuple(words),
    )
    if asked.resume is None:
        make_room(course.directory)
    given = [course.domain, *words, f"--minutes={minutes:g}", f"--model={model}", f"--examples={examples}"]
    given += [f"--seed={course.seed}"] if course.seed else []
    given += [f"--from={begin}"] if begin else []
    again = shlex.join(["trialogue", "learn", *given, f"--resume={course.directory}"])
    hold_course(partial(learn, course), course.directory, as_json, again)


def to_stem(domain: str) -> str:
    """A domain's name as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(domain).stem if "/" in domain else domain).strip("-")


def hold_course(
    hold: Callable[[Callable[[str], None], Watch], Coroutine[Any, Any, dict[str, Any]]],
    directory: Path,
    as_json: bool,
    again: str = "",
) -> None:
    """Hold a course, which is told where to say what comes next and what was learned, and show its result.
    `again` goes on with one that was stopped."""
    import asyncio

    from trialogue.learn.course import Stopped
    from trialogue.view.course import show_course, write_course_report
    from trialogue.view.live import show_steps
    from trialogue.view.report import write_report

    try:
        with show_steps(quiet=as_json) as watch:
            summary = asyncio.run(hold(partial(echo, err=as_json), watch))
    except Stopped as stopped:
        echo(f"{stopped}; go on with: {again}", err=as_json)
        if as_json:
            echo_json({"directory": str(directory), "state": "stopped"})
        return
    except KeyboardInterrupt:
        echo(f"stopped at once; go on with: {again}", err=True)
        raise
    for run in summary["runs"].values():
        write_report(Path(run))
    write_course_report(summary, directory)
    if as_json:
        echo_json(summary)
    else:
        show_course(summary, directory)


def make_room(directory: Path) -> None:
    """Rename the folder of an earlier course."""
    from trialogue.run import set_aside

    if (earlier := set_aside(directory)) is not None:
        echo(f"what was in {directory} is now in {earlier}", err=True)


@click.command("sft")
@in_domain("side", "reward", "split", "seed", "data", "config", "resume", "trust", "json")
def sft_verb(asked: Asked, as_json: bool) -> None:
    """Fine-tune a model on recorded conversations, or on those of the oracle of a DOMAIN.

    \b
    trialogue sft shop sft.count=2000 sft.faults=0.25
    trialogue sft shop sft.examples=runs/rollout-shop-1 learner.model=smollm2
    """
    from trialogue.config import SftConfig
    from trialogue.learn.sft import sft

    _learn(sft, SftConfig, asked, as_json)


@click.command("train")
@in_domain("user", "reward", "split", "seed", "data", "config", "resume", "trust", "json")
def train_verb(asked: Asked, as_json: bool) -> None:
    """Train an agent in a DOMAIN by reinforcement learning with a user in the loop.

    \b
    trialogue train shop learner.model=runs/sft-shop-1 training.steps=100
    trialogue train --config configs/shop-smollm2.toml optimizer.learning_rate=1e-5
    """
    from trialogue.config import TrainConfig
    from trialogue.learn.train import train

    _learn(train, TrainConfig, asked, as_json)


def _learn(verb: Any, kind: Any, asked: Asked, as_json: bool) -> None:
    import asyncio
    from contextlib import closing

    from trialogue.cli.conversations import to_chat_config
    from trialogue.run import read_about
    from trialogue.seams import Seam
    from trialogue.view.live import show_steps
    from trialogue.view.report import write_report
    from trialogue.view.trackers import Trackers

    config = asked.to_config(kind)
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
                if verb.__name__ == "train" and asked.resume is None:
                    warn_of_no_cold_start(config)

            def watch(step: int, metrics: dict[str, Any]) -> None:
                shown(step, metrics)
                trackers(step, metrics)

            path = asyncio.run(verb(config, resume=asked.resume, watch=watch, started=started))
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
    if asked.resume and not shown.last:
        echo(f"{path} had nothing left to do", err=True)
    if as_json:
        echo_json({"run": str(path), "state": state, **({"marks": marks} if marks else {})})
    elif state == "stopped":
        echo(f"stopped and saved; go on with: {to_resume(verb.__name__, path, config)}")
    else:
        name, domain = shlex.quote(str(path)), shlex.quote(config.domain)
        echo(f"model: {path / 'model'}")
        if verb.__name__ == "sft" and config.sft.side == "user":
            echo(
                f"let it play: trialogue eval {domain} --user {shlex.quote(f'local:{path}')} user.prompt=card"
            )
        else:
            levels = config.tasks.levels
            same = "" if levels == type(config.tasks)().levels else f' "tasks.levels={list(levels)}"'
            if config.reward.name:
                same += f" --reward {shlex.quote(config.reward.name)}"
            if Seam().find_code(config.learner.renderer or "") is not None:
                same += f" {shlex.quote(f'agent.renderer={config.learner.renderer}')}"
            echo(f"evaluate it: trialogue eval {domain} --agent {name}{same}")
            echo(f"talk to it: trialogue chat {to_allowed(path, to_chat_config(config))}")
        echo(f"look at it: trialogue view {shlex.quote(str(path))}")


def warn_of_no_cold_start(config: TrainConfig) -> None:
    """Say that the tiny base learns next to nothing by reinforcement before it has imitated conversations."""
    from trialogue.config import Tasks, TrainConfig
    from trialogue.engine.models import BASES
    from trialogue.run import read_learned
    from trialogue.score.resume import to_word

    model = config.learner.model
    learned = read_learned(model)
    if isinstance(learned, TrainConfig):  # a run that was not begun from a cold start either
        model = learned.learner.model
    if model not in BASES and Path(model).expanduser().resolve() not in BASES.values():
        return
    words = [shlex.quote(config.domain)]
    if config.tasks.levels != Tasks().levels:
        words.append(to_word("tasks.levels", config.tasks.levels))
    given = " ".join(words)
    echo(
        "warning: the tiny base has had no cold start: it cannot hold a conversation yet, so there is almost "
        f"nothing to reinforce. Fine-tune it first: `trialogue sft {given} run.name=cold`, then "
        f"`trialogue train {given} learner.model={config.run.directory}/cold`",
        err=True,
    )


@click.group("export")
def export_verb() -> None:
    """Write the settings of `train` as another trainer reads them."""


@export_verb.command("verl")
@click.option("--out", required=True, help="Folder for everything it writes.")
@click.option(
    "--launcher",
    type=click.Choice(["slurm", "ray", "k8s"]),
    help="Also write what starts it: a Slurm script, a script for Ray, a RayJob and a Containerfile.",
)
@in_domain("user", "reward", "split", "seed", "data", "config", "json")
def verl_verb(asked: Asked, out: str, launcher: Literal["slurm", "ray", "k8s"] | None, as_json: bool) -> None:
    """Write the settings of `train` in a DOMAIN as verl reads them: data, agent loop, launch script.

    \b
    trialogue export verl --config configs/paper-8b.toml --data DIR --out runs/paper-8b
    trialogue export verl shop optimizer.schedule=constant --out shop-verl --launcher slurm
    """
    from trialogue.config import TrainConfig
    from trialogue.hosts.export import export_verl
    from trialogue.hosts.launchers import write_launcher

    config = asked.to_config(TrainConfig)
    written = export_verl(config, Path(out))
    if launcher is not None:
        written["launchers"] = write_launcher(config, Path(out), launcher)
    if as_json:
        echo_json(written)
        return
    for mark in written.get("marks", ()):
        echo(f"marked: {mark}")
    echo(f"{written['train']} tasks to train on, {written['dev']} to watch, {written['steps']} steps")
    for file in written.get("launchers", ()):
        echo(f"wrote {written['out']}/{file}")
    echo(f"start: {written['out']}/{written.get('launchers', ['launch.sh'])[0]}")


@click.command("demo")
@click.option("--out", default="runs/demo", show_default=True, help="Folder for everything it writes.")
@click.option(
    "--minutes", type=click.FloatRange(0.5), help="Shorten it to about so many; the whole takes six."
)
@offer("seed", "json")
def demo_verb(out: str, minutes: float | None, seed: int | None, as_json: bool) -> None:
    """Train the built-in shop's agent on this machine's CPU: cold start, then learning from users.

    \b
    trialogue demo
    trialogue demo --minutes 1
    """
    from trialogue.learn.demo import Size, demonstrate

    size = Size() if minutes is None else Size.fit(minutes)
    make_room(Path(out))
    hold_course(partial(demonstrate, Path(out), seed or 0, size=size), Path(out), as_json)
