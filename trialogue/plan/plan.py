"""What a training run needs: memory, seconds, requests, money; for the GPUs asked for and for other numbers.

config ─► shape of the model ─► memory of a GPU ─► does it fit, what makes it fit
       ─► lengths of conversations ─► simulation of the loop ─► seconds, requests, dollars, bottleneck
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from statistics import fmean
from typing import Any

from trialogue.assumptions import PlanSettings
from trialogue.config import PlanConfig
from trialogue.engine.hardware import Gpu, find_gpu
from trialogue.engine.shapes import ModelShape, find_shape
from trialogue.plan.layout import Layout, change, to_layout
from trialogue.plan.lengths import Lengths, find_lengths, is_endpoint
from trialogue.plan.memory import Memory, find_smallest_change, measure_memory
from trialogue.plan.simulate import PARTS, Loop, Simulation, Step
from trialogue.plan.timing import Update, measure_sampling, measure_update
from trialogue.talk.budget import find_price, to_cost
from trialogue.trajectory import Usage

SIZES = (1, 8, 32, 64, 256)
"""GPUs of the table."""
CROWDS = (1_000, 10_000, 100_000)
"""Conversations at once, besides those of a step as configured."""
BOTTLENECKS = {
    "queue": "rollout.concurrency",
    "user": "the user's answers",
    "limit": "limits of the user's endpoint",
    "tools": "tools",
    "python": "processors that hold conversations",
    "sampling": "sampling",
    "cache": "room in the sampler's cache",
    "compute": "products of the update",
    "network": "network, offloading",
    "publish": "handing weights over",
    "other": "fixed seconds of a step",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    gpus: int
    conversations: int
    """Under way at once."""
    route: str
    fits: bool
    changed: Mapping[str, Any]
    """Settings without which it does not fit; the figures are those with them."""
    collect: float
    update: float
    parts: Mapping[str, float]
    """Seconds of a step by what they are spent on."""
    bottleneck: str
    typical: float
    """Seconds of the median conversation."""
    hours: float
    """Of the whole run, evaluations included."""
    gpu_hours: float
    tokens_per_second: float
    """Tokens of rows learned from, for each GPU and second of a step."""
    requests_per_second: float
    busiest_second: float
    calls: float
    """Requests to the user's endpoint in the whole run."""
    user_usd: float | None
    gpu_usd: float | None

    @property
    def step(self) -> float:
        return self.collect + self.update


@dataclass(frozen=True, slots=True)
class Plan:
    """What `trialogue plan` tells."""

    config: PlanConfig
    shape: ModelShape
    gpu: Gpu
    layout: Layout
    memory: Memory
    remedy: tuple[int, Mapping[str, Any]] | None
    """Where it does not fit: the number of GPUs and the settings with which it does."""
    lengths: Lengths
    rows: tuple[Row, ...]
    """The first one is the run as it is configured."""
    given: frozenset[str] = frozenset()
    """The assumptions that are not the usual ones."""

    def to_data(self) -> dict[str, Any]:
        return {
            "domain": self.config.domain,
            "model": asdict(self.shape),
            "gpu": self.gpu.model_dump(),
            "layout": asdict(self.layout),
            "memory": {**asdict(self.memory), "peak": self.memory.peak, "fits": self.memory.fits},
            "remedy": None if self.remedy is None else {"gpus": self.remedy[0], "settings": self.remedy[1]},
            "recorded": len(self.lengths.recorded),
            "prompt_tokens": self.lengths.shared_tokens,
            "user_seconds": self.lengths.user_seconds,
            "rows": [{**asdict(row), "step": row.step} for row in self.rows],
            "assumptions": self.config.plan.model_dump(),
        }


def make_plan(config: PlanConfig, *, table: bool = True) -> Plan:
    """Plan a run; with `table` for other numbers of GPUs and conversations, too."""
    shape, gpu = find_shape(config.learner.model), find_gpu(config.plan.gpu)
    usual = PlanSettings().model_dump()
    given = frozenset(name for name, value in config.plan.model_dump().items() if value != usual[name])
    config = config.model_copy(update={"plan": settle(config.plan, gpu)})
    lengths = find_lengths(config)
    layout = to_layout(config)
    memory = measure_memory(config, layout, shape, gpu)
    remedy = None if memory.fits else find_smallest_change(config, layout.gpus, shape, gpu)
    planner = Planner(config, shape, gpu, lengths)
    rows = [planner.to_row(layout.gpus, None)]
    if table:
        sizes = (
            SIZES
            if config.plan.route == "auto"
            else [n for n in SIZES if (n == 1) == (layout.route == "train")]
        )
        rows += [planner.to_row(gpus, crowd) for gpus in sizes for crowd in (None, *CROWDS)]
    return Plan(config, shape, gpu, layout, memory, remedy, lengths, tuple(rows), given)


