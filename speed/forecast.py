"""What `trialogue plan` predicts beside what was measured: python speed/forecast.py

The measured side is in speed/results.json and in the documents. The machine of those figures is taken from
their bounds: memory bandwidth from sampling one conversation, products from the shortest update. All other
assumptions are the usual ones of `plan` for a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import fmean, median

from trialogue.assumptions import PlanSettings
from trialogue.config import Limits, PlanConfig
from trialogue.engine.hardware import Gpu
from trialogue.engine.shapes import find_shape
from trialogue.plan.layout import Layout
from trialogue.plan.lengths import Lengths, Part
from trialogue.plan.plan import Planner, settle
from trialogue.plan.simulate import Loop, Simulation
from trialogue.plan.timing import Sampling, measure_sampling, measure_update

ROOT = Path(__file__).parents[1]
FREE = Sampling(0.0, 0.0, 0.0, 0.0, 0.0, 1 << 40)
SMOLLM2 = find_shape("smollm2")
ONE = Layout("train", 1)
TURN_SECONDS = 42.9 / 100_000 / 5
"""Processor time of a turn: `growth with conversations`, whose conversations have five."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prediction."""

    name: str
    unit: str
    predicted: float
    measured: float
    source: str

    def to_row(self) -> str:
        off = self.predicted / self.measured - 1
        figures = f"{self.predicted:,.3g} | {self.measured:,.3g} | {off:+.0%}"
        return f"| {self.name} | {self.unit} | {figures} | {self.source} |"


@dataclass(frozen=True)
class InTurn(Lengths):
    """These conversations, one after the other."""

    def draw(self, random: Random) -> Sequence[Part]:
        return self.recorded[random.randrange(len(self.recorded))]


def of(conversations: Sequence[Sequence[Part]], shared: int) -> Lengths:
    return InTurn(PlanSettings(), Limits(), shared, 0.0, tuple(map(tuple, conversations)))


def read_results() -> dict[str, tuple[float, float | None]]:
    """Recorded figures and their bounds, by name."""
    lines = json.loads((ROOT / "speed" / "results.json").read_text(encoding="utf-8"))
    return {line["name"]: (line["ours"], line["bound"]) for line in lines}


def find_cpu(results: dict[str, tuple[float, float | None]], precision: str) -> Gpu:
    """The processor of the recorded figures."""
    size = 4 if precision == "float32" else 2
    ending = "" if precision == "float32" else ", bfloat16"
    one = results[f"sampling, batch of 1{ending}"][1] or 0.0
    update = results[f"GRPO update, prompt 512, 8 × 128 new in 1 turn{ending}"][1] or 1.0
    bandwidth = one * SMOLLM2.parameters * size
    operations = 6 * (1536 * (SMOLLM2.parameters - SMOLLM2.output) + 1024 * SMOLLM2.output) / update
    return Gpu(
        name=f"the recorded processor, {precision}",
        gigabytes=25,
        tflops=operations / 1e12,
        bandwidth=bandwidth / 1e9,
        link=bandwidth / 1e9,
        number_bytes=size,
        is_cpu=True,
    )


