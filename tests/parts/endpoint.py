"""The scripted OpenAI-compatible endpoint of all tests: a real server on loopback.

    with Endpoint(script) as endpoint:
        ...  # endpoint.url is its address; endpoint.requests is what it was asked

A script is a function of a request and of how often that model was asked before. It returns a text, a body, a
status with a body, or a function that writes to the connection itself.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Fault = Callable[[BaseHTTPRequestHandler], None]
Answer = str | dict[str, Any] | tuple[int, Any] | Fault
Script = Callable[[dict[str, Any], int], Answer]


class Endpoint(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.closing = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two packets
    server: Endpoint

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        about = {"authorization": self.headers["Authorization"], "size": size}
        request = {**json.loads(self.rfile.read(size)), **about}
        with self.server.lock:
            asked = self.server.asked[request["model"]]
            self.server.asked[request["model"]] += 1
            self.server.requests.append(request)
        match self.server.script(request, asked):
            case str(text):
                send(self, 200, completion(text))
            case dict(body):
                send(self, 200, body)
            case (status, body):
                send(self, status, body)
            case fault:
                fault(self)

    def do_GET(self) -> None:
        """What was seen, for a test in another process."""
        send(self, 200, self.server.script.look())  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def send(handler: BaseHTTPRequestHandler, status: int, body: Any, **headers: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    known = {"Content_Type": "application/json", "Content_Length": str(len(data))}
    handler.send_response(status)
    for name, value in {**known, **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


# -- answers ------------------------------------------------------------------------------------------------


def completion(
    content: str | None = None, finish: str = "stop", usage: tuple[int, int] = (10, 2), **message: Any
) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **message}
    prompt, reply = usage
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "finish_reason": finish, "message": message}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply},
    }


def to_call(name: str, arguments: str, identity: str | None = "call_1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(name: str, arguments: str, identity: str | None = "call_1") -> dict[str, Any]:
    return completion(tool_calls=[to_call(name, arguments, identity)], finish="tool_calls")


def in_turn(*answers: Answer) -> Script:
    """Give these answers one after the other, the last one from then on."""
    left = list(answers)
    return lambda request, asked: left.pop(0) if len(left) > 1 else left[0]


# -- faults -------------------------------------------------------------------------------------------------


def status(code: int, message: str = "no", **headers: str) -> Fault:
    return lambda handler: send(handler, code, {"error": {"message": message}}, **headers)


def hang(handler: BaseHTTPRequestHandler) -> None:
    handler.server.closing.wait(60)  # type: ignore[attr-defined]
    handler.close_connection = True


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def truncate(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 200, b'{"id": "x", "choi', Content_Length="500")
    handler.close_connection = True


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(100):
        if handler.server.closing.wait(0.05):  # type: ignore[attr-defined]
            break
        try:
            handler.wfile.write(b" ")
        except OSError:
            break
    handler.close_connection = True
