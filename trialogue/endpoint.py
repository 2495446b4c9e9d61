"""The one reader of what an HTTP endpoint answers. What a server sends is data, and it is bounded.

Bytes are counted after decompression and reading stops at a limit, a redirect to another origin is refused,
and JSON is parsed once. Whatever an answer holds, the errors below are the only ones it can raise.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, cast

from trialogue.errors import TrialogueError
from trialogue.reading import explain

if TYPE_CHECKING:
    from httpx2 import URL, Response

MOST_VALUES = 1_000_000
"""JSON values in one answer, at most: parsed, a value of two bytes can take a hundred."""
ERROR_BYTES = 1 << 16
"""How much is read of an answer that is an error: enough for what it says."""
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_SAME_AGAIN = (301, 302, 307, 308)
_PORTS = {"http": 80, "https": 443}


class Unreachable(TrialogueError):
    """Nobody answered, or the connection broke."""


class Unreadable(TrialogueError):
    """The answer is too large, or is not what it claims to be."""


class Redirected(TrialogueError):
    """The server sends requests to another address."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered: of an error the first bytes, of anything else the whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_error(self) -> bool:
        return self.status >= 400

    def read(self) -> Any:
        """The body as JSON."""
        return read_json(self.body)

    def explain(self) -> str:
        """What an error says of itself."""
        phrase = HTTPStatus(self.status).phrase if self.status in set(HTTPStatus) else "unknown status"
        text = _find_message(self.body)
        return f"{self.status} {phrase}: {text}" if text else f"{self.status} {phrase}"


class Endpoint:
    """A server at an address, asked with a key. It keeps connections, and no cookies."""

    def __init__(self, address: str, key: str, most_bytes: int) -> None:
        import httpx2

        self.address, self.most_bytes = address.rstrip("/"), most_bytes
        self._client = httpx2.AsyncClient(
            headers={
                "Authorization": f"Bearer {key}",
                "Accept": "application/json",
                "Accept-Encoding": "gzip",
                "User-Agent": "trialogue",
            },
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=None,
        )

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a request and read the answer. The caller bounds the time."""
        import httpx2

        content = None if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            url = httpx2.URL(self.address + path)
            for _ in range(_MOST_REDIRECTS + 1):
                request = self._client.build_request(method, url, content=content, headers=headers)
                response = await self._client.send(request, stream=True)
                try:
                    if response.status_code not in _REDIRECTS:
                        return Answer(response.status_code, response.headers, await self._read(response))
                    url = _follow(url, response)
                finally:
                    await response.aclose()
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        raise Redirected(f"{self.address} redirects more than {_MOST_REDIRECTS} times")

    async def _read(self, response: Response) -> bytes:
        """The body, decompressed piece by piece so that a small one cannot become a large one unseen."""
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", ""):
            raise Unreadable(f"its content encoding is {encoding[:40]!r}; gzip and identity are read")
        most = ERROR_BYTES if response.status_code >= 400 else self.most_bytes
        unzip = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
        read = bytearray()
        async for piece in response.aiter_raw():
            room = most - len(read)
            try:
                read += piece[: room + 1] if unzip is None else unzip.decompress(piece, room + 1)
            except zlib.error as error:
                raise Unreadable(f"it is not gzip: {error}") from None
            if len(read) > most:
                if response.status_code >= 400:
                    break
                raise Unreadable(f"it is longer than {most} bytes, the limit of an answer")
        return bytes(read[:most])

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()


def read_json(body: bytes) -> Any:
    """Parse JSON of a bounded number of values; whatever is wrong with it raises `Unreadable`."""
    if sum(map(body.count, (b"[", b"{", b","))) > MOST_VALUES:
        raise Unreadable(f"it holds more than {MOST_VALUES} values")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unreadable(explain(error)) from None


def _follow(url: URL, response: Response) -> URL:
    """Where the same request goes now. Another origin would get the key and the conversation: refused."""
    target = url.join(response.headers.get("location", ""))
    if response.status_code not in _SAME_AGAIN or _find_origin(target) != _find_origin(url):
        raise Redirected(
            f"{_show(url)} redirects to {_show(target)}, which is not followed; "
            "if that is the right address, name it yourself"
        )
    return target


def _find_origin(url: URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or _PORTS.get(url.scheme)


def _show(url: URL) -> str:
    """An address without what may be secret in it."""
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))[:200]


def _find_message(body: bytes) -> str:
    """The text of an error: `error.message`, `error`, `message` or `detail`, else the body itself."""
    try:
        found = read_json(body)
    except Unreadable:
        found = None
    for name in ("error", "message", "detail"):
        if isinstance(found, dict):
            found = cast("dict[str, Any]", found).get(name, cast(Any, found))
    text = found if isinstance(found, str) else body.decode("utf-8", "replace")
    return " ".join(text.split())
