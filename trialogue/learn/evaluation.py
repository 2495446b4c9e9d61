"""Evaluations during training: greedy conversations on tasks that the agent does not learn from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from trialogue.config import TrainConfig
from trialogue.errors import TrialogueError
from trialogue.learn.checkpoint import Learner
from trialogue.learn.checks import Checks
from trialogue.learn.collect import Gate, Watch
from trialogue.run import Run, read_lines
from trialogue.score.metrics import find_prices, summarize
from trialogue.score.parties import Parties
from trialogue.talk.rollout import rollout
from trialogue.task import Task
from trialogue.trajectory import in_order
from trialogue.world.domain import Domain


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluations of one run that learns."""

    run: Run
    domain: Domain
    parties: Parties
    config: TrainConfig
    learner: Learner
    gate: Gate
    checks: Checks
    watch: Watch | None = None

    def is_recorded(self, step: int) -> bool:
        """Whether the evaluation after a step is on record. One that was stopped is held after resuming."""
        lines = read_metrics(self.run.path)
        return any(line.get("kind") == "eval" and line.get("step") == step for line in lines)

    async def evaluate(self, step: int) -> float | None:
        """Hold one greedy conversation of each task and record the figures. Returns the success rate; None
        where there is none."""
        config, run, learner = self.config, self.run, self.learner
        split = config.training.eval_split or "dev"
        tasks = find_eval_tasks(self.domain, config, split) if config.training.eval_every else []
        if not tasks:
            return None
        started = perf_counter()
        settings = replace(self.parties.to_settings(config), name=f"eval-{step}/", exclude=False)
        agent = learner.agent(config.limits, temperature=0.0)
        found = [group async for group in rollout(self.domain, tasks, agent, self.parties.user, settings)]
        groups = in_order(found, tasks)
        run.write_trajectories(f"eval-{step:06d}", [item for group in groups for item in group.everything])
        held = [item for group in groups for item in group.trajectories]
        failed = [item for group in groups for item in group.failed]
        price = find_prices(config.budget.prices, user=config.user)
        figures = summarize(held, failed, config.seed, price)
        metrics: dict[str, Any] = {"step": step, "kind": "eval", "split": split, **figures}
        self.checks.see_evaluations([*read_metrics(run.path), metrics], config.training.group_size)
        self.checks.see_near_calls(metrics)
        self.checks.see_success(metrics)
        if warnings := self.checks.collect():
            metrics["warnings"] = warnings
        run.add_metrics(metrics)
        run.add_timings(step, evaluate=perf_counter() - started)
        async with self.gate.closed():
            await learner.engine.publish()  # the next step begins as it would after resuming
        if self.watch is not None:
            self.watch(step, metrics)
        return metrics.get("pass^1")


def find_eval_tasks(domain: Domain, config: TrainConfig, split: str) -> list[Task]:
    """The tasks of an evaluation. There are none where the domain has no dev split and no other is named."""
    wanted, number = config.tasks, config.training.eval_tasks
    try:
        return domain.tasks(split, number, config.seed, levels=wanted.levels, families=wanted.families)
    except TrialogueError:
        if config.training.eval_split is not None:
            raise
        return []


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics so far."""
    file = path / "metrics.jsonl"
    return [line for _, line in read_lines(file)] if file.exists() else []
