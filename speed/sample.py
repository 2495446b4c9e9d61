# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false
"""Sampling for 32 conversations of 6 turns that share their first 500 or 2,000 tokens, on SmolLM2-135M.

Every side gets the same token ids in and gives the same number out; a peer keeps of earlier turns what it can
keep: transformers' `generate` nothing, vLLM what its prefix cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from speed.measure import Figure, Options, Part, alternate, compare, find_rates, find_versions
from speed.step import make_prompt

OWN, OBSERVED = 24, 24  # tokens of a conversation's own first message, and after each reply but the last


def converse(
    prompt: Sequence[int], talks: int, turns: int, reply: Callable[[list[list[int]]], list[list[int]]]
) -> dict[str, Any]:
    """All conversations, turn by turn; `reply` continues every row."""
    rows = [[*prompt, *(5000 + (31 * talk + place) % 997 for place in range(OWN))] for talk in range(talks)]
    started, count = perf_counter(), 0
    for turn in range(turns):
        for row, said in zip(rows, reply(rows), strict=True):
            count += len(said)
            row += said
            row += [6000 + (turn * 17 + place) % 991 for place in range(OBSERVED)]
    return {"rate": count / (perf_counter() - started), "tokens": count}


def sample_ours(folder: str, prompt: int, talks: int, turns: int, new: int) -> Callable[[], dict[str, Any]]:
    import asyncio

    from transformers import AutoTokenizer

    from trialogue.engine.api import EngineSettings, SamplingParams
    from trialogue.engine.torch_engine import TorchEngine

    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    engine = TorchEngine(folder, EngineSettings(device="cpu"))
    loop = asyncio.new_event_loop()
    params = SamplingParams(max_tokens=new, seed=1)

    async def everyone(rows: list[list[int]]) -> list[list[int]]:
        asked = (engine.sample([row], params, session=str(number)) for number, row in enumerate(rows))
        return [completion.tokens for (completion,) in await asyncio.gather(*asked)]

    def run() -> dict[str, Any]:
        loop.run_until_complete(engine.publish())  # nothing is left of the run before
        return converse(shared, talks, turns, lambda rows: loop.run_until_complete(everyone(rows)))

    return run


def sample_generate(
    folder: str, prompt: int, talks: int, turns: int, new: int
) -> Callable[[], dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def reply(rows: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(rows)
        mask = torch.ones_like(ids)
        sizes = {"min_new_tokens": new, "max_new_tokens": new}
        found = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **sizes)
        return found[:, ids.shape[1] :].tolist()

    return lambda: converse(shared, talks, turns, reply)


def sample_vllm(folder: str, prompt: int, talks: int, turns: int, new: int) -> Callable[[], dict[str, Any]]:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    longest = prompt + OWN + turns * (new + OBSERVED)
    model = LLM(folder, dtype="float32", max_model_len=longest + 16, enable_prefix_caching=True)
    params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=1.0)

    def reply(rows: list[list[int]]) -> list[list[int]]:
        found = model.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        return [list(item.outputs[0].token_ids) for item in found]

    def run() -> dict[str, Any]:
        model.reset_prefix_cache()
        return converse(shared, talks, turns, reply)

    return run


PARTS = {
    "ours": sample_ours,
    "transformers generate": sample_generate,
    "vLLM": sample_vllm,
}


def measure(options: Options) -> list[Figure]:
    assert options.model is not None
    talks, turns, new = (3, 2, 4) if options.quick else (32, 6, 32)
    prompts = (64,) if options.quick else (500, 2000)
    rates = find_rates()
    figures: list[Figure] = []
    for prompt in prompts:
        settings = {"folder": options.model, "prompt": prompt, "talks": talks, "turns": turns, "new": new}
        peers: list[tuple[str, str | None, int]] = [("transformers generate", None, 1)]
        if options.vllm is not None:
            peers.append(("vLLM", options.vllm, options.repetitions))
        else:
            print("sample: vLLM left out, name the Python of an environment with it by --vllm-python")
        tokens = talks * turns * new
        seen = prompt + talks * (OWN + turns * (new + OBSERVED))
        body, embedding = 106.2e6, 28.3e6
        bound = tokens / ((2 * body * seen + 2 * embedding * tokens) / rates["flops"])
        for peer, python, repetitions in peers:
            ours, theirs = alternate(
                [
                    partial(Part, "sample", "ours", **settings),
                    partial(Part, "sample", peer, python, **settings),
                ],
                repetitions if options.quick else repetitions + 1,
            )
            rows = list(zip(ours, theirs, strict=True))
            rows = rows if len(rows) == 1 else rows[1:]  # the first one warms up
            assert all(one["tokens"] == other["tokens"] == tokens for one, other in rows)
            figures.append(
                compare(
                    f"sampling, {talks} conversations × {turns} turns, shared prefix {prompt:,}",
                    "tokens/s",
                    [(one["rate"], other["rate"]) for one, other in rows],
                    peer,
                    more_is_better=True,
                    bound=bound,
                    bounded_by="every distinct token once, at GEMM speed",
                    versions=find_versions("torch", "transformers"),
                )
            )
    return figures
