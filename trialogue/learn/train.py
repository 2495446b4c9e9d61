"""Reinforcement learning with a user in the loop, top to bottom:

choose tasks → hold groups of conversations → grade → advantages → rows → update → publish → log →
now and then evaluate on dev tasks and save a checkpoint.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from time import perf_counter
from typing import Any

from trialogue.activity import phase
from trialogue.config import Optimizer, TrainConfig
from trialogue.engine.api import Engine, OptimParams, Row, find_conversations
from trialogue.errors import BudgetError, ConfigError, RunError, TrialogueError
from trialogue.learn.checkpoint import Checkpoints, Interrupt, Learned, load_learner
from trialogue.learn.checks import Checks, to_plain
from trialogue.learn.collect import Gate, Wave, Waves, measure_flow
from trialogue.learn.grpo import PolicyLoss, advantages
from trialogue.learn.held_out import find_marks
from trialogue.learn.measure import measure
from trialogue.learn.rows import add_elsewhere, to_rows
from trialogue.run import Run, read_ledger, read_lines
from trialogue.score.metrics import find_prices, summarize
from trialogue.score.parties import Cast, set_up
from trialogue.score.resume import settle
from trialogue.score.reward import grade
from trialogue.talk.model import ModelSource, save_tokenizer
from trialogue.talk.prompts import collect_prompts
from trialogue.talk.rate_limit import LOG
from trialogue.talk.rollout import derive_seed, rollout
from trialogue.task import Task
from trialogue.trajectory import Group, Reward, Trajectory, in_order
from trialogue.world.domain import Domain

Watch = Callable[[int, dict[str, Any]], None]
"""Told the number and the metrics of each step; while conversations are held, how many are over (`kind` is
`talk`); that Ctrl-C was heard (`stopping`)."""


async def train(
    config: TrainConfig,
    *,
    resume: Path | None = None,
    watch: Watch | None = None,
    started: Callable[[Path], None] | None = None,
) -> Path:
    """Train and return the run directory. Stopped by Ctrl-C or for want of money it saves, and `resume` goes
    on exactly there; what the user was paid to say is not asked for again."""
    config = settle(config, "train", resume)
    if config.loss.importance_cap and config.training.mini_batches > 1:
        raise ConfigError(
            "loss.importance_cap takes each update's own weights as the old ones, so that later mini-batches "
            "would never be clipped: set training.mini_batches=1 or loss.importance_cap=0"
        )
    domain, cast = set_up(config)
    tasks = choose_tasks(domain, config, 0, 0, config.tasks.levels)
    tasks = tasks if domain.endless else find_known(domain, config, config.tasks.levels)
    marks = find_marks(tasks, config.tasks, domain.reference or domain.name, config.learner.model)
    learner = load_learner(config.learner, config.seed, config.engine)
    untouched = config.engine.model_copy(update={"vllm": None})  # a reference never speaks
    reference = load_learner(config.learner, config.seed, untouched) if config.loss.kl else None
    if resume is not None:
        run = Run.resume(resume)
    else:
        run = Run.create(
            config.run, "train", config.domain, config, config.seed, [*marks, *config.renderer.marks]
        )
    with run.setting_up():
        checkpoints = Checkpoints(run, learner, config.training.keep_checkpoints)
        known: dict[str, Any] = {}
        if resume is not None:
            known = await checkpoints.restore()
            run.extend(config.training.steps)
        run.add_prompts(collect_prompts(domain, tasks))
        save_tokenizer(learner.agent(config, "train"), run.path)
        first, level = int(known.get("step", 0)), int(known.get("level", 0))
        cast.account.load(read_ledger(run.path))
        cast.record(config.user, run.path)
        checks = Checks(config.checks, known.get("streaks"))
        levels = sorted(config.tasks.levels)
        price = find_prices(config.budget.prices, user=config.user)
        gate = Gate(learner.engine)
        agent = learner.agent(config, "train", gate)
        waves = make_waves(domain, agent, cast, config)
        for old in known.get("waves", ()):
            tasks = choose_tasks(domain, config, old["step"], 0, old["levels"])
            waves.begin(old["step"], [task for task in tasks if task.id in old["tasks"]], old["levels"])
        if started is not None:
            started(run.path)
    state = "failed"
    reached = first
    try:
        with (
            Interrupt(lambda: watch(0, {"kind": "stopping"}) if watch is not None else None) as interrupt,
            phase("learning", config.training.steps, "steps", first) as seen,
        ):
            if is_due(first, config) and not has_evaluation(run.path, first):
                await evaluate_learner(first, run, domain, learner, gate, cast, config, checks, watch)
            for step in range(first, config.training.steps):
                clock = [perf_counter()]
                admitted = levels[: level + 1] if config.training.curriculum else levels
                tasks = choose_tasks(domain, config, step, 0, admitted)
                if config.stragglers.policy == "wait":
                    groups, flat = await hold(step, domain, agent, cast, config, admitted, watch)
                else:
                    waves.begin(step, tasks, admitted)
                    groups, flat = await waves.take(step, step + 1 == config.training.steps), []
                rows = to_step(groups, config, checks)
                held = [item for group in [*groups, *flat] for item in everything(group)]
                run.write_trajectories(f"step-{step + 1:06d}", with_advantages(held, rows))
                clock.append(perf_counter())

                metrics: dict[str, Any] = {
                    "step": step + 1,
                    **measure([*groups, *flat], price),
                    "levels": admitted,
                }
                if marks:
                    metrics["marks"] = marks
                if config.training.redraw_flat_groups:
                    metrics["redrawn_groups"] = len(flat)
                version = learner.engine.weight_version
                metrics |= measure_flow(tasks, groups, rows, config.training.group_size, version)
                checks.see_conversations(metrics, len(rows))
                async with gate.closed():
                    seen.note = f"learning from {len(rows)} rows"
                    metrics |= await update(learner.engine, rows, step, config, reference)
                    checks.see_update(metrics, stale=metrics["staleness_max"] > 0)
                    await learner.engine.publish()
                seen.note = ""
                seen.done = reached = step + 1
                clock.append(perf_counter())

                if config.training.curriculum and metrics.get("reward", 0.0) >= config.training.curriculum:
                    level = min(level + 1, len(levels) - 1) if levels else 0
                if warnings := checks.collect():
                    metrics["warnings"] = warnings
                run.add_metrics(to_plain(metrics))
                run.add_ledger(cast.account.take(), step + 1)
                run.add_timings(step + 1, rollout=clock[1] - clock[0], update=clock[2] - clock[1])
                if watch is not None:
                    watch(step + 1, metrics)
                stop = interrupt.asked  # asked once: what is stopped has been saved
                last = step + 1 == config.training.steps or stop
                if not stop and is_due(step + 1, config):
                    await evaluate_learner(step + 1, run, domain, learner, gate, cast, config, checks, watch)
                if last or (step + 1) % config.training.checkpoint_every == 0:
                    async with gate.closed():  # several processes save together, and then none may sample
                        await checkpoints.save(step + 1, to_facts(step + 1, level, checks, waves))
                if stop:
                    state = "stopped"
                    return run.path
        await checkpoints.finish()
        state = "finished"
        return run.path
    except BudgetError as error:
        LOG.warning("%s; saved after step %d", error, reached)
        async with gate.closed():
            await checkpoints.save(reached, to_facts(reached, level, checks, waves))
        state = "stopped"
        return run.path
    except (asyncio.CancelledError, KeyboardInterrupt):
        state = "stopped"
        raise
    finally:
        await waves.close()
        with suppress(RunError):  # on a full disk there is another error to tell
            run.add_ledger(cast.account.take(), reached)
        learner.engine.close()
        if reference is not None:
            reference.engine.close()
        await cast.close()
        run.close(state)


def to_facts(step: int, level: int, checks: Checks, waves: Waves) -> dict[str, Any]:
    """What the loop knows besides the weights before a step, for a checkpoint."""
    return {"level": level, "streaks": checks.streaks, "waves": waves.to_data(step)}


def make_waves(domain: Domain, agent: ModelSource, cast: Cast, config: TrainConfig) -> Waves:
    """Where conversations are held that a step need not wait for."""
    if config.stragglers.policy != "wait" and config.training.redraw_flat_groups:
        raise ConfigError("training.redraw_flat_groups needs whole steps: set stragglers.policy=wait")

    def begin(wave: Wave) -> AsyncGenerator[Group]:
        return rollout(
            domain,
            wave.tasks,
            agent,
            cast.user,
            group_size=config.training.group_size,
            concurrency=config.rollout.concurrency,
            limits=config.limits,
            seed=derive_seed(config.seed, "step", wave.step),
            redraws=config.rollout.redraws,
            grade=grade,
            audit=cast.audit,
            exclude=cast.exclude,
            name=f"{wave.step + 1}/",
            each=wave.hear,
            deadline=wave.deadline,
        )

    return Waves(config.stragglers, begin, config.training.group_size)


def is_due(step: int, config: TrainConfig) -> bool:
    """Whether the agent is evaluated after this step."""
    every = config.training.eval_every
    return every > 0 and (step % every == 0 or step == config.training.steps)


def has_evaluation(path: Path, step: int) -> bool:
    """Whether the evaluation after a step is on record: one stopped by Ctrl-C is made up for on resuming."""
    return any(line.get("kind") == "eval" and line.get("step") == step for line in read_metrics(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics so far."""
    file = path / "metrics.jsonl"
    return [line for _, line in read_lines(file)] if file.exists() else []


