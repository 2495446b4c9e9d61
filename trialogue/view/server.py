"""The local web page of a folder of runs: a few fixed files and a small JSON API.

It is read-only: only GET and HEAD are allowed. Requests with a foreign host name are refused, because a
website could point its name at this machine; so are requests made by other sites' pages.

One event loop holds all connections, so a slow client costs a socket and no thread. A few threads read runs.
Beyond its limits the server answers 503 at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl

from trialogue.errors import RunError
from trialogue.reading import explain
from trialogue.view.api import Answers, Query
from trialogue.view.connection import (
    HEAD_BYTES,
    BadRequest,
    PageRequest,
    Response,
    end,
    read_request,
    to_text_response,
    write_response,
)

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SCRIPTS = (
    *("dom.js", "source.js", "address.js", "charts.js", "list.js", "transcript.js", "why.js", "tokens.js"),
    *("compare.js", "conversation.js", "runs.js", "run.js", "app.js"),
)
"""The page's modules, each after those it imports."""
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::([0-9]{1,5}))?")
_FIELDS = 50
_BACKLOG = 1024
_THREADS = 4


def read_page() -> dict[str, bytes]:
    """The files of the page by name; no other file is served. All modules are joined into one script, so that
    a browser makes one request."""
    page = {
        item.name: item.read_bytes()
        for item in files("trialogue.view").joinpath("page").iterdir()
        if Path(item.name).suffix in TYPES
    }
    script = "\n".join(to_plain_script(page.pop(name).decode()) for name in SCRIPTS)
    return {**page, "app.js": script.encode()}


def to_plain_script(module: str) -> str:
    """A module without imports and exports: what it imports comes earlier in the same script."""
    without = re.sub(r"^import .*;\n", "", module, flags=re.MULTILINE)
    return re.sub(r"^export ", "", without, flags=re.MULTILINE)


