"""verl's trainer as a whole on CPUs: `make test-verl-run`, in verl's environment.

`launch.sh` as it is exported, verl's main_ppo on a local Ray, two FSDP2 workers over gloo, two rollout
servers that get the weights after every step. The platform, the workers' engine and the servers are
registered through verl's own registries by verl_platform.py and verl_worker.py.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("verl", reason="verl lives in an environment of its own: make test-verl-run")

from conftest import teach
from verl_run import VerlRun, run_python

from trialogue.config import TrainConfig, load_config
from trialogue.engine.models import find_model_folder
from trialogue.hosts.verl_trainer import ConversationTrainer
from trialogue.learn.advantages import to_rows
from trialogue.learn.train import train
from trialogue.run import find_weights, read_trajectories
from trialogue.talk.render.load import load_renderer
from trialogue.trajectory import Trajectory

pytestmark = pytest.mark.timeout(14400)
STEPS = 8
USUAL = {
    "tasks.families": ["plain"],
    "training.steps": STEPS,
    "optimizer.learning_rate": 5e-4,
    "training.checkpoint_every": 1,
    "training.keep_checkpoints": 3,
    "training.eval_every": STEPS,
    "training.eval_tasks": 4,
}


@dataclass
class Trained:
    run: VerlRun
    statuses: list[int | None]
    first: dict[str, torch.Tensor]
    """The weights after the first step."""


@pytest.fixture(scope="module")
def painted(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Eight steps of the small Qwen3, of which a worker is killed on the way, and later everything."""
    run = VerlRun.export(config, tmp_path_factory.mktemp("painted"), USUAL)
    run.start()
    run.wait(lambda run: 2 in run.steps)
    first = run.read_weights(1)
    run.wait(lambda run: 3 in run.steps)
    assert run.kill("ray::WorkerDict") == 1
    statuses = [run.wait()]
    run.start()
    run.wait(lambda run: 5 in run.steps)
    assert run.kill() > 5
    statuses.append(run.wait())
    run.start()
    statuses.append(run.wait())
    return Trained(run, statuses, first)


