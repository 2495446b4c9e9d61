"""Evaluation: hold the conversations of a split, grade them, and write a run that can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trialogue.config import EvalConfig, to_config
from trialogue.errors import ConfigError
from trialogue.run import Kind, Run, read_about, read_trajectories, write_json
from trialogue.score.metrics import summarize
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.talk.model import ModelSource
from trialogue.talk.rollout import rollout
from trialogue.task import Task
from trialogue.trajectory import Group, Trajectory
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain

Progress = Callable[[Group, int, int], None]
"""Told each group as it finishes, how many conversations are over and how many there are in all."""


def find_tasks(domain: Domain, config: EvalConfig) -> list[Task]:
    """The tasks a configuration asks for."""
    wanted = config.tasks
    tasks = domain.tasks(
        wanted.split, wanted.count, config.seed, levels=wanted.levels, families=wanted.families
    )
    if not tasks:
        raise ConfigError(
            f"{domain.name} has no tasks in split '{wanted.split}'"
            + (f" of levels {list(wanted.levels)}" if wanted.levels else "")
            + (f" of families {list(wanted.families)}" if wanted.families else "")
        )
    return tasks


async def evaluate(
    config: EvalConfig,
    *,
    kind: Kind = "eval",
    resume: Path | None = None,
    progress: Progress | None = None,
    agent: ModelSource | None = None,
) -> dict[str, Any]:
    """Evaluate and return the result, which is also in the run's `metrics.jsonl`.

    `agent` puts a model that is already there in place of the one the configuration names. With `resume`
    the configuration is the run's own, and conversations on record are not held again.
    """
    if resume is not None:
        read_about(resume)
        config = to_config(EvalConfig, _read_json(resume / "config.json"), str(resume / "config.json"))
    domain = find_domain(config.domain, config.data)
    tasks = find_tasks(domain, config)
    agent = agent or find_model(config.agent, "agent", domain, config.limits, config.seed)
    user = find_model(config.user, "user", domain, config.limits, config.seed)
    if resume is not None:
        run = Run.resume(resume, kind)
        held = [item for item in read_trajectories(resume) if item.end != "error"]
    else:
        run = Run.create(config.run, kind, config.domain, config, config.seed)
        held = []
    done = {(item.task.id, item.trial) for item in held}
    total = len(tasks) * config.tasks.trials
    state = "stopped"
    failed: list[Trajectory] = []
    try:
        groups = rollout(
            domain,
            tasks,
            agent,
            user,
            group_size=config.tasks.trials,
            concurrency=config.rollout.concurrency,
            limits=config.limits,
            seed=config.seed,
            redraws=config.rollout.redraws,
            grade=grade,
            skip=lambda task, trial: (task.id, trial) in done,
        )
        async for group in groups:
            run.add_trajectories(kind, [*group.trajectories, *group.failed])
            held += group.trajectories
            failed += group.failed
            if progress is not None:
                progress(group, len(held), total)
        result = to_result(config, domain, held, failed, run.path)
        run.add_metrics(result)
        write_json(run.path / "result.json", result)
        state = "finished"
        return result
    finally:
        run.close(state)


def to_result(
    config: EvalConfig, domain: Domain, held: list[Trajectory], failed: list[Trajectory], path: Path
) -> dict[str, Any]:
    """The figures of an evaluation with everything needed to tell it again."""
    return {
        "domain": domain.name,
        "split": config.tasks.split,
        "trials": config.tasks.trials,
        "agent": config.agent.model,
        "user": config.user.model,
        "seed": config.seed,
        **summarize(held, failed, config.seed),
        "notes": domain.notes,
        "run": str(path),
    }


def _read_json(path: Path) -> dict[str, Any]:
    import json

    return json.loads(path.read_text(encoding="utf-8"))
