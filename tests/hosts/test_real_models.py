# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""Our engine on real pretrained weights beside transformers: `make test-models`.

Prompts are those of conversations in the shop, policy and tool schemas included. TRIALOGUE_PROMPTS sets their
number. A model that cannot be fetched is skipped, and the last line says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from real_models import find_model_file

from trialogue import RolloutSettings, find_domain, find_model, rollout
from trialogue.engine.api import EngineSettings, LoraSettings, Row, SamplingParams
from trialogue.engine.gguf import convert_gguf
from trialogue.engine.model_folder import load_weights
from trialogue.engine.torch_engine import TorchEngine
from trialogue.learn.losses import cross_entropy
from trialogue.learn.sft import to_example_rows
from trialogue.talk.render.load import count_ids, load_renderer

NAMES = ("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct")
PROMPTS = int(os.environ.get("TRIALOGUE_PROMPTS", "4"))
NEW_TOKENS = 24
LEARNED = 400
NAT = 1e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    file = find_model_file(request.param)
    if not file.is_file():
        pytest.skip(f"{request.param} is not there: python tests/parts/real_models.py {request.param}")
    return convert_gguf(file)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """The model as transformers computes it."""
    return load_weights(folder, torch.float32).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rows(folder: Path) -> list[Row]:
    """Conversations of the shop's oracle in the model's own template."""
    domain = find_domain("shop")
    _, renderer = load_renderer(str(folder))
    tasks = domain.tasks("train", PROMPTS, seed=1, levels=[1])
    agent, user = find_model("oracle", "agent", domain), find_model("agenda", "user", domain)
    groups = [group async for group in rollout(domain, tasks, agent, user, RolloutSettings(seed=1))]
    held = [item for group in groups for item in group.trajectories]
    return [row for item in held for row in to_example_rows(item, domain, renderer, "agent", False)]


def open_engine(folder: Path, **settings: Any) -> TorchEngine:
    tokenizer, _ = load_renderer(str(folder))
    known = EngineSettings(device="cpu", precision="float32", vocabulary=count_ids(tokenizer), **settings)
    return TorchEngine(folder, known)


async def test_greedy_tokens_and_log_probabilities(folder: Path, plain: Any, rows: list[Row]) -> None:
    engine = open_engine(folder)
    try:
        prompts = [row.tokens[: row.mask.index(1)] for row in rows]
        done = await engine.sample(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
        again = await engine.forward(
            [to_row(prompt, item.tokens) for prompt, item in zip(prompts, done, strict=True)]
        )
    finally:
        engine.close()
    assert len(prompts) >= PROMPTS
    widest = 0.0
    for prompt, completion, computed in zip(prompts, done, again, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits[:, : engine.capabilities.vocabulary], -1)
        assert wanted.argmax(-1).tolist() == completion.tokens
        expected = wanted.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        for found in (completion.logprobs, computed[len(prompt) :]):
            widest = max(widest, (torch.tensor(found) - expected).abs().max().item())
    print(f"\n{folder.name}: {len(prompts)} prompts, same greedy tokens, largest difference {widest:.1e} nat")
    assert widest < NAT


def to_row(prompt: list[int], reply: list[int]) -> Row:
    tokens = prompt + reply
    return Row(tokens, [0] * len(prompt) + [1] * len(reply), [0.0] * len(tokens), [1.0] * len(tokens))


def shorten(row: Row) -> Row:
    """The end of a row: logits over 150,000 tokens for a whole one take several gigabytes."""
    first = max(0, len(row.tokens) - LEARNED)
    mask = [0, *row.mask[first + 1 :]]
    return Row(row.tokens[first:], mask, row.logprobs[first:], row.advantages[first:])


@pytest.mark.parametrize("adapter", [False, True])
async def test_gradients(folder: Path, plain: Any, rows: list[Row], adapter: bool) -> None:
    if not adapter and "1.5b" in folder.name:
        pytest.skip("two sets of float32 weights and gradients of 1.5B take 25 GB")
    rows = [shorten(row) for row in rows[:2]]
    engine = open_engine(folder, lora=LoraSettings(r=8) if adapter else None)
    beside = plain
    if adapter:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)
        beside = get_peft_model(plain, settings)
        known = dict(engine.model.named_parameters())
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                if "lora_B" in name:  # zero in a new adapter, so that nothing would reach lora_A
                    parameter.copy_(torch.randn_like(parameter) * 0.01)
            for name, parameter in beside.named_parameters():
                parameter.copy_(known[name])
    beside.train(False).zero_grad()
    try:
        await engine.publish()
        outputs = await engine.forward_backward(rows, cross_entropy)
        total = sum(sum(row.mask) for row in rows)
        for row in rows:
            logprobs = torch.log_softmax(beside(torch.tensor([row.tokens])).logits[0, :-1], -1)
            chosen = logprobs.gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
            (-chosen[torch.tensor(row.mask[1:], dtype=torch.bool)].sum() / total).backward()
        wanted = {name: item.grad for name, item in beside.named_parameters() if item.grad is not None}
        found = {name: item.grad for name, item in engine.model.named_parameters() if item.grad is not None}
        assert wanted.keys() == found.keys()
        apart = [
            ((found[name] - grad).norm() / grad.norm()).item() for name, grad in wanted.items() if grad.any()
        ]
        kind = "LoRA" if adapter else "all weights"
        print(f"\n{folder.name}: {kind}, loss {outputs.metrics['loss']:.4f}, {len(apart)} gradients, ")
        print(f"relative differences: median {sorted(apart)[len(apart) // 2]:.1e}, largest {max(apart):.1e}")
        assert len(apart) > 100
        assert max(apart) < 1e-3
    finally:
        engine.close()
        beside.zero_grad()
        if adapter:
            beside.unload()
