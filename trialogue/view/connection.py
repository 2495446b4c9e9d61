"""One client over HTTP/1.1: read the head of a request, write an answer. Everything has a bound.

Only what the page needs: requests without a body, several on one connection, one after the other.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

HEAD_BYTES = 1 << 15
"""The longest head of a request."""
_CHUNK = 1 << 16
_ONCE = {"host", "origin", "content-length", "sec-fetch-site"}
_REQUEST = re.compile(r"([A-Z]{1,20}) (\S+) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")


class BadRequest(Exception):
    """Not a request that can be answered; the connection ends after saying so."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request. Names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    stays: bool
    """Whether the client wants to ask again on this connection."""


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    kind: str
    content: bytes


def to_text(status: HTTPStatus, text: str) -> Response:
    return Response(status, "text/plain; charset=utf-8", text.encode())


async def read_request(reader: asyncio.StreamReader, seconds: float) -> Request | None:
    """The next request, or None where the client left or sent no whole head within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, TimeoutError, OSError):
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head is over {HEAD_BYTES} bytes"
        ) from None
    return parse_head(head[:-4].decode("latin-1"))


def parse_head(head: str) -> Request:
    """The request of these lines. Strict: what two programs could read differently is refused."""
    first, *lines = head.split("\r\n")
    found = _REQUEST.fullmatch(first)
    if found is None or not found[2].startswith("/"):
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the first line must be: METHOD /PATH HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None or ((name := header[1].lower()) in _ONCE and name in headers):
            raise BadRequest(HTTPStatus.BAD_REQUEST, "a header is malformed or given twice")
        headers[name] = header[2].rstrip(" \t")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "a request has no body here")
    path, _, query = found[2].partition("?")
    stays = found[3] == "1" and headers.get("connection", "").lower() != "close"
    return Request(found[1], path, query, headers, stays)


async def write_response(
    writer: asyncio.StreamWriter,
    response: Response,
    headers: Mapping[str, str],
    seconds: float,
    *,
    body: bool = True,
    stays: bool = False,
) -> bool:
    """Send an answer in pieces. False where the client left or took longer than `seconds` for a piece."""
    status = response.status
    told = {
        **headers,
        "Content-Type": response.kind,
        "Content-Length": str(len(response.content)),
        "Connection": "keep-alive" if stays else "close",
    }
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *(f"{name}: {value}" for name, value in told.items()),
    ]
    sent = "\r\n".join([*lines, "", ""]).encode() + (response.content if body else b"")
    writer.transport.set_write_buffer_limits(0)  # drain() waits until the system has taken everything
    try:
        for start in range(0, len(sent), _CHUNK):
            writer.write(sent[start : start + _CHUNK])
            if writer.transport.get_write_buffer_size():
                async with asyncio.timeout(seconds):
                    await writer.drain()
    except (OSError, TimeoutError):
        writer.transport.abort()
        return False
    return True


async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close after a refusal. What the client still sends is read for a moment: closing on unread bytes would
    reset the connection, and the client would never see the refusal."""
    try:
        writer.write_eof()
        async with asyncio.timeout(1):
            for _ in range(64):
                if not await reader.read(_CHUNK):
                    break
    except (OSError, TimeoutError):
        pass
