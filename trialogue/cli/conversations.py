"""The verbs that hold conversations: evaluate, collect, take part."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from trialogue.cli.options import Asked, find_ask, find_keys, in_domain, resumable
from trialogue.output import echo, echo_json

if TYPE_CHECKING:
    from trialogue.config import EvalConfig, SftConfig, TrainConfig

EVAL = (
    *("agent", "user", "reward", "split", "tasks", "trials", "seed", "data"),
    *("config", "resume", "trust", "json"),
)


@click.command("eval")
@in_domain(*EVAL)
def eval_verb(asked: Asked, as_json: bool) -> None:
    """Evaluate an agent with a user on a DOMAIN: conversations, rewards, pass^k with intervals.

    \b
    trialogue eval shop --agent oracle --user agenda --split test --tasks 100
    trialogue eval shop --agent openai:gpt-4.1 --user openai:gpt-4.1 limits.observations=40
    """
    _evaluate("eval", asked, as_json)


@click.command("rollout")
@in_domain(*EVAL)
def rollout_verb(asked: Asked, as_json: bool) -> None:
    """Hold conversations in a DOMAIN and record them: as eval does, to collect data rather than a score.

    \b
    trialogue rollout shop --agent oracle --split train --tasks 500 --trials 4
    """
    _evaluate("rollout", asked, as_json)


def _evaluate(kind: Literal["eval", "rollout"], asked: Asked, as_json: bool) -> None:
    import asyncio

    from trialogue.config import EvalConfig
    from trialogue.score.evaluate import evaluate
    from trialogue.view.report import write_report
    from trialogue.view.terminal import show_progress, show_result, tell_failed

    config = asked.to_config(EvalConfig)
    run: list[Path] = []
    with (
        resumable(kind, run, config),
        show_progress(quiet=as_json or "human" in (config.agent.model, config.user.model)),
    ):
        result = asyncio.run(evaluate(config, kind=kind, resume=asked.resume, started=run.append))
    write_report(Path(result["run"]))
    if as_json:
        echo_json({"pass^1": None, "pass^1_low": None, "pass^1_high": None, **result})
    else:
        show_result(result)
    if result["conversations"] < result["asked"]:
        if as_json:
            echo(tell_failed(result), err=True)
        sys.exit(1)


@click.command("play")
@click.option(
    "--as", "side", type=click.Choice(["agent", "user"]), default="agent", help="Which side you take."
)
@click.option("--task", help="Id of the task. Default: one chosen by the seed.")
@in_domain("agent", "user", "reward", "split", "seed", "data", "config", "json")
def play_verb(asked: Asked, side: Literal["agent", "user"], task: str | None, as_json: bool) -> None:
    """Sit on one side of a conversation in a DOMAIN: type text, or a call such as get_order order_id=W1.

    \b
    trialogue play shop
    trialogue play shop --as user --agent openai:gpt-4.1
    """
    _play(asked, side, as_json, task)


@click.command("chat")
@click.argument("run")
@in_domain("seed", "data", "trust", "json")
def chat_verb(asked: Asked, run: str, as_json: bool) -> None:
    """Talk to a trained agent as the user. RUN is a run directory or a folder of weights. The DOMAIN is the
    one it has learned in, where no other is named.

    \b
    trialogue chat runs/agent
    """
    _play(to_chat(run, asked), "user", as_json, calls=True)


def _play(
    asked: Asked,
    side: Literal["agent", "user"],
    as_json: bool,
    task: str | None = None,
    *,
    calls: bool = False,
) -> None:
    import asyncio

    from trialogue.config import EvalConfig
    from trialogue.score.play import find_task, play
    from trialogue.score.reward import with_reward
    from trialogue.screen import Screen
    from trialogue.talk.human import HumanModel, ask_aside
    from trialogue.view.terminal import show_why
    from trialogue.world.find import find_domain

    patient = replace(asked, defaults=(*asked.defaults, "limits.seconds=86400"))
    config = patient.to_config(EvalConfig)
    found = with_reward(find_domain(config.domain, config.data), config.reward.name, config.reward.rules)
    chosen = find_task(found, config, task, any_split=asked.options.get("split") is None)
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


def to_chat(run: str, asked: Asked) -> Asked:
    """Talk with a trained agent: in the domain of its run, where no other is named."""
    from trialogue.config import EvalConfig, load_config
    from trialogue.run import WORDS, find_weights, read_learned, refuse_missing
    from trialogue.score.resume import refuse_claims

    if run not in WORDS and ":" not in run:
        refuse_missing(Path(run))
    asked = replace(asked, options={**asked.options, "agent": run})
    learned = read_learned(run) if asked.domain is None else None
    if learned is None:
        if Path(run).is_dir():
            find_weights(Path(run))
        return asked
    recorded = _to_recorded(learned)
    if not asked.trust:
        words = asked.to_words()
        config = load_config(EvalConfig, None, [*recorded, *words])
        refuse_claims(Path(run), config, find_keys(words), find_ask())
    return replace(asked, defaults=tuple(recorded))


def to_chat_config(learned: TrainConfig | SftConfig) -> EvalConfig:
    """What `chat` takes from the settings of the run that an agent has learned in."""
    from trialogue.config import EvalConfig, load_config

    return load_config(EvalConfig, None, _to_recorded(learned))


def _to_recorded(learned: TrainConfig | SftConfig) -> list[str]:
    recorded = [f"domain={json.dumps(learned.domain)}"]
    recorded += [f"data={json.dumps(learned.data)}"] if learned.data is not None else []
    simulator: dict[str, Any] = learned.simulator.model_dump(mode="json")
    names = ("model", "base_url", "api_key_env")
    recorded += [f"simulator.{name}={json.dumps(simulator[name])}" for name in names if simulator[name]]
    recorded += [f"reward.name={json.dumps(learned.reward.name)}"] if learned.reward.name else []
    recorded += [f"agent.renderer={json.dumps(name)}"] if (name := learned.learner.renderer) else []
    return recorded
