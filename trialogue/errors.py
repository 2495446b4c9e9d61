"""The exception tree. An error says what was wrong, what is allowed and what to do.

TrialogueError
├── ConfigError       wrong usage or configuration: exit status 2
├── DomainError       a domain's own code or data is wrong; its author has to mend it
├── ToolError         a tool refuses; the text goes back to whoever called it
│   └── RecordNotFound
├── ModelError        a model gave no usable reply
├── BudgetError       the run may spend no more; everything finished is saved
├── EngineError       sampling or updating weights failed
│   └── OutOfMemory   the GPU has too little memory for these settings
├── RunError          a run directory cannot be read, written or resumed
└── GradeError        a conversation cannot be graded (a judge failed, a replay diverged)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Blame = Literal["agent", "user", "tool", "judge", "infrastructure"]


class TrialogueError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(TrialogueError):
    """Wrong usage or configuration."""


class DomainError(TrialogueError):
    """A domain's code or data is wrong."""


class ToolError(TrialogueError):
    """A tool refuses. The text is shown to the speaker, who may try again."""


class RecordNotFound(ToolError, KeyError):
    """A table has no record of that key."""

    __str__ = Exception.__str__  # KeyError would show the repr of the text


class ModelError(TrialogueError):
    """A model gave no usable reply; `blame` says whether its service or its words are at fault."""

    def __init__(self, text: str, blame: Blame | None = None) -> None:
        super().__init__(text)
        self.blame: Blame | None = blame


class BudgetError(TrialogueError):
    """The run may spend no more. It stops with everything saved, and goes on with a larger budget."""


class EngineError(TrialogueError):
    """Sampling or updating weights failed."""


class OutOfMemory(EngineError):
    """The GPU has too little memory for these settings. `is_unchanged` says whether the weights are those of
    the last step."""

    def __init__(self, text: str, is_unchanged: bool = True) -> None:
        super().__init__(text)
        self.is_unchanged = is_unchanged


class RunError(TrialogueError):
    """A run directory cannot be read, written or resumed."""


class GradeError(TrialogueError):
    """A conversation cannot be graded."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Suggest close matches for a misspelt name, as the end of an error message."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), 3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
