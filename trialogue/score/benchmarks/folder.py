"""Finding a benchmark's data: a folder that the user names, or one that an installed package brings along."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trialogue.errors import ConfigError

VARIABLE = "TRIALOGUE_DATA"
ENDINGS = ("", ".gz")


def find_data(
    data: str | None, places: Sequence[str], name: str, help: str, package: str | None = None
) -> Path:
    """The first of `places` below the named folder that exists; `package` is `module/folder` of a package
    that brings the data along and is looked at without being imported."""
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


def read_text(folder: Path, stem: str, endings: Iterable[str] = (".md", ".txt")) -> str:
    """A text file by its name without ending, gzipped or not."""
    path = find_file(folder, stem, endings)
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def read_data(folder: Path, stem: str) -> Any:
    """JSON or TOML by its name without ending, gzipped or not."""
    path = find_file(folder, stem, (".json", ".toml"))
    text = read_text(folder, stem, (".json", ".toml"))
    try:
        return tomllib.loads(text) if ".toml" in path.suffixes else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def find_file(folder: Path, stem: str, endings: Iterable[str]) -> Path:
    names = [f"{stem}{ending}{packed}" for ending in endings for packed in ENDINGS]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder} has no {stem}; looked for {', '.join(names)}")


def read_lines(path: Path) -> list[Any]:
    """JSON lines, gzipped or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]