def choose_tasks(
    domain: Domain, config: TrainConfig, step: int, draw: int, levels: Sequence[int]
) -> list[Task]:
    """The tasks of a step. An endless domain makes new ones; a finite one is gone through in epochs."""
    wanted = config.tasks
    count = config.training.tasks_per_step
    if domain.endless:
        seed = derive_seed(config.seed, "tasks", step, draw)
        return domain.tasks(wanted.split, count, seed, levels=levels, families=wanted.families)
    known = find_known(domain, config, levels)
    first = (step + draw * config.training.steps) * count
    chosen: list[Task] = []
    for place in range(first, first + count):
        epoch, position = divmod(place, len(known))
        order = list(range(len(known)))
        random.Random(derive_seed(config.seed, "epoch", epoch)).shuffle(order)
        chosen.append(known[order[position]])
    return list({task.id: task for task in chosen}.values())


def choose_some(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """A uniform sample of tasks, in their order. The first ones alone would be biased: a domain may list its
    tasks by level."""
    places = random.Random(seed).sample(range(len(tasks)), min(count, len(tasks)))
    return [tasks[place] for place in sorted(places)]


def find_known(domain: Domain, config: TrainConfig, levels: Sequence[int]) -> list[Task]:
    """Every task of a finite domain that there is to learn from."""
    wanted = config.tasks
    known = domain.tasks(wanted.split, wanted.count, config.seed, levels=levels, families=wanted.families)
    if not known:
        raise ConfigError(
            f"{domain.name} has no tasks in split '{wanted.split}' of these levels and families"
        )
    return known


def find_eval_tasks(domain: Domain, config: TrainConfig, split: str) -> list[Task]:
    """The tasks the agent is evaluated on; none where a domain has no dev split and no other is named."""
    wanted, number = config.tasks, config.training.eval_tasks
    try:
        return domain.tasks(split, number, config.seed, levels=wanted.levels, families=wanted.families)
    except TrialogueError:
        if config.training.eval_split is not None:
            raise
        return []


async def hold(
    step: int,
    domain: Domain,
    agent: ModelSource,
    cast: Cast,
    config: TrainConfig,
    levels: Sequence[int],
    watch: Watch | None = None,
) -> tuple[list[Group], list[Group]]:
    """The groups of one step, in the order of their tasks. With dynamic sampling, groups without signal are
    replaced by new tasks within the budget, and come second."""
    kept: list[Group] = []
    replaced: list[Group] = []
    wanted, over = config.training.tasks_per_step * config.training.group_size, 0

    def tell(held: int) -> None:
        nonlocal over
        over += held
        if watch is not None:
            watch(step, {"kind": "talk", "done": over, "of": max(wanted, over)})

    tell(0)
    for draw in range(config.training.redraw_flat_groups + 1):
        missing = config.training.tasks_per_step - len(kept)
        drawn = choose_tasks(domain, config, step, draw, levels)
        tasks = choose_some(drawn, missing, derive_seed(config.seed, "redraw", step, draw))
        groups = [
            group
            async for group in rollout(
                domain,
                tasks,
                agent,
                cast.user,
                group_size=config.training.group_size,
                concurrency=config.rollout.concurrency,
                limits=config.limits,
                seed=derive_seed(config.seed, "step", step),
                redraws=config.rollout.redraws,
                grade=grade,
                audit=cast.audit,
                exclude=cast.exclude,
                each=lambda _: tell(1),
                name=f"{step + 1}.{draw}/" if draw else f"{step + 1}/",
            )
        ]
        last = draw == config.training.redraw_flat_groups
        for group in in_order(groups, tasks):
            (kept if last or has_signal(group) else replaced).append(group)
        if len(kept) >= config.training.tasks_per_step:
            break
    return kept, replaced


def everything(group: Group) -> list[Trajectory]:
    """Graded, failed and excluded conversations of a group."""
    return [*group.trajectories, *group.failed, *group.excluded]


def has_signal(group: Group) -> bool:
    """Whether some sibling did better than another."""
    values = [item.value for item in group.trajectories]
    return len(values) > 1 and max(values) - min(values) > 1e-6


def with_advantages(trajectories: Iterable[Trajectory], rows: Iterable[Row]) -> list[Trajectory]:
    """Conversations with the advantage they are learned from, for whoever looks at them."""
    shares = {row.id: row.advantages[-1] for row in rows}
    return [
        item.model_copy(update={"meta": {**item.meta, "advantage": shares[item.id]}})
        if item.id in shares
        else item
        for item in trajectories
    ]


def to_step(groups: Sequence[Group], config: TrainConfig, checks: Checks | None = None) -> list[Row]:
    """The rows of a step: the conversations of groups with signal. Failed ones enter no baseline."""
    rows: list[Row] = []
    checks = checks or Checks(config.checks)
    for group in groups:
        held = list(group.trajectories)
        if config.training.score_failures:
            held += [item.model_copy(update={"reward": Reward(value=0.0)}) for item in group.failed]
        values = [item.value for item in held]
        shares = advantages(values, config.loss.name)
        checks.see_group(group, values, shares)
        if not any(shares):
            continue
        for item, share in zip(held, shares, strict=True):
            whole = config.training.train_on_everything
            found = to_rows(item, share, train_on_everything=whole)
            rows += found if whole or checks.is_masked_right(item, found) else []
    return rows


async def update(
    engine: Engine, rows: list[Row], step: int, config: TrainConfig, reference: Learned | None
) -> dict[str, Any]:
    """One optimizer step, or as many as there are mini-batches."""
    if not rows:
        return {"skipped": 1.0}
    if config.training.train_on_everything:
        # Nobody sampled what users and tools say: the policy of the moment stands in for whoever did.
        known = await engine.forward(rows, config.training.temperature)
        rows = [replace(row, logprobs=logprobs) for row, logprobs in zip(rows, known, strict=True)]
    if reference is not None:
        known = await reference.engine.forward(rows, config.training.temperature)
        rows = [replace(row, reference_logprobs=logprobs) for row, logprobs in zip(rows, known, strict=True)]
    conversations = find_conversations(rows)
    random.Random(derive_seed(config.seed, "rows", step)).shuffle(conversations)
    size = -(-len(conversations) // config.training.mini_batches)
    parts: list[dict[str, float]] = []
    for first in range(0, len(conversations), size):
        chosen = conversations[first : first + size]
        part = [rows[index] for members in chosen for index in members]
        if config.loss.name == "gspo" and not config.loss.importance_cap and len(part) > len(chosen):
            part = add_elsewhere(part, await engine.forward(part, config.training.temperature))
        outputs = await engine.forward_backward(
            part, PolicyLoss(config.loss), temperature=config.training.temperature
        )
        optim = to_optim(config.optimizer, step, config.training.steps)
        parts.append(outputs.metrics | await engine.optim_step(optim))
    return join_parts(parts)


def join_parts(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its mini-batches: skipped ones are counted, the others averaged, so
    that a number that is none stays visible. The gap is the first one's: it alone compares like with like."""
    if len(parts) == 1:
        return parts[0]
    joined = dict(parts[0])
    for key in joined.keys() - {"logprob_gap", "logprob_gap_max", "learning_rate"}:
        joined[key] = sum(part[key] for part in parts) / (1 if key == "skipped" else len(parts))
    return joined


def to_optim(optimizer: Optimizer, step: int, steps: int) -> OptimParams:
    """The optimizer's parameters at a step of the schedule."""
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


async def evaluate_learner(
    step: int,
    run: Run,
    domain: Domain,
    learner: Learned,
    gate: Gate,
    cast: Cast,
    config: TrainConfig,
    checks: Checks,
    watch: Watch | None,
) -> None:
    """Greedy conversations on tasks it does not learn from: the curve that counts."""
    split = config.training.eval_split or "dev"
    tasks = find_eval_tasks(domain, config, split) if config.training.eval_every else []
    if not tasks:
        return
    started = perf_counter()
    groups = [
        group
        async for group in rollout(
            domain,
            tasks,
            learner.agent(config, "eval"),
            cast.user,
            concurrency=config.rollout.concurrency,
            limits=config.limits,
            seed=config.seed,
            grade=grade,
            audit=cast.audit,
            name=f"eval-{step}/",
        )
    ]
    groups = in_order(groups, tasks)
    run.write_trajectories(f"eval-{step:06d}", [item for group in groups for item in everything(group)])
    held = [item for group in groups for item in group.trajectories]
    failed = [item for group in groups for item in group.failed]
    price = find_prices(config.budget.prices, user=config.user)
    figures = summarize(held, failed, config.seed, price)
    metrics = {"step": step, "kind": "eval", "split": split, **figures}
    checks.see_evaluations([*read_metrics(run.path), metrics], config.training.group_size)
    checks.see_near_calls(metrics)
    if warnings := checks.collect():
        metrics["warnings"] = warnings
    run.add_metrics(metrics)
    run.add_timings(step, evaluate=perf_counter() - started)
    async with gate.closed():
        await learner.engine.publish()  # the next step begins as it would after resuming
    if watch is not None:
        watch(step, metrics)
