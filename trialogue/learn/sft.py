"""Supervised fine-tuning: the same rows as reinforcement learning, with cross-entropy on one side's turns."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, cast

from trialogue.activity import phase
from trialogue.config import SftConfig, SftSettings, Synthesis, TrainConfig, Training
from trialogue.digests import refuse_injured
from trialogue.engine.api import Row
from trialogue.errors import BudgetError, ConfigError, OutOfMemory, RunError
from trialogue.learn.advantages import to_rows
from trialogue.learn.checkpoint import Best, Checkpoints, Interrupt, load_learner, save_and_raise
from trialogue.learn.checks import Checks, to_finite
from trialogue.learn.collect import Gate, Watch, is_varied
from trialogue.learn.evaluation import Evaluation
from trialogue.learn.examples import Example, read_parquet
from trialogue.learn.held_out import find_marks
from trialogue.learn.losses import cross_entropy
from trialogue.learn.throughput import Throughput
from trialogue.learn.train import to_optim
from trialogue.run import Run, find_files, read_about, read_ledger, read_trajectories
from trialogue.score.parties import open_parties
from trialogue.score.resume import settle_config
from trialogue.score.reward import grade
from trialogue.score.varied import vary_tasks
from trialogue.talk.conversation import Party
from trialogue.talk.evidence import find_ungrounded
from trialogue.talk.find import find_model
from trialogue.talk.model import Model, ModelSource
from trialogue.talk.prompts import collect_prompts
from trialogue.talk.render.api import Renderer, with_tokens
from trialogue.talk.rewording import reword
from trialogue.talk.rollout import RolloutSettings, derive_seed, rollout
from trialogue.talk.teacher.teacher import make_teacher
from trialogue.talk.users import user_prompt
from trialogue.task import Side, Task
from trialogue.trajectory import Group, Trajectory, in_order
from trialogue.world.domain import Domain

PARQUET = ".parquet"
HELD = ("oracle", "teacher")
"""Examples that are held on the spot, by these agents."""
LOG = logging.getLogger(__name__)
FREE_TEXT = frozenset(Synthesis().free_text)
TOLD = 256
"""The prompts are collected from this many tasks at most: there may be many examples, with equal prompts."""


async def sft(
    config: SftConfig,
    *,
    resume: Path | None = None,
    watch: Watch | None = None,
    started: Callable[[Path], None] | None = None,
) -> Path:
    """Fine-tune on recorded or freshly held conversations and return the run directory."""
    config = settle_config(config, "sft", resume)
    settings = config.sft
    domain, parties = open_parties(
        to_played(config), is_played=settings.eval_tasks > 0 or settings.examples in HELD
    )
    with phase("choosing examples"):
        source = find_examples(domain, config)
    learned = [item if isinstance(item, Task) else item.task for item in source]
    tasks = [] if settings.examples.endswith(PARQUET) else learned  # its prompts are in the file
    origins = (config.learner.model, settings.examples)
    marks = find_marks(learned, config, domain.reference or domain.name, *origins)
    learner = load_learner(config.learner, config.seed)
    if resume is not None:
        run = Run.resume(resume)
    else:
        run = Run.create(config.run, "sft", config.domain, config, config.seed, marks)
    with run.setting_up():
        checkpoints = Checkpoints(run, learner, keep=1)
        known = await checkpoints.restore() if resume is not None else {}
        run.add_prompts(collect_prompts(domain, tasks[:TOLD]))
        parties.account.load(read_ledger(run.path))
        parties.record(config.user, run.path)
        first, checks = int(known.get("step", 0)), Checks(streaks=known.get("streaks"))
        best = Best.restore(settings.patience, known.get("best"))
        if started is not None:
            started(run.path)

    throughput = Throughput([learner.engine], config.learner.peak_tflops)
    gate = Gate(learner.engine)
    evaluation = Evaluation(run, domain, parties, to_played(config), learner, gate, checks, watch)

    async def evaluate(step: int) -> None:
        if settings.eval_tasks:
            await evaluation.evaluate(step)
            run.add_ledger(parties.account.take(), step)

    state, reached = "failed", first

    async def save() -> None:
        facts = {"streaks": checks.streaks, "best": best.to_data()}
        await checkpoints.save(reached, facts, best.kept)

    try:
        examples = await collect(domain, config, source, parties.user)
        run.add_ledger(parties.account.take())
        with phase(f"writing {len(examples):,} conversations as tokens"):
            rows, held_out = split_rows(examples, domain, learner.renderer, config)
        if not rows:
            raise ConfigError(f"of {len(held_out)} rows none is left to learn from; lower sft.validation")
        steps = max(1, round(settings.epochs * len(rows) / settings.batch))
        if first == 0:
            await evaluate(0)
        with (
            Interrupt(lambda: watch(0, {"kind": "stopping"}) if watch is not None else None) as interrupt,
            phase("learning", steps, "steps", first) as seen,
        ):
            for step in range(first, steps):
                if best.is_over:
                    break
                began = perf_counter()
                throughput.begin()
                batch = choose_batch(rows, settings.batch, step, config.seed)
                outputs = await learner.engine.forward_backward(batch, cross_entropy)
                metrics: dict[str, Any] = {"step": step + 1, "steps": steps, **outputs.metrics}
                metrics |= await learner.engine.optim_step(to_optim(config.optimizer, step, steps))
                checks.see_update(metrics)
                if warnings := checks.collect():
                    metrics["warnings"] = warnings
                if marks:
                    metrics["marks"] = marks
                await learner.engine.publish()
                seen.done = reached = step + 1
                due = step + 1 == steps or (step + 1) % settings.checkpoint_every == 0
                if due and held_out:
                    metrics["validation_loss"] = await measure_loss(learner.engine, held_out)
                    best.see(step + 1, -metrics["validation_loss"])
                run.add_metrics(to_finite(metrics))
                seconds = perf_counter() - began
                speeds = throughput.measure(batch, rollout=0.0, update=seconds)
                run.add_timings(step + 1, update=seconds, **speeds)
                if watch is not None:
                    watch(step + 1, metrics | speeds)
                stop = interrupt.asked  # asked once: what is stopped has been saved
                if due or stop:
                    await save()
                if stop:
                    state = "stopped"
                    return run.path
        if best.kept not in (None, reached):
            await learner.engine.load_state(checkpoints.find_folder(best.kept))
            await learner.engine.publish()
        await evaluate(reached)
        await checkpoints.finish(best.kept)
        state = "finished"
        return run.path
    except OutOfMemory as error:
        await save_and_raise(error, save, reached)
    except (asyncio.CancelledError, KeyboardInterrupt, BudgetError):
        state = "stopped"
        raise
    finally:
        with suppress(RunError):  # on a full disk another error is already being raised
            run.add_ledger(parties.account.take())
        learner.engine.close()
        await parties.close()
        run.close(state)


def to_played(config: SftConfig) -> TrainConfig:
    """The settings of the evaluations before and after: greedy conversations, as in training."""
    training = Training(eval_tasks=max(1, config.sft.eval_tasks), eval_split=config.sft.eval_split)
    names = set(SftConfig.model_fields) & set(TrainConfig.model_fields) - {"optimizer", "run"}
    return TrainConfig(**{name: getattr(config, name) for name in names}, training=training)


def find_examples(domain: Domain, config: SftConfig) -> list[Trajectory] | list[Task] | list[Example]:
    """Recorded conversations, or the tasks on which a teacher will hold some. What cannot be learned from
    is refused here, before a run directory is made."""
    path = Path(config.sft.examples)
    if path.suffix == PARQUET:
        if config.sft.side != "agent":
            raise ConfigError("a parquet file holds what the agent saw; set sft.side=agent")
        return list(read_parquet(path))
    if config.sft.examples not in HELD:
        found = read_examples(path)
        choose_good(found, config)
        return found
    to_teacher(domain, config.sft)
    wanted, seed = config.tasks, derive_seed(config.seed, "examples")
    tasks = domain.tasks(wanted.split, config.sft.count, seed, levels=wanted.levels, families=wanted.families)
    if is_varied(domain, wanted.vary):
        tasks = repeat_varied(domain, tasks, config.sft.count, seed)
    return [reword(task, seed) for task in tasks] if wanted.reword else tasks


def repeat_varied(domain: Domain, tasks: list[Task], count: int, seed: int) -> list[Task]:
    """As many tasks as are wanted: those of a list again and again, each time with fresh values."""
    made: list[Task] = []
    fixed: set[str] = set()
    for number in range(-(-count // max(1, len(tasks)))):
        varied = vary_tasks(
            domain, [task for task in tasks if task.id not in fixed], derive_seed(seed, number)
        )
        fixed.update(varied.kept)
        made += [
            task if task.id in fixed else task.model_copy(update={"id": f"{task.id}~{number}"})
            for task in varied.tasks
        ]
        if len(fixed) == len(tasks):
            break
    if fixed:
        LOG.warning(
            "vary: %d of %d tasks keep their values: %s", len(fixed), len(tasks), ", ".join(sorted(fixed)[:5])
        )
    LOG.info("vary: %d tasks with fresh values were made of %d", len(made), len(tasks))
    return made[:count]


def read_examples(path: Path) -> list[Trajectory]:
    """The conversations of a file or run to learn from. Of a synthesis these are the accepted ones, of a
    training run those of its steps: its evaluations are on tasks that training does not use."""
    if path.is_dir():
        refuse_injured(path)
    if (path / "accepted.jsonl").is_file():
        return list(read_trajectories(path / "accepted.jsonl"))
    if not (path / "run.json").is_file() or read_about(path).get("kind") not in ("train", "sft"):
        return list(read_trajectories(path))
    files = [file for file in find_files(path) if file.stem.startswith("step-")]
    return [item for file in files for item in read_trajectories(file)]


async def collect(
    domain: Domain,
    config: SftConfig,
    source: list[Trajectory] | list[Task] | list[Example] | None = None,
    user: ModelSource | None = None,
) -> list[Trajectory] | list[Example]:
    """The conversations to learn from."""
    settings = config.sft
    source = find_examples(domain, config) if source is None else source
    given = [item for item in source if isinstance(item, Example)]
    if given:
        return given
    found = [item for item in source if isinstance(item, Trajectory)]
    tasks = [item for item in source if isinstance(item, Task)]
    if tasks:
        user = user or find_model(config.user, "user", domain, config.limits, config.seed)
        teacher = to_teacher(domain, settings)
        play = RolloutSettings(limits=config.limits, seed=config.seed, grade=grade)
        groups = [group async for group in rollout(domain, tasks, teacher, user, play)]
        found = [item for group in in_order(groups, tasks) for item in group.trajectories]
        if settings.examples == "teacher" or domain.oracle is None:
            found = choose_sound(found, groups, domain)
    return choose_good(found, config)


def choose_good(found: Sequence[Trajectory], config: SftConfig) -> list[Trajectory]:
    """The conversations that are worth imitating."""
    good = [item for item in found if not item.is_failed and not item.excluded]
    if config.sft.only_successes:
        good = [item for item in good if item.reward is None or item.is_success]
    if not good:
        raise ConfigError(
            f"none of {len(found)} conversations in '{config.sft.examples}' can be learned from"
        )
    return good


def choose_sound(found: Sequence[Trajectory], groups: Sequence[Group], domain: Domain) -> list[Trajectory]:
    """Conversations of the teacher that earned the whole reward with arguments that each had a source."""
    sound = [
        item
        for item in found
        if item.reward is not None
        and item.reward.value >= 1
        and not find_ungrounded(item.turns, domain.open(item.task), FREE_TEXT)
    ]
    held = sum(len(group.everything) for group in groups)
    if not sound:
        errors = [item.error for group in groups for item in group.failed if item.error]
        first = f": {errors[0]}" if errors else ""
        raise ConfigError(
            f"the teacher solved none of {held} tasks{first}; `trialogue check "
            f"{domain.reference or domain.name} --for-training` tells what is wrong with each"
        )
    if len(sound) < held:
        LOG.warning("the teacher solved %d of %d tasks; the others are left out", len(sound), held)
    return sound


def to_teacher(domain: Domain, settings: SftSettings) -> ModelSource:
    """The oracle of the domain, perhaps with faults: imitating a perfect one leaves nothing to reinforce. The
    built-in teacher where it is asked for, or where the domain has no oracle."""
    oracle = domain.oracle
    if settings.examples == "teacher" or oracle is None:
        if settings.faults:
            raise ConfigError(
                f"{domain.name} is taught by the teacher, which makes no mistakes on purpose; leave "
                "sft.faults out, or give the domain an oracle that takes them"
            )
        return make_teacher(domain, settings.plain)
    faults = settings.faults
    if not faults:
        return oracle

    def faulty(task: Task, seed: int) -> Model:
        return cast("Callable[..., Model]", oracle)(task, seed, faults=faults)

    return faulty


def split_rows(
    examples: list[Trajectory] | list[Example], domain: Domain, renderer: Renderer, config: SftConfig
) -> tuple[list[Row], list[Row]]:
    """Rows to learn from, and rows to measure the loss on: by the split of the examples where they have one,
    else task by task, so that no task is in both."""
    settings = config.sft
    own_ids = settings.side == "agent" and has_own_ids(Path(settings.examples), renderer)
    held_out: list[Row] = []
    by_task: dict[str, list[Row]] = {}
    for item in examples:
        if isinstance(item, Example):
            by_task.setdefault(item.id, []).extend(to_recorded_rows(item, renderer))
            continue
        rows = to_example_rows(item, domain, renderer, settings.side, own_ids)
        if item.meta.get("split") == "validation":
            held_out += rows
        else:
            by_task.setdefault(item.task.id, []).extend(rows)
    order = list(by_task)
    random.Random(derive_seed(config.seed, "split")).shuffle(order)
    kept_apart = 0 if held_out else round(len(order) * settings.validation)
    held_out += [row for task in order[:kept_apart] for row in by_task[task]]
    return [row for task in order[kept_apart:] for row in by_task[task]], held_out


def to_recorded_rows(example: Example, renderer: Renderer) -> list[Row]:
    """A conversation in the OpenAI shape as rows that learn the agent's messages."""
    turns = with_tokens(example.turns, example.tools, renderer)
    held = Trajectory(id=example.id, task=example.task, turns=tuple(turns), end="user_stop")
    return to_rows(held, 1.0)


