"""Models behind an OpenAI-compatible endpoint: async, bounded in time, retries and requests at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from time import perf_counter, time
from typing import Any
from urllib.parse import urlsplit

from trialogue.config import Price, Speaker
from trialogue.endpoint import Answer, Endpoint, Redirected, Unreachable, Unreadable
from trialogue.errors import Blame, ConfigError, ModelError
from trialogue.talk.budget import Account, LedgerEntry, find_price, to_cost
from trialogue.talk.completion import ChatAnswer, read_chat, read_usage
from trialogue.talk.rate_limit import LOG, Breaker, Down, Pace
from trialogue.task import Side, Task
from trialogue.trajectory import Reply, Turn, Usage
from trialogue.world.tools import Tool

ADDRESS = "https://api.openai.com/v1"
"""Where an endpoint is that no setting and no variable names."""
LONGEST_WAIT = 60.0
"""Seconds to wait at most, whatever a server asks for."""
_OPENING = "(The conversation begins. Write your first message.)"


class Problem(Exception):
    """Why there is no reply yet: whose doing it is, how long the server asks to wait, what was billed."""

    def __init__(self, text: str, blame: Blame, wait: float | None = None) -> None:
        super().__init__(text)
        self.blame: Blame = blame
        self.wait = wait
        self.usage: Usage | None = None


class Outage(Problem, Down):
    """The endpoint was not there, or answered with an error of its own."""

    def __init__(self, text: str, wait: float | None = None, answered: bool = False) -> None:
        super().__init__(text, "infrastructure", wait)
        self.answered = answered


@dataclass(frozen=True, slots=True)
class Voice:
    """A shared model speaking in one conversation, with its seed."""

    model: OpenAIModel
    seed: int

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        return await self.model.reply(turns, tools, self.seed + len(turns))


@dataclass(slots=True)
class OpenAIModel:
    """One endpoint model. It keeps no state between replies, so all conversations share it."""

    name: str
    side: Side
    settings: Speaker
    reply_tokens: int
    seed: int = 0
    account: Account = field(default_factory=Account)
    role: str = ""
    """What the ledger files its use under; the side where empty."""
    pause: Callable[[float], Any] = asyncio.sleep
    ledger: LedgerEntry = field(init=False)
    breaker: Breaker = field(init=False)
    _price: Price | None = field(init=False)
    _endpoint: Endpoint = field(init=False)
    _pace: Pace = field(init=False)
    _room: asyncio.Semaphore | None = None
    _cap: str = "max_tokens"
    _seeded: bool = True
    _doubted: bool = False
    """Whether its usage has been out of bounds, which is told once."""
    _jitter: random.Random = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.role = self.role or self.side
        self._price = find_price(self.name, settings.price, self.account.budget.prices)
        self.ledger = self.account.open(self.role, self.name, self._price)
        self.breaker = Breaker(
            f"openai:{self.name}",
            2 * (settings.retries + 1),
            settings.outage if settings.retries else 0.0,
            self.pause,
            setting=f"{self.side}.outage",
        )
        self._pace = Pace(settings.requests_per_minute, settings.tokens_per_minute, pause=self.pause)
        self._jitter = random.Random(self.seed)
        self._endpoint = self._connect()  # a missing key is told before anything starts

    def __call__(self, task: Task, seed: int) -> Voice:
        return Voice(self, seed)

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool], seed: int | None = None) -> Reply:
        """Answer. A conversation's seed goes with the request, where the endpoint takes one."""
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
        return await self._ask(request, seed)

    async def _ask(self, request: dict[str, Any], seed: int | None) -> Reply:
        """Send a request until there is a usable reply, waiting longer after each passing fault."""
        if self._room is None:
            self._room = asyncio.Semaphore(self.settings.concurrency)
        size = len(json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        most = Usage(prompt=size, completion=self.reply_tokens)  # no token is shorter than a byte
        problem = Problem("", "infrastructure")
        billed: Usage | None = None
        for attempt in range(self.settings.retries + 1):
            if attempt:
                self.ledger.retries += 1
                await self.pause(self._find_wait(attempt, problem.wait))
            drawn = {} if seed is None or not self._seeded else {"seed": (seed + attempt) % (1 << 31)}
            reckoned = await self._pace.wait(size // 4 + self.reply_tokens // 4)
            used = Usage()
            sent = {**request, **drawn}
            try:
                async with self.account.holding(most, self._price):
                    reply = await self.breaker.through(lambda sent=sent: self._try(sent, most))
                used = reply.usage or used
                return replace(reply, usage=_add(billed, reply.usage))
            except Problem as found:
                problem = found
                used = found.usage or used
                billed = _add(billed, found.usage)
            except Down as down:  # for longer than one cares to wait
                raise ModelError(str(down), "infrastructure") from None
            finally:
                self._pace.settle(reckoned, used.prompt + used.completion)
        tries = f"{self.settings.retries + 1} tries" if self.settings.retries else "1 try"
        raise ModelError(f"{self._who} gave no usable reply in {tries}: {problem}", problem.blame)

    def _find_wait(self, attempt: int, asked: float | None) -> float:
        """How long to wait before the next try: what the server asks for, else longer each time; jittered,
        so that conversations that failed together do not come back together."""
        chance = self._jitter.random()
        if asked is not None:
            return min(asked, LONGEST_WAIT) * (1 + 0.05 * chance)
        return min(30.0, 0.5 * 2**attempt) * (0.5 + chance)

    async def _try(self, request: dict[str, Any], most: Usage) -> Reply:
        """One try. What may be gone at the next raises `Problem`; an endpoint that is not there, `Outage`."""
        assert self._room is not None
        began = perf_counter()
        try:
            async with self._room, asyncio.timeout(self.settings.timeout):
                answer = await self._send(request)
        except TimeoutError:
            raise Outage(f"no answer within {self.settings.timeout:g} s") from None
        except Unreachable as error:
            raise Outage(self._tell(error)) from None
        except Unreadable as error:
            raise Problem(self._tell(error, "an unreadable answer: "), "infrastructure") from None
        except Redirected as error:
            raise ModelError(f"{self._who}: {self._tell(error)}", "infrastructure") from None
        finally:
            self.ledger.seconds += perf_counter() - began
        if answer.is_error:
            return self._read_error(answer)
        self.ledger.calls += 1
        return self._read(answer, most)

    async def _send(self, request: dict[str, Any]) -> Answer:
        cap = self._cap
        answer = await self._endpoint.ask("POST", "/chat/completions", {**request, cap: self.reply_tokens})
        if answer.status != 400:
            return answer
        told = answer.explain()
        if cap == "max_tokens" and "max_completion_tokens" in told:
            self._cap = "max_completion_tokens"  # newer models know the limit by this name only
        elif "seed" in request and "seed" in told:
            self._seeded = False  # some endpoints take none
            request = {key: value for key, value in request.items() if key != "seed"}
        else:
            return answer
        request = {**request, self._cap: self.reply_tokens}
        return await self._endpoint.ask("POST", "/chat/completions", request)

    def _read_error(self, answer: Answer) -> Reply:
        """Raise what an error means, unless it says that the conversation is too long."""
        text = self._tell(answer.explain())
        if answer.status in (400, 413) and _is_overflow(text.lower()):
            return self._read_overflow(text)
        if answer.status >= 500:
            raise Outage(text, _read_wait(answer.headers), answered=True)
        if _is_passing(answer.status):
            raise Problem(text, "infrastructure", _read_wait(answer.headers))
        raise ModelError(f"{self._who} refused the request: {text}", "infrastructure")

    def _read(self, answer: Answer, most: Usage) -> Reply:
        """The reply in an answer. Raises `Problem` where there is none, with what it was billed for."""
        usage: Usage | None = None
        try:
            shape = answer.read()
            received = max(most.completion, len(answer.body))
            usage = self._count(shape, most.model_copy(update={"completion": received}))
            return self._to_reply(read_chat(shape), usage)
        except Unreadable as error:
            problem = Problem(self._tell(error, "an unreadable answer: "), "infrastructure")
            problem.usage = usage
            raise problem from None
        except Problem as problem:
            problem.usage = usage
            raise

    def _count(self, shape: Any, most: Usage) -> Usage:
        """Enter into the ledger what an answer was billed for, as far as that can be true."""
        usage, doubt = read_usage(shape, most)
        if doubt and not self._doubted:
            self._doubted = True
            LOG.warning("%s reports usage that cannot be: %s; such reports are bounded", self._who, doubt)
        self.ledger.prompt += usage.prompt
        self.ledger.completion += usage.completion
        self.ledger.cached += usage.cached
        self.ledger.usd += to_cost(usage, self._price)
        return usage

    def _to_reply(self, chat: ChatAnswer, usage: Usage) -> Reply:
        content = chat.content or chat.refusal
        cut = chat.finish == "length"
        if chat.finish == "content_filter":
            raise Problem("a message kept back by a content filter", self.side)
        if self.side == "user" and (
            chat.refusal or any(isinstance(call.arguments, str) for call in chat.calls)
        ):
            what = f"a refusal ({chat.refusal[:100]})" if chat.refusal else "a malformed tool call"
            raise Problem(what, "user")
        if not content.strip() and not chat.calls and not (cut and self.side == "agent"):
            raise Problem(f"an empty message (finish reason {chat.finish[:40] or None})", self.side)
        return Reply(
            content=content,
            tool_calls=chat.calls,
            reasoning=chat.reasoning,
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

    def _tell(self, said: object, before: str = "") -> str:
        """What an error says, in one short line and without the key, which servers like to quote."""
        text = f"{before}{said}"
        key = os.environ.get(self.settings.api_key_env)
        text = " ".join((text.replace(key, "(key)") if key else text).split())
        return text if len(text) <= 500 else text[:497] + "..."

    async def close(self) -> None:
        """Let go of the connections."""
        await self._endpoint.close()

    def _connect(self) -> Endpoint:
        key = os.environ.get(self.settings.api_key_env)
        address = self.settings.base_url or os.environ.get("OPENAI_BASE_URL")
        if not key and not address:
            raise ConfigError(
                f"openai:{self.name} needs a key: set {self.settings.api_key_env}, or name an endpoint with "
                f"{self.side}.base_url=URL or OPENAI_BASE_URL"
            )
        if not key and self.settings.api_key_env != Speaker().api_key_env:
            raise ConfigError(f"openai:{self.name}: the variable {self.settings.api_key_env} holds no key")
        if address and urlsplit(address).scheme not in ("http", "https"):
            raise ConfigError(
                f"{self.side}.base_url is {address}, which begins with neither http:// nor https://"
            )
        if address and "@" in urlsplit(address).netloc:
            raise ConfigError(
                f"{self.side}.base_url holds a password, which would be written to the run directory; "
                f"put the key into {self.settings.api_key_env}"
            )
        return Endpoint(address or ADDRESS, key or "none", self.settings.answer_bytes)

    @property
    def _who(self) -> str:
        return f"the {self.side}'s model openai:{self.name}"


def _add(before: Usage | None, usage: Usage | None) -> Usage | None:
    return usage if before is None else before if usage is None else before + usage


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
    except (ValueError, TypeError, OverflowError):
        return None
