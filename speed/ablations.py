"""What each part of the method is worth, on the budget of the demonstration: python speed/ablations.py

Needs a finished `make demo`. Every variant may spend the seconds that the demonstration spent on learning,
counted in steps at the demonstration's own pace, and is evaluated on the same test tasks:

- whole            the demonstration itself: cold start, then reinforcement learning
- sft alone        the cold start goes on for the whole time
- rl alone         reinforcement learning from the base, without a cold start
- no mask          the second half, training on the user's and the tools' tokens too
- outages apart    the second half with a user whose service fails now and then: held anew, left out
- outages scored   the same, but a failed conversation counts as the agent's failure
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from trialogue.config import SftConfig, TrainConfig, load_config
from trialogue.errors import ModelError
from trialogue.learn.demo import COLD_START, LEVELS, refuse_unfinished, take_test
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.run import read_lines
from trialogue.talk.agenda import make_agenda_user
from trialogue.talk.model import Model
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domains.shop import domain as shop
from trialogue.world.tools import Tool

OUTAGES = 0.05
"""How often a reply of the unreliable user fails for good."""


class Unreliable:
    """A user whose service is down now and then."""

    def __init__(self, user: Model, random: Random) -> None:
        self.user, self.random = user, random

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        if self.random.random() < OUTAGES:
            raise ModelError("the user's service does not answer", blame="infrastructure")
        return await self.user.reply(turns, tools)


def make_unreliable(task: Task, seed: int) -> Unreliable:
    return Unreliable(make_agenda_user(task, seed), Random(f"outage/{task.id}/{seed}"))


domain = replace(shop, user=make_unreliable)
"""Found by `find_domain` when this file is named as the domain."""


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
            own.append("training.train_on_everything=true")
        if name.startswith("outages"):
            own.append(f"domain={json.dumps(__file__)}")
        if name == "outages scored":
            own += ["training.score_failures=true", "rollout.redraws=0"]
        model = await train(load_config(TrainConfig, None, [*place, *own]), watch=tell)
    refuse_unfinished(model)
    result = await take_test(model, f"test-{name.replace(' ', '-')}", place[:-1])
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
