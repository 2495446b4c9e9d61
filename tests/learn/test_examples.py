"""Every file of `examples/` runs, and does what it says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file as load_weights

from trialogue import (
    Call,
    ConfigError,
    RolloutSettings,
    advantages,
    find_model,
    grade,
    make_agenda_user,
    rollout,
)
from trialogue.cli.conversations import to_chat
from trialogue.cli.main import main
from trialogue.cli.options import Asked
from trialogue.config import TrainConfig
from trialogue.learn.train import train
from trialogue.run import find_files, read_about, read_lines, read_trajectories
from trialogue.score.check import check, to_conversation
from trialogue.seams import load_file
from trialogue.trajectory import Group, Trajectory
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
Configure = Callable[..., TrainConfig]


def load_example(name: str) -> Any:
    return load_file(EXAMPLES / f"{name}.py")


def test_the_loop_fits_on_a_page() -> None:
    assert len((EXAMPLES / "loop.py").read_text(encoding="utf-8").splitlines()) <= 80


async def test_the_loop_learns(
    wall: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A painter who paints blue one time in three paints blue more often after a few steps."""
    monkeypatch.chdir(tmp_path)
    rewards = await load_example("loop").learn(wall, str(trained), steps=8, rate=3e-3)
    assert len(rewards) == 8
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.2
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"step  1: reward {rewards[0]:.2f}")
    before = load_weights(trained / "model" / "model.safetensors")
    after = load_weights(tmp_path / "runs" / "loop" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.timeout(3600)
def test_the_whole_loop_learns_the_shop(tmp_path: Path) -> None:
    """With its cold start, as the page says: some five minutes on one core."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "loop.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rewards = [
        float(found[1]) for found in re.finditer(r"^step .*: reward ([\d.]+)", done.stdout, re.MULTILINE)
    ]
    assert len(rewards) == 20
    assert fmean(rewards[-5:]) > fmean(rewards[:3]) + 0.1


async def run_with(
    train_config: Configure, trained: Path, **settings: object
) -> tuple[Path, list[dict[str, Any]]]:
    """Two steps of training with a part replaced; the run and its metrics."""
    config = train_config(learner__model=str(trained), training__steps=2, training__group_size=8, **settings)
    run = await train(config)
    return run, [line for _, line in read_lines(run / "metrics.jsonl")]


def read_held(run: Path) -> list[Trajectory]:
    return [item for file in find_files(run) for item in read_trajectories(file)]


async def test_the_advantage_counts_later_replies_more(train_config: Configure, trained: Path) -> None:
    reference = f"{EXAMPLES / 'advantage.py'}:discounted"
    run, _ = await run_with(train_config, trained, advantage__name=reference)
    discounted = load_example("advantage").discounted
    held = read_held(run)
    first = next(item for item in held if item.meta.get("advantage"))
    siblings = [
        item
        for item in held
        if item.task.id == first.task.id and item.id.split("/")[0] == first.id.split("/")[0]
    ]
    group = Group(task=first.task, trajectories=tuple(siblings))
    for item, values, whole in zip(siblings, discounted(group), advantages.grpo(group), strict=True):
        assert values == pytest.approx(
            [whole * 0.9 ** (len(values) - 1 - place) for place in range(len(values))]
        )
        assert item.meta["advantage"] == pytest.approx(values[-1])


async def test_the_reward_is_what_is_learned_from(train_config: Configure, trained: Path) -> None:
    reference = f"{EXAMPLES / 'reward.py'}:careful"
    run, metrics = await run_with(train_config, trained, reward__name=reference)
    held = read_held(run)
    graded = [item.reward for item in held if item.end in ("user_stop", "agent_stop")]
    assert graded
    assert all(reward is not None and reward.success is not None for reward in graded)
    won = [item for item in held if item.is_success]
    assert fmean(line["success"] for line in metrics) == pytest.approx(len(won) / len(held))


def test_a_refused_call_costs_a_tenth_and_no_success() -> None:
    library = find_domain(str(EXAMPLES / "library"))
    task = next(item for item in library.tasks("all") if item.id == "renew-1")
    refused = Call(name="renew_loan", arguments={"loan_id": "N99"})
    careful = load_example("reward").careful
    for calls, value in (((), 1.0), ((refused,), 0.9), ((refused,) * 12, 0.0)):
        environment = library.open(task)
        said = to_conversation(task, (*calls, *task.expected.calls), ["Done."], environment)
        reward = careful(task, said, environment)
        assert (reward.value, reward.success) == (pytest.approx(value), True)
    environment = library.open(task)
    reward = careful(task, to_conversation(task, (), ["Done."], environment), environment)
    assert (reward.value, reward.success) == (0.0, False)


def test_a_model_is_used_with_the_renderer_it_learned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that `train` prints runs as it is; a folder of weights alone runs no code."""
    for name in ("renderer", "reward"):
        shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    small = [
        "training.steps=1",
        "training.tasks_per_step=1",
        "training.group_size=2",
        "training.eval_every=0",
    ]
    own = ["learner.renderer=renderer.py:ToolNames", "--reward", "reward.py:careful"]
    done = CliRunner().invoke(main, ["train", "shop", *small, *own, "run.name=run"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "runs/run/model/renderer.json").read_text()) == {
        "renderer": "renderer.py:ToolNames"
    }
    [line] = [line for line in done.stdout.splitlines() if line.startswith("evaluate it: trialogue ")]
    words = shlex.split(line.removeprefix("evaluate it: trialogue "))
    assert words[-3:] == ["--reward", "reward.py:careful", "agent.renderer=renderer.py:ToolNames"]
    few = ["--tasks", "2", "limits.reply_tokens=8"]
    done = CliRunner().invoke(main, [*words, *few])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, [*words[:-1], *few])
    assert done.exit_code == 2
    assert "renderer.json would run " in done.stderr
    assert "add agent.renderer=renderer.py:ToolNames to allow it" in done.stderr
    with pytest.raises(
        ConfigError, match=r"add reward\.name=reward\.py:careful agent\.renderer=renderer\.py:Tool"
    ):
        to_chat("runs/run", Asked())
    assert to_chat("runs/run", Asked(trust=True)).defaults[-2:] == (
        'reward.name="reward.py:careful"',
        'agent.renderer="renderer.py:ToolNames"',
    )


