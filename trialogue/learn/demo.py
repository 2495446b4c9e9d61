# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The demonstration: cold start, then reinforcement learning with a user in the loop, on a laptop's CPU.

Before and after, the agent serves users it has never met: other people, products, order numbers and wording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from trialogue.activity import phase
from trialogue.config import EvalConfig, SftConfig, TrainConfig, load_config
from trialogue.errors import DomainError, RunError
from trialogue.learn.collect import Watch, choose_tasks
from trialogue.learn.sft import find_examples, sft
from trialogue.learn.train import train
from trialogue.run import read_about, read_lines, write_json
from trialogue.score.evaluate import evaluate
from trialogue.task import Task
from trialogue.world.domains.shop.wording import collect_texts
from trialogue.world.find import find_domain

LEVELS = (1,)
"""Difficulty of the demonstration: one request or question per conversation, which the policy allows."""
TEST_TASKS = 256
MINUTES = 6.0
"""The time of the whole demonstration on two idle cores."""
COLD_START = ("sft.faults=0.22", "sft.only_successes=false")
"""The teacher makes mistakes. They are imitated too, which leaves something for reinforcement learning."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a demonstration."""

    examples: int = 6000
    steps: int = 36
    eval_every: int = 12
    dev_tasks: int = 100
    test_tasks: int = TEST_TASKS

    @classmethod
    def fit(cls, minutes: float) -> Size:
        """The size that takes about this many minutes, with enough test tasks for an interval."""
        share, whole = minutes / MINUTES, cls()
        if share >= 1:
            return whole
        steps = max(2, round(whole.steps * share))
        return cls(
            examples=max(120, round(whole.examples * share)),
            steps=steps,
            eval_every=min(whole.eval_every, steps),
            dev_tasks=max(16, round(whole.dev_tasks * share)),
            test_tasks=max(32, round(whole.test_tasks * share)),
        )

    def describe(self) -> str:
        """What to expect, in one line."""
        whole = Size()
        if self == whole:
            return (
                f"about {MINUTES:g} minutes on two quiet cores: the agent solves about 20 % of the test "
                "tasks as the policy wants it after the cold start, about 90 % after reinforcement learning"
            )
        return (
            f"shortened: {self.examples:,} examples in place of {whole.examples:,}, {self.steps} steps in "
            f"place of {whole.steps}, {self.test_tasks} test tasks in place of {whole.test_tasks}. Every "
            "part is real, but the agent stays weak and the intervals are wide; the whole demonstration "
            f"takes {MINUTES:g} minutes and gets to about 90 %"
        )


async def demonstrate(
    directory: Path, seed: int, tell: Tell, watch: Watch, size: Size | None = None
) -> dict[str, Any]:
    """Run the demonstration and write `summary.json` and `curve.png` to the directory.

    Returns the two evaluations and the summary. `tell` is told what comes next, `watch` each step.
    """
    size = size or Size()
    tell(size.describe())
    clock = {"start": perf_counter()}
    levels = f"tasks.levels={list(LEVELS)}"
    place = [f"seed={seed}", levels, f"run.directory={json.dumps(str(directory))}"]

    cold = load_config(SftConfig, None, [*place, f"sft.count={size.examples}", *COLD_START, "run.name=sft"])
    start = f"learner.model={json.dumps(str(directory / 'sft'))}"
    lengths = (
        f"training.steps={size.steps}",
        f"training.eval_every={size.eval_every}",
        f"training.eval_tasks={size.dev_tasks}",
    )
    warm = load_config(TrainConfig, None, [*place, *lengths, "run.name=rl", start])

    with phase("comparing train and test tasks"):
        test = find_domain("shop").tasks("test", size.test_tasks, seed, levels=LEVELS)
        overlap = find_overlap(find_learned(cold, warm), test)
        overlap |= collect_texts("train") & collect_texts("test")
    if overlap:
        raise DomainError(f"train and test tasks share {sorted(overlap)[:5]}")
    tell("train and test tasks share no person, product, order, address or wording")

    tell(f"1. Cold start: imitate {size.examples:,} conversations of a careless teacher")
    tuned = await sft(cold, watch=watch)
    refuse_unfinished(tuned)
    clock["sft"] = perf_counter()
    tell(f"2. Test: {size.test_tasks} conversations with users it has never met")
    before = await take_test(tuned, "test-after-sft", place, size.test_tasks)
    clock["eval_sft"] = perf_counter()

    tell(f"3. Reinforcement learning, {size.steps} steps: talk with users, learn from what came of it")
    trained = await train(warm, watch=lambda step, said: watch(step, {"steps": size.steps, **said}))
    refuse_unfinished(trained)
    clock["rl"] = perf_counter()
    tell("4. Test: the same tasks again")
    after = await take_test(trained, "test-after-rl", place, size.test_tasks)
    clock["end"] = perf_counter()

    summary = {
        "test_tasks": size.test_tasks,
        "levels": list(LEVELS),
        "after_sft": _figures(before),
        "after_rl": _figures(after),
        "seconds": {
            "base": 0.0,
            "sft": round(clock["sft"] - clock["start"], 1),
            "rl": round(clock["rl"] - clock["eval_sft"], 1),
            "eval": round(clock["eval_sft"] - clock["sft"] + clock["end"] - clock["rl"], 1),
            "total": round(clock["end"] - clock["start"], 1),
        },
        "seed": seed,
    }
    write_json(directory / "summary.json", summary)
    draw_curve(trained, summary, directory / "curve.png")
    return {"summary": summary, "before": before, "after": after}


