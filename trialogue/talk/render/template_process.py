# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The program that renders a chat template, in a process of its own under limits of time and memory.

A template is a program that came with a model. Jinja's sandbox keeps it from reading files, but not from
looping for ever or from building endless text, and a thread cannot be stopped. `bounded_template` starts
this file by its path, with a socket as standard input: a line of JSON with the template's values comes in, a
line with its text or an error goes out. Nothing is printed.
"""

import json
import resource
import signal
import socket
import sys
from typing import Any

LONGEST = 1 << 24


def limit_memory(more: int) -> None:
    """Let the process take this many bytes beyond what it has, where the system knows such a limit."""
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
        # Past the limit the system ends the process: no handler could interrupt a single long operation.
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
