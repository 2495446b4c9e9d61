"""The sampler against plain forward passes, alone and in company, with and without what it saves."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PhiConfig, PhiForCausalLM

from trialogue.engine import Completion, SamplingParams
from trialogue.engine.cpu import kernels
from trialogue.engine.cpu.decoder import Decoder
from trialogue.engine.cpu.kernels import DecodeBatch
from trialogue.engine.draw import draw_tokens, uniform_noise
from trialogue.engine.prefixes import best_shared_prefix, common_length
from trialogue.errors import EngineError

VOCABULARY = 300


def make_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


async def converse_all(engine, converse, params, *, prompts, turns=3, named=True):
    return await asyncio.gather(
        *(
            converse(engine, f"c{number}" if named else None, prompt, params, turns, seed=number)
            for number, prompt in enumerate(prompts)
        )
    )


@pytest.fixture(params=[0, 128], ids=["shared", "copied"])
def short(request, monkeypatch):
    """Shared prefixes are attended to separately, or copied into every slot."""
    monkeypatch.setattr("trialogue.engine.sampler.SHORT_PREFIX", request.param)


@pytest.fixture(params=["few operations", "no compiler", "the model's own", "without either"])
def way(request, monkeypatch) -> str:
    """Models are computed in few operations or as large ones are, each with kernels or without."""
    if request.param in ("the model's own", "without either"):
        monkeypatch.setattr("trialogue.engine.cpu.fused.LARGEST", 0)
    if request.param in ("no compiler", "without either"):
        for module in ("kernels", "linear"):
            monkeypatch.setattr(f"trialogue.engine.cpu.{module}.load_kernels", lambda **_: None)
    return request.param


@pytest.fixture
def attended(monkeypatch) -> list[int]:
    """How many rows the kernel was given, each time it was."""
    rows: list[int] = []
    plain_attend, plain_advance = DecodeBatch.attend, Decoder.advance

    def attend(batch, layer, queries, scaling):
        rows.append(len(queries))
        return plain_attend(batch, layer, queries, scaling)

    def advance(decoder, batch, hidden, rotation):
        rows.append(len(hidden))
        return plain_advance(decoder, batch, hidden, rotation)

    monkeypatch.setattr(DecodeBatch, "attend", attend)
    monkeypatch.setattr(Decoder, "advance", advance)
    return rows


async def compare_with_plain(model, engine, converse) -> None:
    """Six conversations of which one begins otherwise, then five that all begin alike."""
    trunk = make_prompt(1, 45)
    prompts = [trunk + make_prompt(10 + number, number) for number in range(5)]
    params = SamplingParams(max_tokens=9, temperature=0.8, stop_tokens=(3, 7), seed=5)
    results = await converse_all(engine, converse, params, prompts=[*prompts, make_prompt(99, 20)])
    await engine.publish()
    results += await converse_all(engine, converse, params, prompts=prompts)
    sampled = 0
    for tokens, logprobs in results:
        with torch.no_grad():
            plain = torch.log_softmax(model(torch.tensor([tokens])).logits[0] / 0.8, dim=-1)
        for position, logprob in enumerate(logprobs):
            if logprob != 0.0:
                sampled += 1
                assert abs(plain[position - 1, tokens[position]].item() - logprob) < 1e-4
    assert sampled > 100


@pytest.mark.usefixtures("short")
async def test_logprobs_equal_a_plain_forward_for_every_token(
    kind, way, attended, make_model, open_engine, converse
):
    model = make_model(kind)
    await compare_with_plain(model, open_engine(copy.deepcopy(model), prefill_chunk=48), converse)
    has_kernels = (
        way in ("few operations", "the model's own") and kernels.load_kernels(is_half=False) is not None
    )
    assert bool(attended) == has_kernels


@pytest.mark.parametrize("make", [(PhiConfig, PhiForCausalLM), (GPTNeoXConfig, GPTNeoXForCausalLM)])
async def test_queries_that_lie_otherwise_are_attended_to_as_well(make, attended, open_engine, converse):
    """Some models turn a part of each head only, which leaves it to lie head by head."""
    settings, kind = make
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    nobody = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = kind(settings(vocab_size=300, **sizes, **nobody)).eval()
    await compare_with_plain(model, open_engine(copy.deepcopy(model), prefill_chunk=48), converse)
    assert attended or kernels.load_kernels(is_half=False) is None


async def test_caches_and_prefixes_change_no_greedy_token(kind, make_model, open_engine, converse):
    trunk = make_prompt(2, 50)
    prompts = [trunk + make_prompt(20 + number, 3 * number) for number in range(4)]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    results, computed = {}, {}
    for keep in (True, False):
        for share in (True, False):
            engine = open_engine(make_model(kind), keep_sessions=keep, share_prefixes=share)
            found = await converse_all(engine, converse, params, prompts=prompts)
            results[keep, share] = [tokens for tokens, _ in found]
            computed[keep, share] = engine.sampler.computed_tokens
    assert all(result == results[True, True] for result in results.values())
    assert computed[True, True] < computed[True, False] < computed[False, False]
    assert computed[True, True] < computed[False, True] < computed[False, False]
    # Each token is computed once, the common prefix once for all, and the last of each completion not at all.
    distinct = len(trunk) + sum(len(tokens) - len(trunk) for tokens in results[True, True])
    assert computed[True, True] == distinct - len(prompts)


@pytest.mark.usefixtures("short")
async def test_a_prefix_shared_later_is_taken_from_the_first(kind, make_model, open_engine, converse):
    trunk = make_prompt(3, 60)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    engine = open_engine(make_model(kind))
    first = await converse(engine, "first", trunk, params, 2, seed=1)
    before = engine.sampler.computed_tokens
    second = await converse(engine, "second", trunk, params, 2, seed=2)
    assert engine.sampler.computed_tokens - before < 60
    (prefix,) = engine.sampler.prefixes
    assert prefix.tokens == trunk[: len(prefix.tokens)]
    assert len(prefix.tokens) >= 60
    # The first conversation goes on from the slot its beginning has left.
    draw = make_prompt(4, 5)
    (more,) = await engine.sample([first[0] + draw], params, session="first")
    alone = open_engine(make_model(kind), keep_sessions=False, share_prefixes=False)
    assert (await alone.sample([first[0] + draw], params))[0].tokens == more.tokens
    assert (await converse(alone, "second", trunk, params, 2, seed=2))[0] == second[0]


async def test_a_small_budget_evicts_and_computes_again(kind, make_model, open_engine, converse):
    prompts = [make_prompt(30, 35) + make_prompt(31 + number, 20) for number in range(6)]
    params = SamplingParams(max_tokens=8, seed=11)
    roomy = open_engine(make_model(kind))
    expected = await converse_all(roomy, converse, params, prompts=prompts)
    needed = roomy.sampler.token_bytes * 130
    tight = open_engine(make_model(kind), cache_bytes=2 * needed)
    found = await converse_all(tight, converse, params, prompts=prompts)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert tight.sampler.computed_tokens > roomy.sampler.computed_tokens
    slab = tight.sampler.slab
    held = slab.slots * slab.capacity + sum(len(prefix.tokens) for prefix in tight.sampler.prefixes)
    assert held * tight.sampler.token_bytes <= 2 * needed


async def test_a_short_prefix_is_shared_where_copies_have_no_room(kind, make_model, open_engine, converse):
    trunk = make_prompt(50, 100)
    prompts = [trunk + make_prompt(51 + number, 4) for number in range(16)]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    roomy = open_engine(make_model(kind))
    expected = await converse_all(roomy, converse, params, prompts=prompts, turns=1)
    tight = open_engine(make_model(kind), cache_bytes=700 * roomy.sampler.token_bytes)
    found = await converse_all(tight, converse, params, prompts=prompts, turns=1)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert tight.sampler.clock < roomy.sampler.clock + 4  # all speak at once here as there


async def test_a_prefix_just_joined_is_not_evicted(make_model, open_engine):
    """Four requests of two kinds come at once, and there is room for both prefixes but not for all four."""
    trunks = [make_prompt(70, 160), make_prompt(71, 160)]
    prompts = [trunk + make_prompt(72 + number, 6) for number, trunk in enumerate(trunks * 2)]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    roomy = open_engine(make_model("llama"))
    expected = await roomy.sample(prompts, params)
    room = (2 * 160 + 3 * 16) * roomy.sampler.token_bytes
    tight = open_engine(make_model("llama"), cache_bytes=room)
    await tight.sample(prompts[::2], params)  # makes the first prefix known; nobody uses it afterwards
    sampler = tight.sampler
    [first] = sampler.prefixes
    before = sampler.computed_tokens
    advance = sampler._advance

    def watched(pieces):
        used = [request.cache.prefix for request in sampler.active]
        assert all(prefix is None or prefix in sampler.prefixes for prefix in used)
        return advance(pieces)

    sampler._advance = watched
    found = await tight.sample(prompts, params)
    assert [item.tokens for item in found] == [item.tokens for item in expected]
    assert first in sampler.prefixes
    assert sampler.computed_tokens - before == 160 + 4 * 6


async def test_a_request_alone_takes_the_room_of_what_others_would_share(make_model, open_engine):
    """The first needs nearly all there is; those behind it have joined a prefix that has to go for it."""
    trunk = make_prompt(80, 150)
    behind = [trunk + make_prompt(81 + number, 6) for number in range(2)]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    roomy = open_engine(make_model("llama"))
    prompts = [make_prompt(83, 250), *behind]
    expected = await roomy.sample(prompts, params)
    tight = open_engine(make_model("llama"), cache_bytes=300 * roomy.sampler.token_bytes)
    await tight.sample(behind, params)
    assert [item.tokens for item in await tight.sample(prompts, params)] == [item.tokens for item in expected]


@pytest.mark.usefixtures("short")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in (1, 2, 3))])
async def test_any_coming_and_going_gives_what_plain_computation_gives(seed, make_model, open_engine):
    """Conversations that start late, end early, rewrite their history and crowd each other out."""
    draw = random.Random(seed)
    plain = open_engine(make_model("lfm2"), keep_sessions=False, share_prefixes=False)
    engine = open_engine(
        make_model("lfm2"),
        cache_bytes=draw.choice([250, 400, 1000]) * plain.sampler.token_bytes,
        prefill_chunk=33,
    )
    trunks = [make_prompt(50 + number, draw.randrange(33, 50)) for number in range(2)]
    trunks.append(trunks[0] + make_prompt(60, 35))

    async def hold(name: str) -> None:
        tokens = draw.choice(trunks) + make_prompt(draw.randrange(1000), draw.randrange(1, 9))
        await asyncio.sleep(draw.random() * 0.05)
        for _ in range(draw.randrange(1, 4)):
            params = SamplingParams(max_tokens=draw.randrange(1, 8), seed=draw.randrange(100))
            (found,) = await engine.sample([tokens], params, session=name)
            asked.append((tokens, params, found))
            tokens = (
                tokens[: draw.choice([20, 60, 1000])] + found.tokens + make_prompt(draw.randrange(1000), 5)
            )
            if draw.random() < 0.2:
                await engine.end_session(name)

    asked: list[tuple[list[int], SamplingParams, Completion]] = []
    await asyncio.gather(*(hold(str(number)) for number in range(12)))
    for tokens, params, found in asked:
        (wanted,) = await plain.sample([tokens], params)
        assert wanted.tokens == found.tokens
        assert wanted.logprobs == pytest.approx(found.logprobs, abs=1e-4)


async def test_logits_that_are_not_finite_are_an_error(open_engine):
    engine = open_engine("llama")
    with torch.no_grad():
        engine.model.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(EngineError, match="not finite"):
        await engine.sample([[1, 2]], SamplingParams(max_tokens=2))


async def test_a_sequence_larger_than_the_budget_is_refused(open_engine):
    engine = open_engine("llama", cache_bytes=10_000)
    with pytest.raises(EngineError, match="cache_bytes"):
        await engine.sample([make_prompt(1, 100)], SamplingParams(max_tokens=4))
    with pytest.raises(EngineError, match="cache_bytes"):
        await engine.sample([make_prompt(1, 5)], SamplingParams(max_tokens=100))
    (completion,) = await engine.sample([make_prompt(1, 3)], SamplingParams(max_tokens=2))
    assert len(completion.tokens) == 2


async def test_the_same_seed_gives_the_same_tokens_in_any_company(kind, make_model, open_engine):
    prompts = [make_prompt(40 + number, 4 + 5 * number) for number in range(6)]
    top_p = (1.0, 0.9)
    params = [SamplingParams(4 + number, top_p=top_p[number % 2], seed=number) for number in range(6)]
    engine = open_engine(make_model(kind))
    alone = [(await engine.sample([prompt], param))[0] for prompt, param in zip(prompts, params, strict=True)]
    together = await asyncio.gather(
        *(engine.sample([prompt], param) for prompt, param in zip(prompts, params, strict=True))
    )
    assert [result.tokens for result in alone] == [result.tokens for (result,) in together]
    other = (await engine.sample([prompts[5]], SamplingParams(max_tokens=9, seed=77)))[0]
    assert other.tokens != alone[5].tokens


async def test_a_rewritten_history_keeps_what_is_common(kind, make_model, open_engine):
    engine = open_engine(make_model(kind))
    params = SamplingParams(max_tokens=5, temperature=0.0)
    prompt = make_prompt(5, 40)
    await engine.sample([prompt], params, session="a")
    before = engine.sampler.computed_tokens
    rewritten = prompt[:25] + make_prompt(6, 10)
    (found,) = await engine.sample([rewritten], params, session="a")
    assert engine.sampler.computed_tokens - before == 10 + 4
    plain = open_engine(make_model(kind), keep_sessions=False)
    assert (await plain.sample([rewritten], params))[0].tokens == found.tokens
    # The same prompt again needs one token computed for its logits.
    before = engine.sampler.computed_tokens
    assert (await engine.sample([rewritten], params, session="a"))[0].tokens == found.tokens
    assert engine.sampler.computed_tokens - before == 1 + 4


async def test_stops_at_a_stop_token_or_at_the_length(open_engine):
    engine = open_engine("llama")
    prompt = make_prompt(7, 12)
    (free,) = await engine.sample([prompt], SamplingParams(max_tokens=12, temperature=0.0))
    assert free.stop_reason == "length"
    assert len(free.tokens) == len(free.logprobs) == 12
    (stopped,) = await engine.sample(
        [prompt], SamplingParams(max_tokens=12, temperature=0.0, stop_tokens=(free.tokens[4],))
    )
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    limit = engine.capabilities.max_length
    (last,) = await engine.sample([make_prompt(8, limit - 3)], SamplingParams(max_tokens=50))
    assert len(last.tokens) == 3


async def test_several_prompts_of_one_call_are_drawn_apart(open_engine):
    engine = open_engine("llama")
    results = await engine.sample([make_prompt(9, 10)] * 4, SamplingParams(max_tokens=10, seed=1))
    assert len({tuple(result.tokens) for result in results}) == 4
    again = await engine.sample([make_prompt(9, 10)] * 4, SamplingParams(max_tokens=10, seed=1))
    assert [result.tokens for result in again] == [result.tokens for result in results]


@pytest.mark.parametrize(
    ("prompts", "params", "session"),
    [
        ([[]], SamplingParams(max_tokens=1), None),
        ([[1], [2]], SamplingParams(max_tokens=1), "a"),
        ([[1]], SamplingParams(max_tokens=0), None),
        ([[1]], SamplingParams(max_tokens=1, temperature=-1), None),
        ([[1]], SamplingParams(max_tokens=1, top_p=0), None),
        ([[VOCABULARY]], SamplingParams(max_tokens=1), None),
        ([[1] * 1024], SamplingParams(max_tokens=1), None),
    ],
)
async def test_wrong_requests_are_refused(open_engine, prompts, params, session):
    with pytest.raises(EngineError):
        await open_engine("llama").sample(prompts, params, session=session)


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -torch.inf]).repeat(20_000, 1)
    ones = torch.ones(len(logits))
    noise = uniform_noise(torch.full((len(logits),), 3), torch.arange(len(logits)))
    tokens, logprobs = draw_tokens(logits, ones, ones, noise)
    shares = tokens.bincount(minlength=4) / len(logits)
    expected = torch.softmax(logits[0], -1)
    assert torch.allclose(shares, expected, atol=0.015)
    assert torch.allclose(logprobs, expected.log()[tokens])
    # top-p 0.5 leaves the first token (mass 0.665), 0.7 the first two, in the proportion they had
    tokens, logprobs = draw_tokens(logits, ones, torch.tensor([0.5, 0.7]).repeat(10_000), noise)
    assert set(tokens[::2].tolist()) == {0}
    assert set(tokens[1::2].tolist()) == {0, 1}
    assert abs((tokens[1::2] == 0).double().mean().item() - 1 / (1 + torch.e**-1)) < 0.02
    assert torch.allclose(logprobs, expected.log()[tokens])


def test_draws_from_a_large_vocabulary_follow_the_distribution():
    weights = torch.rand(200, generator=torch.Generator().manual_seed(0))
    weights[64:128] = 0  # a whole block that is never reached
    weights[::7] = 0
    noise = uniform_noise(torch.full((100_000,), 5), torch.arange(100_000))
    ones = torch.ones(len(noise))
    tokens, logprobs = draw_tokens(weights.log().repeat(len(noise), 1), ones, ones, noise)
    shares = tokens.bincount(minlength=200) / len(noise)
    assert not shares[weights == 0].any()
    assert torch.allclose(shares, weights / weights.sum(), atol=1.5e-3)
    assert torch.allclose(logprobs, (weights / weights.sum()).log()[tokens], atol=1e-5)
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens, _ = draw_tokens(weights.log().repeat(2, 1), ones[:2], ones[:2], edges)
    assert tokens.tolist() == [int(weights.nonzero()[0, 0]), int(weights.nonzero()[-1, 0])]


def test_noise_is_uniform_and_differs_by_seed_and_position():
    seeds, positions = torch.arange(200).repeat_interleave(100), torch.arange(100).repeat(200)
    noise = uniform_noise(seeds, positions)
    assert noise.unique().numel() == len(noise)
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    assert (noise.histc(20, 0, 1) / len(noise) - 0.05).abs().max() < 0.01


def test_common_length():
    draw = random.Random(0)
    for _ in range(300):
        first = [draw.randrange(2) for _ in range(draw.randrange(20))]
        second = first[: draw.randrange(20)] + [draw.randrange(2) for _ in range(draw.randrange(5))]
        walked = 0
        while walked < min(len(first), len(second)) and first[walked] == second[walked]:
            walked += 1
        assert common_length(first, second) == walked


def test_the_prefix_that_saves_most_is_found():
    trunk, branch = list(range(40)), list(range(40)) + list(range(100, 110))
    rows = [([*trunk, number], 0) for number in range(200, 206)] + [
        ([*branch, number], 0) for number in (300, 301)
    ]
    assert best_shared_prefix(rows, 32) == trunk
    assert best_shared_prefix(rows[6:], 32) == branch
    assert best_shared_prefix(rows[:1], 32) is None
    assert best_shared_prefix([([*trunk[:20], 1], 0), ([*trunk[:20], 2], 0)], 32) is None
    # Nothing is gained where the trunk is provided for, or only one of two needs it and it must be computed.
    assert best_shared_prefix([(tokens, 40) for tokens, _ in rows[:6]], 32) is None
    assert best_shared_prefix([rows[0], ([*trunk, 9], -1)], 32) == trunk
    assert best_shared_prefix([rows[0], ([*trunk, 9], 40)], 32) is None
