"""Many conversations at once on one event loop, cancellation, and weights that change between."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from trialogue.engine import OptimParams, Row, SamplingParams
from trialogue.errors import EngineError


async def until_active(engine) -> None:
    while not engine.sampler.active:  # noqa: ASYNC110 - the sampler has no event to wait for
        await asyncio.sleep(0.001)


async def test_many_conversations_share_steps_and_give_the_same_twice(make_model, open_engine, converse):
    async def run() -> tuple[list[list[int]], int]:
        engine = open_engine(make_model("lfm2"))
        prompt = list(range(40))
        steps = 0
        step = engine.sampler.step

        def counted():
            nonlocal steps
            steps += 1
            return step()

        engine.sampler.step = counted
        params = SamplingParams(max_tokens=6)
        found = await asyncio.gather(
            *(converse(engine, str(i), prompt, params, 3, seed=i) for i in range(40))
        )
        return [tokens for tokens, _ in found], steps

    first, steps = await run()
    # In lockstep: every turn's completions are drawn together.
    assert steps <= 3 * 6 + 3
    assert (await run())[0] == first


async def test_a_request_that_arrives_late_joins_the_next_step(open_engine):
    engine = open_engine("llama")
    long = asyncio.create_task(engine.sample([[1, 2, 3]], SamplingParams(max_tokens=60)))
    await until_active(engine)
    await engine.sample([[4, 5, 6]], SamplingParams(max_tokens=3))
    assert not long.done()
    (completion,) = await long
    assert len(completion.tokens) == 60


async def test_the_loop_stays_free(open_engine):
    engine = open_engine("llama")
    task = asyncio.create_task(engine.sample([[1]] * 20, SamplingParams(max_tokens=40)))
    turns, busy = 0, 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        began = time.thread_time()
        await asyncio.sleep(0)
        busy = max(busy, time.thread_time() - began)
        turns += 1
    await task
    # Many steps went by while the loop's own thread did next to nothing.
    assert turns >= 20
    assert busy < 0.05


async def test_cancelling_frees_the_request(open_engine):
    engine = open_engine("llama")
    params = SamplingParams(max_tokens=900)
    doomed = asyncio.create_task(engine.sample([[1, 2, 3]], params, session="doomed"))
    waiting = asyncio.create_task(engine.sample([[1, 2, 3, 4]], params, session="doomed"))
    other = asyncio.create_task(engine.sample([[7, 8]], SamplingParams(max_tokens=20), session="other"))
    await until_active(engine)
    doomed.cancel()
    waiting.cancel()
    (completion,) = await other
    assert len(completion.tokens) == 20
    with pytest.raises(asyncio.CancelledError):
        await doomed
    await engine.end_session("doomed")
    await engine.end_session("never known")
    await asyncio.sleep(0.05)
    assert not engine.sampler.waiting
    assert not engine.sampler.active
    assert list(engine.sampler.sessions) == ["other"]
    (completion,) = await engine.sample([[1, 2]], SamplingParams(max_tokens=2), session="doomed")
    assert len(completion.tokens) == 2


async def test_two_requests_of_one_session_wait_for_each_other(open_engine):
    engine = open_engine("llama")
    params = SamplingParams(max_tokens=5, temperature=0.0)
    (first,), (second,) = await asyncio.gather(
        engine.sample([[1, 2, 3]], params, session="a"), engine.sample([[1, 2, 3]], params, session="a")
    )
    assert first.tokens == second.tokens
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)


async def test_an_ended_session_frees_its_slot(open_engine):
    engine = open_engine("llama")
    await engine.sample([[1, 2, 3]], SamplingParams(max_tokens=2), session="a")
    assert "a" in engine.sampler.sessions
    await engine.end_session("a")
    await asyncio.sleep(0.05)
    assert not engine.sampler.sessions
    assert len(engine.sampler.free) == engine.sampler.slab.slots


async def test_published_weights_are_the_ones_sampled(make_model, open_engine, loss):
    engine = open_engine("qwen3")
    params = SamplingParams(max_tokens=5, temperature=0.0)
    prompt = list(range(50, 60))
    (before,) = await engine.sample([prompt], params, session="a")
    assert before.weight_version == 0
    row = Row(prompt + before.tokens, [0] * 10 + [1] * 5, [0.0] * 10 + before.logprobs, [-1.0] * 15)
    await engine.forward_backward([row], loss)
    await engine.optim_step(OptimParams(learning_rate=0.05))
    with pytest.raises(EngineError, match="publish"):
        await engine.sample([prompt], params, session="a")
    assert await engine.publish() == 1
    (after,) = await engine.sample([prompt], params, session="a")
    assert after.weight_version == 1
    assert after.tokens != before.tokens
    (logprobs,) = await engine.forward(
        [Row(prompt + after.tokens, [0] * 15, [0.0] * 15, [0.0] * 15)], temperature=1.0
    )
    assert logprobs[10:] == pytest.approx(after.logprobs, abs=1e-4)


async def test_weights_do_not_change_under_open_requests(make_rows, open_engine, loss):
    engine = open_engine("llama")
    task = asyncio.create_task(engine.sample([[1, 2, 3]], SamplingParams(max_tokens=300)))
    await engine.forward_backward(make_rows(seed=1, count=2), loss)
    with pytest.raises(EngineError, match="still sampling"):
        await engine.optim_step(OptimParams(learning_rate=0.1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.optim_step(OptimParams(learning_rate=0.1))


async def test_a_failing_step_is_told_to_everybody_and_the_engine_goes_on(open_engine, monkeypatch):
    engine = open_engine("llama")
    good = engine.adapted.logits
    monkeypatch.setattr(engine.adapted, "logits", lambda hidden: torch.zeros(1)[5])
    results = await asyncio.gather(
        *(engine.sample([[number]], SamplingParams(max_tokens=3)) for number in range(3)),
        return_exceptions=True,
    )
    assert all(isinstance(result, EngineError) and "IndexError" in str(result) for result in results)
    monkeypatch.setattr(engine.adapted, "logits", good)
    (completion,) = await engine.sample([[1]], SamplingParams(max_tokens=3))
    assert len(completion.tokens) == 3


def test_one_engine_serves_one_loop_after_another(open_engine):
    engine = open_engine("llama")
    params = SamplingParams(max_tokens=60, temperature=0.0)

    async def leave() -> None:
        task = asyncio.create_task(engine.sample([[1, 2, 3]], params))
        await until_active(engine)
        task.cancel()

    asyncio.run(leave())
    (completion,) = asyncio.run(engine.sample([[1, 2, 3]], params))
    assert len(completion.tokens) == 60
