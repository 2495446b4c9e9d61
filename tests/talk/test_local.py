"""A local model over a sampler that is scripted, and over a real one: every id accounted for."""

import asyncio
import gc
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trialogue.config import Limits, Speaker
from trialogue.engine.api import Completion, EngineSettings, SamplingParams
from trialogue.messages import Message, ToolCall
from trialogue.score.reward import grade
from trialogue.talk.conversation import Party, converse
from trialogue.talk.local import LocalModel, LocalSource, Sampling
from trialogue.talk.render.api import find_renderer
from trialogue.talk.render.load import load_local
from trialogue.talk.render.tiny import COMPACT_TOKENS
from trialogue.talk.rollout import RolloutSettings, attempt
from trialogue.talk.scripted import ScriptedModel
from trialogue.task import Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.database import Database
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain
from trialogue.world.tools import Tool, tool


@cache
def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[
            *COMPACT_TOKENS,
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<think>",
            "</think>",
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world order"] * 3, trainer)
    return tokenizer


@cache
def make_renderer(name: str = "compact") -> Any:
    return find_renderer(make_tokenizer(), name)


class ScriptedSampler:
    """Says what it is told to, and remembers what it was asked."""

    def __init__(self, *replies: Sequence[int], version: int = 7) -> None:
        self.replies = list(replies)
        self.asked: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.sessions: list[str | None] = []
        self.ended: list[str] = []
        self.version = version

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        await asyncio.sleep(0)
        [prompt] = prompts
        self.asked.append(list(prompt))
        self.params.append(params)
        self.sessions.append(session)
        tokens = list(self.replies.pop(0))[: params.max_tokens]
        stopped = bool(tokens) and tokens[-1] in params.stop_tokens
        return [Completion(tokens, [-0.5] * len(tokens), "stop" if stopped else "length", self.version)]

    async def end_session(self, session: str) -> None:
        self.ended.append(session)


def said(content: str, **more: Any) -> list[int]:
    return make_renderer().write(Message(role="assistant", content=content, **more))


def turn(role: Any, content: str = "", **more: Any) -> Turn:
    return Turn(side="agent", message=Message(role=role, content=content, **more))


def keep(reply: Reply) -> Turn:
    message = Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)
    return Turn(side="agent", message=message, tokens=reply.tokens, finish=reply.finish)


OPENING = [turn("system", "Be kind."), turn("user", "Hello")]


async def test_each_prompt_continues_the_one_before() -> None:
    call = ToolCall(id="call_0", name="look", arguments={"key": "W1"})
    sampler = ScriptedSampler(said("", tool_calls=(call,)), said("Found."), said("Bye."))
    model = LocalModel(sampler, make_renderer(), seed=5, session="one", name="tiny")
    turns = [*OPENING]
    row: list[int] = []
    mask: list[int] = []
    for observed in ([turn("tool", "<|end|>", tool_call_id="call_0")], [turn("user", "And W2?")], []):
        reply = await model.reply(turns, [])
        assert reply.tokens is not None
        assert reply.tokens.start == (not row)
        assert len(reply.tokens.logprobs) == len(reply.tokens.reply)
        assert (reply.tokens.version, reply.finish, reply.model) == (7, "stop", "tiny")
        row += reply.tokens.prompt
        mask += [0] * len(reply.tokens.prompt) + [1] * len(reply.tokens.reply)
        assert sampler.asked[-1] == row == make_renderer().start([turn.message for turn in turns], [])
        row += reply.tokens.reply
        turns += [keep(reply), *observed]
    assert turns[2].message.tool_calls == (call,)
    assert sum(mask) == len(said("", tool_calls=(call,))) + len(said("Found.")) + len(said("Bye."))
    assert len({params.seed for params in sampler.params}) == 3
    assert sampler.sessions == ["one"] * 3


