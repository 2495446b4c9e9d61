# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""One update on rows that share their prompt: as a tree, packed without sharing, padded as a plain batch.

The same rows, loss and weights on every side: SmolLM2-135M, eight siblings of one prompt. What can be gained
is the ratio of the tokens that have to be computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from speed.measure import Figure, Options, Part, alternate, compare, find_rates, find_versions

SIBLINGS = 8


def make_rows(prompt: int, new: int) -> list[list[int]]:
    """Siblings of different lengths, from three quarters of `new` to all of it."""
    chance = random.Random(0)
    shared = [chance.randrange(1000, 9000) for _ in range(prompt)]
    lengths = [new - number * new // (4 * SIBLINGS) for number in range(SIBLINGS)]
    return [shared + [chance.randrange(1000, 9000) for _ in range(length)] for length in lengths]


def update_ours(folder: str, prompt: int, new: int, share: bool) -> Callable[[], dict[str, Any]]:
    import trialogue.engine.update as update
    from trialogue.engine.api import EngineSettings, OptimParams, Row
    from trialogue.engine.torch_engine import TorchEngine
    from trialogue.learn.grpo import CrossEntropy

    rows = make_rows(prompt, new)
    engine = TorchEngine(folder, EngineSettings(device="cpu"))
    if not share:
        update.grow_tree = partial(update.grow_tree, shortest=1 << 30)

    def run() -> dict[str, Any]:
        started = perf_counter()
        engine.update.computed_tokens = 0
        taught = [
            Row(row, [0] * prompt + [1] * (len(row) - prompt), [0.0] * len(row), [0.0] * len(row))
            for row in rows
        ]
        engine.update.forward_backward(taught, CrossEntropy(), 1.0)
        engine.update.optim_step(OptimParams(learning_rate=1e-6))
        return {"seconds": perf_counter() - started, "tokens": engine.update.computed_tokens}

    return run


def update_padded(folder: str, prompt: int, new: int) -> Callable[[], dict[str, Any]]:
    """What one writes first: pad, forward, cross entropy on what was said, backward, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    rows = make_rows(prompt, new)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    longest = max(map(len, rows))

    def run() -> dict[str, Any]:
        started = perf_counter()
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :prompt] = -100
        said = longest - prompt + 1
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=said).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, prompt:].flatten(), ignore_index=-100
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"seconds": perf_counter() - started, "tokens": ids.numel()}

    return run


PARTS = {"ours": update_ours, "padded": update_padded}


def measure(options: Options) -> list[Figure]:
    assert options.model is not None
    cases = ((64, 16),) if options.quick else ((512, 128), (2048, 128))
    rates = find_rates()
    figures: list[Figure] = []
    for prompt, new in cases:
        settings = {"folder": options.model, "prompt": prompt, "new": new}
        ours, packed, padded = alternate(
            [
                partial(Part, "update", "ours", **settings, share=True),
                partial(Part, "update", "ours", **settings, share=False),
                partial(Part, "update", "padded", **settings),
            ],
            (1 if options.quick else 3) + 1,
        )
        body, embedding = 106.2e6, 28.3e6
        flops = 6 * (body * ours[0]["tokens"] + embedding * SIBLINGS * new)
        for theirs, against in ((packed, "packed without sharing"), (padded, "padded batch in transformers")):
            rows = list(zip(ours, theirs, strict=True))[1:]
            fewer = rows[0][1]["tokens"] / rows[0][0]["tokens"]
            case = f"{SIBLINGS} rows, prompt {prompt:,}, up to {new} trained"
            versions = find_versions("torch", "transformers")
            figures.append(
                compare(
                    f"update, {case} ({fewer:.1f} times fewer tokens)",
                    "s",
                    [(one["seconds"], other["seconds"]) for one, other in rows],
                    against,
                    bound=flops / rates["flops"],
                    bounded_by="every distinct token forward and backward at GEMM speed",
                    versions=versions,
                )
            )
            peaks = [(one["peak"], other["peak"]) for one, other in rows]
            figures.append(compare(f"peak memory of the update, {case}", "GB", peaks, against))
    return figures
