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
from trialogue.errors import BudgetError, ConfigError, OutOfMemory, RunError
from trialogue.learn.advantages import find_advantage
from trialogue.learn.checkpoint import (
    Best,
    Checkpoints,
    Interrupt,
    Learner,
    load_learner,
    save_and_raise,
    settle_engine,
)
from trialogue.learn.checks import Checks, to_finite
from trialogue.learn.collect import Collector, Gate, Watch, choose_tasks, find_known
from trialogue.learn.evaluation import Evaluation
from trialogue.learn.held_out import find_marks
from trialogue.learn.loop import Method, train_step
from trialogue.learn.losses import find_loss
from trialogue.learn.measure import measure, measure_flow
from trialogue.learn.throughput import Throughput
from trialogue.run import Run, State, read_ledger
from trialogue.score.metrics import find_prices
from trialogue.score.parties import Parties, open_parties
from trialogue.score.resume import settle_config
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
    is_late: Callable[[], bool] = lambda: False,
) -> Path:
    """Train and return the run directory.

    Ctrl-C, and a budget that is spent, save a checkpoint; `resume` continues exactly there. Replies of the
    user that were paid for are recorded and not asked for again. `watch` is called with the metrics of each
    step, `started` with the run directory as soon as it is there. `is_late` is asked after each step whether
    that was the last one.
    """
    training = await open_training(settle_config(config, "train", resume), resume, watch, started)
    state: State = "failed"
    try:
        if await training.run_steps(is_late):
            await training.checkpoints.finish(training.best.kept)
            state = "finished"
        else:
            state = "stopped"
    except BudgetError as error:
        LOG.warning("%s; saved after step %d", error, training.reached)
        await training.save()
        state = "stopped"
    except OutOfMemory as error:
        await save_and_raise(error, training.save, training.reached)
    except (asyncio.CancelledError, KeyboardInterrupt):
        state = "stopped"
        raise
    finally:
        await training.close(state)
    return training.run.path


@dataclass(slots=True)
class TrainingRun:
    """Everything that a run which learns has open."""

    config: TrainConfig
    run: Run
    parties: Parties
    learner: Learner
    reference: Learner | None
    """The weights that a divergence is measured from."""
    method: Method
    gate: Gate
    collector: Collector
    checks: Checks
    checkpoints: Checkpoints
    evaluation: Evaluation
    best: Best
    marks: Sequence[str]
    reached: int
    """Steps done, in earlier runs too."""
    watch: Watch | None

    async def run_steps(self, is_late: Callable[[], bool]) -> bool:
        """Run the steps that are left. Returns False when Ctrl-C ended them early; that step is saved."""
        steps, engine = self.config.training.steps, self.learner.engine
        with (
            Interrupt(self.tell_stopping) as interrupt,
            phase("learning", steps, "steps", self.reached) as seen,
        ):
            record = StepRecord(
                *(self.run, self.config, self.collector, self.parties, self.checks, self.marks),
                *(self.measure_throughput(), seen, self.watch),
            )
            if self.is_due(self.config.training.eval_every, self.reached == steps):
                await self.evaluate()
            for step in range(self.reached, steps):
                record.begin(engine.weight_version)
                optim = to_optim(self.config.optimizer, step, steps)
                await train_step(step, self.collector, engine, self.gate, self.method, optim, record)
                self.reached = step + 1
                metrics = record.finish(step)
                self.collector.adjust_level(metrics.get("reward", 0.0))
                is_last = self.reached == steps or is_late()
                is_stopping = interrupt.asked  # read once: what is stopped has been saved
                if not is_stopping and self.is_due(self.config.training.eval_every, is_last):
                    await self.evaluate()
                if is_stopping or self.is_due(self.config.training.checkpoint_every, is_last):
                    await self.save()
                if is_stopping:
                    return False
                if is_last or self.best.is_over:
                    break
        return True

    def measure_throughput(self) -> Throughput:
        learners = [self.learner, *([self.reference] if self.reference is not None else [])]
        return Throughput([learner.engine for learner in learners], self.config.learner.peak_tflops)

    def is_due(self, every: int, is_last: bool) -> bool:
        """Whether something that is done so often is due after the step reached."""
        return every > 0 and (is_last or self.reached % every == 0)

    async def evaluate(self) -> None:
        """Evaluate on dev tasks, unless that is on record. The best weights so far are saved."""
        if self.evaluation.is_recorded(self.reached):
            return
        success = await self.evaluation.evaluate(self.reached)
        if success is not None:
            self.best.see(self.reached, success)
            if self.best.kept == self.reached:
                await self.save()

    async def save(self) -> None:
        """Save a checkpoint after the step reached."""
        async with self.gate.closed():  # an engine never has to save while it samples
            state = {"streaks": self.checks.streaks, "best": self.best.to_data()}
            await self.checkpoints.save(
                self.reached, {**state, **self.collector.to_data(self.reached)}, self.best.kept
            )

    def tell_stopping(self) -> None:
        if self.watch is not None:
            self.watch(0, {"kind": "stopping"})

    async def close(self, state: State) -> None:
        """End the conversations under way and close everything."""
        await self.collector.close()
        with suppress(RunError):  # on a full disk another error is already being raised
            self.run.add_ledger(self.parties.account.take(), self.reached)
        self.learner.engine.close()
        if self.reference is not None:
            self.reference.engine.close()
        await self.parties.close()
        self.run.close(state)


