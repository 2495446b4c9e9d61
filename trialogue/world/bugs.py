"""Bugs in a domain's own code, reported with the function, file and line that its author has to mend."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trialogue.errors import ConfigError, DomainError, TrialogueError, suggest
from trialogue.reading import locate
from trialogue.task import SPLITS, Task

_HERE = Path(__file__).parent
"""Where the databases of MCP servers and simulated tools stand, which are no domain's own code."""


def find_place(error: Exception, database: object) -> str:
    """Where the code beside this database raised, such as ` (in change_day, domain.py, line 36)`; empty where
    it did not, or raised one of our own errors, which say enough."""
    file: str | None = getattr(sys.modules.get(type(database).__module__), "__file__", None)
    if file is None or isinstance(error, TrialogueError) or Path(file).parent == _HERE:
        return ""
    name, line = locate(error, Path(file).parent)
    return f" (in {name}, {line})" if line else ""


def find_bug(error: Exception, database: object) -> str:
    """What identifies a bug in a domain's code: the kind of error and the line that raised it, whatever the
    arguments were. Empty where the domain's code is not at fault."""
    raised = error.__cause__ if isinstance(error, DomainError) else error
    if not isinstance(raised, Exception) or not find_place(raised, database):
        return ""  # such as a server that did not start: the next conversation may find it
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {last.filename}:{last.lineno}"


class Bugs:
    """Stops a rollout when the first conversations of its first tasks all meet the same bug."""

    ENOUGH = 6

    def __init__(self) -> None:
        self._first: dict[int, str] = {}

    def add(self, number: int, bug: str, told: str | None) -> None:
        """How a conversation of this task, counted from 0 in the order of their beginning, has gone."""
        if number >= self.ENOUGH:
            return
        self._first[number] = bug
        if bug and len(self._first) == self.ENOUGH and len(set(self._first.values())) == 1:
            raise DomainError(
                f"stopped: the first {self.ENOUGH} tasks all failed for one reason, in the domain's own "
                f"code: {told}; mend it, `trialogue check` finds more of its kind"
            )


@dataclass(frozen=True, slots=True)
class CheckedTasks:
    """A domain's source of tasks, whose mistakes are told as its author's."""

    name: str
    source: Callable[..., Any]
    database: object

    def __call__(
        self,
        split: str,
        count: int | None = None,
        seed: int = 0,
        *,
        levels: Sequence[int] = (),
        families: Sequence[str] = (),
    ) -> list[Task]:
        try:
            found: Any = self.source(split, count, seed, levels=levels, families=families)
            if not isinstance(found, list):
                raise TypeError(f"the source gives {type(found).__name__}, not a list of tasks")
            tasks = cast("list[Any]", found)
            if wrong := next((type(item).__name__ for item in tasks if not isinstance(item, Task)), None):
                raise TypeError(f"the source gives a list with {wrong} in it, not a list of tasks")
        except TrialogueError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            place = find_place(error, self.database)
            known = [] if split in SPLITS else [name for name in SPLITS if self._makes(name)]
            hint = f"; it has {', '.join(known)}{suggest(split, known)}" if known else ""
            kind = ConfigError if known else DomainError
            raise kind(f"{self.name} cannot make tasks of split '{split}': {text}{place}{hint}") from error
        return tasks

    def _makes(self, split: str) -> bool:
        try:
            return bool(self.source(split, 1, 0, levels=(), families=()))
        except Exception:  # noqa: BLE001 - the author's code may raise anything
            return False