class PageServer:
    """Serve a folder of runs. Port 0 takes any free port. The server listens from the start and answers in
    `serve_forever`, which may run in any thread."""

    most_connections = 800
    most_questions = 64
    """Maximum number of different questions in progress or waiting; equal questions share one answer."""
    patience = 10.0
    """Seconds a client may take to send a complete head or to receive a chunk."""

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 7878) -> None:
        self.answers = Answers(root)
        self.page = read_page()
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.server_address: tuple[Any, ...] = self._socket.getsockname()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="view")
        self._connections = 0
        self._asked: dict[tuple[str, tuple[tuple[str, str], ...]], asyncio.Future[Response]] = {}
        self._stop: Callable[[], object] = lambda: None
        self._serves = Event()
        Thread(target=self.answers.read_ahead, daemon=True, name="read ahead").start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    # -- connections -----------------------------------------------------------------------------------------

    def serve_forever(self) -> None:
        """Answer until `shutdown`, or until Ctrl-C in the main thread."""
        asyncio.run(self._serve())

    def shutdown(self) -> None:
        """End `serve_forever`, from another thread."""
        self._serves.wait()
        self._stop()

    async def _serve(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        # Do not print clients that vanish or a lack of file descriptors in the terminal.
        loop.set_exception_handler(lambda loop, context: None)
        self._stop = lambda: loop.call_soon_threadsafe(over.set)
        server = await asyncio.start_server(
            self._converse, sock=self._socket, limit=HEAD_BYTES, backlog=_BACKLOG
        )
        self._serves.set()
        await over.wait()
        server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one client."""
        self._connections += 1
        try:
            if self._connections > self.most_connections:
                await self._send(writer, to_busy("too many connections"))
                await end(reader, writer)
                return
            while (request := await read_request(reader, self.patience)) is not None:
                response = await self._respond(request)
                body = request.method != "HEAD"
                if not await self._send(writer, response, body=body, stays=request.stays):
                    return
                if not request.stays:
                    return
        except BadRequest as refusal:
            await self._send(writer, to_text_response(refusal.status, str(refusal)))
            await end(reader, writer)
        finally:
            self._connections -= 1
            writer.close()

    async def _send(
        self, writer: asyncio.StreamWriter, response: Response, *, body: bool = True, stays: bool = False
    ) -> bool:
        busy = response.status == HTTPStatus.SERVICE_UNAVAILABLE
        headers = {**HEADERS, "Retry-After": "1"} if busy else HEADERS
        return await write_response(writer, response, headers, self.patience, body=body, stays=stays)

    # -- requests --------------------------------------------------------------------------------------------

    async def _respond(self, request: PageRequest) -> Response:
        if request.method not in ("GET", "HEAD"):
            return to_text_response(HTTPStatus.NOT_IMPLEMENTED, "this server is read-only: use GET or HEAD")
        if refusal := self._find_refusal(request):
            return to_text_response(HTTPStatus.FORBIDDEN, refusal)
        name = "page.html" if request.path == "/" else request.path.removeprefix("/")
        if name in self.page:
            return Response(HTTPStatus.OK, TYPES[Path(name).suffix], self.page[name])
        try:
            query = dict(parse_qsl(request.query, max_num_fields=_FIELDS))
        except ValueError:
            return to_text_response(HTTPStatus.BAD_REQUEST, f"a query has at most {_FIELDS} fields")
        return await self._ask(request.path, query)

    def _find_refusal(self, request: PageRequest) -> str:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self.is_welcome(host):
            return "this server answers only under its own address"
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return "another site's page may not ask here"
        site = request.headers.get("sec-fetch-site", "none")
        if request.path != "/" and site not in ("same-origin", "none"):
            return "another site's page may not ask here"
        return ""

    def is_welcome(self, host: str) -> bool:
        """Whether a Host header names this machine: as loopback, by the configured host name, or by address
        (a website cannot make a browser send an address that is not its own)."""
        found = _HOST.fullmatch(host)
        if found is None or int(found[2] or 0) > 65535:
            return False
        name = found[1].strip("[]").lower()
        if name in ("localhost", self.host.lower()):
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return number.is_loopback or self.host in ("0.0.0.0", "::")

    # -- questions -------------------------------------------------------------------------------------------

    async def _ask(self, path: str, query: Query) -> Response:
        """The answer to a question. Equal questions asked at the same time share one answer."""
        key = (path, tuple(query.items()))
        task = self._asked.get(key)
        if task is None:
            if len(self._asked) >= self.most_questions:
                return to_busy("too many questions at once")
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._threads, self._find_answer, path, query)
            self._asked[key] = task
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        return await asyncio.shield(task)

    def _find_answer(self, path: str, query: Query) -> Response:
        """Answer in a thread, whatever the run's files contain."""
        try:
            status, answer = HTTPStatus.OK, self.answer(path, query)
            text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        except RunError as error:
            status, text = HTTPStatus.NOT_FOUND, json.dumps({"error": str(error)})
        except Exception as error:  # noqa: BLE001 - files of any content are read here
            run = f"the run '{query['run']}'" if "run" in query else "the runs"
            message = f"the files of {run} cannot be shown: {explain(error)}"
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, json.dumps({"error": message})
        return Response(status, "application/json; charset=utf-8", text.encode("utf-8", "replace"))

    def answer(self, path: str, query: Query) -> Any:
        """The data that the page asks for."""
        run, identity = query.get("run", ""), query.get("id", "")
        questions: dict[str, Callable[[], Any]] = {
            "/api/runs": lambda: {"folder": str(self.answers.root), "runs": self.answers.runs()},
            "/api/run": lambda: self.answers.run(run),
            "/api/conversations": lambda: self.answers.conversations(run, query),
            "/api/conversation": lambda: self.answers.conversation(run, identity, query),
            "/api/tokens": lambda: self.answers.tokens(run, identity),
        }
        ask = questions.get(path)
        if ask is None:
            raise RunError(f"there is nothing at {path}")
        return ask()


def to_busy(text: str) -> Response:
    return to_text_response(HTTPStatus.SERVICE_UNAVAILABLE, f"{text}; ask again in a second")


def open_server(root: Path, host: str, port: int) -> PageServer:
    """Open a listening server, or raise an error that says what to do if the port is taken."""
    try:
        return PageServer(root, host, port)
    except OSError as error:
        raise RunError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --port (0: any free)"
        ) from None
