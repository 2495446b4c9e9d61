"""A vLLM server on a CPU samples with weights we train: `make test-vllm`, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from ports import find_port, wait_until_up
from safetensors.torch import load_file

from trialogue.config import LossSettings, TrainConfig, load_config
from trialogue.engine.api import Completion, EngineSettings, OptimParams, Row, SamplingParams
from trialogue.engine.torch_engine import TorchEngine
from trialogue.engine.vllm import VllmEngine
from trialogue.errors import EngineError
from trialogue.learn.losses import PolicyLoss
from trialogue.learn.train import train
from trialogue.run import read_lines

pytestmark = pytest.mark.timeout(3600)
HERE = Path(__file__).parent
PROMPTS = [[4, 9, 7, 12], list(range(3, 90)), [200, 5, 5, 5, 31, 8], [17]]
TEXT = list(range(5, 45))
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@contextmanager
def serve(model: Path, folder: Path, *options: str) -> Iterator[str]:
    """vLLM's own server; gives its address."""
    port = find_port()
    words = {
        "--model": model,
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": 512,
        "--max-num-seqs": 16,
        "--block-size": 32,
        "--logprobs-mode": "processed_logprobs",
    }
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *(str(word) for pair in words.items() for word in pair)],
            env=os.environ | settings,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(f"{url}/health", process, folder / "log")
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(painter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that takes new weights."""
    folder = tmp_path_factory.mktemp("vllm")
    with serve(painter, folder, "--worker-extension-cls", "vllm_unpacked.Unpacked") as url:
        yield url


def open_engine(painter: Path, url: str, folder: Path) -> VllmEngine:
    return VllmEngine(TorchEngine(str(painter), EngineSettings(device="cpu")), url, folder / "weights")


async def learn(engine: VllmEngine) -> None:
    """One step that moves the weights a good deal."""
    mask, advantages = [0] + [1] * 39, [1.0] * 40
    [now] = await engine.forward([Row(TEXT, mask, [0.0] * 40, advantages)])
    await engine.forward_backward([Row(TEXT, mask, now, advantages)], PolicyLoss(LossSettings(name="grpo")))
    await engine.optim_step(OptimParams(learning_rate=1e-2))


def agree(theirs: list[Completion], ours: list[Completion]) -> float:
    """Same tokens; returns how far their log-probabilities lie apart."""
    assert [reply.tokens for reply in theirs] == [reply.tokens for reply in ours]
    pairs = zip(theirs, ours, strict=True)
    return max(
        abs(one - other)
        for their, our in pairs
        for one, other in zip(their.logprobs, our.logprobs, strict=True)
    )


async def score(engine: VllmEngine) -> list[float]:
    """The server's log-probabilities of a text that stays the same, token by token."""
    answer = await engine._complete(TEXT, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = zip(TEXT[1:], answer["prompt_logprobs"][1:], strict=True)
    return [item[str(token)]["logprob"] for token, item in found]


async def test_greedy_replies_are_the_torch_samplers_before_and_after_updates(
    painter: Path, server: str, tmp_path: Path
) -> None:
    engine = open_engine(painter, server, tmp_path)
    scores: list[list[float]] = []
    for version in range(3):
        assert await engine.publish() == version
        gap = await engine.check()
        theirs, ours = await engine.sample(PROMPTS, GREEDY), await engine.trainer.sample(PROMPTS, GREEDY)
        apart = agree(theirs, ours)
        print(f"version {version}: probe within {gap:.1e}, greedy replies within {apart:.1e}")
        assert gap < 1e-4
        assert apart < 1e-4
        assert {reply.weight_version for reply in theirs} == {version}
        scores.append(await score(engine))
        await learn(engine)
    # The likeliest tokens may stay the same, and do on some machines; how likely a text is changes.
    for before, after in pairwise(scores):
        moved = max(abs(one - other) for one, other in zip(before, after, strict=True))
        print(f"the server's log-probabilities of a fixed text moved by {moved:.1e}")
        assert moved > 1e-2


async def test_sampled_replies_have_the_log_probabilities_of_the_update(
    painter: Path, server: str, tmp_path: Path
) -> None:
    engine = open_engine(painter, server, tmp_path)
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=5)
    replies = await engine.sample(PROMPTS, params)
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        tokens = prompt + reply.tokens
        empty = [0.0] * len(tokens)
        [scored] = await engine.forward([Row(tokens, [0] * len(tokens), empty, empty)], 0.7)
        assert scored[len(prompt) :] == pytest.approx(reply.logprobs, abs=1e-4)


async def test_our_loop_trains_with_the_server(
    painter: Path, server: str, config: TrainConfig, tmp_path: Path
) -> None:
    settings = {
        "engine.name": "vllm",
        "engine.url": server,
        "engine.weights": str(tmp_path / "weights"),
        "tasks.families": ["plain"],
        "training.steps": 3,
        "training.tasks_per_step": 2,
        "training.group_size": 6,
        "run.directory": str(tmp_path),
        "run.name": "served",
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    run = await train(load_config(TrainConfig, None, overrides, config))
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    assert [line["step"] for line in lines] == [1, 2, 3]
    updated = [line for line in lines if "loss" in line]
    assert len(updated) >= 2
    assert max(line["logprob_gap_max"] for line in updated) < 1e-3


async def test_a_server_that_keeps_old_weights_is_found_out(painter: Path, tmp_path: Path) -> None:
    """vLLM as it is: on a CPU it packs an output matrix that is the embeddings' too, says it took a new one,
    and speaks with the old."""
    with serve(painter, tmp_path) as url:
        engine = open_engine(painter, url, tmp_path)
        assert await engine.check() < 1e-4  # it begins with the right ones
        with pytest.raises(EngineError, match="does not have the weights it was sent") as told:
            await engine.sample(PROMPTS, GREEDY)  # before it speaks a word
        print(told.value)
        before = load_file(painter / "model.safetensors")
        assert all(
            value.equal(before[name])
            for name, value in engine.trainer.model.state_dict().items()
            if name in before
        )