def predict_steps(results: dict[str, tuple[float, float | None]]) -> Iterator[Case]:
    """A GRPO step of SmolLM2: eight siblings of one prompt, some turns, then an update."""
    for precision in ("float32", "bfloat16"):
        gpu = find_cpu(results, precision)
        plan = settle(PlanSettings(turn_seconds=TURN_SECONDS), gpu)
        for prompt, new, turns in (
            (512, 128, 1),
            (512, 128, 4),
            (512, 512, 4),
            (2048, 128, 1),
            (2048, 512, 4),
        ):
            name = f"prompt {prompt:,}, 8 × {new} new in {turns} turn{'s' if turns > 1 else ''}"
            name += "" if precision == "float32" else ", bfloat16"
            if f"GRPO generation, {name}" not in results:
                continue
            talk: list[Part] = []
            for turn in range(turns):
                talk.append(Part("agent", new // turns, 0.0))
                if turn + 1 < turns:
                    talk.append(Part("tool", 32, 0.0))
            length = prompt + new + 32 * (turns - 1)
            sampling = measure_sampling(plan, ONE, SMOLLM2, gpu, length / 2, 1 << 40)
            own = 8 * (length - prompt)
            update = measure_update(plan, ONE, SMOLLM2, gpu, prompt + own, length, 8 * new)
            loop = Loop(8, 8, 1, sampling, lambda n, tokens, sampled: 0.0, turn_seconds=plan.turn_seconds)
            [step] = Simulation(loop, of([talk], prompt)).run()
            for part, seconds in (("generation", step.collect), ("update", update.total)):
                yield Case(
                    f"SmolLM2 {part}, {name}", "s", seconds, results[f"GRPO {part}, {name}"][0], "step"
                )


def predict_slow_users(results: dict[str, tuple[float, float | None]]) -> Iterator[Case]:
    """256 conversations of four answers that take 200 ms with a long tail; speed/latency.py measured it."""
    name = "256 conversations, user latency 200 ms with a long tail"
    seconds: list[float] = []
    for seed in range(9):
        random = Random(seed)

        def wait(random: Random = random) -> Part:
            return Part("user", 5, 0.2 * random.lognormvariate(0.0, 0.8))

        calls = [Part("agent", 5, 0.0), Part("tool", 20, 0.0)]
        talks = [
            [wait(), calls[0], wait(), *calls, *calls, calls[0], wait(), calls[0], wait()] for _ in range(256)
        ]
        order = iter(range(256))

        @dataclass(frozen=True)
        class Each(InTurn):
            def draw(self, random: Random) -> Sequence[Part]:
                return self.recorded[next(order)]  # noqa: B023 - used before the next seed

        lengths = Each(PlanSettings(), Limits(), 100, 0.0, tuple(map(tuple, talks)))
        loop = Loop(256, 256, 1, FREE, lambda n, tokens, sampled: 0.0, turn_seconds=TURN_SECONDS, most=1000)
        seconds.append(Simulation(loop, lengths, seed).run()[0].collect)
    yield Case(name, "s", median(seconds), results[name][0], "latency")


LOAD = 8200, 2000, 26 * 60.0
"""`make test-load` as docs/reliability.md records it: conversations, at once, seconds."""


def predict_load() -> Iterator[Case]:
    """2,000 conversations of the shop at once; both sides think up to half a minute before each reply."""
    from trialogue.score.reward import grade
    from trialogue.talk.agenda import make_agenda_user
    from trialogue.talk.rollout import RolloutSettings, rollout
    from trialogue.world.find import find_domain

    shop = find_domain("shop")
    oracle = shop.oracle
    assert oracle is not None

    async def hold() -> list[list[str]]:
        groups = rollout(
            shop, shop.tasks("train", 200, 0), oracle, make_agenda_user, RolloutSettings(grade=grade)
        )
        return [
            ["tool" if turn.message.role == "tool" else turn.side for turn in item.turns]
            async for group in groups
            for item in group.trajectories
        ]

    held = asyncio.run(hold())
    random = Random(0)
    number, at_once, measured = LOAD

    class Thinking(Lengths):
        def draw(self, random: Random) -> Sequence[Part]:
            who = random.choice(held)
            return [Part("tool", 10, 0.0 if one == "tool" else random.uniform(0.0, 30.0)) for one in who]

    lengths = Thinking(PlanSettings(), Limits(), 100, 0.0)
    loop = Loop(
        number, at_once, 1, FREE, lambda n, tokens, sampled: 0.0, turn_seconds=TURN_SECONDS, most=number
    )
    [step] = Simulation(loop, lengths, random.randrange(100)).run()
    turns = fmean(len(who) for who in held)
    name = f"test-load: {number:,} conversations of {turns:.1f} turns, {at_once:,} at once"
    yield Case(name, "s", step.collect, measured, "docs/reliability.md")


DEMO = fmean((315, 329, 328, 360, 353))
"""Seconds of the whole demonstration, five seeds on one core (docs/learning.md)."""


def predict_demo(results: dict[str, tuple[float, float | None]]) -> Iterator[Case]:
    """The demonstration: cold start, learning, and two tests, with conversations as long as the oracle's."""
    from trialogue.learn.demo import LEVELS, Size

    gpu, size, shape = find_cpu(results, "float32"), Size(), find_shape("tiny")
    plan = settle(PlanSettings(gpus=1, turn_seconds=TURN_SECONDS), gpu)
    talks, shared = hold_tokenized(LEVELS)
    training = {"steps": size.steps, "eval_every": size.eval_every, "eval_tasks": size.dev_tasks}
    config = PlanConfig.model_validate({"training": training, "plan": plan.model_dump()})
    lengths = Lengths(plan, config.limits, shared, 0.0, talks)
    learning = Planner(config, shape, gpu, lengths).to_row(1, None)
    test = Planner(config, shape, gpu, lengths).to_row(1, size.test_tasks)
    own = fmean(sum(part.tokens for part in parts) for parts in talks)
    said = fmean(sum(part.tokens for part in parts if part.who == "agent") for parts in talks)
    whole = size.examples * (own + shared)
    cold = measure_update(plan, ONE, shape, gpu, whole, own + shared, size.examples * said).compute
    seconds = learning.hours * 3600 + 2 * test.collect + cold
    yield Case("make demo, whole", "s", seconds, DEMO, "docs/learning.md")


def hold_tokenized(levels: Sequence[int]) -> tuple[tuple[tuple[Part, ...], ...], int]:
    """Conversations of the shop's oracle in the tokens of the tiny base, and what all of them begin with."""
    from trialogue.engine.models import find_model_folder
    from trialogue.learn.sft import to_example_rows
    from trialogue.score.reward import grade
    from trialogue.talk.agenda import make_agenda_user
    from trialogue.talk.render.load import load_renderer
    from trialogue.talk.rollout import RolloutSettings, rollout
    from trialogue.world.find import find_domain

    shop = find_domain("shop")
    oracle = shop.oracle
    assert oracle is not None
    _, renderer = load_renderer(find_model_folder("tiny"))
    tasks = shop.tasks("train", 200, 0, levels=levels)

    async def hold() -> list[list[tuple[int, int]]]:
        groups = rollout(shop, tasks, oracle, make_agenda_user, RolloutSettings(grade=grade))
        rows = [
            row
            async for group in groups
            for item in group.trajectories
            for row in to_example_rows(item, shop, renderer, "agent")
        ]
        return [list(zip(row.tokens, row.mask, strict=True)) for row in rows]

    rows = asyncio.run(hold())
    beginnings = [[token for token, _ in row] for row in rows]
    shared = next(n for n in range(1000) if len({ids[n] for ids in beginnings}) > 1)
    talks = tuple(
        tuple(
            Part("agent" if mask else "tool", len(list(run)), 0.0)
            for mask, run in groupby(row[shared:], key=lambda pair: pair[1])
        )
        for row in rows
    )
    return talks, shared


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    results = read_results()
    cases = [*predict_slow_users(results), *predict_steps(results), *predict_load()]
    cases += predict_demo(results)
    print("| What | | predicted | measured | off | measured by |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for case in cases:
        print(case.to_row())
    near = sum(abs(case.predicted / case.measured - 1) <= 0.3 for case in cases)
    print(f"\n{near} of {len(cases)} within 30 %")


if __name__ == "__main__":
    main()
