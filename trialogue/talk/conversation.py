"""The conversation: an agent, a user and tools take turns until one side ends it or a limit is reached.

`converse` is a plain async function in the order of events. The user is a party like the agent: a script, a
person or a language model, with or without tools of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from time import perf_counter
from typing import TypeVar, cast

from trialogue.activity import ACTIVITY
from trialogue.config import Limits
from trialogue.errors import Blame
from trialogue.messages import Message
from trialogue.talk.model import Model, ask, to_clean
from trialogue.talk.near_calls import is_near_call
from trialogue.talk.stuck import Stuck, find_stuck
from trialogue.task import Side, Task
from trialogue.trajectory import End, Reply, Trajectory, Turn
from trialogue.world.domain import Domain, Environment, ToolResult
from trialogue.world.tools import Tool

T = TypeVar("T")


@dataclass(slots=True)
class Party:
    """Agent and user are the same thing here: a model with a system prompt and perhaps tools."""

    side: Side
    model: Model
    system: str
    tools: Mapping[str, Tool]
    cue: str | None = None
    """Words of the other side that only this one hears, before anything is said."""
    _seen: list[Turn] = field(default_factory=lambda: [], init=False, repr=False)
    _source: Sequence[Turn] = field(default=(), init=False, repr=False)
    _read: int = field(default=0, init=False, repr=False)
    """How much of the source is in what was seen: a conversation only grows, so it is turned round once."""

    def sees(self, turns: Sequence[Turn]) -> list[Turn]:
        """The conversation from this side: itself as assistant, the other as user, and of the other's
        tool calls and results nothing at all."""
        if turns is not self._source or self._read > len(turns) or not self._seen:
            system = Message(role="system", content=self.system)
            self._seen = [Turn(side=self.side, message=system)]
            if self.cue is not None:
                other: Side = "user" if self.side == "agent" else "agent"
                self._seen.append(Turn(side=other, message=Message(role="user", content=self.cue)))
            self._source, self._read = turns, 0
        for turn in turns[self._read :]:
            seen = self._see(turn)
            if seen is not None:
                self._seen.append(seen)
        self._read = len(turns)
        return self._seen.copy()

    def _see(self, turn: Turn) -> Turn | None:
        message = turn.message
        if turn.side != self.side:
            if message.role == "tool" or message.tool_calls:
                return None
            return Turn(side=turn.side, message=Message(role="user", content=message.content))
        if message.role != "user":
            return turn
        own = Message(
            role="assistant",
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=message.tool_calls,
        )
        return turn.model_copy(update={"message": own})

    async def speak(self, turns: Sequence[Turn]) -> Reply:
        return await ask(self.model, self.sees(turns), list(self.tools.values()), self.side)


@dataclass(slots=True)
class Transcript:
    """What has been said so far and who is at work, kept where a failure can be traced from outside."""

    turns: list[Turn] = field(default_factory=lambda: [])
    acting: Blame = "infrastructure"
    near_calls: int = 0
    """Replies that look like tool calls but were not read as calls."""

    def add(self, side: Side, reply: Reply, seconds: float) -> Turn:
        reply = to_clean(reply)
        message = Message(
            role="assistant" if side == "agent" else "user",
            content=reply.content,
            reasoning=reply.reasoning,
            tool_calls=reply.tool_calls,
        )
        turn = Turn(
            side=side,
            message=message,
            tokens=reply.tokens,
            finish=reply.finish,
            usage=reply.usage,
            model=reply.model,
            rejected=reply.rejected,
            has_patience=reply.has_patience,
            seconds=seconds,
        )
        self.turns.append(turn)
        ACTIVITY.turns += 1
        if reply.usage is not None and reply.tokens is None:  # what an engine here samples is counted there
            ACTIVITY.tokens += reply.usage.completion
        return turn


async def converse(
    task: Task,
    environment: Environment,
    agent: Party,
    user: Party,
    limits: Limits | None = None,
    transcript: Transcript | None = None,
) -> Trajectory:
    """Hold one conversation and return it, ungraded. Exceptions pass through: `rollout` catches them."""
    limits = limits or Limits()
    transcript = transcript or Transcript()
    turns = transcript.turns

    def close(end: End, stuck: Stuck | None = None) -> Trajectory:
        found = (stuck.blame, stuck.why) if stuck is not None else (None, None)
        return Trajectory(id=task.id, task=task, turns=tuple(turns), end=end, blame=found[0], error=found[1])

    domain = environment.domain
    rules = domain.rules
    turns += environment.history
    if not turns and domain.greeting is not None:
        transcript.add("agent", Reply(domain.greeting), 0.0)
    observations = failures = 0
    speaker = agent if _next_side(turns, domain) == "agent" else user
    while True:
        transcript.acting = speaker.side
        started = perf_counter()
        reply = await speaker.speak(turns)
        most = rules.most_calls(limits)
        if len(reply.tool_calls) > most:
            reply = replace(reply, tool_calls=reply.tool_calls[:most])
        turn = transcript.add(speaker.side, reply, perf_counter() - started)
        transcript.near_calls += is_near_call(reply, speaker.tools)
        if speaker is agent and is_too_long(turn, limits, speaker.system, turns):
            return close("too_long")

        for number, call in enumerate(turn.message.tool_calls):
            transcript.acting = "tool"
            started = perf_counter()
            if number < limits.calls:
                result = await settle(environment.call(call.name, call.arguments, speaker.side))
            else:
                result = refuse_call(limits.calls)
            observed = Message(role="tool", content=result.text, tool_call_id=call.id)
            seconds = perf_counter() - started
            turns.append(
                Turn(
                    side=speaker.side,
                    message=observed,
                    failed=result.failed,
                    changes=result.changes,
                    usage=result.usage,
                    seconds=seconds,
                )
            )
            observations += 1
            failures = failures + 1 if result.failed else 0
            if result.ends:
                return close("agent_stop" if speaker is agent else "user_stop")
            if rules.is_spent(limits, observations, failures):
                return close("max_turns")

        if rules.is_over(turns):
            return close("max_turns")
        if not turn.message.tool_calls:
            observations += speaker is user
            if rules.is_last(turns):
                return close("user_stop" if speaker is user else "agent_stop")
            if speaker is user and rules.ends_stuck and (stuck := find_stuck(turns)) is not None:
                return close("stuck", stuck)
            speaker = agent if speaker is user else user
        if rules.is_spent(limits, observations, failures):
            return close("max_turns")


def _next_side(turns: list[Turn], domain: Domain) -> Side:
    """Who is to speak: whoever a history leaves waiting, else the side that opens."""
    if not turns:
        return domain.rules.opens
    last = turns[-1]
    if last.message.role == "tool":
        return last.side
    return "user" if last.side == "agent" else "agent"


async def settle(value: T | Awaitable[T]) -> T:
    """What is there at once, or is awaited: the result of a remote tool, the verdict of a judge."""
    return await cast("Awaitable[T]", value) if isawaitable(value) else cast("T", value)


BYTES_PER_TOKEN = 4
"""What a token is taken for where the tokens are not ours to count: about that of English text."""


def is_too_long(turn: Turn, limits: Limits, policy: str, turns: Sequence[Turn]) -> bool:
    """Whether the agent ran out of room: its reply was cut off, or the whole has grown beyond the limit.
    Tokens sampled here are counted. What an endpoint reports decides nothing: there the text is measured."""
    if turn.finish == "length":
        return True
    if turn.usage is None:
        return False
    if turn.tokens is not None:
        return turn.usage.length > limits.context_tokens
    return _count_bytes(policy) + sum(map(_measure, turns)) > BYTES_PER_TOKEN * limits.context_tokens


def _measure(turn: Turn) -> int:
    """Bytes of a turn that the agent sees."""
    message = turn.message
    if turn.side == "user" and (message.role == "tool" or message.tool_calls):
        return 0
    calls = sum(_count_bytes(call.name) + _count_bytes(str(call.arguments)) for call in message.tool_calls)
    return _count_bytes(message.content) + calls


def _count_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def refuse_call(most: int) -> ToolResult:
    """What the first call beyond those of one message is told."""
    text = f"Error: a message may hold {most} tool calls; the calls from this one on were not made"
    return ToolResult(text, True)


def explain_end(trajectory: Trajectory, domain: Domain, limits: Limits) -> str:
    """Why the conversation ended, in words; empty where it failed, for then its error says so."""
    turns = trajectory.turns
    said = next((turn for turn in reversed(turns) if turn.message.role != "tool"), None)
    last = [turn.failed for turn in turns if turn.message.role == "tool"][-limits.tool_errors :]
    match trajectory.end:
        case "user_stop" | "agent_stop" if said is not None and said.message.tool_calls:
            called = [
                call.name for call in said.message.tool_calls if call.id == turns[-1].message.tool_call_id
            ]
            return f"the {said.side} called {', '.join(called)}"
        case "user_stop" if said is not None:
            tokens = [token for token in domain.rules.stop_tokens if token in said.message.content]
            return f"the user said {' '.join(tokens)}"
        case "agent_stop":
            return "the agent ended it"
        case "max_turns" if domain.rules.is_over(turns):
            return "it reached the domain's own limit"
        case "max_turns" if all(last) and len(last) == limits.tool_errors:
            return f"the last {limits.tool_errors} calls were refused or malformed (limits.tool_errors)"
        case "max_turns":
            return f"{limits.observations} user messages and tool results are allowed (limits.observations)"
        case "too_long" if said is not None and said.finish == "length":
            return f"the agent's reply was cut off at {limits.reply_tokens} tokens (limits.reply_tokens)"
        case "too_long":
            return f"the conversation is longer than {limits.context_tokens} tokens (limits.context_tokens)"
        case "stuck":
            return trajectory.error or ""
        case _:
            return ""
