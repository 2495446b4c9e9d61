"""What the verbs of the command line share: options, the settings they stand for, JSON on standard output."""

from __future__ import annotations

import json
from errno import ENAMETOOLONG
from pathlib import Path
from typing import Any

import click


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


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def to_config(
    kind: Any,
    domain: str | None,
    settings: tuple[str, ...],
    file: str | None,
    given: dict[str, Any],
    resume: str | None = None,
) -> Any:
    """The configuration asked for; with `resume` the run's own, which nothing else given may contradict."""
    from trialogue.config import load_config
    from trialogue.errors import ConfigError
    from trialogue.run import read_about, read_config, read_learned, read_resumed, refuse_missing

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
        # An agent speaks within the lengths it has learned with, where nobody says otherwise.
        lengths = own.limits.model_dump(include={"reply_tokens", "context_tokens"})
        known = kind(limits=kind().limits.model_copy(update=lengths))
        return load_config(kind, file, [*overrides, *settings], known)
    path = Path(resume)
    refuse_missing(path)
    read_about(path)
    if file is not None:
        raise ConfigError(f"a resumed run has its own settings: leave the config file {file} out")
    return read_resumed(path, load_config(kind, None, [*overrides, *settings], read_config(kind, path)))


def to_chat(run: str, domain: str | None, settings: tuple[str, ...]) -> dict[str, Any]:
    """Where one talks with a trained agent: in the world of its run, where no other is named."""
    from trialogue.run import WORDS, read_learned, refuse_missing

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
    return {"domain": own.domain, "settings": (*tools, *settings), "data": own.data}


def to_usage_error(error: OSError) -> Exception:
    """A name that no file system takes is wrong usage; whatever else a system says stays what it is."""
    if error.errno != ENAMETOOLONG:
        return error
    return click.UsageError(f"the name is too long: {str(error.filename)[:60]}…")
