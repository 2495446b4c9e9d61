"""The server under load and before hostile clients: real sockets, real links, every client gets an answer."""

import asyncio
import json
import os
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from trialogue.view.export import write_export
from trialogue.view.server import PageServer, open_server

SECRET = "canary-7d21-of-another-folder"


@contextmanager
def serve(root: Path, **bounds: Any) -> Iterator[PageServer]:
    with open_server(root, "127.0.0.1", 0) as server:
        for name, value in bounds.items():
            assert hasattr(server, name)
            setattr(server, name, value)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def find_port(server: PageServer) -> int:
    return int(server.address.rstrip("/").rpartition(":")[2])


def send(server: PageServer, head: str, seconds: float = 20.0) -> bytes:
    """What comes back for these bytes, until the server closes or falls silent."""
    with socket.create_connection(("127.0.0.1", find_port(server)), timeout=seconds) as client:
        client.sendall(head.replace("\n", "\r\n").encode("latin-1"))
        received = b""
        while part := client.recv(1 << 16):
            received += part
        return received


def get_status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:60]
    return int(answer.split()[1])


@pytest.mark.load
def test_500_clients_at_once_are_all_answered(folder: Path) -> None:
    questions = ("/", "/api/runs", "/api/run?run=good", "/api/conversations?run=good", "/app.js")

    async def ask(port: int, path: str, start: asyncio.Event) -> tuple[str, float]:
        await start.wait()
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                answer = await reader.read()
                writer.close()
        except (OSError, TimeoutError) as error:
            return type(error).__name__, time.perf_counter() - begun
        head, _, body = answer.partition(b"\r\n\r\n")
        whole = f"Content-Length: {len(body)}".encode() in head
        return head.split()[1].decode() if whole else "cut off", time.perf_counter() - begun

    async def ask_all(port: int) -> list[tuple[str, float]]:
        start = asyncio.Event()
        asked = [asyncio.create_task(ask(port, questions[n % len(questions)], start)) for n in range(500)]
        await asyncio.sleep(0)
        start.set()
        return await asyncio.gather(*asked)

    with serve(folder / "runs") as server:
        told = asyncio.run(ask_all(find_port(server)))
    counts = Counter(status for status, _ in told)
    seconds = median(seconds for _, seconds in told)
    print(f"500 clients at once: {dict(counts)}, median {seconds * 1000:.0f} ms")
    assert set(counts) <= {"200", "503"}
    assert counts["200"] >= 200
    assert seconds < 5