async def test_equal_seeds_draw_alike() -> None:
    def seeds(seed: int) -> list[int | None]:
        sampler = ScriptedSampler(said("Hi."), said("Well."))

        async def talk() -> list[int | None]:
            model = LocalModel(sampler, make_renderer(), seed=seed)
            reply = await model.reply(OPENING, [])
            await model.reply([*OPENING, keep(reply), turn("user", "So?")], [])
            return [params.seed for params in sampler.params]

        return asyncio.run(talk())

    first, again, other = await asyncio.gather(*(asyncio.to_thread(seeds, seed) for seed in (1, 1, 2)))
    assert first == again
    assert not set(first) & set(other)


async def test_a_greeting_is_observed_not_sampled() -> None:
    sampler = ScriptedSampler(said("Sure."))
    turns = [OPENING[0], turn("assistant", "How can I help?"), OPENING[1]]
    reply = await LocalModel(sampler, make_renderer()).reply(turns, [])
    assert reply.tokens is not None
    assert reply.tokens.reply == tuple(said("Sure."))
    assert "How can I help?<|end|><|user|>Hello" in make_renderer().vocabulary.decode(reply.tokens.prompt)


async def test_a_cut_reply_finishes_with_length_and_is_closed() -> None:
    sampler = ScriptedSampler(said("A long answer."), said("Yes."))
    model = LocalModel(sampler, make_renderer(), Sampling(reply_tokens=3))
    reply = await model.reply(OPENING, [])
    assert reply.finish == "length"
    assert reply.tokens is not None
    assert len(reply.tokens.reply) == 3
    again = await model.reply([*OPENING, keep(reply), turn("user", "What?")], [])
    assert again.tokens is not None
    assert not again.tokens.start
    assert again.tokens.prompt[0] == make_renderer().end


async def test_a_full_context_finishes_with_length() -> None:
    sampler = ScriptedSampler(said("Hi."), said("A long answer."))
    length = len(make_renderer().start([turn.message for turn in OPENING], []))
    model = LocalModel(sampler, make_renderer(), Sampling(context_tokens=length + 2))
    reply = await model.reply(OPENING, [])
    assert (reply.finish, sampler.params[0].max_tokens) == ("length", 2)
    full = await model.reply([*OPENING, keep(reply), turn("user", "Go on")], [])
    assert (full.finish, full.tokens, len(sampler.asked)) == ("length", None, 1)


@pytest.mark.parametrize("change", ["system", "user", "own", "dropped", "tools"])
async def test_a_changed_history_starts_a_new_row(change: str) -> None:
    sampler = ScriptedSampler(said("Hi."), said("Well."))
    model = LocalModel(sampler, make_renderer())
    first = keep(await model.reply(OPENING, []))
    turns = [*OPENING, first, turn("user", "So?")]
    tools: list[Tool] = []
    match change:
        case "system":
            turns[0] = turn("system", "Be brief.")
        case "user":
            turns[1] = turn("user", "Good day")
        case "own":
            turns[2] = turn("assistant", "Hey.")
        case "dropped":
            del turns[1:3]
        case _:
            tools = [Tool("look", "Look.", {"properties": {}}, lambda database, arguments: None)]
    reply = await model.reply(turns, tools)
    assert reply.tokens is not None
    assert reply.tokens.start
    assert list(reply.tokens.prompt) == sampler.asked[-1]
    assert sampler.asked[-1] == make_renderer().start([turn.message for turn in turns], tools)


async def test_a_rewriting_format_starts_a_new_row() -> None:
    renderer = make_renderer("qwen3-exact")
    thought = Message(role="assistant", content="Hi.", reasoning="Greet them.")
    sampler = ScriptedSampler(renderer.write(thought), renderer.write(thought))
    model = LocalModel(sampler, renderer)
    first = await model.reply(OPENING, [])
    assert (first.content, first.reasoning) == ("Hi.", "Greet them.")
    second = await model.reply([*OPENING, keep(first), turn("user", "So?")], [])
    assert second.tokens is not None
    assert second.tokens.start
    assert "Greet" not in renderer.vocabulary.decode(second.tokens.prompt)


async def test_a_conversation_can_be_taken_up_by_another_model() -> None:
    sampler = ScriptedSampler(said("Hi."), said("Well."), said("Bye."))
    first = LocalModel(sampler, make_renderer())
    turns = [*OPENING]
    for _ in range(2):
        turns += [keep(await first.reply(turns, [])), turn("user", "So?")]
    reply = await LocalModel(sampler, make_renderer()).reply(turns, [])
    assert reply.tokens is not None
    assert not reply.tokens.start
    assert sampler.asked[-1] == make_renderer().start([turn.message for turn in turns], [])


