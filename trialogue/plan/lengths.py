"""How long conversations are: drawn from what is assumed, or from the recorded conversations of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from trialogue.assumptions import PlanSettings
from trialogue.config import Limits, PlanConfig
from trialogue.errors import RunError
from trialogue.trajectory import Trajectory

Who = Literal["user", "agent", "tool"]
CHARACTERS = 4
"""Characters of a token, where a text was never tokenized."""


class Part(NamedTuple):
    """One message: who writes it, its tokens, and the seconds it takes besides sampling."""

    who: Who
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Conversations to draw from."""

    settings: PlanSettings
    limits: Limits
    shared_tokens: int
    """Tokens of policy and tools, with which all conversations begin."""
    user_seconds: float
    recorded: tuple[tuple[Part, ...], ...] = ()

    def draw(self, random: Random) -> Sequence[Part]:
        """One conversation."""
        if self.recorded:
            return random.choice(self.recorded)
        return self.invent(random)

    def invent(self, random: Random) -> list[Part]:
        """A conversation of the lengths that are assumed."""
        wanted, limits = self.settings, self.limits
        most = limits.observations
        users = min(most, max(1, round(vary(random, wanted.user_turns, wanted.spread))))
        calls = min(most - users, round(vary(random, wanted.tool_calls, wanted.spread)))
        after = [random.randrange(users) for _ in range(calls)]
        parts: list[Part] = []
        room = limits.context_tokens - self.shared_tokens
        for turn in range(users):
            said: list[Part] = [Part("user", self._tokens(random, wanted.user_tokens), self._wait(random))]
            for _ in range(after.count(turn)):
                said.append(Part("agent", self._reply(random), 0.0))
                said.append(Part("tool", self._tokens(random, wanted.tool_tokens), wanted.tool_seconds))
            if turn + 1 < users or users == 1:
                said.append(Part("agent", self._reply(random), 0.0))
            for part in said:
                room -= part.tokens
                if room < 0:
                    return parts or [part]
                parts.append(part)
        return parts

    def _reply(self, random: Random) -> int:
        return min(self.limits.reply_tokens, self._tokens(random, self.settings.reply_tokens))

    def _tokens(self, random: Random, mean: float) -> int:
        return max(1, round(vary(random, mean, self.settings.spread)))

    def _wait(self, random: Random) -> float:
        return self.user_seconds * random.lognormvariate(0.0, self.settings.user_spread)


def vary(random: Random, mean: float, sigma: float) -> float:
    """A log-normal number with this mean."""
    return mean * random.lognormvariate(0.0, sigma) / exp(sigma * sigma / 2)


def find_lengths(config: PlanConfig) -> Lengths:
    """The lengths that a configuration asks for: those of `plan.like`, else the assumed ones."""
    settings = config.plan
    seconds = settings.user_seconds
    if seconds is None:
        seconds = 2.0 if is_endpoint(config.user.model) or config.user.mix else 0.0
    if settings.like:
        recorded, shared = read_recorded(Path(settings.like))
        return Lengths(settings, config.limits, shared, seconds, recorded)
    shared = min(settings.prompt_tokens, config.limits.context_tokens // 2)
    return Lengths(settings, config.limits, shared, seconds)


def is_endpoint(model: str) -> bool:
    return model.removeprefix("guided:").startswith("openai:")


def read_recorded(run: Path) -> tuple[tuple[tuple[Part, ...], ...], int]:
    """The conversations of a run, part by part with their seconds, and the tokens that they begin with."""
    from trialogue.records import read_lines
    from trialogue.run import read_prompts, read_trajectories, refuse_missing

    refuse_missing(run)
    timings: dict[str, list[float]] = {}
    file = run / "timings.jsonl"
    for _, line in read_lines(file) if file.exists() else ():
        if isinstance(line.get("turns"), list):
            timings[str(line["id"])] = [float(value) for value in line["turns"]]
    items = [item for item in read_trajectories(run) if item.turns and item.end != "error"]
    if not items:
        raise RunError(f"{run} holds no finished conversation to take lengths from")
    parts = tuple(tuple(read_parts(item, timings.get(item.id, []))) for item in items)
    starts = [start for item in items if (start := find_start(item)) is not None]
    if starts:
        return parts, min(starts)
    return parts, max(1, len(str(read_prompts(run))) // CHARACTERS)


def read_parts(item: Trajectory, seconds: Sequence[float]) -> list[Part]:
    """The messages of a conversation."""
    parts: list[Part] = []
    for place, turn in enumerate(item.turns):
        who: Who = "tool" if turn.message.role == "tool" else "agent" if turn.side == "agent" else "user"
        if turn.tokens is not None:
            tokens = len(turn.tokens.reply)
        elif turn.usage is not None and turn.usage.completion:
            tokens = turn.usage.completion
        else:
            tokens = len(to_text(turn.message)) // CHARACTERS
        spent = seconds[place] if place < len(seconds) else 0.0
        parts.append(Part(who, max(1, tokens), 0.0 if who == "agent" else spent))
    return parts


def to_text(message: Any) -> str:
    return f"{message.content}{''.join(str(call) for call in message.tool_calls or ())}"


def find_start(item: Trajectory) -> int | None:
    """Tokens of the prompt before the agent's first reply, less what the user had said by then."""
    said = 0
    for turn in item.turns:
        if turn.side == "agent" and turn.message.role != "tool":
            if turn.tokens is not None:
                return max(1, len(turn.tokens.prompt) - said)
            if turn.usage is not None and turn.usage.prompt:
                return max(1, turn.usage.length - turn.usage.completion - said)
            return None
        said += len(to_text(turn.message)) // CHARACTERS
    return None
