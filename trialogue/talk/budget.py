"""What the models of a run cost: a ledger by role and model, and a budget that is never overspent.

A request is let through only if the most it could cost still fits; otherwise it waits for those under way to
be settled, and when none is left the budget is spent and the run stops.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from trialogue.config import Budget, Price
from trialogue.errors import BudgetError, ConfigError
from trialogue.trajectory import Usage


@dataclass(slots=True)
class LedgerEntry:
    """What one model has used in one role."""

    role: str
    model: str
    calls: int = 0
    retries: int = 0
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    usd: float = 0.0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


AMOUNTS = ("calls", "retries", "prompt", "completion", "cached", "usd", "seconds")


@cache
def read_prices() -> dict[str, Price]:
    """The price table that comes with the package."""
    text = (Path(__file__).parent / "prices.toml").read_text(encoding="utf-8")
    return {name: tuple(price) for name, price in tomllib.loads(text)["prices"].items()}


def find_price(
    model: str, own: Price | None = None, table: Mapping[str, Price] | None = None
) -> Price | None:
    """Money for a million prompt, completion and cached tokens: a speaker's own price, else the table's for
    the longest name the model's begins with, else none."""
    if own is not None:
        return own
    known = {**read_prices(), **(table or {})}
    names = [
        name for name in known if model == name or model.startswith((f"{name}-", f"{name}:", f"{name}@"))
    ]
    return known[max(names, key=len)] if names else None


def to_cost(usage: Usage, price: Price | None) -> float:
    """Money for what was used; cached tokens cost as fresh ones where the price says nothing of them."""
    if price is None:
        return 0.0
    cached = price[2] if len(price) > 2 else price[0]
    fresh = usage.prompt - usage.cached
    return (fresh * price[0] + usage.cached * cached + usage.completion * price[1]) / 1e6


class Account:
    """The books of one run, shared by all its models."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.entries: dict[tuple[str, str], LedgerEntry] = {}
        self._written: dict[tuple[str, str], LedgerEntry] = {}
        self._before = Usage(calls=0)
        self._before_usd = 0.0
        self._held_tokens = 0
        self._held_usd = 0.0
        self._settled = asyncio.Event()

    def open(self, role: str, model: str, price: Price | None) -> LedgerEntry:
        """The line of a model in a role. A budget of money wants to know the price."""
        if self.budget.usd is not None and price is None:
            raise ConfigError(
                f"budget.usd is set, but the price of '{model}' is not known: set {role}.price or "
                f"budget.prices, money for a million prompt, completion (and cached) tokens"
            )
        return self.entries.setdefault((role, model), LedgerEntry(role, model))

    def load(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take over what the run had spent before it was resumed."""
        for line in lines:
            self._before_usd += line.get("usd", 0.0)
            self._before = Usage(
                prompt=self._before.prompt + line.get("prompt", 0),
                completion=self._before.completion + line.get("completion", 0),
                calls=0,
            )

    @property
    def tokens(self) -> int:
        earlier = self._before.prompt + self._before.completion
        return earlier + sum(entry.tokens for entry in self.entries.values())

    @property
    def usd(self) -> float:
        return self._before_usd + sum(entry.usd for entry in self.entries.values())

    @asynccontextmanager
    async def holding(self, most: Usage, price: Price | None) -> AsyncGenerator[None]:
        """Keep room for the most a request could use, while it is under way."""
        if self.budget.usd is None and self.budget.tokens is None:
            yield
            return
        tokens, usd = most.prompt + most.completion, to_cost(most, price)
        while not self._fits(tokens, usd):
            if not self._held_tokens:
                raise BudgetError(self.to_text())
            self._settled.clear()
            await self._settled.wait()
        self._held_tokens += tokens
        self._held_usd += usd
        try:
            yield
        finally:
            self._held_tokens -= tokens
            self._held_usd = self._held_usd - usd if self._held_tokens else 0.0
            self._settled.set()

    def _fits(self, tokens: int, usd: float) -> bool:
        limits = self.budget
        if limits.tokens is not None and self.tokens + self._held_tokens + tokens > limits.tokens:
            return False
        return limits.usd is None or self.usd + self._held_usd + usd <= limits.usd

    def to_text(self) -> str:
        """How much of the budget is spent, and what to do."""
        parts: list[str] = []
        if self.budget.usd is not None:
            parts.append(f"{self.usd:.4f} of {self.budget.usd:g} dollars")
        if self.budget.tokens is not None:
            parts.append(f"{self.tokens} of {self.budget.tokens} tokens")
        return f"the budget is spent ({', '.join(parts)}) as far as the next request is sure to fit"

    def take(self) -> list[dict[str, Any]]:
        """What was used since the last time, a line for each role and model: the run's ledger."""
        lines: list[dict[str, Any]] = []
        for key, entry in self.entries.items():
            before = self._written.get(key) or LedgerEntry(entry.role, entry.model)
            used = {name: getattr(entry, name) - getattr(before, name) for name in AMOUNTS}
            self._written[key] = replace(entry)
            if any(used.values()):
                rounded = {name: round(value, 8) for name, value in used.items()}
                lines.append({"role": entry.role, "model": entry.model, **rounded})
        return lines


def add_up(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A ledger's lines summed by role and model."""
    sums: dict[tuple[str, str], LedgerEntry] = {}
    for line in lines:
        key = line["role"], line["model"]
        entry = sums.setdefault(key, LedgerEntry(*key))
        for name in AMOUNTS:
            setattr(entry, name, getattr(entry, name) + line.get(name, 0))
    return [
        {**asdict(entry), "usd": round(entry.usd, 8), "seconds": round(entry.seconds, 3)}
        for entry in sums.values()
    ]
