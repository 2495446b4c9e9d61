"""Load the caller's own code: `module:name` or `path/to/file.py:name`, in one way for every seam.

A domain, agent, user, reward, advantage, loss, engine or renderer can be replaced from outside. A setting
that may name code has the type `Reference`. A record must not choose code by itself: `score/resume.py`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, cast

from trialogue.errors import ConfigError, TrialogueError, suggest
from trialogue.foreign import show_line
from trialogue.reading import is_own_code, locate

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True)
class Seam:
    """Marks a setting whose value may name code."""

    words: frozenset[str] = frozenset()
    """What stands before a colon without being a module, such as `openai` in `openai:gpt-4.1`."""
    prefix: str = ""
    """What may stand before all this, such as `guided:`."""

    def find_code(self, value: str) -> str | None:
        """What a value of the setting runs; None where it is a built-in name."""
        value = value.removeprefix(self.prefix)
        parts = split_reference(value)
        return None if parts is None or parts.place in self.words else describe_code(value)


Reference = Annotated[str, Seam()]
"""A setting: a built-in name, or a reference to code."""


class Parts(NamedTuple):
    """A reference taken apart."""

    place: str
    """A module, or a path that ends in `.py`."""
    name: str


def split_reference(reference: str) -> Parts | None:
    """The parts of `module:name` or `path/to/file.py:name`; None where the text has neither form."""
    place, _, name = reference.rpartition(":")
    if _NAME.fullmatch(name) and (place.endswith(".py") or _NAME.fullmatch(place)):
        return Parts(place, name)
    return None


def to_absolute(reference: str) -> str:
    """The reference with the full path of its file, if it names one: it holds in every folder."""
    parts = split_reference(reference)
    if parts is None or not parts.place.endswith(".py"):
        return reference
    return f"{Path(os.path.expanduser(parts.place)).resolve()}:{parts.name}"


def load_seam(
    reference: str, what: str, kind: type[TrialogueError] = ConfigError, known: Iterable[str] = ()
) -> Any:
    """The object that a reference names. `what` is the seam, such as `reward`, for the errors. An exception
    while the code is loaded becomes an error of this kind. Where there is no such module, the error suggests
    a close match among the `known` names."""
    where = f"no {what} '{show_line(reference)}'"
    parts = split_reference(reference)
    if parts is None:
        hint = f"; write {reference}:NAME" if reference.endswith(".py") else ""
        raise ConfigError(f"{where}: it is neither module:name nor path/to/file.py:name{hint}")
    if not parts.place.endswith(".py"):
        hint = suggest(parts.place, known)
        return _find_name(_load_module(parts.place, where, kind, hint), parts.name, where, parts.place)
    file = Path(os.path.expanduser(parts.place))  # the method of Path raises on ~nobody
    if not file.is_file():
        raise ConfigError(f"{where}: there is no such file")
    return _find_name(load_file(file, kind), parts.name, where, file.name)


def describe_code(reference: str) -> str:
    """What loading a reference runs, for a person to decide on."""
    place = reference.rpartition(":")[0]
    if not place.endswith(".py"):
        return f"the module {show_line(place)}"
    return show_line(str(Path(os.path.expanduser(place)).resolve()))


def load_file(file: Path, kind: type[TrialogueError] = ConfigError) -> ModuleType:
    """The module in a file, run once per process. It can import the files beside it by `from . import`."""
    path = str(file.resolve())
    name = f"trialogue_file_{file.resolve().stem}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    if (module := sys.modules.get(name)) is not None:
        return module
    specification = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)]
    )
    if specification is None or specification.loader is None:
        raise ConfigError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        with loading(str(file), file.parent, kind):
            specification.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _load_module(name: str, where: str, kind: type[TrialogueError], hint: str) -> ModuleType:
    """A module by name, from the working directory too, like uvicorn's `module:app`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with loading(f"module {name}", Path.cwd(), kind):
            return importlib.import_module(name)
    except kind as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        raise ConfigError(f"{where}: cannot import {name}: {error.__cause__}{hint}") from None


def _find_name(module: ModuleType, name: str, where: str, place: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key in dir(found) if not key.startswith("_")]
            raise ConfigError(f"{where}: {place} has no '{name}'{suggest(part, known)}")
        found = getattr(found, part)
    return found


@contextmanager
def loading(
    where: str, folder: Path | None = None, kind: type[TrialogueError] = ConfigError
) -> Generator[None]:
    """Turn an exception of the caller's code into one line with the place that raised it, in this folder or
    anywhere."""
    try:
        yield
    except TrialogueError:
        raise
    except Exception as error:
        _, line = locate(error, folder)
        place = f" ({line})" if line else ""
        raise kind(f"{where}: {type(error).__name__}: {error}{place}") from error


# -- how the caller's code is called -------------------------------------------------------------------------


def check_signature(function: Any, arguments: Sequence[str], what: str) -> None:
    """Refuse something that cannot be called with these arguments, before anything depends on it."""
    called = f"{what}({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{what} is {describe_value(function)}{find_caller()}; it is called as {called}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built into Python: it has no signature to compare with
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{what} {describe_value(function)}: it is called as {called}, but takes {signature} ({error})"
        ) from None


def describe_value(value: Any) -> str:
    """A value in a few words: `None`, or a function's name with the file and line that define it."""
    if value is None:
        return "None"
    inner: Any = value.func if isinstance(value, partial) else value
    named: Any = inner if isinstance(inner, type) or inspect.isroutine(inner) else type(inner)
    try:
        file, line = inspect.getsourcefile(named), inspect.getsourcelines(named)[1]
    except (OSError, TypeError):  # built into Python, or typed at a prompt
        return f"of type {named.__name__}"
    return f"{named.__name__} ({Path(file or '').name}, line {line})"


def describe_type(value: Any) -> str:
    """What a function returned, in a few words: `None`, its type, or the keys of a dict."""
    if value is None:
        return "None"
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, cast('dict[Any, Any]', value)))[:8]}"
    return f"an object of type {type(value).__name__}"


def find_caller() -> str:
    """The line of the caller's own code that called this package, such as ` (mine.py, line 3)`."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if is_own_code(frame.f_code.co_filename):
            return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


PROGRAMMING_ERRORS = (AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
"""Exceptions that mean wrong code rather than an unusual conversation."""


def raise_bug(error: BaseException, what: str) -> None:
    """Raise an error that names the function, file and line where the caller's own code is wrong. Do nothing
    where the exception may come from the conversation, such as a model's answer that cannot be parsed."""
    name, line = locate(error)
    if line and isinstance(error, PROGRAMMING_ERRORS):
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{what}: {text} (in {name}, {line})") from error
