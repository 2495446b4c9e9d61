# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""Measure one GRPO step on SmolLM2-135M, ours and TRL's: eight siblings of one prompt, sampled and learned
from.

Every repetition has a process of its own, which takes a whole step before the measured one: the first steps
allocate memory, which a long run does only once. If a step takes minutes, the first step is measured on both
sides. With several turns an observation follows each reply but the last. TRL's side is then a `rollout_func`
that calls `generate` for all siblings, turn by turn, as its documentation shows. It returns no
log-probabilities: TRL takes them from the sampler only with vLLM, and computing them would cost it more.
Earlier turns are kept in the cache, and weights are rounded to bfloat16 once, not for every token. TRL
recomputes nothing for its gradients (no checkpointing), and learns in micro-batches, which need less memory
and the same time. Both sides compute in float32, and on processors that multiply bfloat16 also in that, which
is TRL's default. Weights and moments are float32 in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from random import Random
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
    find_precisions,
    find_rates,
    join_versions,
)

SIBLINGS = 8
OBSERVED = 32  # tokens observed after each reply but the last
CASES = ((512, 128, 1), (512, 128, 4), (2048, 128, 1), (512, 512, 4), (2048, 512, 4))
LONG = 6000  # from this many tokens of all siblings a step takes minutes
FITTING = 3000  # tokens per micro-batch of TRL: more take as long and need more memory
WORDS = (
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
)


def make_prompt(tokenizer: Any, length: int) -> tuple[str, list[int]]:
    """A text of common words with an exact number of tokens, in an unpredictable order: siblings with equal
    replies would be computed once."""
    text = " ".join(Random(length).choices(WORDS, k=length))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == length, f"the prompt has {len(ids)} tokens instead of {length}"
    return text, ids


def step_ours(
    folder: str, prompt: int, new: int, turns: int, before: int, precision: Any
) -> Callable[[], dict[str, Any]]:
    import asyncio

    from transformers import AutoTokenizer

    from trialogue.config import LossSettings
    from trialogue.engine.api import EngineSettings, OptimParams, Row, SamplingParams
    from trialogue.engine.torch_engine import TorchEngine
    from trialogue.learn.advantages import normalize
    from trialogue.learn.losses import PolicyLoss

    _, first = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    engine = TorchEngine(folder, EngineSettings(device="cpu", precision=precision))

    async def talk(number: int, share: float) -> Row:
        tokens, mask, logprobs = list(first), [0] * len(first), [0.0] * len(first)
        for turn in range(turns):
            params = SamplingParams(
                max_tokens=new // turns, seed=number
            )  # no two siblings have the same reply
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
        computed = engine.update.computed_tokens
        started = perf_counter()
        shares = normalize([float(number % 2) for number in range(SIBLINGS)])
        rows = await asyncio.gather(*(talk(number, share) for number, share in enumerate(shares)))
        sampled = perf_counter()
        await engine.forward_backward(list(rows), PolicyLoss(LossSettings()))
        await engine.optim_step(OptimParams(learning_rate=1e-6))
        await engine.publish()
        updated = perf_counter()
        tokens = sum(map(sum, (row.mask for row in rows)))
        distinct = engine.update.computed_tokens - computed
        times = {"generation": sampled - started, "update": updated - sampled}
        return {**times, "tokens": tokens, "distinct": distinct}

    loop = asyncio.new_event_loop()
    for _ in range(before):
        loop.run_until_complete(step())
    return lambda: loop.run_until_complete(step())


