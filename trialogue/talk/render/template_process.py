# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Render chat templates in a separate process with limits of time and memory.

A template is a program that came with a model. Jinja's sandbox prevents access to files, but not endless
loops or endless text, and a thread cannot be stopped. `bounded_template` runs this file with a socket as
standard input. Each line of input is JSON with the values of the template, each line of output its text or an
error.
"""

import json
import resource
import signal
import socket
import sys
from typing import Any

LONGEST = 1 << 24


def limit_memory(more: int) -> None:
    """Limit the process to this many bytes more than it uses now, if the system supports it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
    except (OSError, ValueError):
        pass


def answer_lines() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    limit_memory(memory)
    channel = socket.socket(fileno=0).makefile("rw", encoding="utf-8")
    for line in channel:
        # After the limit the system ends the process: a handler could not interrupt a long operation.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            asked = json.loads(line)
            [text], _ = render(**asked)
            if len(text) > LONGEST:
                raise ValueError(f"its text is longer than {LONGEST:,} characters")
            answer = {"text": text}
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            answer = {"error": str(error)[:1000] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    answer_lines()
