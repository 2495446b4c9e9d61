"""A run that learns its training tasks by heart is told; one that learns to do them is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trialogue.config import CheckSettings, TrainConfig
from trialogue.learn.checks import Checks
from trialogue.learn.train import train
from trialogue.run import read_lines
from trialogue.view.api import Answers
from trialogue.view.live import show_steps

Configure = Callable[..., TrainConfig]
EVERY = 5


def write_run(
    training: Sequence[float],
    dev: Sequence[float],
    tasks: int = 100,
    levels: Sequence[Sequence[int]] = (),
    dev_levels: Sequence[dict[str, float]] = (),
    start: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Lines as a run writes them: one evaluation at the start, and one after every five steps."""
    first = dev[0] if start is None else start
    known = {} if start is None else {"1": {"reward": start, "tasks": tasks}}
    yield {"kind": "eval", "step": 0, "reward": first, "tasks": tasks, "families": {}, "levels": known}
    for number, reward in enumerate(training):
        admitted = list(levels[number]) if levels else [1]
        for step in range(EVERY * number + 1, EVERY * (number + 1) + 1):
            yield {"step": step, "reward": reward, "conversations": 128, "levels": admitted, "families": {}}
        parts = dev_levels[number] if dev_levels else {"1": dev[number]}
        yield {
            "kind": "eval",
            "step": step,
            "reward": dev[number],
            "tasks": tasks,
            "families": {},
            "levels": {
                name: {"reward": value, "tasks": tasks // len(parts)} for name, value in parts.items()
            },
        }


def look(lines: Sequence[dict[str, Any]], **settings: Any) -> list[str]:
    checks = Checks(CheckSettings(**settings))
    checks.see_evaluations(lines, group_size=8)
    return checks.collect()


def test_train_rises_while_dev_stands() -> None:
    """The run in which nothing warned: 0.63 to 0.84 while dev stood at 0.43 for twenty steps."""
    lines = list(write_run([0.63, 0.72, 0.79, 0.83, 0.84], [0.43, 0.44, 0.42, 0.43, 0.43]))
    [warning] = look(lines)
    assert "on training tasks the reward rose from 0.63 to 0.84 since step 5" in warning
    assert "on dev tasks it went from 0.43 to 0.43" in warning
    assert "optimizer.learning_rate" in warning
    assert "loss.kl" in warning
    assert look(lines, overfit_evaluations=6) == []
    warned = [len(look(lines[: 1 + number * (EVERY + 1)])) for number in range(1, 6)]
    assert warned == [0, 0, 0, 0, 1]  # the fourth evaluation alone might be chance


def test_dev_falls_while_train_stands() -> None:
    assert look(list(write_run([0.9, 0.9, 0.9, 0.91, 0.91], [0.85, 0.75, 0.65, 0.6, 0.58])))


def test_a_plateau_of_dev_is_found_although_it_rose_before() -> None:
    training = [0.3, 0.5, 0.7, 0.78, 0.87, 0.97, 0.99]
    assert look(list(write_run(training, [0.3, 0.48, 0.66, 0.67, 0.66, 0.66, 0.66])))


@pytest.mark.parametrize(
    ("training", "dev"),
    [
        ([0.5, 0.7, 0.8, 0.88, 0.92], [0.62, 0.75, 0.82, 0.87, 0.88]),  # the demonstration, seed 0
        ([0.63, 0.7, 0.75, 0.8], [0.43, 0.48, 0.53, 0.58]),  # a harder dev split, rising with it
        ([0.6, 0.8, 0.9, 0.97], [0.95, 0.95, 0.95, 0.95]),  # nothing left to gain on dev
        ([0.8, 0.8, 0.8, 0.8], [0.43, 0.43, 0.43, 0.43]),  # apart, but from the start
        ([0.2, 0.2, 0.2, 0.2], [0.2, 0.2, 0.2, 0.2]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_runs_that_are_sound(training: list[float], dev: list[float]) -> None:
    assert look(list(write_run(training, dev))) == []


@pytest.mark.parametrize(
    ("start", "training", "dev"),
    [
        (0.45, [0.63, 0.93, 0.95, 0.95, 0.95], [0.75, 0.75, 0.76, 0.75, 0.75]),
        (0.4, [0.55, 0.88, 0.9, 0.9], [0.7, 0.7, 0.71, 0.7]),
    ],
)
def test_a_steep_start_is_no_overfit(start: float, training: list[float], dev: list[float]) -> None:
    """Training rewards of the first steps are a mean over a rise that the first evaluation does not show."""
    assert not look(list(write_run(training, dev, start=start)))


def test_few_dev_tasks_prove_nothing() -> None:
    curve = [0.63, 0.72, 0.79, 0.83, 0.84], [0.43, 0.44, 0.42, 0.43, 0.43]
    assert look(list(write_run(*curve, tasks=10))) == []
    assert look(list(write_run(*curve, tasks=100))) != []


def test_noise_hardly_ever_warns() -> None:
    """A hundred sound runs of ten evaluations: train and dev rise together. The dev tasks stay the same, a
    fifth of them is decided by chance at each evaluation."""
    draw = random.Random(1)
    warned = 0
    for _ in range(100):
        truth = [0.5 + 0.04 * number for number in range(10)]
        tasks = [draw.random() for _ in range(100)]
        training = [sum(draw.random() < value for _ in range(80)) / 80 for value in truth]
        dev = [
            sum((draw.random() if draw.random() < 0.2 else task) < value - 0.1 for task in tasks) / 100
            for value in truth
        ]
        lines = list(write_run(training, dev))
        warned += any(look(lines[: 1 + number * (EVERY + 1)]) != [] for number in range(1, 11))
    print(f"{warned} of 100 sound runs warn at one of their ten evaluations")
    assert warned <= 3


def test_a_curriculum_is_compared_level_by_level() -> None:
    """Level 1 is learned while dev holds levels 1 to 3; then level 2 comes in and the reward falls."""
    lines = list(
        write_run(
            [0.4, 0.6, 0.85, 0.9],
            [0.2, 0.25, 0.3, 0.32],
            levels=[[1]] * 4,
            dev_levels=[{"1": 0.4 + 0.15 * number, "2": 0.1, "3": 0.1} for number in range(4)],
        )
    )
    assert look(lines) == []
    plain = [{**line, "levels": [1, 2, 3]} if "kind" not in line else line for line in lines]
    assert look(plain) != []  # as if the steps had held all of dev's levels
    grown = list(
        write_run(
            [0.9, 0.5, 0.5, 0.55],
            [0.3, 0.3, 0.3, 0.3],
            levels=[[1], [1, 2], [1, 2], [1, 2]],
            dev_levels=[{"1": 0.9, "2": 0.1, "3": 0.1}] * 4,
        )
    )
    assert look(grown) == []


def test_families_are_weighed_as_in_dev() -> None:
    """Nine training tasks in ten are of an easy family, one dev task in ten: that is no overfitting."""
    lines: list[dict[str, Any]] = []
    for number, easy in enumerate([0.4, 0.6, 0.8, 0.95]):
        for step in range(EVERY * number + 1, EVERY * (number + 1) + 1):
            families = {"easy": easy, "hard": 0.3}
            graded = {"easy": 115, "hard": 13}
            reward = (115 * easy + 13 * 0.3) / 128
            lines.append({"step": step, "reward": reward, "conversations": 128, "levels": []})
            lines[-1] |= {"families": families, "graded": graded}
        parts = {"easy": {"reward": easy, "tasks": 10}, "hard": {"reward": 0.3, "tasks": 90}}
        reward = 0.1 * easy + 0.27
        lines.append({"kind": "eval", "step": step, "reward": reward, "tasks": 100, "families": parts})
        lines[-1]["levels"] = {}
    assert look(lines) == []
    for line in lines:
        line["families"] = {}
    assert look(lines) != []


def test_rewards_of_another_range() -> None:
    """What counts is the share of the range."""

    def scale(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                **line,
                "reward": 4 * line["reward"] - 2,
                "levels": {
                    name: {**part, "reward": 4 * part["reward"] - 2} for name, part in line["levels"].items()
                }
                if "kind" in line
                else line["levels"],
            }
            for line in lines
        ]

    apart = list(write_run([0.63, 0.72, 0.79, 0.83, 0.84], [0.43, 0.44, 0.42, 0.43, 0.43]))
    assert look(scale(apart), rewards=(-2.0, 2.0))
    assert look(scale(list(write_run([0.5, 0.7, 0.9], [0.5, 0.7, 0.9]))), rewards=(-2.0, 2.0)) == []


SPLIT = '        expected=Expected(calls=(Call(name="paint", arguments={"colour": "blue"}),)),\n'


def write_domain(folder: Path, wall: str, colour: str) -> str:
    """The wall with more tasks, and dev users who want another colour."""
    text = Path(wall).read_text(encoding="utf-8")
    wanted = SPLIT.replace('"blue"', f'"blue" if split == "train" else "{colour}"')
    file = folder / "wall.py"
    file.write_text(text.replace(SPLIT, wanted).replace("range(6)", "range(24)"), encoding="utf-8")
    return str(file)


@pytest.mark.training
@pytest.mark.timeout(300)
@pytest.mark.parametrize("colour", ["blue", "green"])
async def test_a_real_run(
    train_config: Configure, trained: Path, wall: str, tmp_path: Path, capfd: Any, colour: str
) -> None:
    """Training users want blue walls, which is learned; where dev users want green ones, that is no use."""
    config = train_config(
        domain=write_domain(tmp_path, wall, colour),
        learner__model=str(trained),
        training__steps=12,
        training__tasks_per_step=6,
        training__group_size=8,
        training__eval_every=2,
        training__eval_tasks=24,
    )
    with show_steps() as watch:
        run = await train(config, watch=watch)
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    steps = [round(line["reward"], 2) for line in lines if "kind" not in line]
    found = [(line["step"], line["reward"], line.get("warnings")) for line in lines if "kind" in line]
    print(steps, found)
    shown = Answers(run.parent).run(run.name)["health"]["warnings"]
    told = capfd.readouterr().err
    if colour == "blue":
        assert not any(warnings for _, _, warnings in found)
        assert "overfit" not in told
        return
    step, _, warnings = found[-1]
    assert warnings
    assert warnings[0].startswith("overfit: ")
    assert f"warning: {warnings[0]}" in told
    assert {"step": step, "text": warnings[0]} in shown
    assert f"warning: {warnings[0]}" in str(watch._foot())
