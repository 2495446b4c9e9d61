"""The verbs of the command line. Heavy imports stand inside each verb, so `--help` answers at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from trialogue.cli.corpus import draft_verb, review_verb, synthesize_verb
from trialogue.cli.entry import Verbs
from trialogue.cli.learn import learn
from trialogue.cli.options import (
    DATA,
    JSON,
    SETTINGS,
    TRUST,
    Whole,
    to_chat,
    to_config,
    to_resume,
)
from trialogue.cli.users import users_verb
from trialogue.cli.verify import verify_verb
from trialogue.output import echo, echo_json, echo_lines


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="trialogue")
def main(debug: bool) -> None:
    """Train language-model agents that talk with users and use tools."""


# -- making and proving a domain ---------------------------------------------------------------------------


@main.command("init")
@click.argument("name")
@JSON
def init_verb(name: str, as_json: bool) -> None:
    """Write a small working domain into a new folder NAME, to start from."""
    from trialogue.world.scaffold import write_domain

    files = write_domain(Path(name))
    if as_json:
        echo_json({"domain": Path(name).name, "path": name, "files": [str(file) for file in files]})
        return
    for file in files:
        echo(f"wrote {file}")
    echo(f"next: trialogue check {name} && trialogue play {name}")


@main.command("check")
@click.argument("domain", required=False)
@click.option("--tasks", "count", type=Whole(1), help="How many tasks; the domain's own default.")
@click.option("--split", help="Only the tasks of this split.")
@click.option("--seed", type=int, default=0, help="Seed of the tasks, where they are generated.")
@click.option(
    "--contamination",
    nargs=2,
    metavar="TRAIN TEST",
    help="Instead, find tasks of DOMAIN/SPLIT TEST whose gold writes are those of a task of TRAIN.",
)
@DATA
@JSON
def check_verb(
    domain: str | None,
    count: int | None,
    split: str | None,
    seed: int,
    contamination: tuple[str, str] | None,
    data: str | None,
    as_json: bool,
) -> None:
    """Prove a DOMAIN: schemas are valid, every gold replay scores 1, every untouched state scores 0."""
    if contamination is not None:
        from trialogue.score.contamination import find_contamination

        found = find_contamination(*contamination, data)
        if as_json:
            echo_json(found.to_data())
            return
        for name, others in found.pairs.items():
            echo(f"{name}  {' '.join(others)}")
        echo(found.to_line())
        return
    if domain is None:
        raise click.UsageError("name a DOMAIN to check, or two sets with --contamination TRAIN TEST")
    from trialogue.score.check import check
    from trialogue.view.terminal import show_check
    from trialogue.world.find import find_domain

    checked = check(find_domain(domain, data), split, count, seed)
    if as_json:
        echo_json(checked.to_data())
    else:
        show_check(checked.to_data(), checked.played)
    sys.exit(0 if checked.ok else 1)


# -- holding conversations ---------------------------------------------------------------------------------


@main.command("play")
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


@main.command("eval")
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


@main.command("rollout")
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


# -- looking at what was recorded --------------------------------------------------------------------------


@main.command("score")
@click.argument("path", type=click.Path())
@click.option("--domain", help="The domain, where it is not built in, or is another now.")
@click.option("--benchmark", help="Grade what a benchmark's own code recorded, such as tau2:retail.")
@TRUST
@DATA
@JSON
def score_verb(
    path: str, domain: str | None, benchmark: str | None, trust: bool, data: str | None, as_json: bool
) -> None:
    """Grade recorded conversations again, from a run directory or a JSONL file alone."""
    from trialogue.errors import RunError
    from trialogue.run import refuse_missing

    refuse_missing(Path(path), "run or file")
    if benchmark is not None:
        from trialogue.benchmarks.recorded import score_recorded

        graded = score_recorded(path, benchmark, data)
        if not graded:
            raise RunError(f"{path} holds no conversation to grade")
        if as_json:
            echo_json([row.to_data() for row in graded])
            return
        for row in graded:
            echo(row.to_line())
        return
    from trialogue.score.rescore import rescore

    rows = rescore(Path(path), domain, data, trust=trust)
    if not rows:
        raise RunError(f"{path} holds no conversation to grade")
    if as_json:
        echo_json([row.to_data() for row in rows])
    else:
        for row in rows:
            echo(row.to_line())
        echo(f"{len(rows)} conversations, {sum(row.same for row in rows)} graded as recorded")
    sys.exit(0 if all(row.same for row in rows) else 1)


# -- learning ----------------------------------------------------------------------------------------------


@main.command("sft")
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
    learn(sft, SftConfig, file, (*extra, *settings), resume, as_json, trust=trust)


@main.command("train")
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

    learn(train, TrainConfig, file, settings, resume, as_json, trust=trust)


@main.command("export")
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


@main.command("chat")
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


@main.command("demo")
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


@main.command("report")
@click.argument("run", type=click.Path(file_okay=False))
@click.argument("other", required=False, type=click.Path(file_okay=False))
@JSON
def report_verb(run: str, other: str | None, as_json: bool) -> None:
    """Write report.md of a finished RUN directory, and print it; with OTHER, compare the two task by task."""
    from trialogue.digests import refuse_injured
    from trialogue.run import read_about, refuse_missing
    from trialogue.view.report import read_result, write_report

    path = Path(run)
    refuse_missing(path)
    refuse_injured(path)
    if other is not None:
        from trialogue.view.paired import compare_runs, to_comparison

        refuse_missing(Path(other))
        refuse_injured(Path(other))
        compared = compare_runs(path, Path(other))
        if as_json:
            echo_json(compared)
        else:
            echo_lines(to_comparison(compared))
        return
    target = write_report(path)
    text = target.read_text(encoding="utf-8")
    if as_json:
        about = read_about(path)
        facts = {key: about.get(key) for key in ("kind", "state", "created", "ended", "seed", "versions")}
        result = read_result(path) if (path / "result.json").exists() else None
        echo_json({"run": run, "report": str(target), **facts, "result": result, "markdown": text})
    else:
        echo_lines(text.rstrip("\n"))


@main.command("view")
@click.argument("folder", default="runs", type=click.Path(file_okay=False))
@click.option("--port", type=Whole(0, 65535), default=7878, show_default=True, help="0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--export", "target", metavar="FILE.html", help="Instead, write one self-contained file.")
@click.option("--id", "identity", help="With --export: only this conversation and its siblings.")
@click.option("--most", type=Whole(1), default=300, show_default=True, help="With --export: conversations.")
@JSON
def view_verb(
    folder: str, port: int, host: str, target: str | None, identity: str | None, most: int, as_json: bool
) -> None:
    """Look at the runs in FOLDER (or at one run) in a browser; a run in progress is followed.

    \b
    trialogue view
    trialogue view runs/agent --export agent.html
    """
    from trialogue.run import refuse_missing

    refuse_missing(Path(folder), "folder")
    if target is not None:
        from trialogue.view.export import write_export

        written = write_export(Path(folder), Path(target), identity, most=most)
        if as_json:
            echo_json(written)
        else:
            echo(f"wrote {target}: {written['conversations']} of {written['of']} conversations")
        return
    if identity is not None:
        raise click.UsageError("--id goes with --export FILE.html; the page shows every conversation")
    from contextlib import suppress

    from trialogue.view.server import open_server

    with open_server(Path(folder), host, port) as server:
        if as_json:
            echo_json({"address": server.address})
        else:
            echo(f"{server.address}  (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


@main.command("config")
@click.argument("verb", required=False, type=click.Choice(["draft", "eval", "synthesize", "sft", "train"]))
@JSON
def config_verb(verb: str | None, as_json: bool) -> None:
    """List every setting of a VERB, or of all: key, default and meaning."""
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


for verb in (draft_verb, synthesize_verb, review_verb, users_verb, verify_verb):
    main.add_command(verb)


if __name__ == "__main__":
    main()
