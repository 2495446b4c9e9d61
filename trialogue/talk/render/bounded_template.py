# pyright: reportUnknownMemberType=false
"""Render a tokenizer's chat template within limits of time and memory (see `template_process`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

from trialogue.errors import ConfigError

SECONDS = 2.0
"""Maximum processor time for one text; real templates take milliseconds."""
MEMORY = 1 << 29
_PROGRAM = Path(__file__).with_name("template_process.py")


class BoundedTemplate:
    """Renders in a process that starts on first use and ends with this object. After a template has exceeded
    a limit it is not rendered again."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: TextIO | None = None
        self._refusal: str | None = None
        self._lock = Lock()

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, prompt: bool) -> str:
        """The text of a conversation. Raises a ConfigError if the template refuses it or takes too long."""
        template = self._tokenizer.get_chat_template(None, tools=tools)
        asked = {
            "conversations": [messages],
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": prompt,
            **self._tokenizer.special_tokens_map,
        }
        with self._lock:
            answer = self._ask(json.dumps(asked, default=str))
        if "error" in answer:
            raise ConfigError(f"the chat template refuses such a conversation: {answer['error']}")
        return str(answer["text"])

    def _ask(self, line: str) -> dict[str, Any]:
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        if self._process is None or self._channel is None:
            self._process, self._channel = self._start()
        process, channel = self._process, self._channel
        try:
            channel.write(line + "\n")
            channel.flush()
            told = channel.readline()
        except (BrokenPipeError, ConnectionResetError):
            told = ""
        if told.endswith("\n"):
            return json.loads(told)
        self._refusal = f"the process that renders the chat template ended by itself ({process.wait()})"
        if process.returncode == -signal.SIGPROF:
            self._refusal = (
                f"the chat template took more than {SECONDS:g} s of processor time for a short text and was "
                "stopped; do not trust it, or name another renderer such as 'hermes'"
            )
        raise ConfigError(self._refusal)

    def _start(self) -> tuple[subprocess.Popen[bytes], TextIO]:
        known = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM), str(SECONDS), str(MEMORY)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**known, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the program that asks
        )
        theirs.close()
        with ours:  # the file keeps it open
            channel = ours.makefile("rw", encoding="utf-8")
        weakref.finalize(self, _end, process, channel)
        return process, channel


def _end(process: subprocess.Popen[bytes], channel: TextIO) -> None:
    process.kill()
    process.wait()
    with suppress(OSError):  # what was still to be sent
        channel.close()
