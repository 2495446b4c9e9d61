"""Each number that lies is caught by the check that is there for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trialogue.config import CheckSettings, RunSettings, TrainConfig
from trialogue.engine.api import OptimParams, Row
from trialogue.errors import EngineError
from trialogue.learn import losses
from trialogue.learn.advantages import build_rows
from trialogue.learn.checkpoint import load_learner
from trialogue.learn.checks import Checks, to_finite
from trialogue.learn.loop import join_metrics, update
from trialogue.learn.train import find_method, to_optim, train
from trialogue.run import Run, read_lines
from trialogue.task import Task
from trialogue.trajectory import Group, Reward, Tokens, Trajectory, Turn
from trialogue.view.api import Answers
from trialogue.view.live import show_steps

Configure = Callable[..., TrainConfig]
TASK = Task(id="t", domain="d", instructions="")
EMPTY = Group(task=TASK, trajectories=())


def talk(identity: str, value: float, logprob: float = -1.0) -> Trajectory:
    tokens = Tokens(start=True, prompt=(1, 2), reply=(3, 4), logprobs=(-1.0, logprob))
    turn = Turn(side="agent", message={"role": "assistant", "content": "…"}, tokens=tokens)  # type: ignore[arg-type]
    return Trajectory(id=identity, task=TASK, turns=(turn,), end="user_stop", reward=Reward(value=value))


def test_a_sound_step_has_no_warning() -> None:
    checks = Checks()
    group = Group(task=TASK, trajectories=(talk("a", 1.0), talk("b", 0.0), talk("c", 0.5)))
    assert len(build_rows([group], checks=checks)) == 3
    metrics = {"loss": 0.1, "skipped": 0.0, "logprob_gap": 1e-5, "entropy": 0.5}
    checks.see_conversations({"conversations": 3, "blame": {}, "reward": 0.5}, 3)
    checks.see_update(metrics)
    assert checks.collect() == []
    assert checks.streaks == {"no_signal": 0, "broken": 0, "failed": 0}


def test_rewards_outside_their_range() -> None:
    checks = Checks()
    group = Group(task=TASK, trajectories=(talk("a", 1.5), talk("b", -0.5), talk("c", 0.5)))
    build_rows([group], checks=checks)
    [warning] = checks.collect()
    assert warning.startswith("a reward of task t is 1.5, outside 0 to 1: correct the reward function")
    assert warning.endswith("(2 times in this step)")
    wider = Checks(CheckSettings(rewards=(-1.0, 2.0)))
    build_rows([group], checks=wider)
    assert wider.collect() == []


def test_advantages_that_do_not_cancel() -> None:
    checks = Checks()
    checks.see_group(EMPTY, [1.0, -0.5])
    [warning] = checks.collect()
    assert "sum to 0.5 instead of 0" in warning
    checks.see_group(EMPTY, [nan, nan])
    assert len(checks.collect()) == 1
    checks.see_group(EMPTY, [1.0, 1.0], sum_to_zero=False)
    assert checks.collect() == []


def test_conversations_with_a_wrong_mask_or_no_logprobs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks()
    group = Group(task=TASK, trajectories=(talk("a", 1.0), talk("b", 0.0, nan), talk("c", 0.5)))
    rows = build_rows([group], checks=checks)
    assert [row.id for row in rows] == ["a", "c"]
    assert checks.collect() == ["b has log-probabilities that are not finite: left out"]
    row = Row([1, 2, 3, 4], [0, 1, 1, 1], [0.0] * 4, [1.0] * 4, id="a")  # the user's token trained on
    assert not checks.is_masked_right(talk("a", 1.0), [row])
    assert "3 tokens of a would be trained on but 2 were sampled" in checks.collect()[0]


def test_sampler_and_trainer_apart() -> None:
    checks = Checks()
    checks.see_update({"loss": 1.0, "skipped": 0.0, "logprob_gap": 0.2, "entropy": 1.0})
    [warning] = checks.collect()
    assert "differ by 0.2 per token" in warning
    assert "loss.importance_cap=2" in warning
    checks.see_update({"loss": 1.0, "skipped": 0.0, "logprob_gap": 0.2, "entropy": 1.0}, stale=True)
    assert checks.collect() == []


def test_entropy_collapse() -> None:
    checks = Checks()
    checks.see_update({"loss": 1.0, "skipped": 0.0, "logprob_gap": 0.0, "entropy": 0.001})
    assert "entropy is 0.001 nats" in checks.collect()[0]


def test_no_signal_for_long() -> None:
    checks = Checks()
    counts: list[int] = []
    for _ in range(6):
        checks.see_conversations({"conversations": 8, "blame": {}, "reward": 0.0}, 0)
        counts.append(len(checks.collect()))
    assert counts == [0, 0, 0, 0, 1, 1]
    again = Checks(streaks=checks.streaks)  # as after resuming
    again.see_conversations({"conversations": 8, "blame": {}, "reward": 1.0}, 0)
    [warning] = again.collect()
    assert "for 7 steps (reward 1.00): the tasks are too easy" in warning
    again.see_conversations({"conversations": 8, "blame": {}, "reward": 0.5}, 3)
    assert again.streaks["no_signal"] == 0


@pytest.mark.parametrize("metrics", [{"loss": nan, "skipped": 1.0}, {"loss": inf, "skipped": 0.0}])
def test_numbers_that_are_none_stop_the_run_after_a_while(metrics: dict[str, Any]) -> None:
    checks = Checks()
    checks.see_update(metrics)
    assert "that update was skipped" in checks.collect()[0]
    checks.see_update({"loss": 1.0, "skipped": 0.0})
    for _ in range(2):
        checks.see_update(metrics)
    with pytest.raises(EngineError, match="3 steps in a row had no finite gradient"):
        checks.see_update(metrics)
    assert json.loads(json.dumps(to_finite(metrics), allow_nan=False))["loss"] is None


def test_a_run_that_only_fails_is_stopped() -> None:
    checks = Checks()
    for _ in range(2):
        checks.see_conversations({"conversations": 0, "blame": {"user": 5, "tool": 1}}, 0)
        assert "every conversation of the step failed (mostly blamed: user)" in checks.collect()[0]
    with pytest.raises(EngineError, match="3 steps in a row had only failed conversations"):
        checks.see_conversations({"conversations": 0, "blame": {"user": 5}}, 0)


SOUND = {"loss": 1.0, "skipped": 0.0, "logprob_gap": 0.0, "entropy": 1.0}
ROW = Row([1, 2, 3, 4], [0, 0, 1, 1], [0.0] * 4, [1.0] * 4, id="a")
EVERY: dict[str, Callable[[Checks], Any]] = {
    "gap": lambda checks: checks.see_update({**SOUND, "logprob_gap": 0.2}),
    "entropy": lambda checks: checks.see_update({**SOUND, "entropy": 0.001}),
    "finite": lambda checks: checks.see_update({**SOUND, "loss": nan}),
    "reward": lambda checks: checks.see_group(Group(task=TASK, trajectories=(talk("a", 1.5),)), [0.0]),
    "advantage": lambda checks: checks.see_group(EMPTY, [1.0, -0.5]),
    "mask": lambda checks: checks.is_masked_right(talk("a", 1.0), [ROW, ROW]),
    "logprobs": lambda checks: checks.is_masked_right(talk("a", 1.0, nan), [ROW]),
    "no_signal": lambda checks: checks.see_conversations({"conversations": 8, "blame": {}, "reward": 0.0}, 0),
    "failed": lambda checks: checks.see_conversations({"conversations": 0, "blame": {"user": 5}}, 0),
}


@pytest.mark.parametrize("kind", EVERY)
def test_every_warning_is_seen_in_terminal_and_page(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = Checks(CheckSettings(no_signal_steps=1))
    EVERY[kind](checks)
    [warning] = checks.collect()
    assert ":" in warning  # what is wrong, and what to do or what was done
    metrics = {"step": 1, "loss": 1.0, "warnings": [warning]}
    run = Run.create(RunSettings(directory=str(tmp_path), name="r"), "train", "d", TrainConfig(), 0)
    run.add_metrics(metrics)
    run.close("finished")
    with show_steps() as watch:
        watch(1, metrics)
    assert f"warning: {warning}" in capsys.readouterr().err
    assert f"warning: {warning}" in str(watch._foot())  # and in the block of a terminal that can move
    assert Answers(tmp_path).run("r")["health"]["warnings"] == [{"step": 1, "text": warning}]


async def test_bounds_that_nothing_keeps_warn_in_a_real_run(
    train_config: Configure, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = train_config(
        learner__model=str(trained),
        training__steps=1,
        training__group_size=8,
        checks__entropy=100.0,
        checks__logprob_gap=1e-12,
        checks__rewards=[2.0, 3.0],
    )
    with show_steps() as watch:
        run = await train(config, watch=watch)
    [line] = [line for _, line in read_lines(run / "metrics.jsonl")]
    told = capfd.readouterr().err
    shown = [item["text"] for item in Answers(run.parent).run(run.name)["health"]["warnings"]]
    for words in ("outside 2 to 3", "sampler and trainer differ by", "the entropy is"):
        assert any(words in warning for warning in line["warnings"])
        assert words in told
        assert any(words in warning for warning in shown)


async def test_a_poisoned_step_is_skipped_in_a_real_run(
    train_config: Configure, trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The loss of the second update is not a number: weights stay, it is counted, the third one learns."""
    real, calls = losses.reduce, [0]

    def poisoned(losses: torch.Tensor, batch: Any, settings: Any) -> torch.Tensor:
        calls[0] += 1
        return real(losses, batch, settings) * (nan if calls[0] == 2 else 1.0)

    monkeypatch.setattr(losses, "reduce", poisoned)
    config = train_config(
        learner__model=str(trained),
        training__steps=3,
        training__group_size=8,
        training__checkpoint_every=1,
        training__keep_checkpoints=3,
    )
    with show_steps() as watch:
        run = await train(config, watch=watch)
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    assert [line["skipped"] for line in lines] == [0.0, 1.0, 0.0]
    assert lines[1]["loss"] is None
    assert "that update was skipped" in lines[1]["warnings"][0]
    assert "warnings" not in lines[0]
    assert "warning: the loss or the gradient is not finite" in capfd.readouterr().err
    first, second, third = (
        load_file(run / "checkpoints" / f"step-00000{step}" / "model.safetensors") for step in (1, 2, 3)
    )
    assert all(first[name].equal(second[name]) for name in first)
    assert not all(second[name].equal(third[name]) for name in first)