def test_questions_beyond_the_bound_are_told_503(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal questions share one answer; different ones beyond the bound are refused, and files still come."""
    free = threading.Event()
    asked: list[str] = []
    with serve(folder / "runs", most_questions=2) as server:
        answers, conversations = server.answers, server.answers.conversations

        def wait(name: str, query: Any) -> Any:
            asked.append(query["task"])
            assert free.wait(60)
            return conversations(name, query)

        monkeypatch.setattr(answers, "conversations", wait)
        port = find_port(server)
        got: list[int] = []

        def ask(number: int) -> None:
            path = f"/api/conversations?run=good&task=cancel-{number}"
            got.append(get_status(send(server, to_head(path, port), 60)))

        def ask_aside(numbers: list[int]) -> list[threading.Thread]:
            threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
            for thread in threads:
                thread.start()
            return threads

        waiting = ask_aside([1, 1, 1, 2])
        until = time.monotonic() + 30
        while len(asked) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        refused = send(server, to_head("/api/conversations?run=good&task=cancel-3", port))
        assert get_status(refused) == 503
        assert b"Retry-After: 1" in refused
        assert get_status(send(server, to_head("/", port))) == 200
        free.set()
        for thread in waiting:
            thread.join()
        assert got == [200] * 4
        assert sorted(asked) == ["cancel-1", "cancel-2"]


def test_connections_beyond_the_bound_are_told_503(folder: Path) -> None:
    with serve(folder / "runs", most_connections=3) as server:
        port = find_port(server)
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for client in idle:  # an answer shows that the server has taken the connection
            client.sendall(to_head("/style.css", port, close=False).replace("\n", "\r\n").encode())
            assert client.recv(1 << 16)
        assert get_status(send(server, to_head("/", port))) == 503
        idle.pop().close()
        until = time.monotonic() + 30
        while get_status(send(server, to_head("/", port))) != 200:
            assert time.monotonic() < until
        for client in idle:
            client.close()


def to_head(path: str, port: int, close: bool = True) -> str:
    return f"GET {path} HTTP/1.1\nHost: 127.0.0.1:{port}\n{'Connection: close' if close else 'X: y'}\n\n"


def test_aborted_clients_leave_no_word(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve(folder / "runs") as server:
        port = find_port(server)
        for number in range(100):
            client = socket.create_connection(("127.0.0.1", port))
            head = to_head("/api/run?run=good", port).replace("\n", "\r\n").encode()
            client.sendall(head[: 20 if number % 2 else None])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            client.close()
        assert get_status(send(server, to_head("/api/runs", port))) == 200
    told = capfd.readouterr()
    assert told.out + told.err == ""


@pytest.mark.load
def test_silent_clients_hold_no_thread_and_are_let_go(folder: Path) -> None:
    with serve(folder / "runs", patience=2.0) as server:
        port = find_port(server)
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(100)]
        for client in silent[::2]:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert get_status(send(server, to_head("/api/runs", port))) == 200
        assert threading.active_count() - before < 20
        for client in silent:
            assert client.recv(1 << 16) == b""
            client.close()
        assert get_status(send(server, to_head("/api/runs", port))) == 200


@pytest.mark.load
def test_a_client_that_reads_nothing_is_let_go(folder: Path) -> None:
    with serve(folder / "runs", patience=1.0) as server:
        port = find_port(server)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", port))
        client.sendall(to_head("/app.js", port, close=False).replace("\n", "\r\n").encode() * 300)
        time.sleep(3)
        received = 0
        try:
            while part := client.recv(1 << 20):
                received += len(part)
        except ConnectionResetError:
            pass
        assert received < 300 * len(server.page["app.js"])
        client.close()


# -- heads that are no request of ours ---------------------------------------------------------------------

HOSTS = [
    *("evil.com@127.0.0.1", "127.0.0.1@evil.com", "[::1", "::1", "[::1]x", "[]", "[::1]:port", "localhost:"),
    *("localhost:99999", "localhost:-1", "localhost:80:80", "localhost/evil", "localhost?x", "localhost#x"),
    *("local host", "127.0.0.1\\evil", "127.1", "0x7f.1", "127.0.0.1.", "[::ffff:8.8.8.8]", "\xb2.0.0.1"),
    *("localhost, evil.com", "user:pw@localhost"),
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_is_not_exactly_ours_is_refused(folder: Path, host: str) -> None:
    with serve(folder / "runs") as server:
        answer = send(server, f"GET /api/runs HTTP/1.1\nHost: {host}\nConnection: close\n\n")
        assert get_status(answer) in (400, 403)
        assert b"good" not in answer


@pytest.mark.parametrize(
    "origin",
    [
        *("http://[::1", "http://evil.com@127.0.0.1:{port}", "http://127.0.0.1:{port}@evil.com", "http://["),
        *(
            "http://127.0.0.1:{port}/",
            "127.0.0.1:{port}",
            "//127.0.0.1:{port}",
            "http://127.0.0.1:0",
            "",
            "x",
        ),
    ],
)
def test_an_origin_that_is_not_exactly_ours_is_refused(folder: Path, origin: str) -> None:
    with serve(folder / "runs") as server:
        port = find_port(server)
        head = to_head("/api/runs", port)[:-1] + f"Origin: {origin.format(port=port)}\n\n"
        answer = send(server, head)
        assert get_status(answer) in (400, 403)
        assert b"good" not in answer


@pytest.mark.parametrize(
    ("head", "allowed"),
    [
        ("GET //[::1 HTTP/1.1\nHost: localhost\nConnection: close\n\n", {400, 404}),
        ("GET http://[ HTTP/1.1\nHost: localhost\nConnection: close\n\n", {400, 404}),
        ("GET * HTTP/1.1\nHost: localhost\nConnection: close\n\n", {400, 404}),
        ("GET /api/runs HTTP/1.1\nHost: localhost\nHost: evil.com\nConnection: close\n\n", {400}),
        ("GET /api/runs HTTP/1.1\nConnection: close\n\n", {400, 403}),
        ("GET /api/runs HTTP/9.9\nHost: localhost\nConnection: close\n\n", {400, 505}),
        ("nonsense\n\n", {400}),
        ("\n\n", {400}),
        ("GET / HTTP/1.1\nHost localhost\n\n", {400}),
        ("GET / HTTP/1.1\nHost : localhost\n\n", {400}),
        ("GET / HTTP/1.1\nHost: localhost\n folded: x\n\n", {400}),
        ("GET / HTTP/1.1\nHost: localhost\nContent-Length: 5\n\nhello", {400}),
        ("GET / HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n0\n\n", {400}),
        ("GET /" + "x" * 70_000 + " HTTP/1.1\nHost: localhost\n\n", {414, 431}),
        ("GET / HTTP/1.1\nHost: localhost\n" + "".join(f"X{n}: {n}\n" for n in range(9000)) + "\n", {431}),
        ("GET /api/run?" + "&" * 20_000 + " HTTP/1.1\nHost: localhost\nConnection: close\n\n", {400, 404}),
        ("GET /api/run?" + "a=1&" * 2_000 + " HTTP/1.1\nHost: localhost\nConnection: close\n\n", {400, 404}),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", {400}),
    ],
)
def test_a_broken_request_is_answered(
    folder: Path, capfd: pytest.CaptureFixture[str], head: str, allowed: set[int]
) -> None:
    with serve(folder / "runs") as server:
        assert get_status(send(server, head)) in allowed
        assert get_status(send(server, to_head("/", find_port(server)))) == 200
    assert capfd.readouterr().err == ""


def test_requests_follow_each_other_on_one_connection(folder: Path) -> None:
    with serve(folder / "runs") as server:
        port = find_port(server)
        heads = to_head("/style.css", port, close=False) * 3 + to_head("/mark.svg", port)
        answer = send(server, heads)
        assert answer.count(b"HTTP/1.1 200 OK") == 4
        assert answer.endswith(server.page["mark.svg"])


# -- links out of a run ------------------------------------------------------------------------------------


def ask_everything(root: Path) -> str:
    """All that the page can be told about a run, and its export, as one text."""
    told = ""
    with serve(root) as server:
        records = server.answers.open("good")
        records.refresh()
        records.wait()
        paths = ["runs", "run?run=good", "conversations?run=good"]
        for entry in records.entries():
            paths += [f"{kind}?run=good&id={quote(entry.id)}" for kind in ("conversation", "tokens")]
        for path in paths:
            with urlopen(f"{server.address}api/{path}", timeout=60) as answer:
                told += answer.read().decode()
    target = root.parent / "export.html"
    write_export(root / "good", target, most=100)
    return told + target.read_text()


def hide_secret(run: Path, name: str) -> None:
    """Put a secret into a file of the run where the page shows it."""
    file = run / name
    marks: dict[str, dict[str, Any]] = {
        "run.json": {"command": [SECRET]},
        "config.json": {"agent": {"model": SECRET}},
        "metrics.jsonl": {"step": 1, "warnings": [SECRET]},
    }
    if name.startswith("trajectories"):
        (run / "index.jsonl").unlink()
        file = run / "trajectories" / "eval.jsonl"
        file.write_text(file.read_text().replace('"content":"', f'"content":"{SECRET} '))
    elif name.endswith(".jsonl"):
        file.write_text(json.dumps(marks[name]) + "\n")
    else:
        told = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**told, **marks.get(name, {"note": SECRET})}))


@pytest.mark.parametrize(
    "name",
    [
        *("run.json", "config.json", "result.json", "prompts.json", "metrics.jsonl"),
        *("trajectories/eval.jsonl", "trajectories"),
    ],
)
def test_a_link_out_of_a_run_is_neither_served_nor_exported(folder: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "runs" / "good"
    shutil.copytree(folder / "runs" / "good", run)
    hide_secret(run, name)
    assert SECRET in ask_everything(tmp_path / "runs")
    outside = tmp_path / "elsewhere" / Path(name).name
    outside.parent.mkdir()
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    assert SECRET not in ask_everything(tmp_path / "runs")


def test_a_linked_tokenizer_is_not_read(folder: Path, tmp_path: Path) -> None:
    from trialogue.engine.models import BASES
    from trialogue.view.tokens import find_tokenizer

    run = tmp_path / "good"
    shutil.copytree(folder / "runs" / "good", run)
    shutil.copy(BASES["tiny"] / "tokenizer.json", run)
    assert find_tokenizer(run) == run / "tokenizer.json"
    (run / "tokenizer.json").unlink()
    (run / "tokenizer.json").symlink_to(BASES["tiny"] / "tokenizer.json")
    assert find_tokenizer(run) is None
    (run / "model").symlink_to(BASES["tiny"])
    assert find_tokenizer(run) is None


def test_a_link_within_a_run_is_followed(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "good"
    shutil.copytree(folder / "runs" / "good", run)
    (run / "metrics.jsonl").rename(run / "kept.jsonl")
    (run / "metrics.jsonl").symlink_to("kept.jsonl")
    with serve(tmp_path / "runs") as server:
        assert server.answers.runs()[0]["pass1"][0] == 1.0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_a_run_holds_nobody(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "good"
    shutil.copytree(folder / "runs" / "good", run)
    for name in ("metrics.jsonl", "result.json", "timings.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    with serve(tmp_path / "runs") as server:
        for path in ("runs", "run?run=good", "conversations?run=good"):
            with urlopen(f"{server.address}api/{path}", timeout=20) as answer:
                assert answer.status == 200


def test_a_run_of_the_wrong_shape_is_told_in_one_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "good"
    shutil.copytree(folder / "runs" / "good", run)
    (run / "metrics.jsonl").write_text('{"step": {}, "tools": 3, "warnings": 4, "families": 5}\n' * 3)
    with serve(tmp_path / "runs") as server:
        answer = send(server, to_head("/api/run?run=good", find_port(server)))
        assert get_status(answer) == 500
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert "good" in error
        assert "\n" not in error
    assert capfd.readouterr().err == ""
