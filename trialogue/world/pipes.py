"""The MCP client's transport over a program's pipes, with a bound on what the program may send.

The SDK's own transport takes time that grows with the square of a message's length and holds the event loop
meanwhile; here a long message costs its length, and one without end is answered with an error in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import IO, Any

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import ErrorData, JSONRPCError, jsonrpc_message_adapter

LONGEST = 128 << 20
"""Bytes of one message; the rest of a longer one is thrown away as it comes."""
_LONG = 1 << 20
"""Longer messages are read in a thread."""
_GRACE = 2.0
"""Seconds a program gets to end by itself, and again after being asked to."""


@contextlib.asynccontextmanager
async def run_program(
    command: Sequence[str], environment: dict[str, str], folder: Path, errors: IO[str]
) -> AsyncGenerator[tuple[Any, Any]]:
    """Start a program in a process group of its own and speak MCP with it; it is gone when this is left."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    heard, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, said = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [asyncio.create_task(_listen(process, heard)), asyncio.create_task(_speak(process, said, heard))]
    try:
        yield incoming, outgoing
    finally:
        await _stop(process)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (heard, incoming, outgoing, said):
            stream.close()


async def _listen(process: asyncio.subprocess.Process, heard: Any) -> None:
    """Hand messages on, one a line. The stream closes with the program's output."""
    assert process.stdout is not None
    parts: list[bytes] = []
    size = 0
    with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async with heard:
            while chunk := await process.stdout.read(1 << 18):
                *ended, rest = chunk.split(b"\n")
                for end in ended:
                    message = await _read(b"".join([*parts, end]), size + len(end))
                    parts, size = [], 0
                    if message is not None:
                        await heard.send(message)
                size += len(rest)
                if size <= LONGEST or not parts:
                    parts.append(rest[:LONGEST])
                else:
                    parts = [b"".join(parts)[:1024]]  # enough to tell which request it answers


async def _read(line: bytes, size: int) -> SessionMessage | Exception | None:
    if not line.strip():
        return None
    if size > LONGEST:
        found = re.search(rb'"id"\s*:\s*(\d+)', line[:1024])
        error = ErrorData(code=-32000, message=f"the answer has more than {LONGEST} bytes")
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error)) if found else None
    try:
        if len(line) > _LONG:
            message = await asyncio.to_thread(jsonrpc_message_adapter.validate_json, line, by_name=False)
        else:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError as error:  # what is no message is none; many programs print a greeting
        return error
    return SessionMessage(message)


async def _speak(process: asyncio.subprocess.Process, said: Any, heard: Any) -> None:
    assert process.stdin is not None
    try:
        async with said:
            async for message in said:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode("utf-8", "replace") + b"\n")
                await process.stdin.drain()
    except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        heard.close()  # nobody listens any more: whoever waits for an answer is told


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a program and everything it started: its input closes, then it is asked to, then it is killed."""
    if process.stdin is not None:
        process.stdin.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if await _is_over(process):
            break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
    await _is_over(process)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what it may have left behind


async def _is_over(process: asyncio.subprocess.Process) -> bool:
    try:
        async with asyncio.timeout(_GRACE):
            await process.wait()
    except TimeoutError:
        return False
    return True
