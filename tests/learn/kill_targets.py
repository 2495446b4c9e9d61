"""Runs verbs in processes that are killed. Loads everything once and forks a process for each order.

An order is a line of JSON on stdin: `kind`, `config` (a file), `run` (to go on with, or null), and `fault`:
`["line", place, n]` kills at the n-th line executed in one of the PLACES where something is written or
published, `["write", n, share]` in the middle of the n-th write to a log, `["time", seconds]` whenever that
is. The answer is a line of JSON: how the process ended and, where it was not killed, how many lines (by
place) and writes there were.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import Lfm2ForCausalLM  # noqa: F401 - loaded once, before the forks

from trialogue import durable
from trialogue.config import EvalConfig, SftConfig, SynthesizeConfig, TrainConfig
from trialogue.corpus.synthesize import synthesize
from trialogue.engine import state as engine_state
from trialogue.learn import checkpoint
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.score.evaluate import evaluate

torch.set_num_threads(1)
logging.getLogger("trialogue").setLevel(logging.ERROR)

PLACES = ("checkpoint", "log", "publish", "verb")
VERBS: dict[str, tuple[Any, Any]] = {
    "train": (train, TrainConfig),
    "sft": (sft, SftConfig),
    "eval": (evaluate, EvalConfig),
    "synthesize": (synthesize, SynthesizeConfig),
}
PACKAGE = str(Path(durable.__file__).parent)
CHECKPOINT_FILES = {checkpoint.__file__, engine_state.__file__}
CHECKPOINT_NAMES = {"seal", "put_in_place", "put_back", "find_damage", "hash_file"}
PUBLISH_NAMES = {"publish", "optim_step"}
LOG_FILES = {
    durable.__file__,
    *(sys.modules[f"trialogue.{name}"].__file__ for name in ("run", "records", "digests")),
}
VERB_NAMES = {"train", "sft", "evaluate", "keep", "_evaluate", "finish", "write_lines"}


def find_place(code: CodeType) -> str | None:
    """Which of the places a function belongs to."""
    if not code.co_filename.startswith(PACKAGE):
        return None
    if code.co_name in PUBLISH_NAMES:
        return "publish"
    if code.co_filename in CHECKPOINT_FILES or code.co_name in CHECKPOINT_NAMES:
        return "checkpoint"
    if code.co_filename in LOG_FILES:
        return "log"
    return "verb" if code.co_name in VERB_NAMES else None


class Count:
    lines: Counter[str] = Counter()
    writes = 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch_lines(where: str, at: int) -> None:
    """Count the lines executed where something is written or published, in whatever thread."""

    def count(place: str) -> Any:
        def local(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                Count.lines[place] += 1
                if place == where and Count.lines[place] == at:
                    die()
            return local

        return local

    counters = {place: count(place) for place in PLACES}

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        place = find_place(frame.f_code)
        return None if place is None else counters[place]

    threading.settrace(look)
    sys.settrace(look)


def watch_writes(at: int, share: float) -> None:
    """Count the writes to logs, and leave one of them half done."""
    write = os.write

    def counted(descriptor: int, data: Any) -> int:
        Count.writes += 1
        if Count.writes == at:
            write(descriptor, bytes(data)[: int(len(data) * share)])
            die()
        return write(descriptor, data)

    durable.os = type("Os", (), {**vars(os), "write": staticmethod(counted)})  # type: ignore[assignment]


def work(order: dict[str, Any]) -> None:
    fault = order["fault"]
    if fault is None or fault[0] == "line":
        watch_lines(*(("", 0) if fault is None else fault[1:]))
    if fault is None or fault[0] == "write":
        watch_writes(*((0, 0.0) if fault is None else fault[1:]))
    verb, kind = VERBS[order["kind"]]
    config = kind.model_validate_json(Path(order["config"]).read_text(encoding="utf-8"))
    asyncio.run(verb(config, resume=order["run"] and Path(order["run"])))


def obey(order: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        answer: dict[str, Any] = {}
        try:
            work(order)
        except BaseException:  # noqa: BLE001 - whoever gave the order is told
            answer["error"] = traceback.format_exc()
        answer |= {"lines": Count.lines, "writes": Count.writes}
        sys.settrace(None)
        os.write(outside, json.dumps(answer).encode())
        os._exit(0)
    os.close(outside)
    clock: threading.Timer | None = None
    if order["fault"] is not None and order["fault"][0] == "time":
        clock = threading.Timer(order["fault"][1], os.kill, (child, signal.SIGKILL))
        clock.start()
    with os.fdopen(inside, "rb") as source:
        text = source.read()
    if clock is not None:
        clock.cancel()
    _, status = os.waitpid(child, 0)
    answer = json.loads(text) if text else {}
    return {**answer, "killed": os.WIFSIGNALED(status), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)
