"""What the verbs of the command line share: options and the settings they stand for."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trialogue.output import confirm, echo

if TYPE_CHECKING:
    from trialogue.config import R


class Whole(click.IntRange):
    """A whole number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except (TypeError, ValueError):
            bounds = f" from {self.min}" + (" up" if self.max is None else f" to {self.max}")
            self.fail(f"{value!r} is no whole number{bounds}", param, ctx)
        return super().convert(value, param, ctx)


OPTIONS = {
    "agent": click.option("--agent", help="Who plays the agent: oracle, naive, openai:NAME, a checkpoint, …"),
    "user": click.option("--user", help="Who plays the user: agenda, openai:NAME, human, …"),
    "reward": click.option(
        "--reward", help="What a conversation is worth: outcome, module:name or FILE.py:name."
    ),
    "judge": click.option("--judge", help="Who scores verified conversations: openai:NAME. Default: nobody."),
    "side": click.option("--side", type=click.Choice(["agent", "user"]), help="Whose turns are learned."),
    "split": click.option("--split", help="Split of the tasks, such as train, dev or test."),
    "tasks": click.option("--tasks", type=Whole(1), help="Number of tasks."),
    "trials": click.option("--trials", type=Whole(1), help="Conversations per task."),
    "count": click.option("--count", type=Whole(1), help="Number of verified, distinct conversations."),
    "seed": click.option("--seed", type=int, help="Seed of every random choice."),
    "data": click.option("--data", metavar="DIR", help="Folder with a benchmark's data."),
    "config": click.option(
        "--config", "file", type=click.Path(dir_okay=False), help="TOML file of settings."
    ),
    "resume": click.option("--resume", metavar="RUN", help="Continue a run directory with its own settings."),
    "trust": click.option(
        "--trust", is_flag=True, help="Run the code, and use the endpoints and keys, that the record names."
    ),
    "json": click.option(
        "--json", "as_json", is_flag=True, help="Print one machine-readable value and nothing else."
    ),
}
"""The options that several verbs offer; each means the same everywhere."""
KEYS = {
    "agent": "agent.model",
    "user": "user.model",
    "reward": "reward.name",
    "judge": "judge.model",
    "side": "sft.side",
    "split": "tasks.split",
    "tasks": "tasks.count",
    "trials": "tasks.trials",
    "count": "synthesize.count",
    "seed": "seed",
    "data": "data",
}
"""The setting that an option stands for."""
DOMAIN = click.argument("domain", required=False)
SETTINGS = click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
F = TypeVar("F", bound=Callable[..., Any])


