# pyright: reportUnknownMemberType=false
"""Run the demonstration with several seeds, one curve each: python speed/seeds.py [--seeds 0 1 2] [--out DIR]

Seeds finished in `--out` are not run again. Prints the tables and writes `learning.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from trialogue.learn.demo import demonstrate
from trialogue.run import read_lines

COLOURS = ("#1f5f8b", "#b4436c", "#2e7d4f", "#8a6d1d", "#5b4b9a")


def learn(seed: int, folder: Path) -> None:
    def tell(step: int, metrics: dict[str, Any]) -> None:
        if metrics.get("kind") == "eval":
            print(f"seed={seed} step={step} dev={metrics['pass^1']:.2f}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(demonstrate(folder, seed, print, tell))


def read_checks(folder: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(folder / "rl" / "metrics.jsonl") if line.get("kind") == "eval"]


def draw(folders: dict[int, Path], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=120)
    for place, (seed, folder) in enumerate(folders.items()):
        colour, checks = COLOURS[place % len(COLOURS)], read_checks(folder)
        summary = json.loads((folder / "summary.json").read_text())
        steps = [line["step"] for line in checks]
        axes.plot(
            steps, [line["pass^1"] for line in checks], color=colour, linewidth=1.2, label=f"seed {seed}"
        )
        for name, step in (("after_sft", steps[0]), ("after_rl", steps[-1])):
            value = summary[name]
            reach = [[value["pass^1"] - value["low"]], [value["high"] - value["pass^1"]]]
            apart = step + 0.3 * (place - 1)
            axes.errorbar([apart], [value["pass^1"]], yerr=reach, color=colour, marker="D", capsize=4)
    axes.set(
        xlabel="step",
        ylabel="solved, policy kept (pass^1)",
        ylim=(0, 1),
        title="Shop, level 1: dev tasks (lines), 256 test tasks before and after (95 %)",
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)


def show(value: dict[str, float]) -> str:
    return f"{value['pass^1']:.1%} | {value['low']:.0%}–{value['high']:.0%}"


def show_tables(folders: dict[int, Path]) -> None:
    """Each seed, and each family of tasks with all seeds, before and after."""
    print("| Seed | after SFT | 95 % | after RL | 95 % | solved | policy kept | dev after RL | seconds |")
    print("| --- |" + " ---: |" * 8)
    families: dict[str, dict[str, list[str]]] = {}
    for seed, folder in folders.items():
        summary = json.loads((folder / "summary.json").read_text())
        before, after = summary["after_sft"], summary["after_rl"]
        cells = [show(before), show(after)]
        cells += [f"{before[key]:.0%} → {after[key]:.0%}" for key in ("outcome", "compliant")]
        cells += [f"{read_checks(folder)[-1]['pass^1']:.0%}", f"{summary['seconds']['total']:.0f}"]
        print(f"| {seed} | {' | '.join(cells)} |")
        for part in ("after-sft", "after-rl"):
            result = json.loads((folder / f"test-{part}" / "result.json").read_text())
            for name, figures in result["families"].items():
                shares = families.setdefault(name, {}).setdefault(part, [])
                shares.append(f"{100 * figures['pass^1']:.0f}")
    print("\n| Family | after SFT, by seed | after RL, by seed |\n| --- | ---: | ---: |")
    for name, parts in families.items():
        print(f"| {name} | {' | '.join(', '.join(shares) + ' %' for shares in parts.values())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    given = parser.parse_args()
    folders = {seed: given.out / f"seed{seed}" for seed in given.seeds}
    for seed, folder in folders.items():
        if not (folder / "summary.json").exists():
            learn(seed, folder)
    show_tables(folders)
    draw(folders, given.out / "learning.png")


if __name__ == "__main__":
    main()
