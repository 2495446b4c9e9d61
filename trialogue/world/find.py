"""Find a domain: by name, path to a file or folder, `module:name`, `file.py:name`, or entry point."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from trialogue.errors import ConfigError, DomainError, suggest
from trialogue.foreign import show_line
from trialogue.seams import describe_code, load_file, load_seam, loading, to_absolute
from trialogue.world.domain import Domain

GROUP = "trialogue.domains"
"""Packages announce domains under this entry-point group. The object is a `Domain`, a function without
arguments that makes one, or, for names such as `tau2:retail`, a function of what stands after the colon."""


Loader = Callable[[], Domain]


def find_domain(reference: str, data: str | None = None) -> Domain:
    """The domain a reference names; `data` is the folder a benchmark reads from."""
    load, _ = _find(reference, data)
    return load()


def find_recorded_domain(
    reference: str, record: Path, data: str | None = None, *, trust: bool = False
) -> Domain:
    """The domain that a conversation in a record names. A record is data: where loading the domain would run
    code that is neither built in nor installed, the caller has to trust the record."""
    load, code = _find(reference, data)
    if code is not None and not trust:
        raise ConfigError(
            f"{record} would run {code}: add the DOMAIN {shlex.quote(show_line(reference))} to allow it, or "
            "--trust to allow everything that the record names"
        )
    return load()


def find_code(reference: str) -> str | None:
    """What loading a domain runs of its author's code: a file or a module. None for what is built in or
    installed, and for a scenario, which is only data."""
    return _find(reference, None)[1]


def _find(reference: str, data: str | None) -> tuple[Loader, str | None]:
    """How the domain is loaded, and what of its author's code that runs."""
    if reference == "shop":
        return _load_shop, None
    try:
        path = Path(reference).expanduser()
    except RuntimeError:  # ~name of nobody
        path = Path(reference)
    if reference and path.exists() and (path.is_dir() or path.suffix == ".py"):
        return _find_at(path)
    name, _, rest = reference.partition(":")
    announced = {point.name: point for point in entry_points(group=GROUP)}
    if name in announced:
        return partial(_from_entry_point, announced[name], rest, data, reference), None
    if rest:
        return partial(_from_reference, reference), describe_code(reference)
    if reference and path.is_file():
        raise ConfigError(f"no domain '{reference}': a domain is a folder or a .py file, and this is neither")
    if path.suffix == ".py" or "/" in reference:
        raise ConfigError(f"no domain '{reference}': there is no such file or folder")
    known = sorted({"shop", *announced})
    folders = [file.parent.name for file in Path().glob("*/domain.py")]
    raise ConfigError(
        f"no domain '{reference}': it is none of {', '.join(known)}, no path to a folder or .py file, and no "
        f"module:name or file.py:name{suggest(reference, [*known, *folders])}"
    )


def _load_shop() -> Domain:
    from trialogue.world.domains.shop import domain

    return domain


def _from_entry_point(point: EntryPoint, rest: str, data: str | None, reference: str) -> Domain:
    with loading(f"'{reference}' (entry point {point.value})", kind=DomainError):
        found: Any = point.load()
        if not isinstance(found, Domain) and callable(found):
            make = cast("Callable[..., Any]", found)
            found = make(rest, data=data) if rest or data else make()
    return _checked(found, reference)


def _find_at(path: Path) -> tuple[Loader, str | None]:
    """A domain in a file or folder: a server's, a scenario, or Python."""
    if not any(path.glob("*.py")) and (path / "server.toml").is_file():
        from trialogue.world.mcp import load_server

        return partial(load_server, path), f"the server of {show_line(str(path.resolve() / 'server.toml'))}"
    if not any(path.glob("*.py")) and (path / "scenario.json").is_file():
        from trialogue.world.simulated import load_scenario

        return partial(load_scenario, path), None
    file = path / "__init__.py" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        candidates = [path / f"{path.name}.py", path / "domain.py", *sorted(path.glob("*.py"))]
        file = next((candidate for candidate in candidates if candidate.exists()), file)
    if not file.exists():
        raise ConfigError(f"{path} holds no Python file that defines a domain")
    return partial(_from_file, file, path), show_line(str(file.resolve()))


def _from_file(file: Path, path: Path) -> Domain:
    return _checked(_the_domain(load_file(file, DomainError), str(file)), str(path.resolve()))


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


def _from_reference(reference: str) -> Domain:
    found = load_seam(reference, "domain", DomainError)
    if callable(found) and not isinstance(found, Domain):
        with loading(f"'{reference}'", kind=DomainError):
            found = found()
    return _checked(found, to_absolute(reference))


def _checked(found: Any, reference: str) -> Domain:
    """The domain, with how it was found: a recorded conversation leads back to it by that."""
    if not isinstance(found, Domain):
        raise ConfigError(f"'{reference}' is {type(found).__name__}, not a Domain")
    return found if found.reference else replace(found, reference=reference)
