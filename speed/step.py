# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""One GRPO step on SmolLM2-135M, ours and TRL's: eight siblings of one prompt, sampled and learned from.

In several turns an observation follows each reply but the last; TRL's side then is a `rollout_func` that
calls `generate` for all siblings at once, turn by turn, as its documentation shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from speed.measure import Figure, Options, Part, alternate, compare, find_rates, find_versions

SIBLINGS = 8
OBSERVED = 32  # tokens after each reply but the last
CASES = ((512, 128, 1), (512, 128, 4), (2048, 128, 1), (512, 512, 4))
WORDS = [
    "the",
    "order",
    "of",
    "a",
    "customer",
    "who",
    "was",
    "here",
    "today",
    "and",
    "did",
    "not",
    "say",
    "it",
]


def make_prompt(tokenizer: Any, length: int) -> tuple[str, list[int]]:
    """A text of common words that is exactly so many tokens."""
    text = " ".join(WORDS[place % len(WORDS)] for place in range(length))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == length, f"the prompt has {len(ids)} tokens instead of {length}"
    return text, ids


def step_ours(folder: str, prompt: int, new: int, turns: int) -> Callable[[], dict[str, Any]]:
    import asyncio

    from transformers import AutoTokenizer

    from trialogue.config import LossSettings
    from trialogue.engine.api import EngineSettings, OptimParams, Row, SamplingParams
    from trialogue.engine.torch_engine import TorchEngine
    from trialogue.learn.grpo import PolicyLoss, advantages

    _, first = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    engine = TorchEngine(folder, EngineSettings(device="cpu"))
    params = SamplingParams(max_tokens=new // turns, seed=1)

    async def talk(number: int, share: float) -> Row:
        tokens, mask, logprobs = list(first), [0] * prompt, [0.0] * prompt
        for turn in range(turns):
            (reply,) = await engine.sample([tokens], params, session=str(number))
            tokens += reply.tokens
            mask += [1] * len(reply.tokens)
            logprobs += reply.logprobs
            if turn + 1 < turns:
                tokens += first[:OBSERVED]
                mask += [0] * OBSERVED
                logprobs += [0.0] * OBSERVED
        return Row(tokens, mask, logprobs, [share] * len(tokens))

    async def step() -> dict[str, Any]:
        started = perf_counter()
        shares = advantages([float(number % 2) for number in range(SIBLINGS)])
        rows = await asyncio.gather(*(talk(number, share) for number, share in enumerate(shares)))
        sampled = perf_counter()
        await engine.forward_backward(list(rows), PolicyLoss(LossSettings()))
        await engine.optim_step(OptimParams(learning_rate=1e-6))
        await engine.publish()
        updated = perf_counter()
        tokens = sum(map(sum, (row.mask for row in rows)))
        return {"generation": sampled - started, "update": updated - sampled, "tokens": tokens}

    loop = asyncio.new_event_loop()
    return lambda: loop.run_until_complete(step())


def step_trl(folder: str, prompt: int, new: int, turns: int) -> Callable[[], dict[str, Any]]:
    import tempfile

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, first = make_prompt(tokenizer, prompt)
    clock: dict[str, float] = {}
    counts: dict[str, int] = {}

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.setdefault("begin", perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock["end"] = perf_counter()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(number % 2) for number in range(len(completion_ids))]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch

        ids = torch.tensor([first] * len(prompts))
        mask: list[int] = []
        model = trainer.accelerator.unwrap_model(trainer.model)
        for turn in range(turns):
            with torch.no_grad():
                ids = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    min_new_tokens=new // turns,
                    max_new_tokens=new // turns,
                )
            mask += [1] * (new // turns)
            if turn + 1 < turns:
                ids = torch.cat([ids, torch.tensor([first[:OBSERVED]] * len(prompts))], 1)
                mask += [0] * OBSERVED
        said = ids[:, prompt:].tolist()
        return {
            "prompt_ids": [first] * len(prompts),
            "completion_ids": said,
            "logprobs": [[0.0] * len(row) for row in said],
            "env_mask": [mask] * len(prompts),
        }

    def step() -> dict[str, Any]:
        clock.clear()
        clock["generation"] = 0.0
        with tempfile.TemporaryDirectory() as scratch:
            config = GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                beta=0.0,
                learning_rate=1e-6,
                per_device_train_batch_size=SIBLINGS,
                num_generations=SIBLINGS,
                max_completion_length=new + (turns - 1) * OBSERVED,
                generation_kwargs={"min_new_tokens": new},
                max_steps=1,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": "float32"},
            )
            trainer = GRPOTrainer(
                folder,
                reward,
                config,
                train_dataset=Dataset.from_list([{"prompt": text}] * SIBLINGS),
                callbacks=[Watch()],
                rollout_func=rollout if turns > 1 else None,
            )
            generate = trainer._generate

            def timed(*arguments: Any, **more: Any) -> Any:
                # The first batch is fetched before the step is announced: the step begins here at the latest.
                began = perf_counter()
                clock.setdefault("begin", began)
                result = generate(*arguments, **more)
                clock["generation"] += perf_counter() - began
                counts["tokens"] = SIBLINGS * new
                return result

            trainer._generate = timed
            trainer.train()
        whole = clock["end"] - clock["begin"]
        return {"generation": clock["generation"], "update": whole - clock["generation"], **counts}

    return step


