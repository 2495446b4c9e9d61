"""GRPOTrainer of TRL 1.16 with our conversations, on a CPU: `make test-trl`, in an environment of its own."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
pytest.importorskip("trl", reason="TRL lives in an environment of its own: make test-trl")

from datasets import Dataset
from faulty_users import run_users
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trialogue.config import LossSettings, TrainConfig
from trialogue.engine.api import EngineSettings, Row
from trialogue.engine.torch_engine import TorchEngine
from trialogue.hosts.trl import conversation_reward, make_rollout, to_prompts
from trialogue.learn.advantages import center, normalize
from trialogue.learn.losses import PolicyLoss

GROUP = 6
LONGEST = 64


class Watched(GRPOTrainer):
    """TRL's trainer, whose rollouts, batches and losses can be looked at afterwards."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rolled: list[dict[str, Any]] = []
        self.scored: list[dict[str, Any]] = []
        """In the order of the rollout; TRL shuffles before it splits into batches."""
        self.batches: list[dict[str, Any]] = []
        told = self.given = self.rollout_func

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            told_back = told(prompts, trainer)
            self.rolled.append({**copy.deepcopy(told_back), "prompts": prompts})
            return told_back

        self.rollout_func = rollout

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.scored.append(super()._generate_and_score_completions(inputs))
        return self.scored[-1]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.batches.append({"inputs": inputs, "loss": float(loss.detach()), "weights": weights})
        return loss


def make_trainer(config: TrainConfig, folder: Path, kind: str) -> Watched:
    tokenizer = AutoTokenizer.from_pretrained(config.learner.model)
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    arguments = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        beta=0.0,
        loss_type=kind,
        per_device_train_batch_size=GROUP * 2,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        generation_kwargs={"eos_token_id": stop},
        scale_rewards="none" if kind == "dr_grpo" else "group",
        shuffle_dataset=False,
        seed=1,
    )
    return Watched(
        model=AutoModelForCausalLM.from_pretrained(config.learner.model, dtype=torch.float32),
        reward_funcs=conversation_reward,
        args=arguments,
        train_dataset=Dataset.from_list(to_prompts(config)),
        processing_class=tokenizer,
        rollout_func=make_rollout(config),
    )


def to_our_rows(inputs: dict[str, Any]) -> list[Row]:
    """TRL's padded batch as our rows, with the log-probabilities of an older policy made up."""
    rows: list[Row] = []
    for number in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][number][inputs["prompt_mask"][number].bool()].tolist()
        shown = inputs["completion_mask"][number].bool()
        completion = inputs["completion_ids"][number][shown].tolist()
        mask = [0] * len(prompt) + inputs["tool_mask"][number][shown].long().tolist()
        old = [0.0] * len(prompt) + inputs["old_per_token_logps"][number][shown].tolist()
        advantage = float(inputs["advantages"][number])
        rows.append(Row(prompt + completion, mask, old, [advantage] * len(mask)))
    return rows


REDUCTION = {"grpo": "row", "dr_grpo": "constant", "dapo": "token"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
async def test_two_steps(config: TrainConfig, tmp_path: Path, kind: Any) -> None:
    trainer = make_trainer(config, tmp_path, kind)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert len(trainer.rolled) == len(trainer.batches) == 2
    assert any(not before[name].equal(value) for name, value in trainer.model.state_dict().items())

    # What TRL was given: one conversation for each entry, several turns each, tools and users masked.
    rewards: list[float | None] = []
    for rolled in trainer.rolled:
        assert len(rolled["completion_ids"]) == len(rolled["prompts"]) == 2 * GROUP
        assert len(set(rolled["prompts"])) == 2
        assert max(rolled["user_turns"]) >= 3
        assert max(rolled["tool_calls"]) >= 2
        for ids, mask, reward, sampled in zip(
            rolled["completion_ids"],
            rolled["env_mask"],
            rolled["reward"],
            rolled["response_tokens"],
            strict=True,
        ):
            assert len(ids) == len(mask)
            assert sum(mask) == (0 if reward is None else sampled)
        rewards += rolled["reward"]
    assert {0.0, 1.0, None} == set(rewards)  # good ones, bad ones, and owners who hung up

    for rolled, inputs in zip(trainer.rolled, trainer.scored, strict=True):
        trained = (inputs["tool_mask"] * inputs["completion_mask"]).sum(-1)
        assert trained.tolist() == [sum(mask) for mask in rolled["env_mask"]]
        for first in range(0, 2 * GROUP, GROUP):
            group = rolled["reward"][first : first + GROUP]
            held = [reward for reward in group if reward is not None]
            ours = iter((center if kind == "dr_grpo" else normalize)(held))
            expected = [0.0 if reward is None else next(ours) for reward in group]
            found = inputs["advantages"][first : first + GROUP].tolist()
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    lengths = [line["completions/mean_length"] for line in trainer.state.log_history if "loss" in line]
    assert lengths == [
        pytest.approx(sum(map(sum, rolled["env_mask"])) / (2 * GROUP)) for rolled in trainer.rolled
    ]

    # The same rows in our engine, with ratios on both sides of the clip.
    batch = max(trainer.batches, key=lambda batch: float(batch["inputs"]["advantages"].abs().sum()))
    inputs = dict(batch["inputs"])
    model = trainer.model
    model.load_state_dict(batch["weights"])
    engine_model = copy.deepcopy(model)
    with torch.no_grad():
        now, _, _ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
        )
    places = torch.arange(now.shape[1]) % 5 - 2
    inputs["old_per_token_logps"] = now + 0.15 * places
    model.train()
    model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    loss = GRPOTrainer._compute_loss(trainer, model, inputs)
    loss.backward()
    settings = LossSettings(
        name=kind,
        reduction=REDUCTION[kind],
        constant=float(LONGEST),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=0.0,
    )
    engine = TorchEngine(lambda: engine_model, EngineSettings(device="cpu"))
    outputs = await engine.forward_backward(to_our_rows(inputs), PolicyLoss(settings))
    assert outputs.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    pairs = [
        (value.grad.flatten(), engine.update.parameters[name].grad.flatten())
        for name, value in model.named_parameters()
    ]
    one, other = (torch.cat(side) for side in zip(*pairs, strict=True))
    cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    print(f"{kind}: loss {float(loss.detach()):.6f} and {outputs.metrics['loss']:.6f}, cosine {cosine:.8f}")
    assert one.norm() > 0
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.timeout(600)
def test_an_endpoint_plays_the_user_in_every_step(config: TrainConfig, tmp_path: Path) -> None:
    """Connections and places in the queue outlive a rollout, and so does the event loop they belong to."""
    with run_users(lines=["Paint it.", "Paint it.", "###STOP###"]) as server:
        user = {"model": "openai:owner", "base_url": server.url, "concurrency": 2}
        user |= {"retries": 0, "outage": 0.0}
        played = TrainConfig.model_validate({**config.model_dump(), "user": user})
        trainer = make_trainer(played, tmp_path, "grpo")
        rollout = trainer.given
        trainer.train()
        assert len(trainer.rolled) == 2
        for rolled in trainer.rolled:
            assert rolled["failed"] == [0.0] * 2 * GROUP
            assert set(rolled["user_turns"]) == {3.0}
        assert server.look()["seen"] == {"none": 3 * 2 * 2 * GROUP}
        rollout.close()
        assert not rollout.thread.is_alive()
        assert rollout.loop.is_closed()
