"""Train with reinforcement learning: open everything, resume, and run the steps of `loop.py`.

Around each step this file records, evaluates, saves checkpoints, and handles the budget and Ctrl-C.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import cos, pi
from pathlib import Path
from time import perf_counter
from typing import Any

from trialogue.activity import Phase, phase
from trialogue.config import EngineChoice, Optimizer, TrainConfig
from trialogue.engine.api import OptimParams, Row
from trialogue.errors import BudgetError, ConfigError, RunError
from trialogue.learn.advantages import find_advantage
from trialogue.learn.checkpoint import Checkpoints, Interrupt, load_learner
from trialogue.learn.checks import Checks, to_plain
from trialogue.learn.collect import Collector, Gate, Watch, choose_tasks, find_known
from trialogue.learn.evaluation import Evaluation
from trialogue.learn.held_out import find_marks
from trialogue.learn.loop import Method, train_step
from trialogue.learn.losses import find_loss
from trialogue.learn.measure import measure, measure_flow
from trialogue.run import Run, read_ledger
from trialogue.score.metrics import find_prices
from trialogue.score.parties import Parties, open_parties
from trialogue.score.resume import settle
from trialogue.talk.model import save_tokenizer
from trialogue.talk.prompts import collect_prompts
from trialogue.talk.rate_limit import LOG
from trialogue.trajectory import Group, Trajectory


async def train(
    config: TrainConfig,
    *,
    resume: Path | None = None,
    watch: Watch | None = None,
    started: Callable[[Path], None] | None = None,
) -> Path:
    """Train and return the run directory.

    Ctrl-C, and a budget that is spent, save a checkpoint; `resume` continues exactly there. Replies of the
    user that were paid for are recorded and not asked for again.
    """
    config = settle(config, "train", resume)
    if config.loss.importance_cap and config.training.mini_batches > 1:
        raise ConfigError(
            "loss.importance_cap takes the weights of each update as the old ones, so later mini-batches "
            "would never be clipped: set training.mini_batches=1 or loss.importance_cap=0"
        )
    method = find_method(config)
    domain, parties = open_parties(config)
    tasks = choose_tasks(domain, config, 0, 0, config.tasks.levels)
    tasks = tasks if domain.endless else find_known(domain, config, config.tasks.levels)
    marks = find_marks(tasks, config.tasks, domain.reference or domain.name, config.learner.model)
    learner = load_learner(config.learner, config.seed, config.engine)
    here = EngineChoice() if config.engine.name == "vllm" else config.engine  # a reference never samples
    reference = load_learner(config.learner, config.seed, here) if config.loss.kl else None
    if resume is not None:
        run = Run.resume(resume)
    else:
        run = Run.create(
            config.run, "train", config.domain, config, config.seed, [*marks, *config.renderer.marks]
        )
    steps = config.training.steps
    with run.setting_up():
        checkpoints = Checkpoints(run, learner, config.training.keep_checkpoints)
        known: dict[str, Any] = {}
        if resume is not None:
            known = await checkpoints.restore()
            run.extend(steps)
        run.add_prompts(collect_prompts(domain, tasks))
        save_tokenizer(learner.agent(config, "train"), run.path)
        parties.account.load(read_ledger(run.path))
        parties.record(config.user, run.path)
        first = reached = int(known.get("step", 0))
        checks = Checks(config.checks, known.get("streaks"))
        gate = Gate(learner.engine)
        collector = Collector(config, domain, learner.agent(config, "train", gate), parties, watch)
        collector.restore(known)
        if reference is not None:
            method = replace(method, reference=reference.engine)
        evaluation = Evaluation(run, domain, parties, config, learner, gate, checks, watch)
        if started is not None:
            started(run.path)

    async def save(step: int) -> None:
        async with gate.closed():  # an engine never has to save while it samples
            await checkpoints.save(step, {"streaks": checks.streaks, **collector.to_data(step)})

    state = "failed"
    try:
        with (
            Interrupt(lambda: watch(0, {"kind": "stopping"}) if watch is not None else None) as interrupt,
            phase("learning", steps, "steps", first) as seen,
        ):
            record = StepRecord(run, config, collector, parties, checks, marks, seen, watch)
            if evaluation.is_due(first) and not evaluation.is_recorded(first):
                await evaluation.evaluate(first)
            for step in range(first, steps):
                record.begin(learner.engine.weight_version)
                optim = to_optim(config.optimizer, step, steps)
                await train_step(step, collector, learner.engine, gate, method, optim, record)
                reached = step + 1
                metrics = record.finish(step)
                collector.adjust_level(metrics.get("reward", 0.0))
                is_stopping = interrupt.asked  # read once: what is stopped has been saved
                if not is_stopping and evaluation.is_due(reached):
                    await evaluation.evaluate(reached)
                if is_stopping or reached == steps or reached % config.training.checkpoint_every == 0:
                    await save(reached)
                if is_stopping:
                    state = "stopped"
                    return run.path
        await checkpoints.finish()
        state = "finished"
        return run.path
    except BudgetError as error:
        LOG.warning("%s; saved after step %d", error, reached)
        await save(reached)
        state = "stopped"
        return run.path
    except (asyncio.CancelledError, KeyboardInterrupt):
        state = "stopped"
        raise
    finally:
        await collector.close()
        with suppress(RunError):  # on a full disk another error is already being raised
            run.add_ledger(parties.account.take(), reached)
        learner.engine.close()
        if reference is not None:
            reference.engine.close()
        await parties.close()
        run.close(state)


def find_method(config: TrainConfig) -> Method:
    """The method that settings name."""
    return Method(
        find_advantage(config.advantage.name, config.loss.name),
        find_loss(config.loss),
        temperature=config.training.temperature,
        mini_batches=config.training.mini_batches,
        seed=config.seed,
    )


@dataclass(slots=True)
class StepRecord:
    """Writes what happens in a step to the run directory: conversations, metrics, spending, seconds."""

    run: Run
    config: TrainConfig
    collector: Collector
    parties: Parties
    checks: Checks
    marks: Sequence[str]
    seen: Phase
    watch: Watch | None = None
    version: int = 0
    clock: list[float] = field(default_factory=lambda: [])
    metrics: dict[str, Any] = field(default_factory=lambda: {})

    def begin(self, version: int) -> None:
        """Start the clock of a step whose conversations the weights of this version begin."""
        self.version, self.clock = version, [perf_counter()]

    def see_conversations(self, step: int, groups: Sequence[Group], rows: Sequence[Row]) -> None:
        config, collector = self.config, self.collector
        held = [*groups, *collector.replaced]
        items = with_advantages((item for group in held for item in group.everything), rows)
        self.run.write_trajectories(f"step-{step + 1:06d}", items)
        self.clock.append(perf_counter())
        price = find_prices(config.budget.prices, user=config.user)
        self.metrics = {"step": step + 1, **measure(held, price), "levels": collector.admitted}
        if self.marks:
            self.metrics["marks"] = self.marks
        if config.training.redraw_no_signal:
            self.metrics["redrawn_groups"] = len(collector.replaced)
        size = config.training.group_size
        self.metrics |= measure_flow(collector.started, groups, rows, size, self.version)
        self.checks.see_conversations(self.metrics, len(rows))
        self.seen.note = f"learning from {len(rows)} rows"

    def see_update(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self.checks.see_update(self.metrics, stale=self.metrics["staleness_max"] > 0)

    def finish(self, step: int) -> dict[str, Any]:
        """Write the metrics of a step, and return them."""
        self.seen.note, self.seen.done = "", step + 1
        self.clock.append(perf_counter())
        if warnings := self.checks.collect():
            self.metrics["warnings"] = warnings
        self.run.add_metrics(to_plain(self.metrics))
        self.run.add_ledger(self.parties.account.take(), step + 1)
        started, held, updated = self.clock
        self.run.add_timings(step + 1, rollout=held - started, update=updated - held)
        if self.watch is not None:
            self.watch(step + 1, self.metrics)
        return self.metrics


def with_advantages(trajectories: Iterable[Trajectory], rows: Iterable[Row]) -> list[Trajectory]:
    """The conversations, each with the advantage it is learned from, to be shown."""
    advantages = {row.id: row.advantages[-1] for row in rows}
    return [
        item.model_copy(update={"meta": {**item.meta, "advantage": advantages[item.id]}})
        if item.id in advantages
        else item
        for item in trajectories
    ]


def to_optim(optimizer: Optimizer, step: int, steps: int) -> OptimParams:
    """The parameters of the optimizer at a step of the schedule."""
    rate = optimizer.learning_rate
    if step < optimizer.warmup:
        rate *= (step + 1) / (optimizer.warmup + 1)
    elif optimizer.schedule != "constant":
        passed = (step - optimizer.warmup) / max(1, steps - optimizer.warmup)
        rate *= 1 - passed if optimizer.schedule == "linear" else (1 + cos(pi * passed)) / 2
    return OptimParams(
        learning_rate=rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        grad_clip=optimizer.gradient_clip,
    )