def offer(*names: str) -> Callable[[F], F]:
    """Give a verb some of the shared options."""

    def decorate(function: F) -> F:
        for name in reversed(names):
            function = OPTIONS[name](function)
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class Asked:
    """What a verb that works in a domain was given: [DOMAIN] [KEY=VALUE]... and the shared options."""

    domain: str | None = None
    settings: tuple[str, ...] = ()
    file: str | None = None
    resume: Path | None = None
    trust: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The options that stand for a setting, by name; None where one was not given."""
    defaults: tuple[str, ...] = ()
    """Settings of the verb itself, which everything given overrides."""

    def to_words(self) -> list[str]:
        """All of it as `key=value`, later words winning: the domain, the options, the settings."""
        given = {KEYS[name]: value for name, value in self.options.items() if value is not None}
        if self.domain is not None:
            given = {"domain": self.domain, **given}
        return [*(f"{key}={json.dumps(value)}" for key, value in given.items()), *self.settings]

    def to_config(self, kind: type[R]) -> R:
        """The configuration asked for. With `resume` it is the run's own, which nothing given may contradict;
        without `trust` it may choose nothing that only the caller may choose."""
        from trialogue.config import load_config
        from trialogue.run import read_learned

        refuse_files(*filter(None, [self.domain]), *self.settings)
        if self.resume is not None:
            return self._to_resumed(kind, self.resume)

        def load(known: R) -> R:
            usual = load_config(kind, None, self.defaults, known)
            return load_config(kind, self.file, self.to_words(), usual)

        config = load(kind(domain=""))
        if not config.domain:
            raise click.UsageError(
                "name a DOMAIN, such as shop (or domain=… in the settings)",
                click.get_current_context(silent=True),
            )
        agent = getattr(config, "agent", None)
        learned = read_learned(agent.model) if agent is not None else None
        if learned is None:
            return config
        # An agent speaks within the lengths it has learned with, and is read as it was then.
        lengths = learned.limits.model_dump(include={"reply_tokens", "context_tokens"})
        return load(kind(limits=kind().limits.model_copy(update=lengths), renderer=learned.renderer))

    def _to_resumed(self, kind: type[R], run: Path) -> R:
        from trialogue.config import load_config
        from trialogue.digests import refuse_injured
        from trialogue.errors import ConfigError
        from trialogue.run import read_about, read_config, refuse_missing
        from trialogue.score.resume import read_resumed, refuse_claims

        refuse_missing(run)
        read_about(run)
        if self.file is not None:
            raise ConfigError(f"a resumed run has its own settings: leave the config file {self.file} out")
        words = self.to_words()
        try:
            config = read_resumed(run, load_config(kind, None, words, read_config(kind, run)))
        except ConfigError:
            refuse_injured(run)  # a damaged config.json may be no configuration any more
            raise
        if not self.trust:
            refuse_claims(run, config, find_keys(words), find_ask())
        return config


def in_domain(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a verb work in a domain: it takes [DOMAIN] [KEY=VALUE]... and the shared options of these names,
    and is called with one `Asked` for all of them but `--json`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def verb(
            domain: str | None,
            settings: tuple[str, ...],
            file: str | None = None,
            resume: str | None = None,
            trust: bool = False,
            **given: Any,
        ) -> None:
            options = {name: given.pop(name) for name in names if name in KEYS}
            if domain is not None and "=" in domain:
                settings, domain = (domain, *settings), None
            run = Path(resume) if resume is not None else None
            function(Asked(domain, settings, file, run, trust, options), **given)

        return DOMAIN(SETTINGS(offer(*names)(verb)))

    return decorate


def refuse_files(*words: str) -> None:
    """Refuse a file of settings that is given as a word."""
    for word in words:
        if word.endswith(".toml") and "=" not in word:
            raise click.UsageError(
                f"{word} is a file of settings: write --config {word}",
                click.get_current_context(silent=True),
            )


def find_keys(settings: Iterable[str]) -> set[str]:
    """What some settings are about."""
    return {setting.partition("=")[0].strip() for setting in settings}


def find_ask() -> Callable[[str], bool] | None:
    """A way to ask whoever sits at the terminal; none where nobody does."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    return confirm


@contextmanager
def resumable(verb: str, run: Sequence[Path], config: Any) -> Generator[None]:
    """Say how to go on with a run that its budget or Ctrl-C stops. `run` holds it as soon as it is there."""
    from trialogue.errors import BudgetError

    try:
        yield
    except BudgetError as error:
        echo(f"trialogue: {error}; what was finished is in {run[0]}. Go on with more:", err=True)
        echo(f"  {to_resume(verb, run[0], config)} budget.usd=… or budget.tokens=…", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        if not run:
            raise
        echo(f"stopped; what was finished is in {run[0]}. Go on with:", err=True)
        echo(f"  {to_resume(verb, run[0], config)}", err=True)
        sys.exit(130)


def to_resume(verb: str, run: Path, config: Any) -> str:
    """The command that resumes a run whose settings the caller has allowed."""
    return f"trialogue {verb} --resume {to_allowed(run, config)}"


def to_allowed(run: Path, config: Any) -> str:
    """A run as words of a command, with the settings that only the caller may choose. `--trust` would also
    allow whatever is in the record by then."""
    from trialogue.score.resume import find_claims, to_word

    settings = {key: value for claim in find_claims(config) for key, value in claim.settings.items()}
    return " ".join([shlex.quote(str(run)), *(to_word(key, value) for key, value in settings.items())])
