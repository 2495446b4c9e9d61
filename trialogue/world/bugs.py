"""Bugs in a domain's own code, reported with the function, file and line that its author has to mend, and
other reasons for which every conversation fails.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trialogue.errors import (
    Blame,
    ConfigError,
    DomainError,
    EngineError,
    ModelError,
    TrialogueError,
    suggest,
)
from trialogue.reading import locate
from trialogue.task import SPLITS, Task

_HERE = Path(__file__).parent
"""Where the databases of MCP servers and simulated tools stand, which are no domain's own code."""


def find_place(error: Exception, database: object) -> str:
    """Where the code beside this database, or other code of the caller's, raised, such as ` (in change_day,
    domain.py, line 36)`; empty where it did not, or raised one of our own errors, which say enough."""
    if isinstance(error, TrialogueError):
        return ""
    name, line = _locate_in_domain(error, database)
    if not line:
        name, line = locate(error)
    return f" (in {name}, {line})" if line else ""


def _locate_in_domain(error: Exception, database: object) -> tuple[str, str]:
    file: str | None = getattr(sys.modules.get(type(database).__module__), "__file__", None)
    if file is None or isinstance(error, TrialogueError) or Path(file).parent == _HERE:
        return "", ""
    return locate(error, Path(file).parent)


def find_bug(error: Exception, database: object) -> str:
    """What identifies a bug in a domain's code: the kind of error and the line that raised it, whatever the
    arguments were. Empty where the domain's code is not at fault."""
    raised = error.__cause__ if isinstance(error, DomainError) else error
    if not isinstance(raised, Exception) or not _locate_in_domain(raised, database)[1]:
        return ""  # such as a server that did not start: the next conversation may find it
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {last.filename}:{last.lineno}"


def find_reason(error: Exception, blame: Blame, told: str) -> str:
    """What identifies a reason that is no bug of the domain and not up to a model, such as a bug in a reward
    or a server that does not start. Empty where a model is at fault."""
    if isinstance(error, ModelError | EngineError) or isinstance(error.__cause__, ModelError | EngineError):
        return ""
    if not isinstance(error, TrialogueError) and (line := locate(error)[1]):
        return f"{type(error).__name__} {line}"
    return told if blame in ("tool", "judge", "infrastructure") else ""


class Failures:
    """Stops a rollout when all conversations of its first tasks fail for the same reason."""

    ENOUGH = 6

    def __init__(self, tasks: int | None = None) -> None:
        self._tasks = self.ENOUGH if tasks is None else min(self.ENOUGH, tasks)
        self._reasons: dict[int, list[str]] = {}

    def add(
        self, number: int, error: Exception | None, blame: Blame | None, told: str, database: object
    ) -> None:
        """How a conversation of this task, counted from 0 in the order of their beginning, has gone."""
        if number >= self._tasks:
            return
        bug = reason = ""
        if error is not None and blame is not None:
            bug = find_bug(error, database)
            reason = bug or find_reason(error, blame, told)
        self._reasons.setdefault(number, []).append(reason)
        found = [item for reasons in self._reasons.values() for item in reasons]
        if len(self._reasons) < self._tasks or len(found) < self.ENOUGH or set(found) != {reason}:
            return
        stopped = f"stopped: all {len(found)} conversations so far failed for one reason"
        if bug:
            raise DomainError(
                f"{stopped}, in the domain's own code: {told}; mend it, `trialogue check` finds more of its "
                "kind"
            )
        if reason:
            raise TrialogueError(f"{stopped}: {told}; blame: {blame}")


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
