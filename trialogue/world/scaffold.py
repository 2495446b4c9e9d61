"""Write the files of `starter/` into a new folder: a working domain to start from."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from trialogue.errors import ConfigError

BUILT_IN = {"shop"}


def write_domain(folder: Path, generated: bool = False) -> list[Path]:
    """Write a small working domain into a new folder and name it after the folder. Returns the files. With
    `generated` its tasks are made by program."""
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"'{name}' is not a valid name for a domain: use small letters, digits and _, "
            "and begin with a letter"
        )
    if name in BUILT_IN:
        raise ConfigError(f"'{name}' is a built-in domain; choose another name")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists already; choose another name") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
    written: list[Path] = []
    starter = "starter_generated" if generated else "starter"
    for source in sorted(files("trialogue.world").joinpath(starter).iterdir(), key=lambda file: file.name):
        target = folder / source.name.removesuffix(
            ".txt"
        )  # not called .py, because it is not a module of this package
        target.write_text(source.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
        written.append(target)
    return written