def refuse_unfinished(run: Path) -> None:
    """Stop where a part was stopped: later figures would describe a model that is half trained."""
    if (state := read_about(run)["state"]) != "finished":
        raise RunError(f"{run} is {state}, so the demonstration ends here; start it again with make demo")


async def take_test(model: Path, name: str, place: Iterable[str], count: int = TEST_TASKS) -> dict[str, Any]:
    settings = [
        *place,
        f"run.name={name}",
        f"agent.model={json.dumps(str(model))}",
        "tasks.split=test",
        f"tasks.count={count}",
        "limits.reply_tokens=64",
        "limits.context_tokens=1024",
        "rollout.concurrency=128",
    ]
    return await evaluate(load_config(EvalConfig, None, settings))


def _figures(result: dict[str, Any]) -> dict[str, float]:
    """Solved with the policy kept, its interval, solved whatever rules say, and how many kept every rule."""
    interval = {"low": result["pass^1_low"], "high": result["pass^1_high"]}
    return {name: result[name] for name in ("pass^1", "outcome", "compliant")} | interval


def find_learned(cold: SftConfig, warm: TrainConfig) -> Iterable[Task]:
    """Every task that both parts will learn from."""
    domain = find_domain("shop")
    for item in find_examples(domain, cold):
        assert isinstance(item, Task)  # for the oracle to hold a conversation on
        yield item
    for step in range(warm.training.steps):
        yield from choose_tasks(domain, warm, step, 0, LEVELS)


def find_overlap(train_tasks: Iterable[Task], test_tasks: Iterable[Task]) -> set[str]:
    """What two sets of tasks have in common: records, people, addresses, or sentences of the user."""
    return set(_marks(train_tasks)) & set(_marks(test_tasks))


def _marks(tasks: Iterable[Task]) -> Iterable[str]:
    for task in tasks:
        for table in task.setup.data.values():
            for key, record in table.items():
                yield str(key)
                for field in ("name", "email", "postcode", "address"):
                    if field in record:
                        yield f"{field} {record[field]}"
                for item in record.get("items", ()):
                    yield f"product {item['name']}"
        agenda = task.meta.get("agenda", {})
        yield from filter(None, chain.from_iterable(agenda.get("phrases", {}).values()))
        facts = [agenda.get("facts", {})]
        for wish in agenda.get("wishes", ()):
            yield from wish["says"]
            facts.append(wish["facts"])
        for fact in chain.from_iterable(known.values() for known in facts):
            yield from fact.get("says", ())


def draw_curve(run: Path, summary: dict[str, Any], target: Path) -> None:
    """Plot success during training, and on the test tasks before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    steps = [line for line in lines if "kind" not in line]
    checks = [line for line in lines if line.get("kind") == "eval"]
    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=120)
    for key, style, label in (
        ("success", "-", "train tasks, sampled"),
        ("outcome", ":", "the same, whatever rules say"),
    ):
        values = [line.get(key, 0.0) for line in steps]
        axes.plot([line["step"] for line in steps], values, style, color="#9db4c8", linewidth=1, label=label)
    axes.errorbar(
        [line["step"] for line in checks],
        [line["pass^1"] for line in checks],
        yerr=[
            [line["pass^1"] - line["pass^1_low"] for line in checks],
            [line["pass^1_high"] - line["pass^1"] for line in checks],
        ],
        color="#1f5f8b",
        marker="o",
        capsize=3,
        label="dev tasks, greedy, 95 % interval",
    )
    last = max((line["step"] for line in steps), default=1)
    for name, place, colour in (("after_sft", 0, "#b4436c"), ("after_rl", last, "#2e7d4f")):
        value = summary[name]
        axes.errorbar(
            [place],
            [value["pass^1"]],
            yerr=[[value["pass^1"] - value["low"]], [value["high"] - value["pass^1"]]],
            color=colour,
            marker="D",
            capsize=4,
            label=f"{summary['test_tasks']} test tasks {name.replace('_', ' ')}",
        )
    axes.set(
        xlabel="step",
        ylabel="solved, policy kept (pass^1)",
        ylim=(0, 1),
        title="Learning to serve users: shop",
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
