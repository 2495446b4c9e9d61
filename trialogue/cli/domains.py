"""The verbs around a domain: start one, prove it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trialogue.cli.options import offer
from trialogue.output import echo, echo_json


@click.command("init")
@click.argument("name")
@click.option("--generated", is_flag=True, help="Make the tasks by program, without end.")
@offer("json")
def init_verb(name: str, generated: bool, as_json: bool) -> None:
    """Write a small working domain into a new folder NAME, to start from."""
    from trialogue.world.scaffold import write_domain

    files = write_domain(Path(name), generated)
    if as_json:
        echo_json({"domain": Path(name).name, "path": name, "files": [str(file) for file in files]})
        return
    for file in files:
        echo(f"wrote {file}")
    echo(f"next: trialogue check {name} && trialogue play {name}")


@click.command("check")
@click.argument("domain", required=False)
@click.option(
    "--contamination",
    nargs=2,
    metavar="TRAIN TEST",
    help="Instead, find tasks of DOMAIN/SPLIT TEST whose gold writes are those of a task of TRAIN.",
)
@click.option(
    "--for-training", is_flag=True, help="Also find what stands in the way of learning from the tasks."
)
@click.option("--cheats", is_flag=True, help="Play agents that cheat too: how often is each of them paid?")
@offer("reward", "split", "tasks", "seed", "data", "json")
def check_verb(
    domain: str | None,
    contamination: tuple[str, str] | None,
    for_training: bool,
    cheats: bool,
    reward: str | None,
    split: str | None,
    tasks: int | None,
    seed: int | None,
    data: str | None,
    as_json: bool,
) -> None:
    """Prove a DOMAIN: schemas are valid, every gold replay scores 1, every untouched state scores 0.

    \b
    trialogue check shop --split test
    trialogue check shop --for-training
    trialogue check shop --cheats
    trialogue check --contamination shop/train shop/test
    """
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
    from trialogue.score.reward import with_reward
    from trialogue.view.terminal import show_cheats, show_check
    from trialogue.world.find import find_domain

    found_domain = with_reward(find_domain(domain, data), reward or "")
    checked = check(found_domain, split, tasks, seed or 0)
    told = checked.to_data()
    if cheats:
        from trialogue.score.cheats import play_cheats

        told["cheats"] = play_cheats(found_domain, split, tasks, seed or 0)
    if for_training:
        from trialogue.score.training_check import check_for_training

        told["training"] = check_for_training(found_domain, seed or 0).to_data()
    if as_json:
        echo_json(told)
    else:
        show_check(told, checked.played)
        if cheats:
            show_cheats(told["cheats"])
        for text in told["training"]["findings"] if for_training else ():
            echo(f"! {text}")
        if for_training and not told["training"]["findings"]:
            echo("for training: nothing found")
    sys.exit(0 if checked.ok else 1)
