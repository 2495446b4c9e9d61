"""Bad input that finds its own way: `python tests/fuzz/guided.py --seconds 300`, for each parser.

libFuzzer, by way of atheris, changes inputs and keeps those that reach new lines of the parsers. The same
holds here as for every other input: nothing but the errors meant for it, no hang, memory bounded. An input
that breaks something is printed and kept in a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PARSERS = ("calls", "replies", "config", "written", "verdicts")
INSTRUMENTED = [
    "tomllib",
    "trialogue.config",
    "trialogue.messages",
    "trialogue.reading",
    "trialogue.benchmarks.ace.execute",
    "trialogue.benchmarks.bfcl.execute",
    "trialogue.benchmarks.tau.tau2.judge",
    "trialogue.corpus.review",
    "trialogue.score.verdict",
    "trialogue.talk.render.tiny",
    "trialogue.talk.model",
    "trialogue.talk.render.parse",
    "trialogue.talk.render.templates",
    "trialogue.talk.render.vocabulary",
    "trialogue.world.simulated",
]
BOUNDS = ("-max_len=4096", "-timeout=5", "-rss_limit_mb=3000", "-print_final_stats=1", "-verbosity=0")


def find_parser(name: str) -> tuple[Callable[[bytes], None], list[str]]:
    """What is given the bytes, and good inputs to begin with."""
    import random

    import files
    import fuzz
    from mutate import SEEDS

    from trialogue.config import EvalConfig, TrainConfig, load_config
    from trialogue.errors import ConfigError
    from trialogue.talk.render.tiny import from_brief_call

    def to_text(data: bytes) -> str:
        return data.decode("utf-8", "surrogatepass" if b"\xed" in data else "replace")

    def calls(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        fuzz.read_calls(text, random.Random(0))
        fuzz.keep(fuzz.Reply("", fuzz.to_calls([from_brief_call(text)])))

    def replies(data: bytes) -> None:
        """The first byte chooses the template; a letter behind a zero stands for a control token."""
        renderers = fuzz.find_renderers()
        renderer = renderers[data[0] % len(renderers)] if data else renderers[0]
        controls = list(renderer.vocabulary.controls.values())
        first, *others = data[1:].decode("utf-8", "replace").split("\x00")
        ids = renderer.vocabulary.encode([first])
        for part in others:
            ids.append(controls[ord(part[0]) % len(controls)] if part else controls[0])
            ids += renderer.vocabulary.encode([part[1:]])
        fuzz.keep(renderer.parse(ids))

    def config(data: bytes) -> None:
        file = fuzz.find_folder() / "config.toml"
        file.write_bytes(data)
        text = data.decode("utf-8", "replace")
        for kind in (EvalConfig, TrainConfig):
            for given in ((file, []), (None, text.split(" "))):
                with contextlib.suppress(ConfigError):
                    load_config(kind, *given)

    def written(data: bytes) -> None:
        try:
            text = to_text(data)
        except UnicodeDecodeError:
            text = data.decode("utf-8", "replace")
        files.parse_written(text)

    def verdicts(data: bytes) -> None:
        files.judge(data.decode("utf-8", "replace"))

    parsers = {"calls": calls, "replies": replies, "config": config, "written": written, "verdicts": verdicts}
    answers = [json.dumps(answer) for answer in files.VERDICTS]
    good = {"written": files.CALLS, "verdicts": answers, "replies": [f"\x02{text}\x00a" for text in SEEDS]}
    return parsers[name], good.get(name, SEEDS)


def run(name: str, options: list[str]) -> None:
    """Give inputs to one parser until the time is over or something breaks; the process ends with it."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        parser, good = find_parser(name)
    with tempfile.TemporaryDirectory(prefix="trialogue-guided-") as corpus:
        for number, text in enumerate(good):
            (Path(corpus) / str(number)).write_bytes(text.encode("utf-8", "surrogatepass"))
        parser(b"")  # loads what is loaded once
        atheris.Setup([sys.argv[0], *options, corpus], parser)
        atheris.Fuzz()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seconds", type=int, default=300)
    arguments.add_argument("--parser", choices=PARSERS)
    arguments.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given, options = arguments.parse_known_args()
    if given.run:
        run(given.parser, options)
        return
    broken = 0
    for name in (given.parser,) if given.parser else PARSERS:
        kept = Path(tempfile.gettempdir()) / f"trialogue-guided-{name}-"
        command = [sys.executable, __file__, "--run", "--parser", name, *BOUNDS]
        command += [f"-max_total_time={given.seconds}", f"-artifact_prefix={kept}"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        told = done.stdout + done.stderr
        inputs, memory = (
            found[1] if (found := re.search(rf"stat::{key}:\s+(\d+)", told)) else "?"
            for key in ("number_of_executed_units", "peak_rss_mb")
        )
        result = "nothing broke" if done.returncode == 0 else f"broken (exit {done.returncode})"
        print(f"{name}: {inputs} inputs in {given.seconds} s, {memory} MB at most: {result}", flush=True)
        if done.returncode != 0:
            broken += 1
            print(told[-4000:], flush=True)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
