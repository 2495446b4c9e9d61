"""What the tests of the page share: a server over runs, and a watch on what a page does.

`make test-view` makes the runs: `cold` (fine-tuned), `agent` (trained from it), `oracle` (evaluated), and
`corpus` (synthesised and reviewed).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, expect

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)> [a](javascript:alert(4)) "
    "<a href='javascript:alert(5)'>b</a> \x1b[31mred\x1b[0m \u202etxet\u202c {{7*7}} </script><!-- &lt;b&gt;"
)


PATIENCE = 90_000
"""Milliseconds until something is said not to happen: machines that do much else are slow."""
expect.set_options(timeout=PATIENCE)


def find_runs() -> Path:
    return Path(os.environ["TRIALOGUE_VIEW_RUNS"])


class Site:
    """A server in a process of its own, and what may be asked of it."""

    def __init__(self, address: str, process: int) -> None:
        self.address, self.process = address, process

    def ask(self, question: str, **query: object) -> Any:
        words = urlencode({key: str(value) for key, value in query.items()})
        with urlopen(f"{self.address}api/{question}?{words}", timeout=PATIENCE / 1000) as answer:
            return json.load(answer)

    def find_group(self, run: str = "agent") -> dict[str, Any]:
        """A lost conversation whose siblings did better, neither short nor long, with a wrong database if
        there is one such."""
        rows = self.ask("conversations", run=run, part="step", reward="lost", limit=200)["rows"]
        mixed = [
            row
            for row in rows
            if any(outcome == "won" for _, outcome in row["group"]) and row["end"] == "user_stop"
        ]
        mixed.sort(key=lambda row: abs(row["turns"] - 12))
        for row in mixed[:8]:
            if self.ask("conversation", run=run, id=row["id"])["trajectory"]["reward"].get("differences"):
                return row
        return mixed[0]

    def to(self, run: str, identity: str = "", **query: object) -> str:
        words = urlencode({key: str(value) for key, value in query.items()})
        path = f"#/run/{quote(run, safe='')}" + (f"/{quote(identity, safe='')}" if identity else "")
        return self.address + path + (f"?{words}" if words else "")


@contextmanager
def serve(folder: Path) -> Iterator[Site]:
    command = [sys.executable, "-m", "trialogue", "view", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Site(json.loads(server.stdout.readline())["address"], server.pid)
        finally:
            server.terminate()


def run_verb(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trialogue", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Watch:
    """What a page did that it should not: errors, dialogs, requests to somebody else."""

    def __init__(self, page: Page, allowed: str) -> None:
        self.problems: list[str] = []
        self.asked: list[str] = []
        page.on(
            "console", lambda message: self.note("console", message.text) if message.type == "error" else None
        )
        page.on("pageerror", lambda error: self.note("error", str(error)))
        page.on("dialog", lambda dialog: (self.note("dialog", dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.see(request.url, allowed))

    def note(self, kind: str, text: str) -> None:
        self.problems.append(f"{kind}: {text}")

    def see(self, url: str, allowed: str) -> None:
        self.asked.append(url)
        if not url.startswith((allowed, "data:")):
            self.note("request", url)


def new_page(browser: Browser, **options: Any) -> Page:
    """A page of its own, which is waited for patiently."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    context.set_default_timeout(PATIENCE)
    return context.new_page()


def open_page(browser: Browser, allowed: str) -> Iterator[Page]:
    page = new_page(browser)
    watch = Watch(page, allowed)
    yield page
    page.context.close()
    assert not watch.problems, watch.problems


def go(page: Page, address: str) -> None:
    """Open an address and wait until its screen is drawn."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
