"""One step of learning and a batch of sampling, ours and theirs, on SmolLM2-135M: python speed/learn.py

The step: a prompt of 512 tokens, 8 siblings of 128 new tokens each, one update. `--trl-python` names the
Python of an environment with TRL (`make test-trl` makes .venv-trl), `--vllm-python` one with vLLM. Every part
runs in a process of its own, one after the other, with the same token counts and no warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

PROMPT, SIBLINGS, NEW = 512, 8, 128
SAMPLER_PROMPT, SAMPLER_NEW = 500, 64
BATCHES = (1, 8, 32)
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


def find_peak() -> float:
    """Peak resident memory of this process in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def make_prompt(tokenizer: Any, length: int) -> tuple[str, list[int]]:
    """A text of common words that is exactly so many tokens."""
    text = " ".join(WORDS[place % len(WORDS)] for place in range(length))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == length, f"the prompt has {len(ids)} tokens instead of {length}"
    return text, ids


# -- the parts, each in a process of its own ---------------------------------------------------------------


def step_ours(folder: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from trialogue.config import LossSettings
    from trialogue.engine.api import EngineSettings, OptimParams, Row, SamplingParams
    from trialogue.engine.torch_engine import TorchEngine
    from trialogue.learn.grpo import PolicyLoss, advantages

    _, prompt = make_prompt(AutoTokenizer.from_pretrained(folder), PROMPT)
    engine = TorchEngine(folder, EngineSettings(device="cpu"))

    async def step() -> dict[str, Any]:
        started = perf_counter()
        params = SamplingParams(max_tokens=NEW, seed=1)
        replies = await engine.sample([prompt] * SIBLINGS, params)
        sampled = perf_counter()
        shares = advantages([float(number % 2) for number in range(SIBLINGS)])
        rows = [
            Row(
                prompt + reply.tokens,
                [0] * PROMPT + [1] * NEW,
                [0.0] * PROMPT + reply.logprobs,
                [share] * (PROMPT + NEW),
            )
            for reply, share in zip(replies, shares, strict=True)
        ]
        outputs = await engine.forward_backward(rows, PolicyLoss(LossSettings()))
        await engine.optim_step(OptimParams(learning_rate=1e-6))
        updated = perf_counter()
        return {
            "generation": sampled - started,
            "update": updated - sampled,
            "tokens": sum(len(reply.tokens) for reply in replies),
            "logprob_gap_max": outputs.metrics["logprob_gap_max"],
        }

    return asyncio.run(step())


def step_trl(folder: str) -> dict[str, Any]:
    import tempfile

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    text, _ = make_prompt(AutoTokenizer.from_pretrained(folder), PROMPT)
    clock: dict[str, float] = {"generation": 0.0}
    counts: dict[str, int] = {}

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock["begin"] = perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock["end"] = perf_counter()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        counts["tokens"] = sum(map(len, completion_ids))
        return [float(number % 2) for number in range(len(completion_ids))]

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            beta=0.0,
            learning_rate=1e-6,
            per_device_train_batch_size=SIBLINGS,
            num_generations=SIBLINGS,
            max_completion_length=NEW,
            generation_kwargs={"min_new_tokens": NEW},
            max_steps=1,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
        )
        data = Dataset.from_list([{"prompt": text}] * SIBLINGS)
        trainer = GRPOTrainer(folder, reward, config, train_dataset=data, callbacks=[Watch()])
        generate = trainer._generate

        def timed(*arguments: Any, **more: Any) -> Any:
            # The first batch is fetched before the step is announced: the step begins here at the latest.
            began = perf_counter()
            clock.setdefault("begin", began)
            result = generate(*arguments, **more)
            clock["generation"] += perf_counter() - began
            return result

        trainer._generate = timed
        trainer.train()
    whole = clock["end"] - clock["begin"]
    return {"generation": clock["generation"], "update": whole - clock["generation"], **counts}


def sample_ours(folder: str, seconds: float) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from trialogue.engine.api import EngineSettings, SamplingParams
    from trialogue.engine.torch_engine import TorchEngine

    _, prompt = make_prompt(AutoTokenizer.from_pretrained(folder), SAMPLER_PROMPT)
    engine = TorchEngine(folder, EngineSettings(device="cpu"))

    async def sample() -> dict[str, Any]:
        rates: dict[str, Any] = {}
        for batch in BATCHES:
            await engine.publish()  # nothing is left of the batch before
            started = perf_counter()
            params = SamplingParams(max_tokens=SAMPLER_NEW, seed=batch)
            replies = await engine.sample([prompt] * batch, params)
            rates[str(batch)] = sum(len(reply.tokens) for reply in replies) / (perf_counter() - started)
        return rates

    return asyncio.run(sample())