@pytest.fixture(scope="module")
def ours(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same settings and seed in our own loop."""
    settings = {**USUAL, "run.directory": str(tmp_path_factory.mktemp("ours"))}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return asyncio.run(train(load_config(TrainConfig, None, words, config)))


def test_the_reward_rises_and_weights_arrive(painted: Trained) -> None:
    assert [status == 0 for status in painted.statuses] == [False, False, True], painted.statuses
    steps = painted.run.steps
    assert sorted(steps) == [*range(STEPS + 1)]
    rewards = read_column(steps, "critic/score/mean")
    gaps = read_column(steps, "training/rollout_probs_diff_max")
    print("reward", rewards, "probs_diff_max", gaps)
    assert max(gaps) < 1e-5
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.1
    assert max(read_column(steps, "conversations/logprob_gap")) < 1e-5


def read_column(steps: dict[int, dict[str, float]], name: str) -> list[float]:
    return [steps[step][name] for step in sorted(steps) if step]


def test_a_run_that_was_killed_keeps_as_many_checkpoints_as_it_should(painted: Trained) -> None:
    assert painted.run.list_checkpoints() == [STEPS - 2, STEPS - 1, STEPS]
    assert all((place / "actor").is_dir() for place in painted.run.folder.glob("checkpoints/global_step_*"))


def test_our_own_loop_learns_from_the_same(painted: Trained, ours: Path) -> None:
    """Rows, rewards and advantages; and the updates, by what each next step samples with the new weights,
    also after two resumes."""
    run = painted.run
    held = run.read_conversations()
    equal: list[float] = []
    for step in range(1, STEPS + 1):
        own = {item.id: item for item in read_trajectories(ours / f"trajectories/step-{step:06d}.jsonl")}
        assert held[step].keys() == own.keys()
        pairs = [(item, own[name]) for name, items in held[step].items() for item in items]
        equal.append(fmean(is_same(*pair) for pair in pairs))
    print("conversations that are the same in both loops, by step:", equal)
    assert equal[:2] == [1.0, 1.0]
    assert fmean(equal) > 0.9
    own_first = [
        item.meta.get("advantage", 0.0) for item in read_trajectories(ours / "trajectories/step-000001.jsonl")
    ]
    assert run.steps[1]["critic/advantages/max"] == pytest.approx(max(own_first), abs=1e-5)
    assert run.steps[1]["critic/advantages/min"] == pytest.approx(min(own_first), abs=1e-5)
    lines = (ours / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    known = next(line for line in map(json.loads, lines) if "grad_norm" in line)
    assert run.steps[1]["actor/grad_norm"] == pytest.approx(known["grad_norm"], rel=1e-4)
    assert run.steps[1]["actor/loss"] == pytest.approx(known["loss"], abs=1e-5)


def test_the_first_update_is_that_of_our_own_loop(
    painted: Trained, config: TrainConfig, tmp_path: Path
) -> None:
    settings = {**USUAL, "training.steps": 1, "training.eval_every": 0, "run.directory": str(tmp_path)}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    run = asyncio.run(train(load_config(TrainConfig, None, words, config)))
    before = load_file(Path(config.learner.model) / "model.safetensors")
    after = load_file(find_weights(run) / "model.safetensors")
    assert painted.first.keys() >= after.keys()
    moved, expected = (
        torch.cat([(tree[name].float() - before[name]).flatten().double() for name in sorted(after)])
        for tree in (painted.first, after)
    )
    cosine = float(torch.nn.functional.cosine_similarity(moved, expected, dim=0))
    print("the first update: cosine", cosine, "length", float(moved.norm()), float(expected.norm()))
    assert cosine > 0.999
    assert float(moved.norm()) == pytest.approx(float(expected.norm()), rel=1e-3)


def is_same(one: Trajectory, other: Trajectory) -> bool:
    """The same ids and reward, and log-probabilities to 1e-4."""
    [row], [expected] = to_rows(one, 0.0), to_rows(other, 0.0)
    return (row.tokens, row.mask, one.reward) == (expected.tokens, expected.mask, other.reward) and max(
        abs(a - b) for a, b in zip(row.logprobs, expected.logprobs, strict=True)
    ) < 1e-4


def test_a_merged_checkpoint_scores_what_the_run_saw(painted: Trained, tmp_path: Path) -> None:
    folder = painted.run.merge(STEPS, tmp_path / "merged")
    _, renderer = load_renderer(str(folder))
    assert renderer.name == "brief"
    score_again(painted.run, folder, tmp_path)


def score_again(run: VerlRun, folder: Path, place: Path) -> None:
    """Evaluate a merged folder on the tasks of the run's own validation: the scores are the same."""
    limits = run.config.limits
    words = ["eval", run.config.domain, "--agent", str(folder), "--tasks", "4", "tasks.split=dev", "--json"]
    words += [f"limits.reply_tokens={limits.reply_tokens}", f"limits.context_tokens={limits.context_tokens}"]
    words += [f"tasks.families={json.dumps(run.config.tasks.families)}", f"run.directory={place / 'runs'}"]
    told = json.loads(run_python("-m", "trialogue", *words))
    print(told)
    watched = run.steps[run.config.training.steps]
    assert told["reward"] == pytest.approx(watched["val-core/wall/reward/mean@1"])


@pytest.fixture(scope="module")
def small(wall: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base, of LFM2's shape, which paints blue about every second time."""
    settings = {
        "domain": wall,
        "tasks.families": ["plain"],
        "sft.faults": 0.5,
        "sft.count": 8,
        "sft.epochs": 30.0,
        "optimizer.learning_rate": 2e-3,
    }
    return teach(Path(find_model_folder("tiny")), settings, tmp_path_factory.mktemp("small"))


SMALL = {
    "limits.reply_tokens": 24,
    "limits.context_tokens": 400,
    "tasks.families": ["plain", "gone"],
    "training.steps": 6,
    "training.eval_every": 6,
    "training.eval_tasks": 4,
    "training.redraw_no_signal": 1,
    "optimizer.warmup": 2,
}


def test_the_tiny_base_learns_beside_tasks_that_always_fail(
    config: TrainConfig, small: Path, tmp_path: Path
) -> None:
    """Groups without signal and groups whose conversations all failed are drawn again, and counted."""
    run = VerlRun.export(config, tmp_path / "run", {**SMALL, "learner.model": str(small)})
    run.start()
    assert run.wait() == 0, run.log.read_text()[-5000:]
    rewards = read_column(run.steps, "critic/score/mean")
    gaps = read_column(run.steps, "training/rollout_probs_diff_max")
    replaced = [
        read_column(run.steps, f"conversations/{kind}_groups_replaced") for kind in ("no_signal", "failed")
    ]
    print("reward", rewards, "gaps", gaps, "replaced", replaced)
    assert max(gaps) < 1e-5
    assert sum(replaced[1]) > 0
    assert sum(replaced[0]) > 0
    check_figures(run)


def check_figures(run: VerlRun) -> None:
    """The rate after the first step, and what the recorded conversations say about the metrics."""
    assert run.steps[1]["actor/lr"] == pytest.approx(run.config.optimizer.learning_rate * 2 / 3)
    held = run.read_conversations()
    for step, figures in run.steps.items():
        if step:
            items = [item for versions in held[step].values() for item in versions]
            assert figures["conversations/failed"] == sum(item.end == "error" for item in items)
            assert figures["conversations/count"] + figures["conversations/failed"] <= len(items)
    watched = run.read_conversations("dev")
    assert watched.keys() == {0, 6}
    failed = sum(item.end == "error" for items in watched[6].values() for item in items)
    assert run.steps[6]["val-aux/conversations/missing"] == failed > 0


def test_a_server_that_drops_weights_is_noticed(config: TrainConfig, tmp_path: Path) -> None:
    run = VerlRun.export(config, tmp_path / "run", {**USUAL, "training.steps": 3, "training.eval_every": 0})
    run.start(VERL_CPU_KEEPS_WEIGHTS="1")
    assert run.wait() == 0
    gaps = read_column(run.steps, "training/rollout_probs_diff_max")
    print("gaps", gaps)
    assert gaps[0] < 1e-5
    assert min(gaps[1:]) > 1e-3


def test_verls_asynchronous_trainer_takes_the_settings_and_reports_staleness(
    config: TrainConfig, tmp_path: Path
) -> None:
    """Its next conversations are held during an update, so after the first step they begin with weights that
    are a step old."""
    run = VerlRun.export(config, tmp_path / "run", {**USUAL, "training.steps": 5, "training.eval_every": 0})
    run.start("trainer.v1.trainer_mode=colocate_async")
    assert run.wait() == 0, run.log.read_text()[-5000:]
    names = ["trajectory_staleness", "trajectory_staleness_worst", "trajectory_spans"]
    found = {name: read_column(run.steps, f"training/off_policy/{name}/max") for name in names}
    print("reward", read_column(run.steps, "critic/score/mean"), found)
    assert sorted(run.steps) == [1, 2, 3, 4, 5]
    assert found["trajectory_staleness_worst"][0] == 0
    assert max(found["trajectory_staleness_worst"]) == 1


def test_two_models_are_told_apart_in_the_first_step(
    config: TrainConfig, small: Path, tmp_path: Path
) -> None:
    """Packed rows leak through the convolutions of the tiny base."""
    settings = {
        **SMALL,
        "learner.model": str(small),
        "tasks.families": ["plain"],
        "checks.logprob_gap": 0.001,
    }
    run = VerlRun.export(config, tmp_path / "run", settings)
    run.start("actor_rollout_ref.model.use_remove_padding=true")
    assert run.wait() != 0
    assert "so one of them computes another model" in run.log.read_text()
    assert 1 not in run.steps


def test_a_step_without_any_signal_moves_nothing() -> None:
    """No worker is even asked: Adam's momentum would move the weights."""
    trainer: Any = object.__new__(ConversationTrainer)  # it has no workers
    trainer.signal = []
    metrics: dict[str, Any] = {}
    assert trainer._update_actor("the batch", metrics) == "the batch"
    assert metrics == {"actor/skipped": 1.0}


def test_a_dead_endpoint_ends_the_run(config: TrainConfig, tmp_path: Path) -> None:
    """Not the first failed batch, and not never."""
    run = VerlRun.export(
        config,
        tmp_path / "run",
        {**USUAL, "training.eval_every": 0, "tasks.families": ["gone"], "training.tasks_per_step": 2},
    )
    run.start()
    assert run.wait() != 0
    assert "all conversations of step 1 failed, also those of 3 more rounds" in run.log.read_text()
    assert "user to blame: ModelError: the line is dead" in run.log.read_text()
    assert {len(items) for items in run.read_conversations()[1].values()} <= {1, 2, 3, 4}
