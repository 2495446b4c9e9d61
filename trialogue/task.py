"""What one conversation is about: the user's wish, how the world is set up, and what is expected of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from trialogue.messages import Frozen

Side = Literal["agent", "user"]
SPLITS = ("train", "dev", "test")
"""What tasks are usually divided into."""


class Call(Frozen):
    """A call written in a task: of the agent's or the user's tools (or set-up functions)."""

    name: str
    arguments: dict[str, Any] = {}
    side: Side = "agent"


class Assertion(Call):
    """A function of a database that must answer `value` at the end."""

    value: bool = True


class Check(Call):
    """A call made when the conversation is over, whose result must match."""

    matches: str
    """A regular expression, looked for anywhere in the result."""


class Setup(Frozen):
    """How the world differs from the domain's base when this conversation opens."""

    data: dict[str, Any] = {}
    """Laid over the agent-side database, table by table, record by record, field by field."""
    user_data: dict[str, Any] = {}
    """The same for the user's own database."""
    calls: tuple[Call, ...] = ()
    """Run in order after the data is laid in; they may name any public method of the databases."""


class Expected(Frozen):
    """What must hold at the end. Everything given is required."""

    calls: tuple[Call, ...] = ()
    """Gold calls: replayed on a fresh environment, they give the database that must be reached."""
    say: tuple[str | tuple[str, ...], ...] = ()
    """Things the agent must tell the user; a tuple lists wordings of which one suffices."""
    assertions: tuple[Assertion, ...] = ()
    checks: tuple[Check, ...] = ()
    """For worlds that are not ours, such as an MCP server: asked of its tools at the end."""
    nothing: bool = False
    """True where doing and saying nothing at all is right (otherwise `check` complains)."""


class Task(Frozen):
    """One task. `instructions` are the user's and are never shown to the agent."""

    id: str
    domain: str
    instructions: str
    setup: Setup = Setup()
    expected: Expected = Expected()
    split: str = "test"
    meta: dict[str, Any] = Field(default_factory=dict)
    """Free data; `family` and `level` split every metric, `agenda` feeds the rule-based user."""

    @field_validator("meta")
    @classmethod
    def _level_is_whole(cls, meta: dict[str, Any]) -> dict[str, Any]:
        try:
            int(meta.get("level", 0))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"level must be a whole number, not {meta['level']!r}") from None
        return meta

    @property
    def family(self) -> str:
        return str(self.meta.get("family", ""))

    @property
    def level(self) -> int:
        return int(self.meta.get("level", 0))
