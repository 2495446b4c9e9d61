"""Find and read a benchmark's data: in a folder that the user names or in an installed package."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trialogue.errors import ConfigError
from trialogue.reading import from_json, from_python, reading

VARIABLE = "TRIALOGUE_DATA"
ENDINGS = ("", ".gz")
DATA = (".json", ".toml")


class Missing(ConfigError):
    """A file is missing. Some files are optional."""


def find_data(
    data: str | None, places: Sequence[str], name: str, help: str, package: str | None = None
) -> Path:
    """The first of `places` that exists below the named folder. `package` is `module/folder` of a package
    that contains the data; it is found without being imported."""
    given = data or os.environ.get(VARIABLE)
    roots = [Path(given).expanduser()] if given else []
    if not roots and package is not None:
        module, _, rest = package.partition("/")
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            roots.append(Path(found.origin).parent / rest)
    for root in roots:
        for place in places:
            if (root / place).exists():
                return root / place
    if not given:
        raise ConfigError(f"{name} needs its data: name the folder with --data DIR or {VARIABLE}. {help}")
    looked = ", ".join(place or "." for place in places)
    missing = "" if roots[0].is_dir() else " (there is no such folder)"
    raise ConfigError(f"no data of {name} in {given}{missing}; looked for {looked}. {help}")


def find_version(folder: Path) -> str:
    """The version of the package or checkout that contains a folder, and its commit if it has one."""
    for place in (folder, *folder.parents[:6]):
        found = sorted(place.parent.glob(f"{place.name}-*.dist-info"))
        if found:
            return found[0].name.removesuffix(".dist-info").replace("-", " ", 1)
        parts = [text for text in (_read_declared(place), _read_commit(place / ".git")) if text]
        if parts:
            return ", ".join(parts)
    return "unknown: the data lies in no package and no checkout"


def _read_declared(folder: Path) -> str | None:
    """The version declared in a project's files."""
    for name in ("pyproject.toml", "setup.py"):
        file = folder / name
        found = file.is_file() and re.search(
            r"""^[ \t]*version[ \t]*=[ \t]*["']([^"']+)["']""", file.read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return found[1]
    return None


def _read_commit(folder: Path) -> str | None:
    """The commit checked out."""
    try:
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    name = head.removeprefix("ref: ")
    if name == head:
        return f"commit {head[:12]}"
    if (folder / name).is_file():
        return f"commit {(folder / name).read_text(encoding='utf-8').strip()[:12]}"
    packed = folder / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    found = [line.split()[0] for line in lines if line.endswith(f" {name}")]
    return f"commit {found[0][:12]}" if found else None


def read_text(folder: Path, stem: str, endings: Iterable[str] = (".md", ".txt")) -> str:
    """A text file by its name without ending, gzipped or not."""
    return _unpack(find_file(folder, stem, endings))


def _unpack(path: Path) -> str:
    with reading(path, ConfigError):
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def read_data(folder: Path, stem: str) -> Any:
    """JSON or TOML by its name without ending, gzipped or not."""
    path = find_file(folder, stem, DATA)
    if ".toml" not in path.suffixes:
        return read_json_file(path)
    with reading(path, ConfigError):
        return tomllib.loads(_unpack(path))


def read_json_file(path: Path) -> Any:
    """A file of JSON, gzipped or not."""
    with reading(path, ConfigError):
        return from_json(_unpack(path))


def find_file(folder: Path, stem: str, endings: Iterable[str]) -> Path:
    names = [f"{stem}{ending}{packed}" for ending in endings for packed in ENDINGS]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise Missing(f"{folder} has no {stem}; looked for {', '.join(names)}")


def read_json_lines(path: Path) -> list[Any]:
    """JSON lines, gzipped or not."""
    rows: list[Any] = []
    for number, line in enumerate(_unpack(path).split("\n"), 1):
        with reading(f"{path}, line {number}", ConfigError):
            if line.strip():
                rows.append(from_json(line))
    return rows


def read_python(path: Path) -> ast.Module:
    """The syntax tree of a Python file. The file is never run."""
    with reading(path, ConfigError):
        return from_python(_unpack(path))


def read_assigned(path: Path) -> dict[str, ast.expr]:
    """What a Python file assigns to names at its top level."""
    found: dict[str, ast.expr] = {}
    for node in read_python(path).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case _:
                pass
    return found


def read_texts(path: Path) -> dict[str, str]:
    """The texts that a Python file assigns at its top level, `.strip()` included."""
    texts: dict[str, str] = {}
    for name, value in read_assigned(path).items():
        match value:
            case ast.Constant(value=str(text)):
                texts[name] = text
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="strip"), args=[]):
                texts[name] = text.strip()
            case _:
                pass
    return texts
