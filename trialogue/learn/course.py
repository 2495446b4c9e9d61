"""From a domain to an evaluated agent, in the minutes that are given: `trialogue learn DOMAIN`.

    look at the domain ─► cold start ─► test ─► reinforcement ─► the same test ─► what is still wrong

Each part is a run directory of its own in one folder. A part that is there is not done again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, TypeVar

from trialogue.activity import phase, to_duration
from trialogue.config import EvalConfig, SftConfig, TrainConfig, load_config
from trialogue.durable import write_json
from trialogue.errors import ConfigError, RunError
from trialogue.learn.collect import Watch
from trialogue.learn.pace import is_small, measure_pace
from trialogue.learn.sft import HELD, read_examples, sft
from trialogue.learn.sizes import (
    BATCH,
    CONCURRENCY,
    SIBLINGS,
    TASKS,
    Sizes,
    plan_cold_start,
    plan_lengths,
    plan_reinforcement,
)
from trialogue.learn.train import train
from trialogue.run import find_files, read_about, read_lines, read_trajectories
from trialogue.score.evaluate import evaluate
from trialogue.score.mistakes import count_mistakes, find_mistakes
from trialogue.score.training_check import check_for_training
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain

C = TypeVar("C", SftConfig, TrainConfig, EvalConfig)
Tell = Callable[[str], None]
COLD_RATES = {True: 2e-3, False: 1e-4}
"""Learning rate of the cold start, of small models and of others."""
WARM_RATES = {True: 2.5e-4, False: 1e-5}
"""Learning rate of reinforcement."""
REWORD = "tasks.reword=true"
"""Users of training tasks speak in more ways than the author wrote, where sizes are planned."""
PATIENCE = 3
"""Measurements without a better one after which a part ends, and the best weights count."""
GAP = 0.15
"""How far success on training tasks lies above that on dev tasks where words are known by heart."""
PARTS = {
    "look": "looking at the domain",
    "sft": "cold start",
    "test-after-sft": "test",
    "rl": "reinforcement",
    "test-after-rl": "the same test again",
    "mistakes": "what is still wrong",
}
"""The parts in their order: those that are runs by the names of these."""


@dataclass(frozen=True, slots=True)
class Course:
    """What is asked for."""

    domain: str
    directory: Path
    minutes: float = 10.0
    seed: int = 0
    model: str = "tiny-desk"
    begin: Path | None = None
    """A run to begin with: its weights, in place of a cold start."""
    examples: str = "teacher"
    """Conversations to imitate, as in `sft.examples`."""
    words: tuple[str, ...] = ()
    """Settings of all parts, each for those that know it."""
    cold_words: tuple[str, ...] = ()
    warm_words: tuple[str, ...] = ()
    sizes: Sizes | None = None
    """Fixed sizes, for a domain that is known. None: look at it first, and plan from the minutes."""

    def to_config(self, kind: type[C], name: str, *words: str) -> C:
        """The settings of one part."""
        place = (
            f"domain={json.dumps(self.domain)}",
            f"seed={self.seed}",
            f"run.directory={json.dumps(str(self.directory))}",
            f"run.name={name}",
        )
        usual = (REWORD,) if self.sizes is None else ()
        sections = kind.model_fields
        known = (word for word in self.words if word.partition("=")[0].split(".")[0] in sections)
        return load_config(kind, None, [*place, *usual, *words, *known])


@dataclass(slots=True)
class Clock:
    """The time of a course: what each part has taken, and when all is to be over."""

    minutes: float
    tell: Tell
    seconds: dict[str, float] = field(default_factory=lambda: {})
    began: float = field(default_factory=monotonic)

    @property
    def end(self) -> float:
        return self.began + 60 * self.minutes

    @property
    def left(self) -> float:
        return self.end - monotonic()

    @contextmanager
    def part(self, name: str, more: str = "") -> Generator[None]:
        """Tell what begins, and count its seconds."""
        number = f"{list(PARTS).index(name) + 1}/{len(PARTS)}"
        left = f"; about {to_duration(self.left)} left in all" if self.left > 0 else ""
        self.tell(f"{number} {PARTS[name]}{': ' + more if more else ''}{left}")
        began = monotonic()
        with phase(f"{number} {PARTS[name]}", until=self.end):
            yield
        self.seconds[name] = round(monotonic() - began, 1)


async def learn(course: Course, tell: Tell, watch: Watch) -> dict[str, Any]:
    """Hold the whole course and return its summary, which is also in `summary.json`."""
    clock = Clock(course.minutes, tell)
    domain = find_domain(course.domain, find_data(course))
    with clock.part("look"):
        findings = await look(domain, course, tell)
        sizes = await settle_sizes(course, domain)

    with clock.part("sft", describe_cold(course, sizes)):
        cold = course.begin or await take_part(sft, cold_config(course, sizes), watch)
    with clock.part("test-after-sft", f"{sizes.cold.test_tasks} conversations with users it has never met"):
        before = await take_test(course, sizes, cold, "test-after-sft")

    sizes = settle_steps(course, sizes, clock, before)
    with clock.part("rl", describe_warm(sizes, before)):
        late = clock.end - 1.2 * before["wall_seconds"]  # the same test comes after it
        done = await reinforce(course, sizes, cold, watch, late)
    with clock.part("test-after-rl", "" if done != cold else "left out, nothing was learned since"):
        after = before if done == cold else await take_test(course, sizes, done, "test-after-rl")

    with clock.part("mistakes"):
        held = [item for file in find_files(Path(after["run"])) for item in read_trajectories(file)]
        mistakes = count_mistakes(find_mistakes(held, domain))
    summary = summarize(course, sizes, clock, before, after, done, findings, mistakes)
    write_json(course.directory / "summary.json", summary)
    return summary


async def look(domain: Domain, course: Course, tell: Tell) -> list[str]:
    """What stands in the way of learning, told at once. A domain that cannot be learned is refused."""
    for split in ("train", "test"):
        if not domain.tasks(split, 1, course.seed):
            raise ConfigError(
                f"{domain.name} has no tasks in split '{split}': learn needs 'train' to learn from and "
                "'test' to see what was learned"
            )
    if course.sizes is not None:
        return []
    findings = (await asyncio.to_thread(check_for_training, domain, course.seed)).texts
    for finding in findings:
        tell(f"! {finding}")
    return findings


async def reinforce(course: Course, sizes: Sizes, cold: Path, watch: Watch, late: float) -> Path:
    """Reinforcement that ends when its time is over; the model as it is where there is no time for any."""
    if sizes.warm is None or not sizes.warm.steps:
        return cold

    def is_late() -> bool:
        return course.sizes is None and monotonic() > late

    return await take_part(train, warm_config(course, sizes, cold), watch, is_late=is_late)


# -- the parts -----------------------------------------------------------------------------------------------


async def take_part(verb: Callable[..., Any], config: Any, watch: Watch, **more: Any) -> Path:
    """Do a part that learns, or go on with it; one that is finished is left as it is."""
    path = Path(config.run.directory) / config.run.name
    if path.exists() and read_about(path)["state"] == "finished":
        return path
    steps = {} if verb is sft else {"steps": config.training.steps}

    def tell(step: int, metrics: dict[str, Any]) -> None:
        watch(step, {**steps, **metrics})

    await verb(config, resume=path if path.exists() else None, watch=tell, **more)
    if (state := read_about(path)["state"]) != "finished":
        raise Stopped(f"{path} is {state}, so the course ends here")
    return path


class Stopped(RunError):
    """A part was stopped, and with it the course."""


async def take_test(course: Course, sizes: Sizes, model: Path, name: str) -> dict[str, Any]:
    """The figures of greedy conversations on test tasks."""
    path = course.directory / name
    config = course.to_config(
        EvalConfig,
        name,
        f"agent.model={json.dumps(str(model))}",
        "tasks.split=test",
        f"tasks.count={sizes.cold.test_tasks}",
        *limits(sizes),
        f"rollout.concurrency={CONCURRENCY}",
    )
    if path.exists() and read_about(path)["state"] == "finished":
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    else:
        result = await evaluate(config, resume=path if path.exists() else None)
    if "pass^1" not in result:
        raise RunError(f"no conversation of {path} was graded; `trialogue report {path}` tells why")
    return result


def limits(sizes: Sizes) -> tuple[str, ...]:
    return (
        f"limits.reply_tokens={sizes.reply_tokens}",
        f"limits.context_tokens={sizes.context_tokens}",
    )


def cold_config(course: Course, sizes: Sizes) -> SftConfig:
    """Imitation of the teacher, which ends when the loss on held-out conversations stops falling."""
    cold = sizes.cold
    return course.to_config(
        SftConfig,
        "sft",
        f"learner.model={json.dumps(course.model)}",
        f"sft.examples={json.dumps(course.examples)}",
        f"sft.count={cold.examples}",
        f"sft.epochs={cold.epochs}",
        f"sft.batch={BATCH}",
        f"sft.checkpoint_every={max(1, cold.steps // 10)}",
        f"sft.patience={PATIENCE}",
        f"sft.plain={str(sizes.is_small).lower()}",
        f"optimizer.learning_rate={COLD_RATES[sizes.is_small]}",
        *course.cold_words,
    )


def warm_config(course: Course, sizes: Sizes, model: Path) -> TrainConfig:
    """Reinforcement, of which the weights with the best success on dev tasks are kept."""
    assert sizes.warm is not None
    return course.to_config(
        TrainConfig,
        "rl",
        f"learner.model={json.dumps(str(model))}",
        f"training.steps={sizes.warm.steps}",
        f"training.tasks_per_step={TASKS}",
        f"training.group_size={SIBLINGS}",
        f"training.eval_every={sizes.warm.eval_every}",
        f"training.eval_tasks={sizes.cold.dev_tasks}",
        f"training.checkpoint_every={sizes.warm.eval_every}",
        f"training.patience={PATIENCE}",
        f"optimizer.learning_rate={WARM_RATES[sizes.is_small]}",
        *limits(sizes),
        *course.warm_words,
    )


# -- sizes ---------------------------------------------------------------------------------------------------


async def settle_sizes(course: Course, domain: Domain) -> Sizes:
    """The sizes: those a course goes on with, those that are fixed, or those planned for this machine."""
    file = course.directory / "course.json"
    if file.exists():
        known = json.loads(file.read_text(encoding="utf-8"))
        if (known["domain"], known["seed"]) != (course.domain, course.seed):
            raise ConfigError(
                f"{course.directory} is a course of {known['domain']} with seed {known['seed']}: go on with "
                "these, or begin another one with --out"
            )
        return Sizes.read(known["sizes"])
    sizes = course.sizes or await plan(course, domain)
    write_sizes(course, sizes)
    return sizes


async def plan(course: Course, domain: Domain) -> Sizes:
    """The sizes for the minutes, planned from what a few conversations cost here."""
    recorded = None if course.examples in HELD else len(read_examples(Path(course.examples)))
    config = course.to_config(
        SftConfig,
        "measured",
        f"learner.model={json.dumps(str(course.begin or course.model))}",
        f"sft.examples={json.dumps(course.examples)}",
        *course.cold_words,
    )
    small = is_small(config.learner.model)
    pace = await measure_pace(domain, config)
    reply, context = plan_lengths(pace)
    return Sizes(plan_cold_start(course.minutes, pace, recorded), pace, reply, context, small)


def write_sizes(course: Course, sizes: Sizes) -> None:
    course.directory.mkdir(parents=True, exist_ok=True)
    plain = {"domain": course.domain, "seed": course.seed, "minutes": course.minutes}
    write_json(course.directory / "course.json", {**plain, "sizes": asdict(sizes)})


def settle_steps(course: Course, sizes: Sizes, clock: Clock, before: dict[str, Any]) -> Sizes:
    """The sizes with those of reinforcement, for the time that is left."""
    if sizes.warm is not None:
        return sizes
    assert sizes.pace is not None
    tested = before["wall_seconds"] / before["tasks"]
    warm = plan_reinforcement(clock.left, sizes.pace, tested, sizes.cold)
    settled = replace(sizes, warm=warm)
    write_sizes(course, settled)
    return settled


# -- words ---------------------------------------------------------------------------------------------------


def find_data(course: Course) -> str | None:
    """The folder of a benchmark, where the settings name one."""
    return course.to_config(EvalConfig, "test").data


def describe_cold(course: Course, sizes: Sizes) -> str:
    if course.begin is not None:
        return f"left out, {course.begin} is there"
    who = f"conversations of the {course.examples}" if course.examples in HELD else f"of {course.examples}"
    return f"{sizes.cold.examples:,} {who}, up to {sizes.cold.steps:,} steps"


def describe_warm(sizes: Sizes, before: dict[str, Any]) -> str:
    found = f"{before['pass^1']:.0%} of the test tasks are solved so far"
    if sizes.warm is None or not sizes.warm.steps:
        return f"left out, there is no time for it ({found}); give more --minutes"
    return f"up to {sizes.warm.steps} steps of {TASKS * SIBLINGS} conversations; {found}"


def summarize(
    course: Course,
    sizes: Sizes,
    clock: Clock,
    before: dict[str, Any],
    after: dict[str, Any],
    model: Path,
    findings: list[str],
    mistakes: list[dict[str, Any]],
) -> dict[str, Any]:
    """What came of it, as plain data."""
    return {
        "domain": course.domain,
        "model": str(model),
        "base": course.model,
        "minutes": course.minutes,
        "seed": course.seed,
        "test_tasks": before["tasks"],
        "after_sft": to_interval(before),
        "after_rl": to_interval(after),
        "families": {
            name: [to_interval(each["families"][name]) for each in (before, after)]
            for name in before["families"]
        },
        "kept_step": find_kept_step(model),
        "sizes": asdict(sizes),
        "seconds": {**clock.seconds, "total": round(monotonic() - clock.began, 1)},
        "findings": findings,
        "advice": find_gap(model),
        "mistakes": mistakes,
        "runs": {name: str(course.directory / name) for name in list_runs(course.directory)},
    }


def list_runs(directory: Path) -> list[str]:
    return [file.parent.name for file in sorted(directory.glob("*/run.json"))]


def to_interval(figures: dict[str, Any]) -> dict[str, float]:
    """Success with its interval; where a policy has rules, also success whatever they say, and kept rules."""
    interval = {"pass^1": figures["pass^1"], "low": figures["pass^1_low"], "high": figures["pass^1_high"]}
    return interval | {name: figures[name] for name in ("outcome", "compliant") if name in figures}


def find_gap(run: Path) -> list[str]:
    """What to say where training tasks are solved and dev tasks are not: more learning would not help."""
    if read_about(run).get("kind") != "train":
        return []
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    trained = [line["success"] for line in lines if "kind" not in line and "success" in line]
    checks = [line["pass^1"] for line in lines if line.get("kind") == "eval" and "pass^1" in line]
    if not trained or not checks or fmean(trained) < max(checks) + GAP:
        return []
    told = f"training tasks are solved ({fmean(trained):.0%}), dev tasks less ({max(checks):.0%})"
    what_helps = (
        "learning longer does not help, more varied training tasks do, such as more phrasings per wish"
    )
    return [f"{told}: {what_helps}"]


def find_kept_step(run: Path) -> int | None:
    """The step whose weights are the model of a run of reinforcement: the last of its best evaluations."""
    if read_about(run).get("kind") != "train":
        return None
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    checks = [line for line in lines if line.get("kind") == "eval" and "pass^1" in line]
    return max(checks, key=lambda line: (line["pass^1"], line["step"]))["step"] if checks else None
