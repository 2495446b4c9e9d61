"""A few updates and a reply, alone or under torchrun: shards_run.py FOLDER NAME FIRST LAST [STATE]."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import torch

from trialogue.config import LossSettings
from trialogue.engine import EngineSettings, OptimParams, Row, SamplingParams
from trialogue.engine.torch_engine import TorchEngine
from trialogue.learn.losses import PolicyLoss


def make_rows(step: int) -> list[Row]:
    """Rows of very different lengths, some with a common beginning, one without anything to train on; the
    first three and the last are one conversation."""
    draw = random.Random(step)
    start = [draw.randrange(300) for _ in range(20)]
    rows: list[Row] = []
    for number in range(7):
        tokens = start[: draw.choice([1, 20])] + [draw.randrange(300) for _ in range(draw.randrange(2, 60))]
        mask = [int(place > 0 and place % 3 > 0 and number != 3) for place in range(len(tokens))]
        old = [draw.uniform(-7, -5) for _ in tokens]
        name = "whole" if number in (0, 1, 2, 6) else ""
        rows.append(Row(tokens, mask, old, [draw.gauss(0, 1)] * len(tokens), [-6.0] * len(tokens), name))
    return rows


async def run(folder: Path, name: str, first: int, last: int, state: str | None) -> None:
    torch.set_num_threads(1)
    settings = EngineSettings(device="cpu", max_tokens_per_micro_batch=90, cache_bytes=1 << 24)
    engine = TorchEngine(str(folder / "model"), settings)
    if engine.world is not None and engine.world.rank:
        engine.world.follow()
        return
    if state is not None:
        await engine.load_state(folder / state)
    told: dict[str, object] = {}
    loss = PolicyLoss(LossSettings(kl=0.1, reduction="row"))
    for step in range(first, last):
        rows = make_rows(step)
        before = await engine.forward(rows)
        outputs = await engine.forward_backward(rows, loss)
        # Without a sizable eps the first steps are signs of gradients, and so are their rounding errors.
        params = OptimParams(learning_rate=1e-3, eps=1e-5, grad_clip=0.5, weight_decay=0.1)
        optim = await engine.optim_step(params)
        await engine.publish()
        greedy = SamplingParams(max_tokens=8, temperature=0.0)
        [reply] = await engine.sample([rows[0].tokens], greedy, session="one")
        told[str(step)] = {
            "forward": before,
            "metrics": outputs.metrics,
            "logprobs": outputs.logprobs,
            "norm": optim["grad_norm"],
            "reply": reply.tokens,
            "reply_logprobs": reply.logprobs,
        }
        await engine.save_state(folder / f"{name}-{step + 1}")
    (folder / f"{name}.json").write_text(json.dumps(told))
    engine.close()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    asyncio.run(
        run(
            Path(arguments[0]),
            arguments[1],
            int(arguments[2]),
            int(arguments[3]),
            arguments[4] if len(arguments) > 4 else None,
        )
    )
