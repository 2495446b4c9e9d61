"""A browser, a server over real runs of the shop, and a run whose every text is hostile."""

import json
import os
import shutil
from collections.abc import Iterator

import pytest
from looking import HOSTILE, Site, find_runs, open_page, run_verb, serve
from playwright.sync_api import Browser, Page, sync_playwright


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    with serve(find_runs()) as site:
        yield site


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A run whose task, user, agent, tool arguments and tool results are as hostile as texts can be."""
    folder = tmp_path_factory.mktemp("hostile")
    run_verb(folder, "init", "bakery")
    tasks = (folder / "bakery" / "tasks.jsonl").read_text().splitlines()
    task = json.loads(tasks[0])
    task.update(split="test", instructions=HOSTILE, expected={"say": [HOSTILE]})
    task["meta"] = {"family": HOSTILE, "agenda": {"facts": {}, "wishes": [{"says": [HOSTILE], "done": "x"}]}}
    (folder / "bakery" / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    lines = [
        {"content": HOSTILE, "tool_calls": [{"name": "cancel_order", "arguments": {"order_id": HOSTILE}}]},
        {"tool_calls": [{"name": HOSTILE, "arguments": HOSTILE}]},
        HOSTILE,
    ]
    (folder / "script.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_verb(
        folder,
        "eval",
        "bakery",
        "--agent",
        f"scripted:{folder / 'script.jsonl'}",
        "--trials",
        "2",
        "run.name=hostile",
    )
    with serve(folder / "runs") as site:
        yield site


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, or the one playwright has installed."""
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, site: Site) -> Iterator[Page]:
    """A page on which nothing may go wrong."""
    yield from open_page(browser, site.address)


@pytest.fixture
def hostile_page(browser: Browser, hostile: Site) -> Iterator[Page]:
    yield from open_page(browser, hostile.address)