async def open_training(
    config: TrainConfig,
    resume: Path | None = None,
    watch: Watch | None = None,
    started: Callable[[Path], None] | None = None,
) -> TrainingRun:
    """Load the domain, the user and the learner, and create the run directory or resume it."""
    refuse_capped_mini_batches(config)
    config = config.model_copy(update={"engine": settle_engine(config.engine, config.learner)})
    method = find_method(config)
    domain, parties = open_parties(config)
    tasks = choose_tasks(domain, config, 0, 0, config.tasks.levels)
    tasks = tasks if domain.endless else find_known(domain, config, config.tasks.levels)
    marks = find_marks(tasks, config, domain.reference or domain.name, config.learner.model)
    learner = load_learner(config.learner, config.seed, config.engine)
    reference = None
    if config.loss.kl:
        here = EngineChoice(name="torch") if config.engine.name == "vllm" else config.engine  # never samples
        reference = load_learner(config.learner, config.seed, here)
        method = replace(method, reference=reference.engine)
    if resume is not None:
        run = Run.resume(resume)
    else:
        run = Run.create(config.run, "train", config.domain, config, config.seed, marks)
    with run.setting_up():
        checkpoints = Checkpoints(run, learner, config.training.keep_checkpoints)
        known: dict[str, Any] = {}
        if resume is not None:
            known = await checkpoints.restore()
            run.extend(config.training.steps)
        run.add_prompts(collect_prompts(domain, tasks))
        gate = Gate(learner.engine)
        agent = learner.agent(config.limits, temperature=config.training.temperature, sampler=gate)
        save_tokenizer(agent, run.path)
        parties.account.load(read_ledger(run.path))
        parties.record(config.user, run.path)
        checks = Checks(config.checks, known.get("streaks"))
        collector = Collector(config, domain, agent, parties, watch)
        collector.restore(known)
        evaluation = Evaluation(run, domain, parties, config, learner, gate, checks, watch)
        if started is not None:
            started(run.path)
    return TrainingRun(
        config=config,
        run=run,
        parties=parties,
        learner=learner,
        reference=reference,
        method=method,
        gate=gate,
        collector=collector,
        checks=checks,
        checkpoints=checkpoints,
        evaluation=evaluation,
        best=Best.restore(config.training.patience, known.get("best")),
        marks=marks,
        reached=int(known.get("step", 0)),
        watch=watch,
    )


def refuse_capped_mini_batches(config: TrainConfig) -> None:
    if config.loss.importance_cap and config.training.mini_batches > 1:
        raise ConfigError(
            "loss.importance_cap takes the weights of each update as the old ones, so later mini-batches "
            "would never be clipped: set training.mini_batches=1 or loss.importance_cap=0"
        )


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
    """Writes what happens in a step to the run directory: conversations, metrics, spending, speed."""

    run: Run
    config: TrainConfig
    collector: Collector
    parties: Parties
    checks: Checks
    marks: Sequence[str]
    throughput: Throughput
    seen: Phase
    watch: Watch | None = None
    version: int = 0
    rows: Sequence[Row] = ()
    clock: list[float] = field(default_factory=lambda: [])
    metrics: dict[str, Any] = field(default_factory=lambda: {})

    def begin(self, version: int) -> None:
        """Start the clock of a step whose conversations the weights of this version begin."""
        self.version, self.clock = version, [perf_counter()]
        self.throughput.begin()

    def see_conversations(self, step: int, groups: Sequence[Group], rows: Sequence[Row]) -> None:
        config, collector = self.config, self.collector
        held = [*groups, *collector.replaced]
        items = with_advantages((item for group in held for item in group.everything), rows)
        self.run.write_trajectories(f"step-{step + 1:06d}", items)
        self.clock.append(perf_counter())
        self.rows = rows
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
        self.run.add_metrics(to_finite(self.metrics))
        self.run.add_ledger(self.parties.account.take(), step + 1)
        started, held, updated = self.clock
        seconds = {"rollout": held - started, "update": updated - held}
        speeds = self.throughput.measure(self.rows, **seconds)
        self.run.add_timings(step + 1, **seconds, **speeds)
        if self.watch is not None:
            self.watch(step + 1, self.metrics | speeds)
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
