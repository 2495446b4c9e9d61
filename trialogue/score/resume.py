"""The settings a run begins or goes on with, and what a record may not choose by itself.

A run directory is data that may come from others. A setting of it that runs code, or sends a key or what is
said to an address, counts only where the caller names the same setting or trusts the record.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from trialogue.config import (
    Budget,
    EngineChoice,
    R,
    Section,
    Share,
    Speaker,
    SynthesizeConfig,
    TrainConfig,
    list_keys,
)
from trialogue.digests import has_digests, refuse_injured
from trialogue.errors import ConfigError, RunError
from trialogue.foreign import PHRASE, show_line
from trialogue.run import Kind, read_about, read_config, refuse_taken
from trialogue.seams import Seam
from trialogue.world.find import find_code

Ask = Callable[[str], bool]


def settle_config(config: R, kind: Kind, resume: Path | None) -> R:
    """The settings a run begins or goes on with. The name of a new one must be free, and one that goes on of
    the right kind: this is asked before anything is loaded. What only the caller may choose must be in a
    section that `config` sets; the run's own settings, from `read_config`, allow everything."""
    if resume is None:
        refuse_taken(config.run)
        return config
    if (own := read_about(resume).get("kind")) != kind:
        raise RunError(f"{resume} is a run of kind '{own}', not '{kind}'")
    resumed = read_resumed(resume, config)
    refuse_claims(resume, resumed, config.model_fields_set)
    return resumed


MEMORY = {
    "learner": ("micro_batch_tokens", "gradient_checkpointing", "cache_gigabytes"),
    "rollout": ("concurrency",),
}
"""Settings that bound memory, by section."""


def read_resumed(path: Path, given: R) -> R:
    """The settings a run goes on with: its own. What is given beside them must agree, but for a budget or
    memory, which it may have stopped for, and for more `training.steps`."""
    if not has_digests(path):
        raise RunError(f"{path} was begun by an earlier version, without digests: begin a new run")
    refuse_injured(path)
    own = read_config(type(given), path)
    asked = own.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})
    if isinstance(own, TrainConfig) and isinstance(asked, TrainConfig) and asked.engine.name == "auto":
        engine = asked.engine.model_copy(update={"name": own.engine.name})  # `auto` was settled at the start
        asked = asked.model_copy(update={"engine": engine})
    new: dict[str, Any] = {} if asked.budget == Budget() else {"budget": asked.budget}
    if isinstance(own, TrainConfig) and isinstance(asked, TrainConfig):
        steps = max(own.training.steps, asked.training.steps)
        new["training"] = own.training.model_copy(update={"steps": steps})
    for section, names in MEMORY.items():
        if hasattr(own, section):
            chosen = {name: getattr(getattr(asked, section), name) for name in names}
            new[section] = getattr(own, section).model_copy(update=chosen)
    resumed = own.model_copy(update=new)
    pairs = zip(list_keys(type(own), default=resumed), list_keys(type(own), default=asked), strict=True)
    wrong = [f"{one.key}={json.dumps(one.default)}" for one, other in pairs if one != other]
    wrong = [key for key in wrong if not key.startswith("budget.")]
    if wrong:
        raise ConfigError(
            f"a resumed run keeps its own settings, and those of {path} are {', '.join(wrong)}; leave "
            "yours out (only the budget, more training.steps and what bounds memory can be given)"
        )
    return resumed


# -- what a record may not choose ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that settings ask for and only the caller may choose."""

    does: str
    settings: dict[str, Any]
    """Whoever names these allows it."""
    runs_code: bool = False


def refuse_claims(
    path: Path,
    config: Section,
    named: Collection[str] = (),
    ask: Ask | None = None,
    *,
    can_name: bool = True,
) -> None:
    """Refuse what a record would do by itself. `named` are the settings, or sections of them, that the caller
    has given. Where no code would be run, `ask` puts the question to the caller. `can_name` is whether
    the caller's verb takes settings."""
    claims = find_claims(config, named)
    if not claims:
        return
    would = f"{path} would {' and '.join(dict.fromkeys(claim.does for claim in claims))}"
    if ask is not None and not any(claim.runs_code for claim in claims) and ask(f"{would}. Allow it?"):
        return
    words = [to_word(key, value) for claim in claims for key, value in claim.settings.items()]
    naming = f"add {' '.join(dict.fromkeys(words))} to allow it, or" if can_name else "add"
    raise ConfigError(f"{would}: {naming} --trust to allow everything that the record names")


def find_claims(config: Section, named: Collection[str] = ()) -> list[Claim]:
    """What settings ask for that only the caller may choose, and the caller has not named."""
    found: list[Claim] = []
    engine = getattr(config, "engine", EngineChoice())
    claims = (
        *_find_code_claims(config),
        *_find_seam_claims(config),
        *_find_endpoint_claims(config),
        *_find_engine_claims(engine),
        *_find_tracker_claims(config),
    )
    for claim in claims:
        unnamed = {key: value for key, value in claim.settings.items() if not _is_named(key, named)}
        if unnamed:
            found.append(Claim(claim.does, unnamed, claim.runs_code))
    return found


