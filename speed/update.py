# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Compare one update on rows that share their prompt: as a tree, packed, and padded.

Packed rows share nothing; padded rows are a plain batch. Rows, loss and weights are the same on every side:
SmolLM2-135M, eight siblings of one prompt. The largest possible gain is the ratio of the tokens that must be
computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from speed.measure import (
    BODY,
    EMBEDDING,
    Figure,
    Options,
    Part,
    alternate,
    compare,
    compare_peaks,
    find_rates,
    join_versions,
)
from speed.step import FITTING, SIBLINGS


def make_rows(prompt: int, new: int) -> list[list[int]]:
    """Siblings of different lengths, between three quarters of `new` and `new`."""
    chance = random.Random(0)
    shared = [chance.randrange(1000, 9000) for _ in range(prompt)]
    lengths = [new - number * new // (4 * SIBLINGS) for number in range(SIBLINGS)]
    return [shared + [chance.randrange(1000, 9000) for _ in range(length)] for length in lengths]


def share_nothing(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of common first tokens of two rows."""
    return 0


def update_ours(folder: str, prompt: int, new: int, share: bool) -> Callable[[], dict[str, Any]]:
    import trialogue.engine.update as update
    from trialogue.engine.api import EngineSettings, OptimParams, Row
    from trialogue.engine.torch_engine import TorchEngine
    from trialogue.learn.losses import cross_entropy

    engine = TorchEngine(folder, EngineSettings(device="cpu", max_tokens_per_micro_batch=FITTING))
    if not share:
        update.grow_tree = partial(update.grow_tree, shortest=1 << 30)
        update.common_length = share_nothing

    rows = make_rows(prompt, new)

    def run() -> dict[str, Any]:
        started = perf_counter()
        engine.update.computed_tokens = 0
        taught = [
            Row(row, [0] * prompt + [1] * (len(row) - prompt), [0.0] * len(row), [0.0] * len(row))
            for row in rows
        ]
        engine.update.forward_backward(taught, cross_entropy, 1.0)
        engine.update.optim_step(OptimParams(learning_rate=1e-6))
        return {"seconds": perf_counter() - started, "tokens": engine.update.computed_tokens}

    run()
    return run


def update_padded(folder: str, prompt: int, new: int) -> Callable[[], dict[str, Any]]:
    """The straightforward update: pad, forward, cross entropy on replies, backward, AdamW, in parts of as
    many tokens as the others learn from at once."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    rows = make_rows(prompt, new)
    trained = sum(len(row) - prompt for row in rows)
    fitting = max(1, FITTING // (prompt + new))

    def learn(rows: list[list[int]]) -> int:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        labels = ids.masked_fill(mask == 0, -100)[:, prompt:]
        said = longest - prompt + 1
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=said).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss / trained).backward()
        return ids.numel()

    def run() -> dict[str, Any]:
        started = perf_counter()
        tokens = sum(learn(rows[at : at + fitting]) for at in range(0, SIBLINGS, fitting))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"seconds": perf_counter() - started, "tokens": tokens}

    run()
    return run


PARTS = {"ours": update_ours, "padded": update_padded}


def measure(options: Options) -> Iterator[Figure]:
    assert options.model is not None
    cases = ((64, 16),) if options.quick else ((512, 128), (2048, 128))
    rates = find_rates()
    for prompt, new in cases:
        case = f"{SIBLINGS} rows, prompt {prompt:,}, up to {new} trained"
        if not options.wants(f"update, {case}"):
            continue
        settings = {"folder": options.model, "prompt": prompt, "new": new}
        sides = [
            partial(Part, "update", "ours", **settings, share=True),
            partial(Part, "update", "ours", **settings, share=False),
            partial(Part, "update", "padded", **settings),
        ]
        trained = sum(len(row) - prompt for row in make_rows(prompt, new))
        for ours, packed, padded in alternate(sides, options.repetitions, anew=True):
            least = 6 * (BODY * ours[0]["tokens"] + EMBEDDING * trained) / rates["flops"]
            yield from match(case, ours, packed, "packed without sharing", least)
            yield from match(case, ours, padded, "padded batch in transformers", least)


def match(
    case: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], against: str, least: float
) -> Iterator[Figure]:
    """Time and memory from the repetitions."""
    rows = list(zip(ours, theirs, strict=True))
    fewer = theirs[0]["tokens"] / ours[0]["tokens"]
    versions = join_versions(ours[0], theirs[0], against)
    yield compare(
        f"update, {case}",
        "s",
        [(one["seconds"], other["seconds"]) for one, other in rows],
        against,
        bound=least,
        bounded_by="every distinct token forward and backward at GEMM speed",
        versions=versions,
        note=f"{fewer:.1f} times fewer tokens",
    )
    yield compare_peaks(f"update, {case}", rows, against, versions)