def settle(settings: PlanSettings, gpu: Gpu) -> PlanSettings:
    """The assumptions with those filled in that depend on the device."""
    usual = {
        "decode_seconds": 0.0005 if gpu.is_cpu else 0.003,
        "update_efficiency": 0.65 if gpu.is_cpu else 0.4,
    }
    empty = {name: value for name, value in usual.items() if getattr(settings, name) is None}
    return settings.model_copy(update=empty)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans one run for several sizes."""

    config: PlanConfig
    shape: ModelShape
    gpu: Gpu
    lengths: Lengths

    def to_row(self, gpus: int, crowd: int | None) -> Row:
        """The run on so many GPUs, with so many conversations at once; None: as configured."""
        config, settings = self.config, {}
        layout = to_layout(config, gpus)
        memory = measure_memory(config, layout, self.shape, self.gpu)
        fits = memory.fits
        if not fits:
            found = find_smallest_change(config, gpus, self.shape, self.gpu)
            if found is not None and found[0] == gpus:
                settings = found[1]
                config = change(config, settings)
                layout = to_layout(config, gpus)
                memory = measure_memory(config, layout, self.shape, self.gpu)
        training = config.training
        count = crowd or training.tasks_per_step * training.group_size
        at_once = crowd or (count if layout.route == "verl" else config.rollout.concurrency)
        step, update = self.simulate(config, layout, memory, count, at_once)
        evaluation = Step()
        times = 0
        if training.eval_every:
            evaluation, _ = self.simulate(config, layout, memory, training.eval_tasks, at_once, learns=False)
            times = training.steps // training.eval_every + 1
        seconds = training.steps * (step.collect + step.update) + times * evaluation.collect
        calls, usd = 0.0, None
        for told, often in ((step, training.steps), (evaluation, times)):
            calls += told.calls * often
            cost = self.find_cost(told)
            usd = None if cost is None else (usd or 0.0) + cost * often
        parts = {**step.parts, **asdict(update)}
        rows = step.finished * self.lengths.shared_tokens + step.tokens
        hourly = config.plan.gpu_usd_per_hour
        return Row(
            gpus=gpus,
            conversations=min(count, at_once),
            route=layout.route,
            fits=fits,
            changed=settings,
            collect=step.collect,
            update=step.update,
            parts=parts,
            bottleneck=max(parts, key=lambda name: parts[name]),
            typical=step.typical,
            hours=seconds / 3600,
            gpu_hours=seconds / 3600 * gpus,
            tokens_per_second=rows / max(1e-9, step.collect + step.update) / gpus,
            requests_per_second=step.calls / step.collect if step.collect else 0.0,
            busiest_second=step.busiest,
            calls=calls,
            user_usd=usd,
            gpu_usd=seconds / 3600 * gpus * hourly if hourly else None,
        )

    def simulate(
        self,
        config: PlanConfig,
        layout: Layout,
        memory: Memory,
        count: int,
        at_once: int,
        *,
        learns: bool = True,
    ) -> tuple[Step, Update]:
        """A step of the run, the mean of those simulated, and its update by part."""
        plan, user, training = config.plan, config.user, config.training
        shared, stragglers = self.lengths.shared_tokens, config.stragglers
        length = shared + plan.user_turns * plan.user_tokens + plan.tool_calls * plan.tool_tokens
        updates: list[Update] = []

        def update(conversations: float, tokens: float, sampled: float) -> float:
            if not learns or not conversations:
                return 0.0
            mean = tokens / conversations + shared
            beginnings = conversations if layout.route == "verl" else conversations / training.group_size
            whole = tokens + beginnings * shared
            trained = sampled if layout.route == "train" else None  # verl computes logits of whole rows
            updates.append(measure_update(plan, layout, self.shape, self.gpu, whole, mean, trained))
            return updates[-1].total

        is_asked = is_endpoint(user.model) or bool(user.mix) or self.lengths.user_seconds > 0
        policy = stragglers.policy if learns and layout.route == "train" else "wait"
        loop = Loop(
            conversations=count,
            at_once=at_once,
            replicas=layout.replicas,
            sampling=measure_sampling(plan, layout, self.shape, self.gpu, length, memory.cache_tokens),
            update_seconds=update,
            user_at_once=user.concurrency if is_asked else inf,
            user_per_second=user.requests_per_minute / 60 if user.requests_per_minute else inf,
            workers=layout.workers,
            turn_seconds=plan.turn_seconds,
            policy=policy,
            quorum=stragglers.quorum,
            patience=stragglers.patience,
            staleness=stragglers.staleness,
            group_size=training.group_size if learns else 1,
            scenario_tokens=plan.scenario_tokens,
            steps=4 if policy == "async" else 1,
            most=plan.simulated,
        )
        steps = Simulation(loop, self.lengths, config.seed).run()
        tail = steps[1:] if policy == "async" else steps  # the first one has nothing to carry over
        return mean_of(tail), updates[-1] if updates else Update()

    def find_cost(self, step: Step) -> float | None:
        """Money for the user's tokens of a step; None where the price is not known."""
        user = self.config.user
        if not is_endpoint(user.model):
            return None
        price = find_price(user.model.rpartition("openai:")[2], user.price, self.config.budget.prices)
        if price is None:
            return None
        usage = Usage(prompt=round(step.prompt), completion=round(step.completion))
        return to_cost(usage, price)


def mean_of(steps: Sequence[Step]) -> Step:
    """The mean of some steps, figure by figure."""
    names = [field.name for field in fields(Step) if field.name != "parts"]
    values = {name: fmean(getattr(step, name) for step in steps) for name in names}
    return Step(**values, parts={part: fmean(step.parts[part] for step in steps) for part in PARTS})
