# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false
"""Measure sampling on SmolLM2-135M: conversations with a shared prompt, and plain batches of 1, 8 and 32.

32 conversations of 6 turns share their first 500 or 2,000 tokens. Beside transformers' continuous batching,
which takes minutes for them, only their first 2 turns are sampled.

Every side gets the same token ids and returns the same number of tokens. A peer keeps from earlier turns what
it can: transformers' `generate` the keys and values of every conversation, its continuous batching and vLLM
their prefix caches, the server of llama.cpp a slot for each conversation. All compute in float32; llama.cpp
with the weights of its file and a half-precision cache, which is its default. On processors that multiply
bfloat16 all but llama.cpp are also measured in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from time import perf_counter, sleep
from typing import Any

from speed.measure import (
    BODY,
    EMBEDDING,
    Figure,
    Options,
    Part,
    alternate,
    compare,
    find_precisions,
    find_rates,
    join_versions,
)
from speed.step import make_prompt

OWN, OBSERVED = 24, 24  # tokens of the first message, and observed after each reply but the last
TURNS, FIRST = 6, 2  # turns, and the number of them for peers that take minutes
CACHED = 2 * 30 * 3 * 64  # cached numbers per token of SmolLM2: keys and values, layers, heads, width
RUNS = count()

Reply = Callable[[list[list[int]]], list[list[int]]]


def converse(prompt: Sequence[int], talks: int, turns: int, reply: Reply) -> dict[str, Any]:
    """Sample all conversations turn by turn; `reply` continues every row. The first token differs in every
    run, so that caches contain nothing from the previous run."""
    shared = [1000 + next(RUNS), *prompt[1:]]
    rows = [[*shared, *(5000 + (31 * talk + place) % 997 for place in range(OWN))] for talk in range(talks)]
    started, said = perf_counter(), 0
    for turn in range(turns):
        for row, new in zip(rows, reply(rows), strict=True):
            said += len(new)
            row += new
            row += [6000 + (turn * 17 + place) % 991 for place in range(OBSERVED)]
    return {"rate": said / (perf_counter() - started), "tokens": said}


def warm_up(prompt: Sequence[int], talks: int, turns: int, reply: Reply) -> Callable[[], dict[str, Any]]:
    """Warm up with two short conversations, then run everything on each request."""
    converse(prompt[:64], min(2, talks), 1, reply)
    return lambda: converse(prompt, talks, turns, reply)


def sample_ours(
    folder: str, prompt: int, talks: int, turns: int, new: int, precision: Any
) -> Callable[[], dict[str, Any]]:
    import asyncio

    from transformers import AutoTokenizer

    from trialogue.engine.api import EngineSettings, SamplingParams
    from trialogue.engine.torch_engine import TorchEngine

    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    engine = TorchEngine(folder, EngineSettings(device="cpu", precision=precision))
    loop = asyncio.new_event_loop()
    params = SamplingParams(max_tokens=new, seed=1)

    async def reply(rows: list[list[int]]) -> list[list[int]]:
        asked = (engine.sample([row], params, session=str(number)) for number, row in enumerate(rows))
        return [completion.tokens for (completion,) in await asyncio.gather(*asked)]

    return warm_up(shared, talks, turns, lambda rows: loop.run_until_complete(reply(rows)))


def sample_generate(
    folder: str, prompt: int, talks: int, turns: int, new: int, precision: str
) -> Callable[[], dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))

    kept: list[Any] = [None]  # keys and values of all rows

    def reply(rows: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(rows)
        # The same conversations: all but the last sampled token, and the observation after it.
        if kept[0] is None or kept[0].get_seq_length() + 1 + OBSERVED != ids.shape[1]:
            kept[0] = DynamicCache(config=model.config)
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0}
        settings |= {"min_new_tokens": new, "max_new_tokens": new, "past_key_values": kept[0]}
        return model.generate(ids, **settings)[:, ids.shape[1] :].tolist()

    return warm_up(shared, talks, turns, reply)


def sample_continuous(
    folder: str, prompt: int, talks: int, turns: int, new: int, precision: str
) -> Callable[[], dict[str, Any]]:
    import logging

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel("ERROR")

    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))
    page = 32
    longest = prompt + OWN + turns * (new + OBSERVED)
    room = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=talks * (longest // page + 2),
        max_batch_tokens=2048,
        max_requests_per_batch=talks,
        max_blocks_per_request=0,  # a code path that only flash attention has
    )
    asked = GenerationConfig(max_new_tokens=new, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)

    def reply(rows: list[list[int]]) -> list[list[int]]:
        found = model.generate_batch(rows, asked, room, persistent_manager=True, warmup=False)
        return [item.generated_tokens for _, item in sorted(found.items(), key=number_of)]

    return warm_up(shared, talks, turns, reply)


def number_of(item: tuple[str, Any]) -> int:
    """The number in the name of a request such as `req_12`."""
    return int(item[0].rsplit("_", 1)[1])


def sample_vllm(
    folder: str, prompt: int, talks: int, turns: int, new: int, precision: str, eager: bool
) -> Callable[[], dict[str, Any]]:
    """Compiled unless it is eager, which takes minutes the first time."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    # Made for all cases, so that it is compiled once. It caches whole blocks only.
    sizes = {"max_model_len": 4096, "max_num_seqs": 32, "block_size": 32}
    model = LLM(folder, dtype=precision, enable_prefix_caching=True, enforce_eager=eager, **sizes)
    params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=1.0, detokenize=False)

    def reply(rows: list[list[int]]) -> list[list[int]]:
        found = model.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        return [list(item.outputs[0].token_ids) for item in found]

    return warm_up(shared, talks, turns, reply)