async def test_the_session_ends_with_the_model() -> None:
    sampler = ScriptedSampler(said("Hi."), said("Hi."))
    model = LocalModel(sampler, make_renderer(), session="closed")
    await model.reply(OPENING, [])
    await model.close()
    await model.close()
    assert sampler.ended == ["closed"]
    model = LocalModel(sampler, make_renderer(), session="dropped")
    await model.reply(OPENING, [])
    del model
    gc.collect()
    await asyncio.sleep(0.01)
    assert sampler.ended == ["closed", "dropped"]


@given(
    replies=st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=12), min_size=1, max_size=5),
    observed=st.lists(st.sampled_from(["", "x", "<|end|>", "<|user|>", "日本", "{"]), min_size=5, max_size=5),
)
@settings(max_examples=50, deadline=None)
def test_whatever_is_sampled_is_kept(replies: list[list[int]], observed: list[str]) -> None:
    """Random ids as replies: they stand in the row as they are, and the next prompt continues it."""
    sampler = ScriptedSampler(*replies)
    model = LocalModel(sampler, make_renderer())

    async def talk() -> None:
        turns = [*OPENING]
        row: list[int] = []
        for ids, text in zip(replies, observed, strict=False):
            reply = await model.reply(turns, [])
            assert reply.tokens is not None
            assert reply.tokens.reply == tuple(ids)
            row += reply.tokens.prompt
            assert sampler.asked[-1] == row
            row += ids
            turns.append(keep(reply))
            turns += [turn("tool", text, tool_call_id=call.id) for call in reply.tool_calls]
            turns += [turn("user", text)] * (not reply.tool_calls)

    asyncio.run(talk())


class Shelf(Database):
    @tool
    def look(self, key: str) -> str:
        """Look something up."""
        return f"{key} is there"


async def test_a_conversation_with_real_weights_repeats() -> None:
    """The rows on the turns are what was sampled from, and the same seed says the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trialogue.engine.torch_engine import TorchEngine

    config = LlamaConfig(
        vocab_size=make_tokenizer().get_vocab_size(),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    engine = TorchEngine(LlamaForCausalLM(config), EngineSettings(device="cpu", cache_bytes=1 << 22))
    source = LocalSource(engine, make_renderer(), Sampling(reply_tokens=400))
    task = Task(id="one", domain="shelf", instructions="Ask.")
    domain = Domain("shelf", "Answer.", Shelf.load({}), lambda *_, **__: [task], greeting="Yes?")

    async def hold(seed: int) -> list[Turn]:
        environment = domain.open(task)
        agent = Party("agent", source(task, seed), environment.policy, environment.tools)
        lines = ["Where is W1?", "And W2?", "Thanks ###STOP###"]
        user = Party("user", ScriptedModel(lines), "", {})
        return list((await converse(task, environment, agent, user)).turns)

    first, again, other = await hold(1), await hold(1), await hold(2)
    assert [turn.tokens for turn in first] == [turn.tokens for turn in again]
    assert [turn.tokens for turn in first] != [turn.tokens for turn in other]
    sampled = [turn.tokens for turn in first if turn.tokens is not None]
    assert [tokens.start for tokens in sampled] == [True] + [False] * (len(sampled) - 1)
    assert first[0].tokens is None


async def test_a_conversation_that_outgrows_the_models_window_is_too_long() -> None:
    """Whatever the limits allow: it scores 0, as the agent's own doing, and is not held anew."""
    domain = find_domain("shop")
    (task,) = domain.tasks("test", 1, 0)

    def chatter(task: Task, seed: int) -> ScriptedModel:
        return ScriptedModel(["my order number is W1234 and " * 700])

    agent = load_local("tiny", Speaker(model="tiny"), Limits(), 0)
    held = await attempt(domain, task, agent, chatter, RolloutSettings(grade=grade))
    assert (held.end, held.value) == ("too_long", 0.0)
