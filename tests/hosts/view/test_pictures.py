"""The pictures of the documents, taken anew from the runs: light, dark and narrow."""

import os
from pathlib import Path

import pytest
from looking import Site, go, new_page
from playwright.sync_api import Browser
from test_access import to_address

PICTURES = [
    ("view-run", "run", "light", 1280, 1000),
    ("view-conversation", "conversation", "light", 1280, 860),
    ("view-conversation-dark", "conversation", "dark", 1280, 860),
    ("view-tokens-dark", "tokens", "dark", 1280, 560),
    ("view-compare", "compare", "light", 1280, 860),
    ("view-run-800-dark", "run", "dark", 800, 1000),
    ("view-runs", "runs", "light", 1280, 420),
    ("view-corpus", "decision", "light", 1280, 700),
]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture[0])
def test_pictures(
    browser: Browser, site: Site, tmp_path: Path, picture: tuple[str, str, str, int, int]
) -> None:
    name, screen, colours, wide, tall = picture
    target = Path(os.environ.get("PICTURES") or tmp_path) / f"{name}.png"
    page = new_page(
        browser,
        color_scheme="dark" if colours == "dark" else "light",
        viewport={"width": wide, "height": tall},
        device_scale_factor=1.5,
    )
    go(page, to_address(site, screen))
    page.screenshot(path=target)
    page.context.close()
    assert target.stat().st_size > 20_000