async def test_the_loss_is_what_is_minimized(train_config: Configure, trained: Path) -> None:
    _, metrics = await run_with(train_config, trained, loss__name=f"{EXAMPLES / 'loss.py'}:reinforce")
    assert [line["capped"] for line in metrics] == [0.0, 0.0]  # on-policy: every ratio is 1
    assert all(line["grad_norm"] > 0 for line in metrics)


async def test_the_engine_counts_what_it_samples(train_config: Configure, trained: Path) -> None:
    reference = f"{EXAMPLES / 'engine.py'}:CountingEngine"
    run, metrics = await run_with(train_config, trained, engine__name=reference)
    sampled = sum(
        len(turn.tokens.reply) for item in read_held(run) for turn in item.turns if turn.tokens is not None
    )
    assert sum(line["sampled_tokens"] for line in metrics) == sampled > 0


async def play(domain: Domain, agent: Any, user: Any) -> list[Trajectory]:
    settings = RolloutSettings(grade=grade, redraws=0)
    tasks = [task for split in ("train", "dev", "test") for task in domain.tasks(split, 11)]
    return [
        item async for group in rollout(domain, tasks, agent, user, settings) for item in group.everything
    ]


async def test_the_agent_renews_the_first_loan() -> None:
    library = find_domain(str(EXAMPLES / "library"))
    held = await play(
        library, find_model(f"{EXAMPLES / 'agent.py'}:agent", "agent", library), make_agenda_user
    )
    assert len(held) == 11
    assert {item.task.id for item in held if item.value == 1} == {
        "renew-1",
        "renew-3",
        "refuse-1",
        "refuse-2",
    }


async def test_the_user_misspells_words_and_is_understood() -> None:
    shop = find_domain("shop")
    oracle = find_model("oracle", "agent", shop)
    hasty = await play(shop, oracle, find_model(f"{EXAMPLES / 'user.py'}:HastyUser", "user", shop))
    usual = await play(shop, oracle, find_model("agenda", "user", shop))
    assert fmean(item.value for item in hasty) > 0.8
    said = {item.task.id: item.turns[0].message.content for item in hasty}
    meant = {item.task.id: item.turns[0].message.content for item in usual}
    assert said != meant
    assert {key: sorted(text) for key, text in said.items()} == {
        key: sorted(text) for key, text in meant.items()
    }


COMMANDS = [
    (file.name, line.split()[1:])
    for file in sorted(EXAMPLES.glob("*.py"))
    for line in file.read_text(encoding="utf-8").split('"""')[1].splitlines()
    if line.startswith("    trialogue ")
]


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_the_command_of_a_docstring_runs(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    small = ["run.name=run", f"run.directory={tmp_path}"]
    if words[0] == "train":
        small += [
            "training.steps=1",
            "training.tasks_per_step=1",
            "training.group_size=2",
            "training.eval_every=0",
        ]
    else:
        small += ["tasks.count=2"]
    done = CliRunner().invoke(main, [*words, *small])
    assert done.exit_code == 0, done.output
    assert read_about(tmp_path / "run")["state"] == "finished"
    assert f"examples/{name}:" in (tmp_path / "run" / "config.json").read_text(encoding="utf-8")


def test_every_example_tells_its_command() -> None:
    assert {name for name, _ in COMMANDS} == {file.name for file in EXAMPLES.glob("*.py")} - {"loop.py"}


def test_the_library_is_sound() -> None:
    assert check(find_domain(str(EXAMPLES / "library"))).ok
    assert check(find_domain(str(EXAMPLES / "library" / "generated.py")), count=60).ok


def test_what_the_page_shows_is_in_the_files() -> None:
    """Every python block of docs/examples.md is copied from an example."""
    sources = [file.read_text(encoding="utf-8") for file in EXAMPLES.rglob("*.py")]
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        assert any(block in source for source in sources), block
