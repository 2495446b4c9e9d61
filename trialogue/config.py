"""The configuration: one typed tree, read from a TOML file and `key.sub=value` overrides.

A docstring under a field is its help; `trialogue config` prints them all.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trialogue.errors import ConfigError


class Section(BaseModel):
    """A part of the tree: frozen, nothing unknown in it, fields described by their docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Limits(Section):
    """When a conversation ends although nobody ended it."""

    observations: int = Field(default=30, ge=1)
    """Tool results and user messages in one conversation; then it ends as max_turns and scores 0."""
    reply_tokens: int = Field(default=1024, ge=1)
    """Tokens in one reply of the agent; a longer one ends the conversation as too_long, scoring 0."""
    context_tokens: int = Field(default=32768, ge=16)
    """Tokens of the whole conversation as the agent sees it; beyond it ends as too_long."""
    tool_errors: int = Field(default=10, ge=1)
    """Refused or malformed calls in a row; then the conversation ends as max_turns and scores 0."""
    seconds: float = Field(default=600.0, gt=0)
    """Wall-clock time of one conversation; beyond it fails, unscored."""
    first_call_only: bool = False
    """Keep only the first tool call of a message, as TAU-bench does."""


class Speaker(Section):
    """Who speaks for one side."""

    model: str = ""
    """oracle, naive, agenda, human, scripted:FILE, replay:FILE, openai:NAME, or a checkpoint's folder."""
    base_url: str | None = None
    """Endpoint of an openai: model; OPENAI_BASE_URL where empty."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key. The key itself is never written anywhere."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; the endpoint's own default where empty."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; off where empty."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds one request may take."""
    retries: int = Field(default=4, ge=0)
    """How often a request is tried again after a passing fault, waiting longer each time."""
    concurrency: int = Field(default=64, ge=1)
    """Requests under way at once."""
    price: tuple[float, float] | None = None
    """Money for a million prompt tokens and a million completion tokens."""


class Tasks(Section):
    """Which tasks."""

    split: str = "test"
    """Name of the split, such as train, dev or test."""
    count: int | None = Field(default=None, ge=1)
    """How many tasks; all of a finite domain, or 100 of an endless one, where empty."""
    trials: int = Field(default=1, ge=1)
    """Conversations per task."""
    levels: tuple[int, ...] = ()
    """Only these difficulty levels."""
    families: tuple[str, ...] = ()
    """Only these families of tasks."""


class Rollout(Section):
    """How conversations are held."""

    concurrency: int = Field(default=64, ge=1)
    """Conversations under way at once."""
    redraws: int = Field(default=2, ge=0)
    """How often a failed conversation is held anew before it is given up."""


class RunSettings(Section):
    """Where results go."""

    directory: str = "runs"
    """Folder that holds the run directories."""
    name: str | None = None
    """Name of the run directory; made from kind, domain and time where empty."""


class EvalConfig(Section):
    """Everything `eval` and `rollout` can be told."""

    domain: str = "shop"
    """A name, module:name, or path to a file or folder."""
    data: str | None = None
    """Folder with a benchmark's data; the environment variable TRIALOGUE_DATA where empty."""
    seed: int = 0
    """Seed of every random choice."""
    agent: Speaker = Speaker(model="oracle")
    user: Speaker = Speaker(model="agenda")
    tasks: Tasks = Tasks()
    limits: Limits = Limits()
    rollout: Rollout = Rollout()
    run: RunSettings = RunSettings()


C = TypeVar("C", bound=Section)


def load_config(kind: type[C], file: str | Path | None = None, overrides: Iterable[str] = ()) -> C:
    """Read a file (if any), lay `key.sub=value` over it, and check the whole.

    Values are TOML (`3`, `true`, `"text"`, `[1, 2]`); what is no TOML is taken as text.
    """
    data = _read_file(Path(file)) if file is not None else {}
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign:
            raise ConfigError(f"'{override}' is no setting; write key=value, such as seed=3")
        _lay(data, key.strip().split("."), _read_value(value))
    return to_config(kind, data, str(file) if file is not None else "the settings")


def to_config(kind: type[C], data: Mapping[str, Any], where: str) -> C:
    """Check plain data against the tree; an error names every wrong key and what is allowed."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines: list[str] = []
        for problem in error.errors(include_url=False):
            path = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                lines.append(f"{path}: no such key; {_allowed(kind, path)}")
            else:
                lines.append(f"{path}: {problem['msg'].lower()}, got {problem['input']!r}")
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def _allowed(kind: type[Section], path: str) -> str:
    section: Any = kind
    for part in path.split(".")[:-1]:
        section = section.model_fields[part].annotation
    return "allowed here: " + ", ".join(section.model_fields)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _lay(data: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"'{'.'.join(path)}': '{part}' is a value, not a section")
        data = cast("dict[str, Any]", inner)
    data[path[-1]] = value


class Key(NamedTuple):
    """One line of `trialogue config`."""

    key: str
    default: Any
    meaning: str


def list_keys(kind: type[Section], prefix: str = "", default: Section | None = None) -> Iterator[Key]:
    """Every key of the tree with its default and meaning."""
    default = default if default is not None else kind()
    for name, field in kind.model_fields.items():
        value = getattr(default, name)
        if isinstance(value, Section):
            yield from list_keys(type(value), f"{prefix}{name}.", value)
        else:
            yield Key(prefix + name, value, field.description or "")


def difference_from_defaults(config: Section) -> dict[str, Any]:
    """The keys whose value is not the default, for reports."""
    now = {key.key: key.default for key in list_keys(type(config), default=config)}
    usual = {key.key: key.default for key in list_keys(type(config))}
    return {key: value for key, value in now.items() if json.dumps(value) != json.dumps(usual.get(key))}
