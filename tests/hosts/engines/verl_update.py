# ruff: noqa: E402 - the platform has to be there before verl is imported
"""One update by verl's FSDP2 engine in a process of its own, on a CPU: verl fixes its platform when imported.

verl_update.py FOLDER reads rows.pkl and overrides.json there, writes result.json, gradient.safetensors, the
weights.safetensors after the update, and verl's own checkpoint of them, actor.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from ports import find_port

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(find_port()),
}
torch.distributed.init_process_group("gloo")

import verl_platform  # noqa: F401
import verl_worker  # noqa: F401
from hydra import compose, initialize_config_module
from safetensors.torch import save_file
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding


def shift(logprobs: torch.Tensor, places: torch.Tensor, by: float) -> torch.Tensor:
    """The same older policy as in the test, by each token's place in its row."""
    return torch.where(logprobs != 0, logprobs + by * ((places % 5) - 2), logprobs)


def main(folder: Path) -> None:
    overrides = json.loads((folder / "overrides.json").read_text())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                *overrides,
                "actor_rollout_ref.actor.use_dynamic_bsz=False",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            ],
        )
    data = DataProto.load_from_disk(folder / "rows.pkl")
    width = data.batch["prompts"].shape[1]
    places = data.batch["attention_mask"].cumsum(1)[:, width:] - 1
    data.batch["old_log_probs"] = shift(data.batch["rollout_log_probs"], places, 0.15)
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    if config.actor_rollout_ref.actor.use_kl_loss:
        data.batch["ref_log_prob"] = shift(data.batch["rollout_log_probs"], places, 0.3)
    data = compute_advantage(
        data,
        adv_estimator=config.algorithm.adv_estimator,
        norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
        config=config.algorithm,
    )
    data.meta_info |= {
        "temperature": config.actor_rollout_ref.rollout.temperature,
        "global_token_num": data.batch["attention_mask"].sum(-1).tolist(),
        "global_batch_size": len(data),
    }
    data.non_tensor_batch.clear()
    model = HFModelConfig(
        path=config.actor_rollout_ref.model.path,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        forward_only=False,
        fsdp_size=1,
        strategy="fsdp2",
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        use_remove_padding=False,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        model_dtype="fp32",
        use_torch_compile=False,
    )
    settings = config.actor_rollout_ref.actor.optim
    optimizer = FSDPOptimizerConfig(
        lr=settings.lr,
        betas=tuple(settings.betas),
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        total_training_steps=2,
    )
    worker = TinkerTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor)))
    worker.optimizer_zero_grad()
    output = worker.forward_backward(left_right_2_no_padding(data.to_tensordict()))
    gradient = {
        name: value.grad.full_tensor().contiguous()
        for name, value in worker.engine.module.named_parameters()
        if value.grad is not None
    }
    norm = worker.optimizer_step()["grad_norm"]
    save_file(gradient, folder / "gradient.safetensors")
    weights = {
        name: value.full_tensor().contiguous() for name, value in worker.engine.module.named_parameters()
    }
    save_file(weights, folder / "weights.safetensors")
    worker.save_checkpoint(str(folder / "actor"))
    metrics = output["metrics"]
    result = {"loss": float(metrics["loss"]), "grad_norm": float(norm)}
    (folder / "result.json").write_text(json.dumps(result))


main(Path(sys.argv[1]))