PARTS = {"ours": step_ours, "TRL": step_trl}


def measure(options: Options) -> list[Figure]:
    if options.trl is None:
        print("step: left out, name the Python of an environment with TRL by --trl-python")
        return []
    assert options.model is not None
    cases = ((64, 16, 1), (64, 16, 2)) if options.quick else CASES
    repetitions = options.repetitions if options.quick else max(1, min(3, options.repetitions))
    rates = find_rates()
    figures: list[Figure] = []
    for prompt, new, turns in cases:
        settings = {"folder": options.model, "prompt": prompt, "new": new, "turns": turns}
        ours, theirs = alternate(
            [
                partial(Part, "step", "ours", **settings),
                partial(Part, "step", "TRL", options.trl, **settings),
            ],
            repetitions + 1,  # the first one warms up
        )
        rows = list(zip(ours, theirs, strict=True))[1:]
        assert all(one["tokens"] == other["tokens"] == SIBLINGS * new for one, other in rows)
        case = f"prompt {prompt:,}, {SIBLINGS} × {new} new in {turns} turn{'s' if turns > 1 else ''}"
        bound = count_flops(prompt, new, turns) / rates["flops"]
        for name in ("step", "generation", "update"):
            pairs = [(take(one, name), take(other, name)) for one, other in rows]
            figures.append(
                compare(
                    f"GRPO {name}, {case}",
                    "s",
                    pairs,
                    "TRL 1.16",
                    bound=bound if name == "step" else None,
                    bounded_by="every distinct token once forward, once more with gradient, at GEMM speed",
                    versions=find_versions("torch", "transformers"),
                )
            )
        memory = [(one["peak"], other["peak"]) for one, other in rows]
        figures.append(compare(f"peak memory of the step, {case}", "GB", memory, "TRL 1.16"))
    return figures


def take(result: dict[str, Any], name: str) -> float:
    return result["generation"] + result["update"] if name == "step" else result[name]


def count_flops(
    prompt: int, new: int, turns: int, weights: float = 134.5e6, embedding: float = 28.3e6
) -> float:
    """Two operations for each weight and token forward, four backward; prompts once for all siblings; the
    output matrix, which is the embedding, only where tokens are sampled."""
    own = SIBLINGS * (new + (turns - 1) * OBSERVED)
    body = 2 * (weights - embedding) * (prompt + own)
    output = 2 * embedding * SIBLINGS * new
    return (body + output) * (1 + 3)
