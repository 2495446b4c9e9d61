"""Each screen in both colours and narrow: what axe finds, and that nothing sticks out at 800 pixels."""

import sys
from pathlib import Path

import pytest
from looking import Site, go, new_page
from playwright.sync_api import Browser, Page

AXE = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
SCREENS = ["runs", "run", "evaluation", "corpus", "decision", "conversation", "tokens", "compare"]


def to_address(site: Site, screen: str) -> str:
    identity = site.find_group()["id"]
    reviewed = site.ask("conversations", run="corpus", verdict="reviewed")["rows"][0]["id"]
    return {
        "runs": site.address,
        "run": site.to("agent"),
        "evaluation": site.to("oracle"),
        "corpus": site.to("corpus"),
        "decision": site.to("corpus", reviewed),
        "conversation": site.to("agent", identity),
        "tokens": site.to("agent", identity, view="tokens"),
        "compare": site.to("agent", identity, view="compare"),
    }[screen]


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, site: Site, screen: str, colours: str) -> None:
    page = new_page(
        browser,
        color_scheme="dark" if colours == "dark" else "light",
        viewport={"width": 1280, "height": 900},
        bypass_csp=True,  # for axe itself, which is put into the page
    )
    go(page, to_address(site, screen))
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'best-practice']})")
    problems = [
        f"{item['id']}: {item['help']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for item in found["violations"]
        for node in item["nodes"][:3]
    ]
    assert found["passes"]
    assert not problems, "\n".join(problems)
    page.context.close()


@pytest.mark.parametrize("screen", SCREENS)
def test_readable_at_800_pixels(page: Page, site: Site, screen: str) -> None:
    page.set_viewport_size({"width": 800, "height": 900})
    go(page, to_address(site, screen))
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 800