def step_trl(
    folder: str, prompt: int, new: int, turns: int, before: int, precision: str
) -> Callable[[], dict[str, Any]]:
    import tempfile

    from datasets import Dataset
    from transformers import AutoTokenizer, DynamicCache, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(number % 2) for number in range(len(completion_ids))]

    def roll_out(first: list[int], new: int, prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch

        ids = torch.tensor([first] * len(prompts))
        mask: list[int] = []
        model = trainer.accelerator.unwrap_model(trainer.model)
        settings = {"do_sample": True, "top_k": 0, "past_key_values": DynamicCache(config=model.config)}
        settings |= {"min_new_tokens": new // turns, "max_new_tokens": new // turns}
        with torch.no_grad(), trainer.accelerator.autocast():  # weights are rounded once for all turns
            for turn in range(turns):
                ids = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                mask += [1] * (new // turns)
                if turn + 1 < turns:
                    ids = torch.cat([ids, torch.tensor([first[:OBSERVED]] * len(prompts))], 1)
                    mask += [0] * OBSERVED
        said = ids[:, len(first) :].tolist()
        return {
            "prompt_ids": [first] * len(prompts),
            "completion_ids": said,
            "logprobs": [[0.0] * len(row) for row in said],
            "env_mask": [mask] * len(prompts),
        }

    text, first = make_prompt(tokenizer, prompt)
    longest = new + (turns - 1) * OBSERVED
    parts = next(n for n in (1, 2, 4, 8) if SIBLINGS * (prompt + longest) <= n * FITTING)
    clocks: list[dict[str, float]] = []  # of each step

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clocks[-1]["end"] = perf_counter()

    def step() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            config = GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=precision == "bfloat16",
                beta=0.0,
                learning_rate=1e-6,
                per_device_train_batch_size=SIBLINGS // parts,
                gradient_accumulation_steps=parts,
                num_generations=SIBLINGS,
                max_completion_length=longest,
                generation_kwargs={"min_new_tokens": new},
                max_steps=before + 1,
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
                rollout_func=partial(roll_out, first, new) if turns > 1 else None,
            )
            generate = trainer._generate

            def timed(*arguments: Any, **more: Any) -> Any:
                began = perf_counter()  # a step begins with sampling
                result = generate(*arguments, **more)
                masks = result[2] or [[1] * len(said) for said in result[1]]
                said = sum(map(sum, masks))
                clocks.append({"begin": began, "generation": perf_counter() - began, "tokens": said})
                return result

            trainer._generate = timed
            trainer.train()
        assert len(clocks) == before + 1, f"TRL generated {len(clocks)} times in {before + 1} steps"
        clock = clocks[-1]
        update = clock["end"] - clock["begin"] - clock["generation"]
        return {"generation": clock["generation"], "update": update, "tokens": int(clock["tokens"])}

    return step


PARTS = {"ours": step_ours, "TRL": step_trl}


def measure(options: Options) -> Iterator[Figure]:
    if options.trl is None:
        print("step: left out, name the Python of an environment with TRL by --trl-python")
        return
    assert options.model is not None
    cases = ((64, 16, 1), (64, 16, 2)) if options.quick else CASES
    for (prompt, new, turns), precision in product(cases, find_precisions(options)):
        case = f"prompt {prompt:,}, {SIBLINGS} × {new} new in {turns} turn{'s' if turns > 1 else ''}"
        case += "" if precision == "float32" else f", {precision}"
        if not options.wants(f"GRPO step, {case}"):
            continue
        rates = find_rates(precision)
        is_long = SIBLINGS * (prompt + new) > LONG
        settings = {"folder": options.model, "prompt": prompt, "new": new, "turns": turns}
        settings |= {"before": 0 if is_long else 1, "precision": precision}
        sides = [
            partial(Part, "step", "ours", **settings),
            partial(Part, "step", "TRL", options.trl, **settings),
        ]
        for ours, theirs in alternate(sides, options.repetitions, anew=True):
            yield from match(case, (prompt, new, turns), list(zip(ours, theirs, strict=True)), rates)


def match(
    case: str,
    sizes: tuple[int, int, int],
    rows: list[tuple[dict[str, Any], dict[str, Any]]],
    rates: dict[str, float],
) -> Iterator[Figure]:
    """The figures of a case from its repetitions."""
    prompt, new, turns = sizes
    assert all(one["tokens"] == other["tokens"] == SIBLINGS * new for one, other in rows)
    whole = prompt + SIBLINGS * (new + (turns - 1) * OBSERVED)
    assert all(one["distinct"] > 0.97 * whole for one, _ in rows), "siblings say the same"
    versions = join_versions(*rows[0], "TRL")
    bounds = find_least(prompt, new, turns, rates)
    for name in ("step", "generation", "update"):
        yield compare(
            f"GRPO {name}, {case}",
            "s",
            [(take(one, name), take(other, name)) for one, other in rows],
            "TRL",
            bound=bounds[name],
            bounded_by="GEMM; for each token sampled side by side memory bandwidth or GEMM",
            versions=versions,
        )
    yield compare_peaks(f"step, {case}", rows, "TRL", versions)


def take(result: dict[str, Any], name: str) -> float:
    return result["generation"] + result["update"] if name == "step" else result[name]


def find_least(prompt: int, new: int, turns: int, rates: dict[str, float]) -> dict[str, float]:
    """Lower bound of the seconds on this machine: two operations per weight and token forward, four backward;
    prompts once for all siblings; the output matrix only for sampled tokens; and all weights read from memory
    for each token that the siblings sample together."""
    weights = BODY + EMBEDDING
    read = prompt + SIBLINGS * (turns - 1) * OBSERVED
    forward = 2 * (BODY * (read + SIBLINGS * new) + EMBEDDING * SIBLINGS * new)
    together = max(2 * weights * SIBLINGS / rates["flops"], weights * rates["width"] / rates["bytes"])
    sampling = 2 * BODY * read / rates["flops"] + new * together
    update = 3 * forward / rates["flops"]
    return {"generation": sampling, "update": update, "step": sampling + update}
