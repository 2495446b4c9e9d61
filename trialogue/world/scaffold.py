"""A new domain to start from: the files of `starter/`, written into a folder of the author's choice."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from trialogue.errors import ConfigError

BUILT_IN = {"shop"}


def write_domain(folder: Path) -> list[Path]:
    """Write a small working domain into a new folder, which gives it its name. Returns what was written."""
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"'{name}' is no name for a domain: use small letters, digits and _, and begin with a letter"
        )
    if name in BUILT_IN:
        raise ConfigError(f"'{name}' is a built-in domain; choose another name")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists and is left as it is; choose another name") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    written: list[Path] = []
    for source in sorted(files("trialogue.world").joinpath("starter").iterdir(), key=lambda file: file.name):
        target = folder / source.name.removesuffix(".txt")  # no module of ours, so not called .py here
        target.write_text(source.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
        written.append(target)
    return written
