"""Files that others wrote: whatever is wrong in one becomes one error, in a line that names it."""

from __future__ import annotations

import ast
import json
import re
import sysconfig
import tomllib
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trialogue.errors import ConfigError, TrialogueError

_HERE = Path(__file__).resolve().parent
_PYTHON = Path(sysconfig.get_path("stdlib")).resolve()
_INSTALLED = {"site-packages", "dist-packages"}
_LONGEST = 300
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


@contextmanager
def reading(where: object, kind: type[TrialogueError]) -> Generator[None]:
    """Raise an error of this kind that says where and what is wrong; one that says so already passes."""
    try:
        yield
    except (kind, ConfigError):
        raise
    except Exception as error:
        raise kind(f"{where}: {explain(error)}") from error


def from_json(text: str) -> Any:
    """JSON as plain data that can be written down again: half of a surrogate pair cannot."""
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def find_object(text: str) -> str:
    """The JSON object in a model's answer: from the first brace to the last. Empty where there is none."""
    start = text.find("{")
    return text[start : text.rfind("}") + 1] if start >= 0 else ""


def find_fenced(text: str) -> str:
    """What the first code fence of a model's answer holds; the whole answer where it has no fence."""
    rest = text.partition("```")[2]
    inside, end, _ = rest.partition("```")
    return inside.removeprefix("json").strip() if end else text


def from_python(text: str) -> ast.Module:
    """The syntax tree of a program, which is never run; its strings too can be written down."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value.encode()
    return tree


def explain(error: Exception) -> str:
    """What is wrong with data that raised this, in one line."""
    match error:
        case ValidationError():
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            told = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
            text = f"{place}: {told}" if place else told
        case json.JSONDecodeError():
            text = f"not JSON: {error}"
        case tomllib.TOMLDecodeError():
            text = f"not TOML: {error}"
        case UnicodeEncodeError():
            text = "half of a surrogate pair, which is no letter"
        case UnicodeDecodeError():
            byte = error.object[error.start]
            text = f"not UTF-8 text: byte 0x{byte:02x} at position {error.start} ({error.reason})"
        case SyntaxError():
            text = f"not Python: {error}"
        case RecursionError():
            text = "nested too deeply"
        case TrialogueError():
            text = str(error)
        case KeyError():
            text = f"there is no {error}"
        case OSError():
            text = error.strerror or str(error)
        case _:
            text = f"{type(error).__name__}: {error}"
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def describe(error: Exception) -> str:
    """The name of an error and what it says; of pydantic's many lines and address only the first fault."""
    kind = type(error).__name__
    if isinstance(error, ValidationError):
        return f"{kind}: {error.title}: {explain(error)}"
    return f"{kind}: {error}"


def locate(error: BaseException, folder: Path | None = None) -> tuple[str, str]:
    """Which function of the author's own code was called when this was raised, and the line it had reached.
    Both are empty where the error does not come from there. With a folder only its code counts."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own_code(frame.filename, folder)]
    return (own[0].name, f"{Path(own[-1].filename).name}, line {own[-1].lineno}") if own else ("", "")


def is_own_code(name: str, folder: Path | None = None) -> bool:
    """Whether a file is the author's own code: neither installed, nor Python's, nor part of this package.
    With a folder only its code counts, without an environment that lies inside it."""
    file = Path(name).resolve()
    if folder is not None:
        folder = folder.resolve()
        if not file.is_relative_to(folder) or _INSTALLED & set(file.relative_to(folder).parts):
            return False
        return not (file.is_relative_to(_HERE) and _HERE.is_relative_to(folder))
    if name.startswith("<") or file.is_relative_to(_HERE) or file.is_relative_to(_PYTHON):
        return False
    return not _INSTALLED & set(file.parts)


def read_table(module: str, name: str) -> dict[str, Any]:
    """A TOML file beside a module of this package, given by the module's `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
