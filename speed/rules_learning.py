# pyright: reportUnknownMemberType=false
"""Learn with and without policy rules: python speed/rules_learning.py [--seeds 0 1 2] [--out DIR]

Each seed has one cold start, and from it two runs of reinforcement learning: `report` is paid for the
outcome alone, `required` only where no rule is broken. Parts finished in `--out` are not run again. Prints
the tables and writes `rules.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from trialogue.config import EvalConfig, SftConfig, TrainConfig, load_config
from trialogue.errors import RunError
from trialogue.learn.demo import COLD_START, LEVELS, TEST_TASKS, Size
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.run import read_about, read_lines
from trialogue.score.evaluate import evaluate

ARMS = ("report", "required")
COLOURS = {"report": "#b4436c", "required": "#1f5f8b"}
LIMITS = ("limits.reply_tokens=64", "limits.context_tokens=1024")
"""Those of the demonstration's test."""
SHOWN = 4
"""Rules with a panel of their own."""


async def learn(folder: Path, seed: int, teacher: tuple[str, ...], size: Size) -> None:
    """The cold start of a seed, both runs from it, and a test of all three."""
    place = [f"seed={seed}", f"tasks.levels={list(LEVELS)}", f"run.directory={json.dumps(str(folder))}"]
    if not is_finished(folder / "sft"):
        cold = load_config(SftConfig, None, [*place, *teacher, f"sft.count={size.examples}", "run.name=sft"])
        refuse_unfinished(await sft(cold))
    lengths = [
        f"training.steps={size.steps}",
        "training.eval_every=6",
        f"training.eval_tasks={size.dev_tasks}",
    ]
    start = f"learner.model={json.dumps(str(folder / 'sft'))}"
    for rules in ARMS:
        if not is_finished(folder / rules):
            print(f"seed={seed} rules={rules}", flush=True)
            chosen = [*place, *lengths, start, f"reward.rules={rules}", f"run.name={rules}"]
            refuse_unfinished(await train(load_config(TrainConfig, None, chosen), watch=tell))
    for name in ("sft", *ARMS):
        if not is_finished(folder / f"test-{name}"):
            model = f"agent.model={json.dumps(str(folder / name))}"
            test = ["tasks.split=test", f"tasks.count={size.test_tasks}", f"run.name=test-{name}", *LIMITS]
            await evaluate(load_config(EvalConfig, None, [*place, model, *test]))


def refuse_unfinished(run: Path) -> None:
    """Stop where a part was stopped: what follows would describe a model that is half trained."""
    if not is_finished(run):
        raise RunError(f"{run} was stopped")


def is_finished(run: Path) -> bool:
    return (run / "run.json").exists() and read_about(run)["state"] == "finished"


def tell(step: int, metrics: dict[str, Any]) -> None:
    if metrics.get("kind") == "eval":
        print(f"step={step} dev={metrics['pass^1']:.2f} compliant={metrics['compliant']:.2f}", flush=True)


def read_test(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"test-{name}" / "result.json").read_text(encoding="utf-8"))


def read_steps(run: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(run / "metrics.jsonl") if "kind" not in line]


def show_tables(folders: dict[int, Path]) -> None:
    print("| Seed | learned | solved | every rule kept | both (95 %) | turns |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    broken: dict[str, Counter[str]] = {}
    held: Counter[str] = Counter()
    for seed, folder in folders.items():
        for name in ("sft", *ARMS):
            figures = read_test(folder, name)
            both = f"{figures['pass^1']:.1%} ({figures['pass^1_low']:.0%}–{figures['pass^1_high']:.0%})"
            cells = f"{figures['outcome']:.1%} | {figures['compliant']:.1%} | {both} | {figures['turns']:.1f}"
            print(f"| {seed} | {name} | {cells} |")
            broken.setdefault(name, Counter()).update(figures["breaches"])
            held[name] += figures["conversations"]
    print("\n| Test conversations that break | " + " | ".join(broken) + " |")
    print("| --- |" + " ---: |" * len(broken))
    for rule in sum(broken.values(), Counter[str]()):
        print(f"| {rule} | " + " | ".join(f"{broken[name][rule] / held[name]:.1%}" for name in broken) + " |")


def find_rules(folders: dict[int, Path]) -> list[str]:
    """The rules that training conversations break most."""
    count = Counter[str]()
    for folder in folders.values():
        for name in ARMS:
            for line in read_steps(folder / name):
                count.update(line["breaches"])
    return [rule for rule, _ in count.most_common(SHOWN)]


def draw(folders: dict[int, Path], target: Path) -> None:
    """The share of training conversations, step by step, that are solved and that break rules."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rules = find_rules(folders)
    titles = ["solved, whatever rules say", "break any rule", *(f"break “{rule}”" for rule in rules)]
    figure, grid = pyplot.subplots(2, 3, figsize=(9, 5.4), dpi=110, sharex=True, sharey=True)

    def read(line: dict[str, Any], panel: int) -> float:
        if panel < 2:
            return line["outcome"] if panel == 0 else 1 - line["compliant"]
        return line["breaches"].get(rules[panel - 2], 0) / line["conversations"]

    for panel, (axes, title) in enumerate(zip(grid.flat, titles, strict=False)):
        for name in ARMS:
            curves = [
                [read(line, panel) for line in read_steps(folder / name)] for folder in folders.values()
            ]
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, color=COLOURS[name], linewidth=0.6, alpha=0.45)
            mean = [fmean(values) for values in zip(*curves, strict=False)]
            axes.plot(range(1, len(mean) + 1), mean, color=COLOURS[name], linewidth=2, label=f"rules {name}")
        axes.set(title=title, ylim=(0, 1))
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.25)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("share of training conversations", fontsize=9)
    grid.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/rules"))
    parser.add_argument("--faults", type=float, help="of the teacher; default: the demonstration's")
    parser.add_argument("--steps", type=int, default=Size().steps)
    given = parser.parse_args()
    teacher = COLD_START if given.faults is None else (*COLD_START, f"sft.faults={given.faults}")
    folders = {seed: given.out / f"seed{seed}" for seed in given.seeds}
    for seed, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(learn(folder, seed, teacher, Size(steps=given.steps, test_tasks=TEST_TASKS)))
    show_tables(folders)
    draw(folders, given.out / "rules.png")


if __name__ == "__main__":
    main()
