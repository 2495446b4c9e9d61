"""What `doctor` asks of endpoints: whether keys are there, how fast answers come. It says so beforehand, and
never shows a key.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from trialogue.config import Speaker, TrainConfig
from trialogue.endpoint import Endpoint, Unreachable
from trialogue.errors import TrialogueError
from trialogue.messages import Message
from trialogue.plan.machine import Finding
from trialogue.talk.openai import OpenAIModel
from trialogue.trajectory import Turn

REPLY_TOKENS = 32
SECONDS = 30.0
"""How long one request may take."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One endpoint model of a run."""

    role: str
    name: str
    speaker: Speaker


def find_endpoints(config: TrainConfig) -> Iterator[Asked]:
    """Every endpoint model that a run would ask."""
    sides = {"user": config.user, "simulator": config.simulator, "audit.judge": config.audit.judge}
    for role, speaker in sides.items():
        for one in (speaker, *speaker.mix):
            kind, _, name = one.model.removeprefix("guided:").partition(":")
            if kind == "openai" and name:
                yield Asked(role, name, one)


def lacks_key(asked: Asked) -> bool:
    """Whether nobody can be asked without the key that is not there."""
    address = asked.speaker.base_url or os.environ.get("OPENAI_BASE_URL")
    return not address and not os.environ.get(asked.speaker.api_key_env)


def look_at_keys(config: TrainConfig) -> Iterator[Finding]:
    """Whether the environment variables that hold keys are set. Their values are not shown."""
    names = {
        asked.speaker.api_key_env: asked.role
        for asked in find_endpoints(config)
        if not asked.speaker.base_url
    }
    if config.engine.name == "tinker":
        names["TINKER_API_KEY"] = "engine"
    if "wandb" in config.run.track:
        names["WANDB_API_KEY"] = "run.track"
    for name, role in names.items():
        if os.environ.get(name):
            yield Finding("key", "ok", f"{name} is set")
        elif role in ("engine", "run.track") or os.environ.get("OPENAI_BASE_URL"):
            yield Finding(
                "key", "warn", f"{name} is not set", f"Export {name} if the endpoint of {role} wants one"
            )
        else:
            yield Finding("key", "fail", f"{name} is not set", f"Export {name}: {role} needs it")


async def probe_endpoints(config: TrainConfig, most: int, tell: Callable[[str], None]) -> list[Finding]:
    """Ask each endpoint once, then as often at once as the run would, up to `most` times."""
    found: list[Finding] = []
    for asked in find_endpoints(config):
        if lacks_key(asked):
            continue  # told by `look_at_keys`
        number = min(asked.speaker.concurrency, most)
        tell(
            f"asking openai:{asked.name} ({asked.role}) {1 + number} times, {number} at once, for at most "
            f"{REPLY_TOKENS} tokens each"
        )
        found.append(await probe(asked, number))
    if config.engine.url:
        tell(f"asking {config.engine.service}'s server once")
        found.append(await probe_server(config.engine.service, config.engine.url))
    return found


async def probe(asked: Asked, number: int) -> Finding:
    """The latency of one request, and requests a second with so many at once."""
    name = f"{asked.role} openai:{asked.name}"
    settings = asked.speaker.model_copy(
        update={"retries": 0, "outage": 0.0, "timeout": min(SECONDS, asked.speaker.timeout)}
    )
    try:
        model = OpenAIModel(asked.name, "user", settings, REPLY_TOKENS)
    except TrialogueError as error:
        return Finding(name, "fail", str(error))
    turns = [
        Turn(side="user", message=Message(role="system", content="You test a connection.")),
        Turn(side="user", message=Message(role="user", content="Answer with one word.")),
    ]

    async def ask() -> float | str:
        began = perf_counter()
        try:
            await model.reply(turns, ())
        except TrialogueError as error:
            return str(error)
        return perf_counter() - began

    try:
        alone = await ask()
        if isinstance(alone, str):
            return Finding(name, "fail", alone, "Check the address, the key and the model's name")
        if not number:
            return Finding(name, "ok", f"answers in {alone:.2f} s")
        began = perf_counter()
        answers = await asyncio.gather(*(ask() for _ in range(number)))
        wall = perf_counter() - began
    finally:
        await model.close()
    good = [answer for answer in answers if isinstance(answer, float)]
    failed = [answer for answer in answers if isinstance(answer, str)]
    told = f"answers in {alone:.2f} s; {number} at once: {len(good) / wall:.1f} a second"
    told += f", median {median(good):.2f} s" if good else ""
    if failed:
        remedy = f"Lower {asked.role}.concurrency or set {asked.role}.requests_per_minute"
        return Finding(name, "warn", f"{told}; {len(failed)} failed: {failed[0]}", remedy)
    return Finding(name, "ok", told)


async def probe_server(kind: str, url: str) -> Finding:
    """Whether a server of an engine answers at all."""
    endpoint = Endpoint(url, "none", 1 << 20)
    try:
        async with asyncio.timeout(SECONDS):
            answer = await endpoint.ask("GET", "/health" if kind == "vllm" else "/")
    except (TrialogueError, TimeoutError) as error:
        why = str(error) if isinstance(error, Unreachable) else type(error).__name__
        return Finding(
            f"engine {kind}", "fail", f"no answer: {why}", "Start the server, or correct engine.url"
        )
    finally:
        await endpoint.close()
    if answer.status >= 500:
        return Finding(f"engine {kind}", "fail", answer.explain(), "Look at the server's log")
    return Finding(f"engine {kind}", "ok", f"answers ({answer.status})")
