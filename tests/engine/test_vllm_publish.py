"""How weights go to a server that samples; with a vLLM server: tests/hosts/engines/test_vllm.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sampling_server import SamplingServer

from trialogue.config import EngineChoice
from trialogue.engine import find
from trialogue.engine.api import Completion, EngineSettings, LoraSettings, OptimParams, Row, SamplingParams
from trialogue.engine.find import find_engine
from trialogue.engine.torch_engine import TorchEngine
from trialogue.engine.vllm import VllmEngine
from trialogue.errors import ConfigError, EngineError

TEXT = list(range(5, 45))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


async def test_conversations_that_begin_together_send_the_weights_once(
    open_engine: Any, tmp_path: Path
) -> None:
    scales: list[float] = []
    sent = 0

    class Watched(VllmEngine):
        async def _send(self) -> None:
            nonlocal sent
            sent += 1
            await asyncio.sleep(0.01)

        async def _ask(self, prompt: list[int], params: SamplingParams) -> Completion:
            return Completion([5], [0.0], "length", self.weight_version)

    trainer = open_engine("qwen3")
    scale = trainer.scale_matrices

    async def watch(factor: float) -> None:
        scales.append(factor)
        await scale(factor)

    trainer.scale_matrices = watch
    engine = Watched(trainer, "http://127.0.0.1:9", tmp_path)
    asked = [engine.sample([[1, 2, 3]], SamplingParams(max_tokens=1)) for _ in range(32)]
    await asyncio.gather(*asked)
    assert scales == [0.5, 2.0]
    assert sent == 2  # the rehearsal, and the weights themselves


@pytest.fixture
def base(make_model: Any, tmp_path: Path) -> Path:
    make_model("qwen3").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def server(base: Path) -> Iterator[SamplingServer]:
    with SamplingServer(base) as running:
        yield running


@pytest.fixture
async def closing() -> AsyncIterator[Callable[[Any], VllmEngine]]:
    """Closes the connections of engines in the end."""
    opened: list[VllmEngine] = []

    def keep(engine: Any) -> VllmEngine:
        assert isinstance(engine, VllmEngine)
        opened.append(engine)
        return engine

    yield keep
    for engine in opened:
        await engine.endpoint.close()


async def learn(engine: VllmEngine, rate: float) -> None:
    mask, advantages = [0] + [1] * 39, [1.0] * 40
    [now] = await engine.forward([Row(TEXT, mask, [0.0] * 40, advantages)])

    def loss(new: Any, batch: Any) -> Any:
        return -(torch.exp(new - batch.old_logprobs) * batch.advantages).mean(), {}

    await engine.forward_backward([Row(TEXT, mask, now, advantages)], loss)
    await engine.optim_step(OptimParams(learning_rate=rate))


@pytest.mark.parametrize("keeps_old", [False, True])
async def test_a_missed_update_of_a_millionth_is_noticed(
    base: Path, server: SamplingServer, tmp_path: Path, keeps_old: bool, closing: Any
) -> None:
    trainer = TorchEngine(base, EngineSettings(device="cpu"))
    engine = closing(VllmEngine(trainer, server.url, tmp_path / "sent"))
    await engine.publish()
    await learn(engine, 1e-6)
    server.keeps_old = keeps_old
    if keeps_old:
        assert await engine.check() < engine.tolerance / 2  # the comparison alone would let it pass
        with pytest.raises(EngineError, match="did not change in any digit"):
            await engine.publish()
        return
    assert await engine.publish() == 1
    (theirs,) = await engine.sample([TEXT], GREEDY)
    (ours,) = await engine.trainer.sample([TEXT], GREEDY)
    assert theirs.tokens == ours.tokens
    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
    assert await engine.publish() == 1  # nothing new: nothing is sent
    assert server.asked.count("/collective_rpc") == 3  # halved, whole, updated


async def test_weights_are_handed_over_in_bfloat16(
    gpu: Any, base: Path, server: SamplingServer, tmp_path: Path, closing: Any
) -> None:
    trainer = TorchEngine(base, EngineSettings(device="fakegpu"))
    engine = closing(VllmEngine(trainer, server.url, tmp_path / "sent"))
    await engine.publish()
    sent = load_file(tmp_path / "sent" / "model.safetensors")
    held = trainer.model.state_dict()
    assert {value.dtype for value in sent.values()} == {torch.bfloat16}
    assert all(value.equal(held[name].cpu().bfloat16()) for name, value in sent.items())
    assert sum(value.nbytes for value in sent.values()) == sum(
        p.numel() * 2 for p in trainer.model.parameters()
    )


async def test_adapters_are_handed_over_alone(
    base: Path, server: SamplingServer, tmp_path: Path, closing: Any
) -> None:
    settings = EngineSettings(device="cpu", lora=LoraSettings(r=4, alpha=8))
    choice = EngineChoice(name="vllm", url=server.url, weights=str(tmp_path / "sent"))
    engine = closing(find_engine(choice, str(base), settings))
    for _ in range(3):
        await learn(engine, 1e-2)
        await engine.publish()
        (theirs,) = await engine.sample([TEXT], GREEDY)
        (ours,) = await engine.trainer.sample([TEXT], GREEDY)
        assert theirs.tokens == ours.tokens
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
    [folder] = (tmp_path / "sent").iterdir()  # older ones are removed
    files = sum(file.stat().st_size for file in folder.iterdir())
    assert files < (base / "model.safetensors").stat().st_size / 2
    assert len(server.engines) == 2
    assert "/collective_rpc" not in server.asked
    del server.engines[folder.name]  # a server that lost the adapter
    with pytest.raises(EngineError, match="does not exist"):
        await engine.sample([TEXT], GREEDY)


def test_large_models_are_sampled_by_a_server_on_a_gpu(
    gpu: Any, base: Path, server: SamplingServer, monkeypatch: Any, caplog: Any
) -> None:
    there = EngineSettings(device="fakegpu", precision="float32")
    assert isinstance(find_engine(EngineChoice(), str(base), there), TorchEngine)  # a small one
    monkeypatch.setattr(find, "LARGE", 1000)
    with pytest.raises(
        ConfigError, match=r"start one and set engine\.url=URL .* or .* engine\.name=torch"
    ) as told:
        find_engine(EngineChoice(), str(base), there)
    assert "\n" not in str(told.value)
    assert isinstance(find_engine(EngineChoice(url=server.url), str(base), there), VllmEngine)
    assert isinstance(find_engine(EngineChoice(name="torch"), str(base), there), TorchEngine)
    assert [EngineChoice(url=url).service for url in ("", server.url)] == ["auto", "vllm"]  # as doctor asks
    with caplog.at_level(logging.WARNING, "trialogue"):
        assert isinstance(find_engine(EngineChoice(), str(base), EngineSettings(device="cpu")), TorchEngine)
    assert "there is no GPU" in caplog.text
