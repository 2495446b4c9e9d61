"""What verl 0.9 itself makes of an exported folder: `make test-verl`, in an environment of its own."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl lives in an environment of its own: make test-verl")

from omegaconf import OmegaConf
from packaging.requirements import Requirement
from verl.trainer.ppo.utils import need_reference_policy
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl_export import Exported, compose_verl, read_overrides, run_python

from trialogue.config import TrainConfig, load_config
from trialogue.hosts.export import export_verl
from trialogue.task import Task

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[3]


def test_the_extra_installs_what_the_launch_script_asks_for(exported: Exported) -> None:
    """The versions named in the exported requirements and in docs/cluster.md are verl's own pins."""
    settings = dict(word.split("=", 1) for word in read_overrides(exported.folder))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [wanted] = extras["optional-dependencies"]["verl"]
    assert settings["actor_rollout_ref.rollout.name"] == "vllm"
    assert wanted.startswith("verl[fsdp,vllm]")
    pins = [Requirement(text) for text in importlib.metadata.requires("verl") or ()]
    chosen = ("fsdp", "vllm", "flash-attn-cu130torch211")  # the first asks for the last
    found = {
        pin.name: str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is not None and any(pin.marker.evaluate({"extra": name}) for name in chosen)
    }
    told = (exported.folder / "requirements.txt").read_text(encoding="utf-8")
    for name in ("torch", "vllm", "transformers", "flash-attn"):
        assert f"{'vLLM' if name == 'vllm' else name} ({found[name].removesuffix('.0')})" in told.replace(
            "\n# ", " "
        )
    table = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    run = {name: importlib.metadata.version(name) for name in ("verl", "transformers", "ray", "torch")}
    short = {name: version.split("+")[0].rsplit(".", 1)[0] for name, version in run.items()}
    assert (
        f"verl {run['verl']}, transformers {short['transformers']}, ray {short['ray']}, "
        f"torch {short['torch']} |" in table
    )


@pytest.mark.parametrize("size", ["8b", "14b", "32b"])
def test_verl_accepts_the_papers_recipe(size: str, tmp_path: Path) -> None:
    """The paper's settings with the built-in domain, whose data need no download."""
    config = load_config(TrainConfig, ROOT / "configs" / f"paper-{size}.toml", ["domain=shop"])
    export_verl(config, tmp_path)
    found = compose_verl(tmp_path)
    OmegaConf.resolve(found)
    actor, generation = found.actor_rollout_ref.actor, found.actor_rollout_ref.rollout
    assert found.algorithm.adv_estimator == "grpo"
    assert (found.data.train_batch_size, actor.ppo_mini_batch_size, generation.n) == (32, 32, 8)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.clip_grad) == (1e-6, 0.01, 1.0)
    assert (generation.prompt_length, generation.response_length, generation.max_model_len) == (
        5000,
        27768,
        32768,
    )
    assert (found.trainer.nnodes, found.trainer.n_gpus_per_node) == (4, 8)
    assert found.actor_rollout_ref.model.path == f"Qwen/Qwen3-{size.upper()}"
    assert actor.strategy == found.actor_rollout_ref.ref.strategy == "fsdp2"
    dataset = RLHFDataset([str(tmp_path / "train.parquet")], None, found.data)
    assert len(dataset) == 150 * 32
    assert dataset[5]["agent_name"] == "trialogue"
    assert Task.model_validate_json(dataset[5]["extra_info"]["task"]).split == "train"


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_verl_accepts_the_settings_with_trainers_of_its_own(exported: Exported, mode: str) -> None:
    found = compose_verl(
        exported.folder, f"trainer.v1.trainer_mode={mode}", "actor_rollout_ref.rollout.nnodes=1"
    )
    OmegaConf.resolve(found)
    validate_config(found, use_reference_policy=need_reference_policy(found), use_critic=False)
    assert issubclass(get_trainer_cls(mode), PPOTrainer)


def test_verl_accepts_the_papers_recipe_on_the_papers_tasks(tmp_path: Path) -> None:
    """By the verb itself, where TAU-bench's data lies beside the repository or in TRIALOGUE_DATA."""
    data = Path(os.environ.get("TRIALOGUE_DATA") or ROOT.parent / "shared" / "benchmarks")
    if not (data / "tau-bench-v1").is_dir():
        pytest.skip(f"no benchmark data: {data} has no tau-bench-v1; set TRIALOGUE_DATA")
    recipe = str(ROOT / "configs" / "paper-32b.toml")
    run_python(
        "-m",
        "trialogue",
        "export",
        "verl",
        "--config",
        recipe,
        "--data",
        data,
        "--out",
        str(tmp_path / "out"),
    )
    found = compose_verl(tmp_path / "out")
    OmegaConf.resolve(found)
    assert found.actor_rollout_ref.model.path == "Qwen/Qwen3-32B"
    assert found.trainer.total_training_steps == 150
    for name, split, count in (("train", "train", 150 * 32), ("dev", "dev", 20)):
        dataset = RLHFDataset([str(tmp_path / "out" / f"{name}.parquet")], None, found.data)
        assert len(dataset) == count
        tasks = [Task.model_validate_json(row["extra_info"]["task"]) for row in dataset]
        assert {(task.domain, task.split) for task in tasks} == {("tau:retail", split)}
