"""When weights go to a server that samples; with a real server: tests/hosts/engines/test_vllm.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from trialogue.engine.api import Completion, SamplingParams
from trialogue.engine.vllm import VllmEngine


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
