"""Our losses against those of TRL 1.16 on the same arrays: `make test-trl`, in an environment of its own.

TRL's own code is `GRPOTrainer._compute_loss`, called as it stands. Arranged around it: a bare object with
what that method reads, log-probabilities from our array instead of a model, one process, no accumulation.
TRL says `delta` for our `dual_clip`, and gives cispo's bound as a ratio where we give its distance from 1.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="TRL lives in an environment of its own: make test-trl")

from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from trialogue.config import LossSettings
from trialogue.engine.api import TokenBatch
from trialogue.learn.advantages import normalize
from trialogue.learn.losses import PolicyLoss

ROWS, LENGTH = 6, 9
LONGEST = 16.0
REDUCTION = {"grpo": "row", "dr_grpo": "constant", "dapo": "token", "cispo": "token", "bnpo": "token"}
"""How TRL reduces each of its loss types, in our words."""


class OneProcess:
    """What the method asks of accelerate, for a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def draw(seed: int) -> dict[str, Tensor]:
    """Rows of different lengths, with ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    new = -2 * torch.rand((ROWS, LENGTH), generator=generator) - 0.1
    mask = (torch.arange(LENGTH) < torch.tensor([9, 1, 4, 7, 3, 6])[:, None]).float()
    mask[0, 3:5] = 0  # what a tool or a user said in between
    return {
        "new": new,
        "old": new + 0.5 * torch.randn((ROWS, LENGTH), generator=generator),
        "reference": new + 0.5 * torch.randn((ROWS, LENGTH), generator=generator),
        "mask": mask,
        "advantages": torch.randn(ROWS, generator=generator),
    }


def ask_trl(
    arrays: dict[str, Tensor],
    kind: str,
    low: float,
    high: float,
    beta: float,
    delta: float | None,
    level: str,
) -> tuple[float, Tensor]:
    new = arrays["new"].clone().requires_grad_()

    def logprobs(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return new, torch.zeros_like(new), None

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=logprobs,
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=OneProcess(),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=high,
        epsilon_low=low,
        importance_sampling_level=level,
        loss_type=kind,
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    inputs = {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.long),
        "prompt_mask": torch.ones((ROWS, 1), dtype=torch.long),
        "completion_ids": torch.zeros((ROWS, LENGTH), dtype=torch.long),
        "completion_mask": arrays["mask"],
        "advantages": arrays["advantages"],
        "old_per_token_logps": arrays["old"],
        "ref_per_token_logps": arrays["reference"],
        "num_items_in_batch": arrays["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad


def ask_ours(arrays: dict[str, Tensor], settings: LossSettings) -> tuple[float, Tensor]:
    new = arrays["new"].clone().requires_grad_()
    chosen = arrays["mask"].bool()
    row = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH)[chosen]
    batch = TokenBatch(
        old_logprobs=arrays["old"][chosen],
        advantages=arrays["advantages"][row],
        reference_logprobs=arrays["reference"][chosen] if settings.kl else None,
        entropy=torch.zeros(len(row)),
        row=row,
        turns=None,
        conversation_tokens=chosen.sum(-1),
        elsewhere=torch.zeros(ROWS),
        rows=ROWS,
        total_conversations=ROWS,
        total_tokens=len(row),
    )
    loss, _ = PolicyLoss(settings)(new[chosen], batch)
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), new.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kl", [0.0, 0.04])
@pytest.mark.parametrize("delta", [None, 1.6])
@pytest.mark.parametrize(
    ("ours", "theirs", "level"),
    [
        ("grpo", "grpo", "token"),
        ("dr_grpo", "dr_grpo", "token"),
        ("dapo", "dapo", "token"),
        ("rloo", "bnpo", "token"),
        ("cispo", "cispo", "token"),
        ("gspo", "grpo", "sequence"),
        ("gspo", "dapo", "sequence"),
    ],
)
def test_losses_and_gradients_agree(
    ours: Any, theirs: str, level: str, delta: float | None, kl: float, seed: int
) -> None:
    low, high = (0.1, 0.15) if level == "sequence" else (0.2, 0.28)
    settings = LossSettings.model_validate(
        {
            "name": ours,
            "reduction": REDUCTION[theirs],
            "constant": LONGEST,
            "clip_low": low,
            "clip_high": high,
            "dual_clip": delta or 0.0,
            "kl": kl,
        }
    )
    arrays = draw(seed)
    bound = 1 + high if theirs == "cispo" else high
    expected, pull = ask_trl(arrays, theirs, low, bound, kl, delta, level)
    found, our_pull = ask_ours(arrays, settings)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert torch.allclose(our_pull, pull, rtol=1e-5, atol=1e-6)
    assert our_pull.abs().sum() > 0


def test_advantages_agree_with_the_arithmetic_of_trl() -> None:
    """TRL computes them in the midst of generation, so this repeats its line over its own `nanstd`; beside
    the spread it has 1e-4 where we have 1e-6."""
    rewards = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.0, 0.5])
    theirs = (rewards - rewards.mean()) / (nanstd(rewards) + 1e-4)
    assert normalize(rewards.tolist()) == pytest.approx(theirs.tolist(), rel=1e-3)