def has_own_ids(path: Path, renderer: Renderer) -> bool:
    """Whether recorded ids mean the same to the learner as to the model that sampled them: the run that a
    path is, or belongs to, has saved that model's tokenizer."""
    from tokenizers import Tokenizer

    folders = (path, path.parent, path.parent.parent)
    file = next((file for folder in folders if (file := folder / "tokenizer.json").is_file()), None)
    if file is None:
        return False
    return Tokenizer.from_file(str(file)).get_vocab() == renderer.vocabulary.tokenizer.get_vocab()


def to_example_rows(
    trajectory: Trajectory, domain: Domain, renderer: Renderer, side: Side, own_ids: bool = False
) -> list[Row]:
    """A recorded conversation as rows that learn the side's messages: as sampled where the ids are the
    learner's own, else as the learner's renderer writes them."""
    if own_ids and any(turn.tokens is not None for turn in trajectory.turns if turn.side == side):
        return to_rows(trajectory, 1.0, side=side)
    environment = domain.open(trajectory.task)
    manner = domain.persona(trajectory.seed)[1] if domain.persona is not None else ""
    system = environment.policy if side == "agent" else user_prompt(domain, trajectory.task, manner)
    tools = environment.tools if side == "agent" else environment.user_tools
    cue = domain.rules.user_cue if side == "user" else None
    opens = domain.greeting is None and domain.rules.opens == side
    party = Party(side, cast("Model", None), system, tools, cue)
    said = [turn.model_copy(update={"tokens": None}) for turn in trajectory.turns]
    turns = with_tokens(party.sees(said), list(tools.values()), renderer, opens=opens)
    return to_rows(trajectory.model_copy(update={"turns": tuple(turns)}), 1.0, side=side)


def choose_batch(rows: Sequence[Row], size: int, step: int, seed: int) -> list[Row]:
    """The rows of a step. Each epoch has an order of its own."""
    chosen: list[Row] = []
    orders: dict[int, list[int]] = {}
    for place in range(step * size, (step + 1) * size):
        epoch, position = divmod(place, len(rows))
        if epoch not in orders:
            orders[epoch] = list(range(len(rows)))
            random.Random(derive_seed(seed, "epoch", epoch)).shuffle(orders[epoch])
        chosen.append(rows[orders[epoch][position]])
    return chosen


async def measure_loss(engine: Any, rows: Sequence[Row]) -> float:
    """The cross-entropy of the masked tokens under the present weights."""
    logprobs = await engine.forward(rows)
    own = [
        value
        for row, values in zip(rows, logprobs, strict=True)
        for value, trained in zip(values, row.mask, strict=True)
        if trained
    ]
    return -fmean(own)
