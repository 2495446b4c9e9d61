"""Bad input by the million: `python tests/fuzz/fuzz.py --count 1000000 --seed 7`.

Each target takes one broken, twisted or hostile input and may raise nothing but the errors it is meant to
raise. Inputs are made from a few good ones by mutation, from a seed, so that a finding can be told again; one
that computes for seconds is a finding too.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from files import FILE_TARGETS
from mutate import SEEDS, mutate, to_bytes

from trialogue.config import EvalConfig, Speaker, TrainConfig, load_config
from trialogue.durable import mend
from trialogue.endpoint import Answer
from trialogue.errors import ConfigError, ModelError, RunError
from trialogue.messages import ToolCall
from trialogue.run import read_lines, read_trajectories
from trialogue.talk.model import clean_arguments, to_clean
from trialogue.talk.openai import OpenAIModel, Problem
from trialogue.talk.render.parse import read_arguments, read_compact, read_json_calls, to_calls
from trialogue.talk.replay import Replay
from trialogue.trajectory import Reply, Trajectory, Usage
from trialogue.world.find import find_domain

SLOWEST = 3.0
"""Seconds of computing for one input of at most 20,000 letters."""
LARGEST = 2000
"""Megabytes the process may ever hold, however many inputs it has seen."""


def keep(reply: Reply) -> None:
    """What was read can be written down and comes back."""
    reply = to_clean(reply)
    for call in reply.tool_calls:
        ToolCall.model_validate_json(call.model_dump_json())
    json.dumps(reply.content).encode()
    reply.content.encode()


@cache
def find_renderers() -> list[Any]:
    """A renderer of each template, as the tests of rendering make them."""
    path = Path(__file__).parents[1] / "talk" / "test_render.py"
    spec = importlib.util.spec_from_file_location("test_render_for_fuzz", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [module.make(name) for name in module.FAMILIES]


def read_reply(text: str, draw: random.Random) -> None:
    """The tool-call parser of each chat template, on sampled ids."""
    renderer = draw.choice(find_renderers())
    vocabulary = renderer.vocabulary
    ids = vocabulary.encode([text.encode("utf-8", "replace").decode()])
    controls = list(vocabulary.controls.values())
    for _ in range(draw.randrange(4)):
        ids.insert(draw.randint(0, len(ids)), draw.choice(controls))
    if draw.random() < 0.2:
        ids = [draw.randrange(vocabulary.tokenizer.get_vocab_size()) for _ in range(draw.randrange(60))]
    keep(renderer.parse(ids))


def read_calls(text: str, draw: random.Random) -> None:
    keep(Reply("", to_calls(read_json_calls(text))))
    keep(Reply("", to_calls([read_compact(text)])))
    arguments = clean_arguments(read_arguments(text))
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()


@cache
def find_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="trialogue-fuzz-"))


def read_config(text: str, draw: random.Random) -> None:
    kind = draw.choice((EvalConfig, TrainConfig))
    file = find_folder() / "config.toml"
    file.write_bytes(to_bytes(text, draw))
    for given in ((file, []), (None, text.split(" "))):
        with suppress(ConfigError):
            load_config(kind, *given)


def read_run(text: str, draw: random.Random) -> None:
    """Lines and conversations of a run, before and after a torn tail was mended."""
    file = find_folder() / "lines.jsonl"
    file.write_bytes(to_bytes(text, draw) + draw.choice((b"", b"\n", b"\n{}\n", b"\n\x00\x00")))
    for reader in (read_lines, read_trajectories):
        try:
            for item in reader(file):
                if isinstance(item, Trajectory):
                    item.to_json()
        except RunError:
            pass
    mend(file)
    content = file.read_bytes()
    assert not content or content.endswith(b"\n")
    with suppress(ConfigError):
        Replay(file)


@cache
def find_endpoint(side: str) -> OpenAIModel:
    return OpenAIModel("m", side, Speaker(base_url="http://127.0.0.1:9/v1", api_key_env="PATH"), 64)  # type: ignore[arg-type]


def read_answer(text: str, draw: random.Random) -> None:
    """The body of an endpoint's answer, whatever it holds."""
    answer = Answer(200, {}, text.encode("utf-8", "surrogatepass"))
    model = find_endpoint(draw.choice(("agent", "user")))
    with suppress(Problem, ModelError):
        keep(model._read(answer, Usage(prompt=len(text), completion=64)))


@cache
def find_shop() -> tuple[Any, list[Any]]:
    domain = find_domain("shop")
    return domain, domain.tasks("test", 3, 0)


def call_tool(text: str, draw: random.Random) -> None:
    """Arguments are data: no call of a tool raises, whatever it is given."""
    domain, tasks = find_shop()
    environment = domain.open(draw.choice(tasks))
    names = [*environment.tools, "__class__", "__init__", "tools", "open", "", text[:50]]
    arguments = clean_arguments(read_arguments(text))
    if isinstance(arguments, dict) and "arguments" in arguments and isinstance(arguments["arguments"], dict):
        arguments = arguments["arguments"]
    result = environment.call(draw.choice(names), arguments)
    result.text.encode()


def read_server(text: str, draw: random.Random) -> None:
    """What an MCP server answers."""
    from mcp.types import CallToolResult, TextContent

    from trialogue.world.mcp import to_tool_result

    content = [TextContent(type="text", text=part) for part in text.split("\n")[: draw.randrange(4)]]
    result = to_tool_result(
        CallToolResult(content=content, is_error=draw.random() < 0.5), draw.choice((10, 10_000))
    )
    result.text.encode()


TARGETS: dict[str, Callable[[str, random.Random], None]] = {
    "replies": read_reply,
    "calls": read_calls,
    "config": read_config,
    "runs": read_run,
    "answers": read_answer,
    "tools": call_tool,
    "servers": read_server,
    **FILE_TARGETS,
}


CHEAP = [*(name for name in TARGETS if name not in FILE_TARGETS), "written", "judges"]
"""What costs a fraction of reading files gets four times as many inputs."""


def try_one(name: str, seed: str) -> str | None:
    """Give one input to a target; what was wrong, or None."""
    draw = random.Random(seed)
    text = mutate(draw, draw.choice(SEEDS) if draw.random() < 0.9 else "")
    started = time.process_time()
    try:
        TARGETS[name](text, draw)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{name} {seed}: {text[:300]!r}\n{''.join(traceback.format_exception(error)[-6:])}"
    if time.process_time() - started > SLOWEST:
        return f"{name} {seed}: {text[:300]!r} took {time.process_time() - started:.1f} s"
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--target", choices=TARGETS)
    given = parser.parse_args()
    names = [given.target] if given.target else [*TARGETS, *CHEAP * 3]
    asyncio.set_event_loop(asyncio.new_event_loop())
    find_renderers()
    find_shop()
    find_endpoint("agent")
    findings: list[str] = []
    began = time.monotonic()
    for number in range(given.count):
        found = try_one(names[number % len(names)], f"{given.seed}-{number}")
        if found is not None:
            findings.append(found)
            print(found, flush=True)
            if len(findings) >= 20:
                break
        if number % 50_000 == 49_999:
            print(
                f"{number + 1} inputs, {len(findings)} findings, {time.monotonic() - began:.0f} s", flush=True
            )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if memory > LARGEST:
        findings.append(f"{memory} MB were held at once")
    told = f"{number + 1} inputs, {len(findings)} findings, {time.monotonic() - began:.0f} s"
    print(f"seed {given.seed}: {told}, {memory} MB at most")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
