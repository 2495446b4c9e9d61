"""Models behind an OpenAI-compatible endpoint: async, bounded in time, retries and requests at once."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from trialogue.config import Speaker
from trialogue.errors import Blame, ConfigError, ModelError
from trialogue.messages import ToolCall, to_arguments
from trialogue.talk.model import clean_arguments
from trialogue.task import Side, Task
from trialogue.trajectory import Reply, Turn, Usage
from trialogue.world.tools import Tool
from trialogue.world.values import clean_text

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion


LONGEST_WAIT = 60.0
"""Seconds to wait at most, whatever a server asks for."""
_OPENING = "(The conversation begins. Write your first message.)"


class Problem(Exception):
    """Why there is no reply yet: whose doing it is, and how long the server asks to wait."""

    def __init__(self, text: str, blame: Blame, wait: float | None = None) -> None:
        super().__init__(text)
        self.blame: Blame = blame
        self.wait = wait


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
    _cap: str = "max_tokens"
    _jitter: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.ledger.price = self.settings.price
        self._jitter = random.Random(self.seed)
        self._client = self._connect()  # a missing key is told before anything starts

    def __call__(self, task: Task, seed: int) -> OpenAIModel:
        return self

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        messages = [turn.message.to_openai() for turn in turns]
        if len(messages) == 1:  # many endpoints want something to answer besides the system prompt
            messages.append({"role": "user", "content": _OPENING})
        request: dict[str, Any] = {"model": self.name, "messages": messages}
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
        problem = Problem("", "infrastructure")
        for attempt in range(self.settings.retries + 1):
            if attempt:
                self.ledger.retries += 1
                chance = self._jitter.random()
                usual = min(30.0, 0.5 * 2**attempt) * (0.5 + chance)
                asked = (
                    None if problem.wait is None else min(problem.wait, LONGEST_WAIT) * (1 + 0.05 * chance)
                )
                await self.pause(usual if asked is None else asked)
            try:
                async with self._room, asyncio.timeout(self.settings.timeout):
                    answer = await self._send(request)
                self.ledger.calls += 1
                return self._read(answer)
            except TimeoutError:
                problem = Problem(f"no answer within {self.settings.timeout:g} s", "infrastructure")
            except Problem as found:
                problem = found
            except openai.APIStatusError as error:
                text = self._tell(error)
                if error.status_code in (400, 413) and _is_overflow(text.lower()):
                    return self._read_overflow(text)
                if not _is_passing(error.status_code):
                    raise ModelError(f"{self._who} refused the request: {text}", "infrastructure") from None
                problem = Problem(text, "infrastructure", _read_wait(error.response.headers))
            except openai.APIError as error:
                problem = Problem(self._tell(error), "infrastructure")
            except (ValueError, TypeError, AttributeError) as error:  # a body of another shape
                problem = Problem(f"an unreadable answer ({self._tell(error)})", "infrastructure")
        tries = f"{self.settings.retries + 1} tries" if self.settings.retries else "1 try"
        raise ModelError(f"{self._who} gave no usable reply in {tries}: {problem}", problem.blame)

    async def _send(self, request: dict[str, Any]) -> ChatCompletion:
        import openai

        create = cast("Callable[..., Awaitable[ChatCompletion]]", self._client.chat.completions.create)
        cap = self._cap
        try:
            return await create(**request, **{cap: self.reply_tokens})
        except openai.BadRequestError as error:
            if cap != "max_tokens" or "max_completion_tokens" not in str(error):
                raise
            self._cap = "max_completion_tokens"  # newer models know the limit by this name only
            return await create(**request, max_completion_tokens=self.reply_tokens)

    def _read(self, completion: ChatCompletion) -> Reply:
        """The reply in an answer. Raises `Problem` where there is none."""
        if not getattr(completion, "choices", None):
            raise Problem("an answer without choices", "infrastructure")
        usage = Usage()
        if completion.usage is not None:
            details = completion.usage.prompt_tokens_details
            usage = Usage(
                prompt=completion.usage.prompt_tokens or 0,
                completion=completion.usage.completion_tokens or 0,
                cached=(details.cached_tokens or 0) if details is not None else 0,
            )
        self.ledger.add(usage)
        choice = completion.choices[0]
        message: Any = choice.message
        if message is None:
            raise Problem("a choice without a message", "infrastructure")
        functions = [(call.id, getattr(call, "function", None)) for call in message.tool_calls or ()]
        calls = tuple(
            ToolCall(
                id=clean_text(identity or f"call_{number}"),
                name=clean_text(function.name or ""),
                arguments=clean_arguments(to_arguments(function.arguments or "")),
            )
            for number, (identity, function) in enumerate(functions)
            if function is not None
        )
        content = message.content or getattr(message, "refusal", None) or ""
        cut = choice.finish_reason == "length"
        if not content.strip() and not calls and not (cut and self.side == "agent"):
            raise Problem(f"an empty message (finish reason {choice.finish_reason})", self.side)
        return Reply(
            content=content,
            tool_calls=calls,
            reasoning=getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None),
            finish="length" if cut else "stop",
            usage=usage,
            model=self.name,
        )

    def _read_overflow(self, text: str) -> Reply:
        """The conversation outgrew the endpoint: the agent's own doing, but nothing to blame an agent for
        where it happens to the user."""
        if self.side == "agent":
            return Reply(finish="length", model=self.name)
        raise ModelError(f"{self._who} has no room for the conversation: {text}", "user")

    def _tell(self, error: Exception) -> str:
        """What an error says, short and without the key, which servers like to quote."""
        text = f"{type(error).__name__}: {error}"
        key = os.environ.get(self.settings.api_key_env)
        text = text.replace(key, "(key)") if key else text
        return text if len(text) <= 500 else text[:497] + "..."

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.close()

    def _connect(self) -> AsyncOpenAI:
        import openai

        key = os.environ.get(self.settings.api_key_env)
        address = self.settings.base_url or os.environ.get("OPENAI_BASE_URL")
        if not key and not address:
            raise ConfigError(
                f"openai:{self.name} needs a key: set {self.settings.api_key_env}, or name an endpoint with "
                f"{self.side}.base_url=URL or OPENAI_BASE_URL"
            )
        if address and "@" in urlsplit(address).netloc:
            raise ConfigError(
                f"{self.side}.base_url holds a password, which would be written to the run directory; "
                f"put the key into {self.settings.api_key_env}"
            )
        return openai.AsyncOpenAI(
            api_key=key or "none", base_url=address, timeout=self.settings.timeout, max_retries=0
        )

    @property
    def _who(self) -> str:
        return f"the {self.side}'s model openai:{self.name}"


def _is_passing(status: int) -> bool:
    """Whether a fault may be gone when the request is sent again."""
    return status in (408, 409, 425, 429) or status >= 500


def _is_overflow(text: str) -> bool:
    return "context" in text and any(word in text for word in ("length", "window", "exceed", "too long"))


def _read_wait(headers: Mapping[str, str]) -> float | None:
    """How many seconds a server asks to wait (`Retry-After`: seconds or a date)."""
    text = headers.get("retry-after")
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, TypeError):
        return None
