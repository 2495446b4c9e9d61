"""A model whose weights we hold: it renders what is new, samples ids, and keeps them on its reply.

One `LocalModel` speaks for one side of one conversation; `LocalSource` makes them for a rollout.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trialogue.engine.api import Completion, SamplingParams
from trialogue.messages import Message
from trialogue.talk.render.api import Renderer
from trialogue.talk.rollout import derive_seed
from trialogue.task import Task
from trialogue.trajectory import Reply, Tokens, Turn, Usage
from trialogue.world.tools import Tool


class Sampler(Protocol):
    """The part of an engine that speaking needs."""

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]: ...

    async def end_session(self, session: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a local model speaks."""

    temperature: float = 1.0
    top_p: float = 1.0
    reply_tokens: int = 1024
    context_tokens: int = 32768


@dataclass(slots=True)
class _Row:
    """What has been laid down so far: these ids and this reply show the first `seen` messages and it."""

    ids: list[int]
    tokens: Tokens
    seen: list[Message]
    tools: list[str] | None


_numbers = itertools.count()


class LocalModel:
    """Speaks for one side of one conversation."""

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        session: str | None = None,
        name: str | None = None,
    ) -> None:
        self.session = session or f"local-{next(_numbers)}"
        self._sampler, self._renderer = sampler, renderer
        self._sampling = sampling or Sampling()
        self._seed, self._name = seed, name
        self._row: _Row | None = None
        self._ending: weakref.finalize[[Sampler, str, asyncio.AbstractEventLoop], LocalModel] | None = None

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        """Answer, never raising for want of room: a reply that does not fit finishes with `length`."""
        messages = [turn.message for turn in turns]
        row = self._row or recover_row(turns)
        added = self._extend(row, turns, tools) if row is not None else None
        if row is None or added is None:
            start, before, prompt = True, [], self._renderer.start(messages, tools)
        else:
            start, before, prompt = False, [*row.ids, *row.tokens.reply], added
        ids = before + prompt
        room = min(self._sampling.reply_tokens, self._sampling.context_tokens - len(ids))
        if room <= 0:
            return Reply(finish="length", model=self._name)
        self._end_with_me()
        params = SamplingParams(
            max_tokens=room,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            stop_tokens=self._renderer.stop_tokens,
            seed=derive_seed(self._seed, len(turns)),
        )
        [completion] = await self._sampler.sample([ids], params, session=self.session)
        tokens = Tokens(
            start=start,
            prompt=tuple(prompt),
            reply=tuple(completion.tokens),
            logprobs=tuple(completion.logprobs),
            version=completion.weight_version,
        )
        self._row = _Row(ids, tokens, messages, [tool.name for tool in tools])
        said = self._renderer.parse(completion.tokens)
        return Reply(
            content=said.content,
            tool_calls=said.tool_calls,
            reasoning=said.reasoning,
            tokens=tokens,
            finish=completion.stop_reason,
            usage=Usage(prompt=len(ids), completion=len(completion.tokens), cached=len(before)),
            model=self._name,
        )

    async def close(self) -> None:
        """Let the sampler forget the conversation. It also does when the model is no longer referred to."""
        if self._ending is not None and self._ending.detach():
            await self._sampler.end_session(self.session)

    def _extend(self, row: _Row, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[int] | None:
        """What to append to the row, or None where the conversation is no longer the one laid down."""
        position = len(row.seen)
        same_tools = row.tools is None or row.tools == [tool.name for tool in tools]
        if not same_tools or len(turns) <= position or turns[position].tokens != row.tokens:
            return None
        if any(turn.message != known for turn, known in zip(turns, row.seen, strict=False)):
            return None
        new = [turn.message for turn in turns[position + 1 :]]
        return self._renderer.extend(row.ids, row.tokens.reply, new)

    def _end_with_me(self) -> None:
        if self._ending is None or not self._ending.alive:
            loop = asyncio.get_running_loop()
            self._ending = weakref.finalize(self, _end_session, self._sampler, self.session, loop)
            self._ending.atexit = False


def recover_row(turns: Sequence[Turn]) -> _Row | None:
    """The row that earlier replies left on their turns, for a model that takes a conversation up."""
    row: _Row | None = None
    for position, turn in enumerate(turns):
        tokens = turn.tokens
        if tokens is None or turn.message.role != "assistant":
            continue
        seen = [earlier.message for earlier in turns[:position]]
        if tokens.start:
            row = _Row(list(tokens.prompt), tokens, seen, None)
        elif row is not None:
            row = _Row([*row.ids, *row.tokens.reply, *tokens.prompt], tokens, seen, None)
    return row


_under_way: set[asyncio.Task[None]] = set()


def _end_session(sampler: Sampler, session: str, loop: asyncio.AbstractEventLoop) -> None:
    """End a session from wherever the garbage collector runs."""

    def begin() -> None:
        task = loop.create_task(sampler.end_session(session))
        _under_way.add(task)  # a loop holds its tasks only weakly
        task.add_done_callback(_under_way.discard)

    if not loop.is_closed():
        loop.call_soon_threadsafe(begin)


@dataclass(frozen=True, slots=True)
class LocalSource:
    """Makes the model for each conversation of a rollout."""

    sampler: Sampler
    renderer: Renderer
    sampling: Sampling = Sampling()
    name: str | None = None

    def __call__(self, task: Task, seed: int) -> LocalModel:
        return LocalModel(self.sampler, self.renderer, self.sampling, seed=seed, name=self.name)

    def save_tokenizer(self, file: Path) -> None:
        self.renderer.vocabulary.tokenizer.save(str(file))
