"""Measure the effect of each part of the method in the time of the demonstration: python speed/ablations.py

Needs a finished `make demo`. Every variant gets the seconds that the demonstration spent on learning, counted
in steps at the demonstration's pace, and is evaluated on the same test tasks:

- whole            the demonstration itself: cold start, then reinforcement learning
- sft alone        the cold start goes on for the whole time
- rl alone         reinforcement learning from the base, without a cold start
- no mask          the second half, training on the user's and the tools' tokens too
- outages apart    the second half with a user whose service sometimes fails: sampled again, left out
- outages scored   the same, but a failed conversation counts as the agent's failure

Variants that the method excludes are made from outside: an engine without a mask, a domain that scores
outages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from trialogue.config import EvalConfig, SftConfig, TrainConfig, load_config
from trialogue.engine.api import LossFunction, Outputs, Row
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import ModelError
from trialogue.learn.demo import COLD_START, LEVELS, TEST_TASKS
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.run import read_lines
from trialogue.score.evaluate import evaluate
from trialogue.score.reward import outcome
from trialogue.talk.agenda import make_agenda_user
from trialogue.talk.model import Model
from trialogue.task import Task
from trialogue.trajectory import Reply, Reward, Trajectory, Turn
from trialogue.world.domain import Domain, Environment
from trialogue.world.domains.shop import domain as shop
from trialogue.world.tools import Tool

OUTAGES = 0.05
"""Probability that a reply of the unreliable user fails."""


SILENCE = "(the line is dead)"
"""The reason recorded for a scored outage."""


class Unreliable:
    """A user whose service sometimes fails. An outage fails the conversation; a scored one ends it with a
    reward of 0."""

    def __init__(self, user: Model, random: Random, *, scored: bool) -> None:
        self.user, self.random, self.scored = user, random, scored

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        if self.random.random() >= OUTAGES:
            return await self.user.reply(turns, tools)
        if self.scored:
            return Reply(f"{SILENCE} {shop.rules.stop_tokens[0]}")
        raise ModelError("the user's service does not answer", blame="infrastructure")


def make_unreliable(task: Task, seed: int, *, scored: bool = False) -> Unreliable:
    return Unreliable(make_agenda_user(task, seed), Random(f"outage/{task.id}/{seed}"), scored=scored)


def score_outage(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    if any(SILENCE in turn.message.content for turn in trajectory.turns):
        return Reward(value=0.0, why=("the user's service did not answer",))
    return outcome(task, trajectory, environment)


apart: Domain = replace(shop, user=make_unreliable)
scored: Domain = replace(shop, user=partial(make_unreliable, scored=True), reward=score_outage)


class UnmaskedEngine(TorchEngine):
    """Trains every token of a conversation. The tokens of users and tools were not sampled, so the current
    policy's log-probabilities replace the sampler's."""

    async def forward_backward(
        self, rows: Sequence[Row], loss: LossFunction, *, temperature: float = 1.0
    ) -> Outputs:
        known = await self.forward(rows, temperature)
        whole = [
            replace(
                row,
                mask=[0] + [1] * (len(row.tokens) - 1),
                logprobs=logprobs,
                advantages=[max(row.advantages, key=abs)] * len(row.tokens),
            )
            for row, logprobs in zip(rows, known, strict=True)
        ]
        return await super().forward_backward(whole, loss, temperature=temperature)


async def run(name: str, demo: Path, out: Path) -> dict[str, Any]:
    summary = json.loads((demo / "summary.json").read_text())
    seconds = summary["seconds"]
    place = [
        f"seed={summary['seed']}",
        f"tasks.levels={list(LEVELS)}",
        f"run.directory={json.dumps(str(out))}",
        f"run.name={name.replace(' ', '-')}",
    ]
    if name == "whole":
        return summary["after_rl"]
    if name == "sft alone":
        count = round(SftConfig().sft.count * (seconds["sft"] + seconds["rl"]) / seconds["sft"])
        model = await sft(load_config(SftConfig, None, [*place, *COLD_START, f"sft.count={count}"]))
    else:
        own: list[str] = []
        if name == "rl alone":
            pace = seconds["rl"] / TrainConfig().training.steps
            own = [f"training.steps={TrainConfig().training.steps + round(seconds['sft'] / pace)}"]
        else:
            own = [f"learner.model={json.dumps(str(demo / 'sft'))}"]
        if name == "no mask":
            own.append(f"engine.name={__file__}:UnmaskedEngine")
        if name.startswith("outages"):
            own.append(f"domain={__file__}:{name.removeprefix('outages ')}")
        model = await train(load_config(TrainConfig, None, [*place, *own]), watch=tell)
    test = [
        *place[:-1],
        f"run.name=test-{name.replace(' ', '-')}",
        f"agent.model={json.dumps(str(model))}",
        f"tasks.count={TEST_TASKS}",
        "limits.reply_tokens=64",
        "limits.context_tokens=1024",
        "rollout.concurrency=128",
    ]
    result = await evaluate(load_config(EvalConfig, None, test))
    return {"pass^1": result["pass^1"], "low": result["pass^1_low"], "high": result["pass^1_high"]}


def tell(step: int, metrics: dict[str, Any]) -> None:
    shown = {key: metrics[key] for key in ("reward", "pass^1", "entropy") if key in metrics}
    print(f"step={step}", *(f"{key}={value:.3f}" for key, value in shown.items()), flush=True)


VARIANTS = ("whole", "sft alone", "rl alone", "no mask", "outages apart", "outages scored")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variants", nargs="*", default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    given = parser.parse_args()
    if unknown := set(given.variants) - set(VARIANTS):
        parser.error(f"there is no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    file = given.out / "results.jsonl"
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.variants:
        print(f"== {name}", flush=True)
        result = {"variant": name, **asyncio.run(run(name, given.demo, given.out))}
        with file.open("a") as stream:
            stream.write(json.dumps(result) + "\n")
    print("| variant | solved | 95 % |\n| --- | ---: | ---: |")
    for _, line in read_lines(file):
        print(f"| {line['variant']} | {line['pass^1']:.1%} | {line['low']:.0%}–{line['high']:.0%} |")


if __name__ == "__main__":
    main()
