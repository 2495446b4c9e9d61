"""Finding a domain: by name, by `module:name`, by path to a file or folder, or through an entry point."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from trialogue.errors import ConfigError, DomainError
from trialogue.world.domain import Domain

GROUP = "trialogue.domains"
"""Packages announce domains under this entry-point group. The object is a `Domain`, a function without
arguments that makes one, or, for names such as `tau2:retail`, a function of what stands after the colon."""


def find_domain(reference: str, data: str | None = None) -> Domain:
    """The domain a reference names; `data` is the folder a benchmark reads from."""
    if reference == "shop":
        from trialogue.world.domains.shop import domain

        return domain
    path = Path(reference).expanduser()
    if path.exists() and (path.is_dir() or path.suffix == ".py"):
        return _from_path(path)
    name, _, rest = reference.partition(":")
    announced = {point.name: point for point in entry_points(group=GROUP)}
    if name in announced:
        found: Any = announced[name].load()
        if isinstance(found, Domain):
            return found
        make = cast("Callable[..., Any]", found)
        return _checked(make(rest, data=data) if rest or data else make(), reference)
    if rest:
        return _from_module(name, rest, reference)
    known = ", ".join(sorted({"shop", *announced}))
    raise ConfigError(
        f"no domain '{reference}': it is none of {known}, no path to a folder or .py file, and no module:name"
    )


def _from_path(path: Path) -> Domain:
    file = path / "__init__.py" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        candidates = [path / f"{path.name}.py", path / "domain.py", *sorted(path.glob("*.py"))]
        file = next((candidate for candidate in candidates if candidate.exists()), file)
    if not file.exists():
        raise ConfigError(f"{path} holds no Python file that defines a domain")
    name = f"trialogue_domain_{path.resolve().stem}_{abs(hash(str(file.resolve()))):x}"
    module = sys.modules.get(name)
    if module is None:
        specification = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(file.parent)]
        )
        if specification is None or specification.loader is None:
            raise ConfigError(f"{file} cannot be imported")
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        try:
            specification.loader.exec_module(module)
        except DomainError:
            sys.modules.pop(name, None)
            raise
        except Exception as error:
            sys.modules.pop(name, None)
            raise DomainError(f"{file}: {type(error).__name__}: {error}") from error
    return _the_domain(module, str(file))


def _the_domain(module: ModuleType, where: str) -> Domain:
    """The one domain a module defines."""
    found = {id(value): value for value in vars(module).values() if isinstance(value, Domain)}
    if len(found) == 1:
        return next(iter(found.values()))
    named = vars(module).get("domain")
    if isinstance(named, Domain):
        return named
    amount = "no domain" if not found else f"{len(found)} domains and none of them is called `domain`"
    raise DomainError(f"{where} defines {amount}; write `domain = Domain.load(__file__, YourDatabase)`")


def _from_module(module: str, name: str, reference: str) -> Domain:
    here = str(Path.cwd())
    if here not in sys.path:  # like uvicorn's module:app
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"no domain '{reference}': cannot import {module}: {error}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"no domain '{reference}': {module} has no '{name}'")
        found = getattr(found, part)
    return _checked(found() if callable(found) and not isinstance(found, Domain) else found, reference)


def _checked(found: Any, reference: str) -> Domain:
    if not isinstance(found, Domain):
        raise ConfigError(f"'{reference}' is {type(found).__name__}, not a Domain")
    return found