async def test_a_poisoned_mini_batch_is_seen_whichever_it_is(
    train_config: Configure, blank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config(training__mini_batches=2)
    rows = [Row([1, 2, 3], [0, 1, 1], [0.0, -5.0, -5.0], [share] * 3) for share in (1.0, -1.0, 0.5, -0.5)]
    real, calls = losses.reduce, [0]

    def poisoned(losses: torch.Tensor, batch: Any, settings: Any) -> torch.Tensor:
        calls[0] += 1
        return real(losses, batch, settings) * (nan if calls[0] == 1 else 1.0)

    monkeypatch.setattr(losses, "reduce", poisoned)
    engine, optim = load_learner(config.learner, 0).engine, to_optim(config.optimizer, 0, 1)
    known = await engine.forward(rows, 1.0)  # nothing is clipped
    rows = [replace(row, logprobs=logprobs) for row, logprobs in zip(rows, known, strict=True)]
    metrics = await update(engine, rows, find_method(config), optim)
    assert calls == [2]
    assert metrics["skipped"] == 1.0
    assert isnan(metrics["loss"])
    checks = Checks()
    checks.see_update(metrics)
    assert any("that update was skipped" in warning for warning in checks.collect())
    metrics = await update(engine, list(rows), find_method(config), optim, 1)
    assert metrics["skipped"] == 0.0
    assert isfinite(metrics["loss"])


def test_mini_batches_are_averaged() -> None:
    one = {"loss": 1.0, "logprob_gap": 0.1, "entropy": 0.5, "grad_norm": 2.0, "skipped": 0.0}
    other = {"loss": 3.0, "logprob_gap": 0.9, "entropy": 0.25, "grad_norm": nan, "skipped": 1.0}
    joined = join_metrics([one, other, other])
    assert isnan(joined.pop("grad_norm"))
    assert joined == {"loss": 7 / 3, "logprob_gap": 0.1, "entropy": 1 / 3, "skipped": 2.0}
    assert join_metrics([one]) == one


async def test_weights_that_are_none_are_told(blank: Path) -> None:
    learner = load_learner(TrainConfig.model_validate({"learner": {"model": str(blank)}}).learner, 0)
    row = Row([1, 2, 3], [0, 1, 1], [0.0, -1.0, -1.0], [1.0] * 3)
    await learner.engine.forward_backward([row], losses.cross_entropy)
    with pytest.raises(EngineError, match="the weights are not finite after this step"):
        await learner.engine.optim_step(OptimParams(learning_rate=inf))


async def test_a_reward_that_is_no_number_is_never_scored(train_config: Configure, wall: str) -> None:
    from trialogue.talk.find import find_model
    from trialogue.talk.rollout import RolloutSettings, rollout
    from trialogue.world.find import find_domain

    config = train_config()
    domain = find_domain(wall)
    user = find_model(config.user, "user", domain, config.limits)
    assert domain.oracle is not None
    groups = rollout(
        domain,
        domain.tasks("dev", 1),
        domain.oracle,
        user,
        RolloutSettings(redraws=0, grade=lambda *_: Reward(value=nan)),
    )
    [group] = [group async for group in groups]
    assert group.trajectories == ()
    assert group.failed[0].blame == "judge"
    assert "no number to learn from" in (group.failed[0].error or "")