def _is_named(key: str, named: Collection[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[: size + 1]) in named for size in range(len(parts)))


def _find_code_claims(config: Section) -> Iterator[Claim]:
    domain, data = getattr(config, "domain", None), getattr(config, "data", None)
    if domain is not None and (code := find_code(domain)) is not None:
        yield Claim(f"run {code}", {"domain": domain}, runs_code=True)
    if data is not None and data != os.environ.get("TRIALOGUE_DATA"):  # some are packages with code
        yield Claim(f"load a benchmark from {show_line(data, PHRASE)}", {"data": data}, runs_code=True)
    if isinstance(config, SynthesizeConfig):
        against = config.synthesize.against
        for name in (reference.rpartition("/")[0] for reference in against):
            if name and (code := find_code(name)) is not None:
                yield Claim(f"run {code}", {"synthesize.against": against}, runs_code=True)


def _find_seam_claims(section: Section, prefix: str = "") -> Iterator[Claim]:
    """Claims of settings that may name code, wherever they stand in the tree."""
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if isinstance(value, Section):
            yield from _find_seam_claims(value, f"{prefix}{name}.")
        elif name == "mix":
            claims = [claim for share in value for claim in _find_seam_claims(share)]
            yield from (replace(claim, settings=_to_mix(f"{prefix}mix", value)) for claim in claims)
        for seam in (item for item in field.metadata if isinstance(item, Seam)):
            if isinstance(value, str) and (code := seam.find_code(value)) is not None:
                yield Claim(f"run {code}", {prefix + name: value}, runs_code=True)


def _to_mix(key: str, mix: tuple[Share, ...]) -> dict[str, Any]:
    return {key: [share.model_dump(mode="json", exclude_defaults=True) for share in mix]}


def _find_endpoint_claims(section: Section, prefix: str = "") -> Iterator[Claim]:
    for name, value in section:
        if isinstance(value, Speaker):
            yield from _find_speaker_claims(prefix + name, value)
        elif isinstance(value, Section):
            yield from _find_endpoint_claims(value, f"{prefix}{name}.")


def _find_speaker_claims(key: str, speaker: Speaker) -> Iterator[Claim]:
    mix = _to_mix(f"{key}.mix", speaker.mix)
    for share in speaker.mix:
        yield from (replace(claim, settings=mix) for claim in _find_speaker_claims(key, share))
    models = [(model or "").removeprefix("guided:") for model in (speaker.model, speaker.otherwise)]
    if not any(model.startswith("openai:") for model in models):
        return
    settings: dict[str, Any] = {}
    usual = os.environ.get("OPENAI_BASE_URL", "")
    if speaker.base_url and speaker.base_url.rstrip("/") != usual.rstrip("/"):
        settings[f"{key}.base_url"] = speaker.base_url
    if speaker.api_key_env != Speaker().api_key_env:
        settings[f"{key}.api_key_env"] = speaker.api_key_env
    yield from _to_claims(speaker.base_url or usual or "api.openai.com", speaker.api_key_env, settings)


def _find_engine_claims(engine: EngineChoice) -> Iterator[Claim]:
    if not engine.url or engine.name not in ("auto", "tinker", "vllm"):
        return
    usual = os.environ.get("TINKER_BASE_URL", "") if engine.name == "tinker" else ""
    if engine.url.rstrip("/") != usual.rstrip("/"):
        key = "TINKER_API_KEY" if engine.name == "tinker" else "VLLM_API_KEY"
        yield from _to_claims(engine.url, key, {"engine.url": engine.url})
    if engine.name in ("auto", "vllm") and engine.weights != EngineChoice().weights:
        folder = engine.weights
        yield Claim(f"write weights to {show_line(folder, PHRASE)}", {"engine.weights": folder})


def _find_tracker_claims(config: Section) -> Iterator[Claim]:
    track = getattr(getattr(config, "run", None), "track", ())
    if track:
        yield Claim(f"send every figure to {', '.join(track)}", {"run.track": list(track)})


LOCAL = re.compile(r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?(/[^\s\\@]*)?", re.ASCII)
"""Addresses of this machine, in forms that every client reads alike."""


def _to_claims(address: str, variable: str, settings: dict[str, Any]) -> Iterator[Claim]:
    """The claim to ask at an address with the key in a variable, where settings name what is not usual. This
    machine may be asked where there is no key to send."""
    has_key = bool(os.environ.get(variable))
    if settings and (has_key or not LOCAL.fullmatch(address)):
        sent = f"the key in {show_line(variable, PHRASE)}" if has_key else "what is said"
        yield Claim(f"send {sent} to {show_line(address, PHRASE)}", settings)


_PLAIN = re.compile(r"(?!(true|false|inf|nan)$)[A-Za-z./~][\w@%+:,./~-]*", re.ASCII)


def to_word(key: str, value: Any) -> str:
    """A setting as a word of a shell's command line."""
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    return shlex.quote(f"{key}={value if is_plain else _to_toml(value)}")


def _to_toml(value: Any) -> str:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{key} = {_to_toml(inner)}" for key, inner in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_to_toml, cast("list[Any]", value))) + "]"
    return json.dumps(value)
