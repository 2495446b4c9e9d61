"""The local page of a folder of runs: a few fixed files and a few questions, over HTTP.

Nothing is ever changed: GET and HEAD are all there is. A request under a foreign host name is refused (a
website could point its name at this machine), and so is one that another site's page makes.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from trialogue.errors import RunError
from trialogue.view.answers import Answers, Query

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
MODULES = (
    *("dom.js", "source.js", "address.js", "charts.js", "list.js", "transcript.js", "why.js", "tokens.js"),
    *("compare.js", "conversation.js", "runs.js", "run.js", "app.js"),
)
"""The modules of the page, each after those it imports."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def read_page() -> dict[str, bytes]:
    """The files of the page by name; nothing else is ever served. All modules are one script, so that a
    browser need not come back for what each of them imports."""
    page = {
        item.name: item.read_bytes()
        for item in files("trialogue.view").joinpath("page").iterdir()
        if Path(item.name).suffix in TYPES
    }
    script = "\n".join(to_plain_script(page.pop(name).decode()) for name in MODULES)
    return {**page, "app.js": script.encode()}


def to_plain_script(module: str) -> str:
    """A module that needs no other: its imports are left out, as what they name stands before it."""
    without = re.sub(r"^import .*;\n", "", module, flags=re.MULTILINE)
    return re.sub(r"^export ", "", without, flags=re.MULTILINE)


class PageServer(ThreadingHTTPServer):
    """Serves a folder of runs. Port 0 takes any free one."""

    daemon_threads = True

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 7878) -> None:
        self.answers = Answers(root)
        self.page = read_page()
        self.host = host
        if ":" in host:
            from socket import AF_INET6

            self.address_family = AF_INET6
        super().__init__((host, port), _Handler)
        Thread(target=self.answers.read_ahead, daemon=True, name="read ahead").start()

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def is_welcome(self, host: str) -> bool:
        """Whether a Host header names this machine: as loopback, as it was told to be called, or by number
        (no website can make a browser send a number that is not its own)."""
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", self.host):
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return number.is_loopback or self.host in ("0.0.0.0", "::")

    def answer(self, path: str, query: Query) -> Any:
        """The answer to a question of the page."""
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


def open_server(root: Path, host: str, port: int) -> PageServer:
    """A server that listens; where the port is taken, an error that says what to do."""
    try:
        return PageServer(root, host, port)
    except OSError as error:
        raise RunError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port, 0 takes any"
        ) from None


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride] # the one it is made for
    protocol_version = "HTTP/1.1"
    server_version = "trialogue"
    sys_version = ""
    timeout = 60
    wbufsize = -1  # head and body leave together; the second of two small packets would wait for the first

    def do_GET(self) -> None:
        self._respond(body=True)

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def _respond(self, body: bool) -> None:
        parts = urlsplit(self.path)
        refusal = self._find_refusal(parts.path)
        if refusal:
            self._send(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", refusal.encode(), body)
            return
        name = "page.html" if parts.path == "/" else parts.path.removeprefix("/")
        if name in self.server.page:
            self._send(HTTPStatus.OK, TYPES[Path(name).suffix], self.server.page[name], body)
            return
        try:
            status, answer = HTTPStatus.OK, self.server.answer(parts.path, dict(parse_qsl(parts.query)))
        except RunError as error:
            status, answer = HTTPStatus.NOT_FOUND, {"error": str(error)}
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        self._send(status, "application/json; charset=utf-8", text.encode("utf-8", "replace"), body)

    def _find_refusal(self, path: str) -> str:
        if not self.server.is_welcome(self.headers.get("Host", "")):
            return "this server answers only under its own address"
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            return "another site's page may not ask here"
        if path != "/" and self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return "another site's page may not ask here"
        return ""

    def _send(self, status: HTTPStatus, kind: str, content: bytes, body: bool) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the terminal belongs to whoever started the server."""
