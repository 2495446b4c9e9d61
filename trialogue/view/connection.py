"""A minimal HTTP/1.1 server connection: read the head of a request, write a response, both bounded.

It supports only what the page needs: requests without a body, one after the other on a connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

HEAD_BYTES = 1 << 15
"""Maximum size of the head of a request."""
_CHUNK = 1 << 16
_ONCE = {"host", "origin", "content-length", "sec-fetch-site"}
_REQUEST = re.compile(r"([A-Z]{1,20}) (\S+) HTTP/1\.([01])")
_HEADER = re.compile(r"\A([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")


class BadRequest(Exception):
    """A request that cannot be served. The connection is closed after the error response."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The head of a request. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    stays: bool
    """Whether the client keeps the connection open for further requests."""


@dataclass(frozen=True, slots=True)
class Response:
    status: HTTPStatus
    kind: str
    content: bytes


def to_text_response(status: HTTPStatus, text: str) -> Response:
    return Response(status, "text/plain; charset=utf-8", text.encode())


async def read_request(reader: asyncio.StreamReader, seconds: float) -> PageRequest | None:
    """Read the next request; None if the client left or sent no complete head within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, TimeoutError, OSError):
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head is longer than {HEAD_BYTES} bytes"
        ) from None
    return parse_head(head[:-4].decode("latin-1"))


def parse_head(head: str) -> PageRequest:
    """Parse the head of a request. Strict: anything that programs parse differently is refused."""
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
        raise BadRequest(HTTPStatus.BAD_REQUEST, "a request must not have a body")
    path, _, query = found[2].partition("?")
    stays = found[3] == "1" and headers.get("connection", "").lower() != "close"
    return PageRequest(found[1], path, query, headers, stays)


async def write_response(
    writer: asyncio.StreamWriter,
    response: Response,
    headers: Mapping[str, str],
    seconds: float,
    *,
    body: bool = True,
    stays: bool = False,
) -> bool:
    """Send a response in chunks. False if the client left or took longer than `seconds` for a chunk."""
    status = response.status
    sent_headers = {
        **headers,
        "Content-Type": response.kind,
        "Content-Length": str(len(response.content)),
        "Connection": "keep-alive" if stays else "close",
    }
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *(f"{name}: {value}" for name, value in sent_headers.items()),
    ]
    sent = "\r\n".join([*lines, "", ""]).encode() + (response.content if body else b"")
    writer.transport.set_write_buffer_limits(0)  # drain() then waits until the kernel has taken everything
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
    """Close after an error response. Read what the client still sends for a moment: closing with unread bytes
    would reset the connection, and the client would never see the response."""
    try:
        writer.write_eof()
        async with asyncio.timeout(1):
            for _ in range(64):
                if not await reader.read(_CHUNK):
                    break
    except (OSError, TimeoutError):
        pass
