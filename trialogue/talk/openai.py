"""Models behind an OpenAI-compatible endpoint: async, bounded in time, retries and requests at once."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trialogue.config import Speaker
from trialogue.errors import Blame, ConfigError, ModelError
from trialogue.messages import ToolCall, to_arguments
from trialogue.task import Side, Task
from trialogue.trajectory import Reply, Turn, Usage
from trialogue.world.tools import Tool

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion


@dataclass(slots=True)
class Ledger:
    """What a model has cost so far."""

    calls: int = 0
    retries: int = 0
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    price: tuple[float, float] | None = None

    def add(self, usage: Usage) -> None:
        self.calls += usage.calls
        self.prompt += usage.prompt
        self.completion += usage.completion
        self.cached += usage.cached

    @property
    def cost(self) -> float | None:
        """Money spent, where a price is known."""
        if self.price is None:
            return None
        return (self.prompt * self.price[0] + self.completion * self.price[1]) / 1e6


@dataclass(slots=True)
class OpenAIModel:
    """One endpoint model. It keeps no state between replies, so all conversations share it."""

    name: str
    side: Side
    settings: Speaker
    reply_tokens: int
    seed: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    pause: Callable[[float], Any] = asyncio.sleep
    _client: AsyncOpenAI = field(init=False)
    _room: asyncio.Semaphore | None = None

    def __post_init__(self) -> None:
        self.ledger.price = self.settings.price
        self._client = self._connect()  # a missing key is told before anything starts

    def __call__(self, task: Task, seed: int) -> OpenAIModel:
        return self

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        request: dict[str, Any] = {
            "model": self.name,
            "messages": [turn.message.to_openai() for turn in turns],
            "max_tokens": self.reply_tokens,
        }
        if tools:
            request["tools"] = [tool.schema for tool in tools]
        if self.settings.temperature is not None:
            request["temperature"] = self.settings.temperature
        if self.settings.top_p is not None:
            request["top_p"] = self.settings.top_p
        return await self._ask(request)

    async def _ask(self, request: dict[str, Any]) -> Reply:
        """Send a request until there is a usable reply, waiting longer after each passing fault."""
        import openai

        if self._room is None:
            self._room = asyncio.Semaphore(self.settings.concurrency)
        problem, blame = "", "infrastructure"
        jitter = random.Random(self.seed + self.ledger.calls)
        for attempt in range(self.settings.retries + 1):
            if attempt:
                self.ledger.retries += 1
                await self.pause(min(30.0, 0.5 * 2**attempt) * (0.5 + jitter.random()))
            try:
                async with self._room:
                    answer: ChatCompletion = await self._client.chat.completions.create(**request)
            except openai.BadRequestError as error:
                if "context" in str(error).lower() and "length" in str(error).lower():
                    return Reply(finish="length", model=self.name)
                raise ModelError(f"{self._who} refused the request: {error}", "infrastructure") from None
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise ModelError(f"{self._who} refused: {error}", "infrastructure") from None
            except openai.APIError as error:
                problem, blame = f"{type(error).__name__}: {error}", "infrastructure"
                continue
            except ValueError as error:  # a body that is no JSON
                problem, blame = f"unreadable answer: {error}", "infrastructure"
                continue
            reply, problem = self._read(answer)
            if reply is not None:
                return reply
            blame = self.side
        tries = f"{self.settings.retries + 1} tries" if self.settings.retries else "1 try"
        raise ModelError(f"{self._who} gave no usable reply in {tries}: {problem}", _as_blame(blame))

    def _read(self, answer: ChatCompletion) -> tuple[Reply | None, str]:
        """The reply in an answer, or what is wrong with it."""
        usage = Usage()
        if answer.usage is not None:
            details = answer.usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details is not None else 0
            usage = Usage(
                prompt=answer.usage.prompt_tokens or 0,
                completion=answer.usage.completion_tokens or 0,
                cached=cached,
            )
        self.ledger.add(usage)
        if not answer.choices:
            return None, "an answer without choices"
        choice = answer.choices[0]
        message: Any = choice.message
        if message is None:
            return None, "a choice without a message"
        calls = tuple(
            ToolCall(
                id=call.id or f"call_{number}",
                name=call.function.name or "",
                arguments=to_arguments(call.function.arguments or ""),
            )
            for number, call in enumerate(message.tool_calls or ())
            if call.type == "function"
        )
        content = message.content or ""
        cut = choice.finish_reason == "length"
        if not content.strip() and not calls and not cut:
            return None, f"an empty message (finish reason {choice.finish_reason})"
        reasoning = getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None)
        return Reply(
            content=content,
            tool_calls=calls,
            reasoning=reasoning,
            finish="length" if cut else "stop",
            usage=usage,
            model=self.name,
        ), ""

    def _connect(self) -> AsyncOpenAI:
        import openai

        key = os.environ.get(self.settings.api_key_env)
        address = self.settings.base_url or os.environ.get("OPENAI_BASE_URL")
        if not key and not address:
            raise ConfigError(
                f"openai:{self.name} needs a key: set {self.settings.api_key_env}, or name an endpoint with "
                f"{self.side}.base_url=URL or OPENAI_BASE_URL"
            )
        return openai.AsyncOpenAI(
            api_key=key or "none", base_url=address, timeout=self.settings.timeout, max_retries=0
        )

    @property
    def _who(self) -> str:
        return f"the {self.side}'s model openai:{self.name}"


def _as_blame(text: str) -> Blame:
    return "infrastructure" if text == "infrastructure" else ("agent" if text == "agent" else "user")