def sample_transformers(folder: str, seconds: float) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, prompt = make_prompt(AutoTokenizer.from_pretrained(folder), SAMPLER_PROMPT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rates: dict[str, Any] = {}
    for batch in BATCHES:
        ids = torch.tensor([prompt] * batch)
        started = perf_counter()
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=SAMPLER_NEW,
            max_new_tokens=SAMPLER_NEW,
            max_time=seconds,  # whatever was sampled until then is counted
        )
        rates[str(batch)] = batch * (found.shape[1] - len(prompt)) / (perf_counter() - started)
    return rates


def sample_vllm(folder: str, seconds: float) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    _, prompt = make_prompt(AutoTokenizer.from_pretrained(folder), SAMPLER_PROMPT)
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=1024, enable_prefix_caching=True)
    params = SamplingParams(max_tokens=SAMPLER_NEW, ignore_eos=True, temperature=1.0)
    rates: dict[str, Any] = {}
    for batch in BATCHES:
        model.reset_prefix_cache()
        started = perf_counter()
        found = model.generate([{"prompt_token_ids": prompt}] * batch, params, use_tqdm=False)
        count = sum(len(item.outputs[0].token_ids) for item in found)
        rates[str(batch)] = count / (perf_counter() - started)
    return rates


PARTS: dict[str, Any] = {
    "step ours": lambda folder, seconds: step_ours(folder),
    "step TRL": lambda folder, seconds: step_trl(folder),
    "sample ours": sample_ours,
    "sample transformers": sample_transformers,
    "sample vLLM": sample_vllm,
}


# -- putting them side by side -----------------------------------------------------------------------------


def run_part(part: str, python: str, folder: str, seconds: float) -> dict[str, Any]:
    """One part in a process of its own; what it prints last is its result."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [python, str(Path(__file__).resolve()), "--part", part, "--model", folder]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{part} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(folder: str, trl: str | None, vllm: str | None, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {
        "prompt": PROMPT,
        "siblings": SIBLINGS,
        "new_tokens": NEW,
        "load": os.getloadavg()[0],
    }
    pythons = {"step ours": sys.executable, "step TRL": trl}
    pythons |= {"sample ours": sys.executable, "sample transformers": sys.executable, "sample vLLM": vllm}
    for part, python in pythons.items():
        if python is not None:
            print(f"{part} …", file=sys.stderr, flush=True)
            result[part] = run_part(part, python, folder, seconds)
    if "step TRL" in result:
        ours, theirs = result["step ours"], result["step TRL"]
        assert ours["tokens"] == theirs["tokens"] == SIBLINGS * NEW, (
            "both have to sample the same number of tokens"
        )
        result["times faster"] = {
            "generation": theirs["generation"] / ours["generation"],
            "update": theirs["update"] / ours["update"],
            "step": (theirs["generation"] + theirs["update"]) / (ours["generation"] + ours["update"]),
        }
    return result


def print_table(result: dict[str, Any]) -> None:
    print(f"one step: prompt {PROMPT}, {SIBLINGS} siblings, {NEW} new tokens each; load {result['load']:.1f}")
    print(f"{'':22}{'generation s':>14}{'update s':>12}{'step s':>10}{'peak GB':>10}")
    for part in ("step ours", "step TRL"):
        if part in result:
            found = result[part]
            whole = found["generation"] + found["update"]
            seconds = f"{found['generation']:14.1f}{found['update']:12.1f}{whole:10.1f}"
            print(f"{part.removeprefix('step '):22}{seconds}{found['peak']:10.2f}")
    if "times faster" in result:
        times = result["times faster"]
        print(f"{'times faster':22}{times['generation']:14.1f}{times['update']:12.1f}{times['step']:10.1f}")
    print(f"\ntokens a second: prompt {SAMPLER_PROMPT}, {SAMPLER_NEW} new tokens")
    print(f"{'requests':22}" + "".join(f"{batch:>10}" for batch in BATCHES) + f"{'peak GB':>10}")
    for part in ("sample ours", "sample transformers", "sample vLLM"):
        if part in result:
            found = result[part]
            rates = "".join(f"{found[str(batch)]:10.1f}" for batch in BATCHES)
            print(f"{part.removeprefix('sample '):22}{rates}{found['peak']:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of the model; SmolLM2 from its package where left out")
    parser.add_argument("--trl-python", default=None, help="Python of an environment with TRL")
    parser.add_argument("--vllm-python", default=None, help="Python of an environment with vLLM")
    parser.add_argument("--seconds", type=float, default=60.0, help="bound of each batch of transformers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        found = PARTS[given.part](given.model, given.seconds)
        print(json.dumps({**found, "peak": find_peak()}))
        return
    folder = given.model
    if folder is None:
        from trialogue.engine.models import find_smollm2

        folder = str(find_smollm2())
    result = compare(folder, given.trl_python, given.vllm_python, given.seconds)
    print(json.dumps(result)) if given.json else print_table(result)


if __name__ == "__main__":
    main()