def sample_llama(
    folder: str, prompt: int, talks: int, turns: int, new: int, precision: str, server: str, gguf: str
) -> Callable[[], dict[str, Any]]:
    import atexit
    import json
    import socket
    import subprocess
    from concurrent.futures import ThreadPoolExecutor
    from urllib.request import Request, urlopen

    from transformers import AutoTokenizer

    assert precision == "float32", "llama.cpp computes with what its file holds"
    _, shared = make_prompt(AutoTokenizer.from_pretrained(folder), prompt)
    longest = prompt + OWN + turns * (new + OBSERVED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ["OMP_NUM_THREADS"]
    sizes = ["-c", str(talks * (longest + 64)), "-np", str(talks), "-t", threads, "-tb", threads]
    command = [server, "-m", gguf, "--port", str(port), *sizes, "--no-webui", "--log-disable"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    atexit.register(process.terminate)

    def ask(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{port}/{path}", data, {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            return json.load(answer)

    def is_ready() -> bool:
        try:
            return ask("health")["status"] == "ok"
        except OSError:  # not listening yet, or still loading
            assert process.poll() is None, f"{server} has ended with status {process.returncode}"
            return False

    while not is_ready():
        sleep(0.2)
    build = str(ask("props").get("build_info", "unknown"))
    settings = {
        "n_predict": new,
        "ignore_eos": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    pool = ThreadPoolExecutor(talks)

    def say(number: int, row: list[int]) -> list[int]:
        asked = {"prompt": row, "id_slot": number, "cache_prompt": True, "return_tokens": True, **settings}
        return ask("completion", asked)["tokens"]

    def reply(rows: list[list[int]]) -> list[list[int]]:
        return list(pool.map(say, range(len(rows)), rows))

    versions = {"llama.cpp": build, "gguf": os.path.basename(gguf)}
    run = warm_up(shared, talks, turns, reply)
    return lambda: {**run(), "versions": versions}


PARTS = {
    "ours": sample_ours,
    "transformers generate": sample_generate,
    "transformers continuous batching": sample_continuous,
    "vLLM": sample_vllm,
    "llama.cpp server": sample_llama,
}
Case = tuple[int, int, int, int]  # tokens shared, conversations, turns, new tokens in each
Peer = tuple[str, str | None, dict[str, Any]]  # name of the part, its Python, settings of its own


def measure(options: Options) -> Iterator[Figure]:
    assert options.model is not None
    talks: list[Case] = [(64, 3, turns, 4) for turns in (TURNS, FIRST)]
    if not options.quick:
        talks = [(prompt, 32, turns, 32) for prompt in (500, 2000) for turns in (TURNS, FIRST)]
    plain: list[Case] = [(8, 2, 1, 4)] if options.quick else [(8, size, 1, 128) for size in (1, 8, 32)]
    slow: list[Peer] = [("transformers continuous batching", None, {})]
    quick: list[Peer] = [("transformers generate", None, {})]
    if options.vllm is not None:
        quick.append(("vLLM", options.vllm, {"eager": options.quick}))
    else:
        print("sample: vLLM left out, name the Python of an environment with it by --vllm-python")
    if options.llama is not None and options.gguf is not None:
        quick.append(("llama.cpp server", None, {"server": options.llama, "gguf": options.gguf}))
    else:
        print("sample: llama.cpp left out, name its server by --llama-server and its weights by --gguf")
    slow, quick = ([peer for peer in peers if options.against in peer[0]] for peers in (slow, quick))
    if not (slow or quick):
        print(f"sample: no peer has '{options.against}' in its name")
    for precision in find_precisions(options):
        rates = find_rates(precision)
        for case in (*talks, *plain):
            peers = slow if case[2] == FIRST else quick
            if options.wants(tell(case, precision)):
                yield from match(case, precision, peers, options.repetitions, options.model, rates)


def tell(case: Case, precision: str) -> str:
    prompt, talks, turns, _ = case
    told = f"batch of {talks}" if turns == 1 else f"{talks} conversations × {turns} turns, prefix {prompt:,}"
    return f"sampling, {told}" + ("" if precision == "float32" else f", {precision}")


def match(
    case: Case, precision: str, peers: list[Peer], repetitions: int, folder: str, rates: dict[str, float]
) -> Iterator[Figure]:
    """Ours and all selected peers in turn."""
    prompt, talks, turns, new = case
    if precision != "float32":
        peers = [peer for peer in peers if "gguf" not in peer[2]]
    if not peers:
        return
    settings = {"folder": folder, "prompt": prompt, "talks": talks, "turns": turns, "new": new}
    settings["precision"] = precision
    sides = [("ours", None, {}), *peers]
    made = [partial(Part, "sample", name, python, **settings, **more) for name, python, more in sides]
    tokens = talks * turns * new
    for ours, *others in alternate(made, repetitions):
        for (peer, _, _), theirs in zip(peers, others, strict=True):
            rows = list(zip(ours, theirs, strict=True))
            assert all(one["tokens"] == other["tokens"] == tokens for one, other in rows)
            yield compare(
                tell(case, precision),
                "tokens/s",
                [(one["rate"], other["rate"]) for one, other in rows],
                peer,
                more_is_better=True,
                bound=tokens / find_least(case, rates),
                bounded_by="GEMM; for each token sampled side by side memory bandwidth or GEMM",
                versions=join_versions(ours[0], theirs[0], peer),
            )


def find_least(case: Case, rates: dict[str, float]) -> float:
    """Lower bound of the seconds on this machine: distinct observed tokens pass the body once at the speed of
    large products; every step of sampled tokens reads all weights and caches from memory and multiplies
    them."""
    prompt, talks, turns, new = case
    read = prompt + talks * (OWN + (turns - 1) * OBSERVED)
    kept = prompt + talks * (OWN + turns * new + (turns - 1) * OBSERVED) / 2  # on average
    brought = ((BODY + EMBEDDING) + kept * CACHED) * rates["width"] / rates["bytes"]
    multiplied = 2 * (BODY + EMBEDDING) * talks / rates["flops"]
    return 2 * BODY * read / rates["flops"] + turns * new * max(brought, multiplied)
