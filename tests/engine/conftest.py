"""Tiny random models of three architectures, made on the spot, and losses simple enough to check by hand."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trialogue.engine import EngineSettings, Row, SamplingParams
from trialogue.engine.torch_engine import TorchEngine

VOCABULARY = 300
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # chosen, so that kernels take what tests say, whatever the load
torch.set_num_threads(1)  # models this small only lose by waiting for a second core
KINDS = ("llama", "qwen3", "lfm2")


def build_model(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": kind != "llama",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, head_dim=16, **sizes))
    else:
        layers = ["conv", "full_attention", "conv", "full_attention"]
        config = Lfm2Config(num_hidden_layers=4, layer_types=layers, block_auto_adjust_ff_dim=False, **sizes)
        model = Lfm2ForCausalLM(config)
    # Fresh weights give nearly uniform distributions, in which mistakes hide.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()


class PolicyGradient:
    """The plainest loss with an importance ratio, averaged over all tokens of the step."""

    name = "policy_gradient"

    def __call__(self, new_logprobs, batch):
        ratio = torch.exp(new_logprobs - batch.old_logprobs)
        loss = -(ratio * batch.advantages).sum() / batch.total_tokens
        entropy = batch.entropy.sum() / batch.total_tokens
        return loss, {"entropy": entropy, "ratio_max": ratio.max(), "rows": float(batch.rows)}


def build_rows(seed: int, count: int, *, longest: int = 30) -> list[Row]:
    """Rows that branch off one another at random places, with masks of several turns."""
    draw = random.Random(seed)
    trunk = [draw.randrange(VOCABULARY) for _ in range(40)]
    rows: list[Row] = []
    for number in range(count):
        start = trunk[: draw.choice([0, 17, 40, 40])]
        if rows and draw.random() < 0.6:
            other = draw.choice(rows).tokens
            start = other[: draw.randrange(1, len(other) + 1)]
        tokens = start + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, longest))]
        turn = draw.randrange(3, 9)
        mask = [int(position > 0 and position // turn % 2 == 1) for position in range(len(tokens))]
        mask[-1] = 1
        rows.append(
            Row(
                tokens,
                mask,
                [draw.uniform(-7, -4) for _ in tokens],
                [draw.gauss(0, 1) for _ in tokens],
                id=f"row {number}",
            )
        )
    return rows


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture
def make_rows() -> Callable[..., list[Row]]:
    return build_rows


@pytest.fixture
def converse() -> Callable[..., Awaitable[tuple[list[int], list[float]]]]:
    return hold_conversation


@pytest.fixture
def loss() -> PolicyGradient:
    return PolicyGradient()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def open_engine() -> Iterator[Callable[..., TorchEngine]]:
    engines: list[TorchEngine] = []

    def opened(source: object = "llama", **settings: object) -> TorchEngine:
        made = build_model(source) if isinstance(source, str) and source in KINDS else source
        engines.append(TorchEngine(made, EngineSettings(device="cpu", **settings)))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


async def hold_conversation(
    engine: TorchEngine, name: str | None, prompt: list[int], params: SamplingParams, turns: int, seed: int
) -> tuple[list[int], list[float]]:
    """One conversation: every turn some observed tokens, then a completion. Returns tokens and logprobs."""
    draw = random.Random(seed)
    tokens, logprobs = list(prompt), [0.0] * len(prompt)
    for _ in range(turns):
        observed = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 12))]
        tokens += observed
        logprobs += [0.0] * len(observed)
        (completion,) = await engine.sample([tokens], params, session=name)
        tokens += completion.tokens
        logprobs += completion.logprobs
        await asyncio.sleep(0)
    return tokens, logprobs
