"""What the verbs of the command line share: options and the settings they stand for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from trialogue.output import confirm


class Whole(click.IntRange):
    """A whole number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except (TypeError, ValueError):
            bounds = f" from {self.min}" + (" up" if self.max is None else f" to {self.max}")
            self.fail(f"{value!r} is no whole number{bounds}", param, ctx)
        return super().convert(value, param, ctx)


JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one machine-readable value and nothing else."
)
DATA = click.option("--data", help="Folder with a benchmark's data.")
TRUST = click.option(
    "--trust", is_flag=True, help="Run the code, and use the endpoints and keys, that the record names."
)
SETTINGS = click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
KEYS = {
    "agent": "agent.model",
    "user": "user.model",
    "split": "tasks.split",
    "tasks": "tasks.count",
    "trials": "tasks.trials",
    "seed": "seed",
    "data": "data",
    "judge": "judge.model",
    "count": "synthesize.count",
}
"""Which setting an option stands for."""


def to_config(
    kind: Any,
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    given: dict[str, Any],
    resume: str | None = None,
    *,
    trust: bool = False,
) -> Any:
    """The configuration asked for; with `resume` the run's own, which nothing else given may contradict, and
    which does by itself, unless there is `trust`, nothing that only the caller may choose."""
    from trialogue.config import load_config
    from trialogue.errors import ConfigError
    from trialogue.run import read_about, read_config, read_learned, refuse_missing

    if domain is not None and "=" in domain:
        settings, domain = (domain, *settings), None
    overrides = [f"domain={json.dumps(domain)}"] if domain is not None else []
    overrides += [f"{KEYS[name]}={json.dumps(value)}" for name, value in given.items() if value is not None]
    if resume is None:
        config = load_config(kind, file, [*overrides, *settings])
        agent = getattr(config, "agent", None)
        own = read_learned(agent.model) if agent is not None else None
        if own is None:
            return config
        # An agent speaks within the lengths it has learned with, and is read as it was then.
        lengths = own.limits.model_dump(include={"reply_tokens", "context_tokens"})
        known = kind(limits=kind().limits.model_copy(update=lengths), renderer=own.renderer)
        return load_config(kind, file, [*overrides, *settings], known)
    from trialogue.score.resume import read_resumed, refuse_claims

    path = Path(resume)
    refuse_missing(path)
    read_about(path)
    if file is not None:
        raise ConfigError(f"a resumed run has its own settings: leave the config file {file} out")
    words = [*overrides, *settings]
    config = read_resumed(path, load_config(kind, None, words, read_config(kind, path)))
    if not trust:
        refuse_claims(path, config, find_keys(words), find_ask())
    return config


def find_keys(settings: Iterable[str]) -> set[str]:
    """What some settings are about."""
    return {setting.partition("=")[0].strip() for setting in settings}


def find_ask() -> Callable[[str], bool] | None:
    """A way to ask whoever sits at the terminal; none where nobody does."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return confirm


def to_resume(verb: str, run: Path, config: Any) -> str:
    """The command that goes on with a run of the caller's own."""
    return f"trialogue {verb} --resume {with_trust(run, config)}"


def with_trust(run: Path, config: Any) -> str:
    """A run of the caller's own, as a word of a command, with the trust that its settings need."""
    from trialogue.score.resume import find_claims

    return f"{run} --trust" if find_claims(config) else str(run)


def to_chat(run: str, domain: str | None, settings: tuple[str, ...], *, trust: bool) -> dict[str, Any]:
    """Where one talks with a trained agent: in the world of its run, where no other is named."""
    from trialogue.config import EvalConfig, load_config
    from trialogue.run import WORDS, read_learned, refuse_missing
    from trialogue.score.resume import refuse_claims

    if run not in WORDS and ":" not in run:
        refuse_missing(Path(run))
    if domain is not None and "=" in domain:
        settings, domain = (domain, *settings), None
    own = read_learned(run) if domain is None else None
    if own is None:
        return {"domain": domain or "shop", "settings": settings, "data": None}
    simulator: dict[str, Any] = own.model_dump(mode="json").get("simulator", {})
    names = ("model", "base_url", "api_key_env")
    tools = [f"simulator.{name}={json.dumps(simulator[name])}" for name in names if simulator.get(name)]
    if not trust:
        world = [f"domain={json.dumps(own.domain)}"]
        world += [f"data={json.dumps(own.data)}"] if own.data is not None else []
        config = load_config(EvalConfig, None, [*world, *tools, *settings])
        refuse_claims(Path(run), config, find_keys(settings), find_ask())
    return {"domain": own.domain, "settings": (*tools, *settings), "data": own.data}
