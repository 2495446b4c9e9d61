"""Evaluation: hold the conversations of a split, grade them, and write a run that can be resumed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from trialogue.config import EvalConfig
from trialogue.durable import write_json
from trialogue.errors import BudgetError, ConfigError, RunError
from trialogue.run import (
    Kind,
    Run,
    State,
    collect_marks,
    find_files,
    judge_file,
    read_ledger,
    read_prompts,
    read_seconds,
    read_trajectories,
    read_usage,
)
from trialogue.score.metrics import add_judge, find_prices, summarize
from trialogue.score.parties import open_parties
from trialogue.score.resume import settle_config
from trialogue.talk.budget import add_up, find_price
from trialogue.talk.find import find_model
from trialogue.talk.model import save_tokenizer
from trialogue.talk.prompts import collect_prompts
from trialogue.talk.replay import Recorder
from trialogue.talk.rollout import rollout
from trialogue.task import Task
from trialogue.trajectory import Group, Trajectory, in_order
from trialogue.world.domain import Domain

LEDGER_SECONDS = 5.0
"""How long what was spent may stay unwritten while conversations go on."""
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
    started: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate and return the result, which is also in the run's `metrics.jsonl`.

    With `resume` the configuration is the run's own, and conversations on record are not held again.
    `started` is called with the run directory as soon as it exists.
    """
    began = monotonic()
    config = settle_config(config, kind, resume)
    domain, parties = open_parties(config)
    tasks = find_tasks(domain, config)
    marks = collect_marks(config.agent.list_models(), config.renderer)
    if marks:
        domain = replace(domain, notes={**domain.notes, "agent": "; ".join(marks)})
    if config.tasks.count is not None and len(tasks) < config.tasks.count:
        fewer = f"{config.tasks.count} were asked for, there are {len(tasks)}"
        domain = replace(domain, notes={**domain.notes, "tasks": fewer})
    agent = find_model(config.agent, "agent", domain, config.limits, config.seed, parties.account)
    parties.opened.append(agent)
    judge = None
    if config.judge.model:
        judge = find_model(config.judge, "user", domain, config.limits, config.seed, parties.account, "judge")
        parties.opened.append(judge)
    if resume is not None:
        run = Run.resume(resume)
    else:
        run = Run.create(config.run, kind, config.domain, config, config.seed, marks)
    with run.setting_up():
        recorded = [item for file in find_files(run.path) for item in read_trajectories(file)]
        parties.account.load(read_ledger(run.path))
        run.add_prompts(collect_prompts(domain, tasks))
        save_tokenizer(agent, run.path)
        parties.record(config.user, run.path)
        if config.agent.model.startswith("openai:"):
            agent = Recorder(agent, run.path / "recordings" / "agent.jsonl")
        if judge is not None:
            judge = Recorder(judge, judge_file(run.path))
            domain = replace(domain, judge=judge, notes={**domain.notes, "judge": config.judge.model})
    held: list[Trajectory] = []
    failed: list[Trajectory] = []
    excluded: list[Trajectory] = []

    def sort(item: Trajectory) -> None:
        (failed if item.is_failed else excluded if item.excluded else held).append(item)

    def keep(item: Trajectory) -> None:
        run.add_trajectories(kind, [item])
        sort(item)

    for item in recorded:
        sort(item)
    done = {(item.task.id, item.trial) for item in held}
    # Failed and excluded conversations stay on record. A resumed run draws them again with new seeds.
    before = Counter((item.task.id, item.trial) for item in [*failed, *excluded])

    def is_done(task: Task, trial: int) -> bool:
        return (task.id, trial) in done

    def count_failures(task: Task, trial: int) -> int:
        return before[task.id, trial]

    total = len(tasks) * config.tasks.trials
    state: State = "failed"
    try:
        if started is not None:
            started(run.path)
        settings = replace(
            parties.to_settings(config),
            group_size=config.tasks.trials,
            skip=is_done,
            failures=count_failures,
            each=keep,
        )
        if "human" in (config.agent.model, config.user.model):
            settings = replace(settings, concurrency=1)
        groups = rollout(domain, tasks, agent, parties.user, settings)
        written = began
        async with aclosing(groups):
            async for group in groups:
                if monotonic() - written > LEDGER_SECONDS:
                    written = monotonic()
                    run.add_ledger(parties.account.take())
                if progress is not None:
                    progress(group, len(held), total)
        run.add_seconds(monotonic() - began)
        run.add_ledger(parties.account.take())
        sorted_ = [in_order(items, tasks) for items in (held, failed, excluded)]
        result = to_result(config, domain, *sorted_, run=run, asked=total)
        run.write_metrics(result)
        write_json(run.path / "result.json", result)
        state = "finished"
        return result
    except (asyncio.CancelledError, KeyboardInterrupt, BudgetError):
        state = "stopped"
        run.add_seconds(monotonic() - began)
        raise
    finally:
        with suppress(RunError):  # on a full disk another error is already being raised
            run.add_ledger(parties.account.take())
        await parties.close()
        run.close(state)


def to_result(
    config: EvalConfig,
    domain: Domain,
    held: list[Trajectory],
    failed: list[Trajectory],
    excluded: list[Trajectory],
    *,
    run: Run,
    asked: int,
) -> dict[str, Any]:
    """The figures of an evaluation, with everything needed to replay it."""
    return {
        "domain": domain.name,
        **to_figures(run.path, config, held, failed, excluded),
        "asked": asked,
        "notes": domain.notes,
        "run": str(run.path),
    }


def to_figures(
    path: Path,
    config: EvalConfig,
    held: Sequence[Trajectory],
    failed: Sequence[Trajectory],
    excluded: Sequence[Trajectory],
) -> dict[str, Any]:
    """The figures of an evaluation, from what is on record."""
    wall, seconds = read_seconds(path)
    prompts = read_prompts(path)
    price = find_prices(config.budget.prices, agent=config.agent, user=config.user)
    figures = summarize(held, failed, config.seed, price, seconds, excluded)
    if config.judge.model:
        name = config.judge.model.removeprefix("openai:")
        known = find_price(name, config.judge.price, config.budget.prices)
        add_judge(figures, read_usage(judge_file(path)), known)
    return {
        "split": config.tasks.split,
        "trials": config.tasks.trials,
        "agent": config.agent.model,
        "user": config.user.model,
        "seed": config.seed,
        "judge": config.judge.model or None,
        **figures,
        "ledger": add_up(read_ledger(path)),
        "wall_seconds": round(wall, 3),
        "prompts": prompts["hash"],
        "tasks_hash": prompts["tasks_hash"],
    }
