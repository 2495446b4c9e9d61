"""Settings: defaults of each kind, files, overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from trialogue.config import EvalConfig, SftConfig, TrainConfig, load_config
from trialogue.errors import ConfigError


def test_what_a_section_leaves_out_has_the_default_of_its_kind(tmp_path: Path) -> None:
    usual = TrainConfig()
    overrides = ["tasks.levels=[1, 2]", "limits.reply_tokens=12", "user.timeout=3", "rollout.redraws=1"]
    config = load_config(TrainConfig, None, overrides)
    assert (config.tasks.split, config.tasks.levels) == ("train", (1, 2))
    assert (config.limits.context_tokens, config.limits.reply_tokens) == (usual.limits.context_tokens, 12)
    assert (config.user.model, config.user.timeout) == ("agenda", 3)
    assert config.rollout.concurrency == usual.rollout.concurrency != EvalConfig().rollout.concurrency
    file = tmp_path / "sft.toml"
    file.write_text("[optimizer]\nlearning_rate = 1e-3\n[tasks]\nlevels = [1]\n", encoding="utf-8")
    tuned = load_config(SftConfig, file, ["tasks.families=['cancel']"])
    assert (tuned.optimizer.schedule, tuned.optimizer.learning_rate) == (SftConfig().optimizer.schedule, 1e-3)
    assert (tuned.tasks.split, tuned.tasks.levels, tuned.tasks.families) == ("train", (1,), ("cancel",))


@pytest.mark.parametrize("name", ["2026-11-16", "2026-11-16T10:00:00", "10:00:00", "mine"])
def test_what_looks_like_a_date_is_a_text(name: str) -> None:
    assert load_config(EvalConfig, None, [f"run.name={name}"]).run.name == name


def test_a_section_is_no_value() -> None:
    with pytest.raises(ConfigError, match=r"tasks is a section: .* got 3"):
        load_config(TrainConfig, None, ["tasks=3"])


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_file_in_configs_loads(file: Path) -> None:
    kind = SftConfig if file.stem.startswith("sft") else TrainConfig
    assert load_config(kind, file) != kind()


def test_the_papers_settings_are_the_papers() -> None:
    folder = Path(__file__).parents[1] / "configs"
    tuned = load_config(SftConfig, folder / "sft-paper.toml")
    assert (tuned.sft.batch, tuned.sft.epochs) == (128, 2.0)
    assert (tuned.optimizer.learning_rate, tuned.optimizer.schedule) == (5e-6, "cosine")
    trained = load_config(TrainConfig, folder / "paper-8b.toml")
    training, loss = trained.training, trained.loss
    assert (training.tasks_per_step, training.group_size, training.mini_batches) == (32, 8, 1)
    assert (loss.name, loss.reduction, loss.clips, loss.dual_clip, loss.kl) == (
        "grpo",
        "token",
        (0.2, 0.2),
        3.0,
        0.001,
    )
    assert (trained.optimizer.learning_rate, trained.tasks.split) == (1e-6, "train")


def test_a_key_that_is_nearly_right_is_suggested() -> None:
    for wrong, meant in (("limit.observations=3", "limits"), ("limits.observation=3", "limits.observations")):
        with pytest.raises(ConfigError, match=rf"no such key; .*; did you mean {meant}\b"):
            load_config(EvalConfig, None, [wrong])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("reward=mine.py:f", "reward is a section: write reward.name=… or --reward …, got 'mine.py:f'"),
        ("agent=mine.py:f", "agent is a section: write agent.model=… or --agent …, got 'mine.py:f'"),
        ("judge=openai:m", "judge is a section: write judge.model=…, got 'openai:m'"),
        ("limits=3", "limits is a section: write one of its keys, such as limits.observations=…, got 3"),
    ],
)
def test_a_value_in_place_of_a_section_says_what_to_write(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as failed:
        load_config(EvalConfig, None, [override])
    assert str(failed.value) == f"the settings: {told}"
