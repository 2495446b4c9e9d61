"""Texts that want to be more than text: they are shown, and nothing happens."""

from pathlib import Path
from urllib.parse import quote

from looking import HOSTILE, Site, Watch, go, new_page, run_verb
from playwright.sync_api import Browser, Page, expect

TAGS = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def look(page: Page) -> None:
    """Nothing the texts ask for is there."""
    assert page.locator("main img, main script, main iframe, main object").count() == 0
    assert page.locator("main svg[onload]").count() == 0
    for link in page.locator("a").all():
        assert (link.get_attribute("href") or "").startswith("#")


def test_every_screen(hostile_page: Page, hostile: Site) -> None:
    page = hostile_page
    identity = hostile.ask("conversations", run="hostile")["rows"][0]["id"]
    go(page, hostile.address)
    look(page)
    go(page, hostile.to("hostile"))
    expect(page.locator(".list tbody")).to_contain_text(TAGS)
    look(page)
    go(page, hostile.to("hostile", identity))
    text = page.locator("article.turn.user .text").first
    expect(text).to_contain_text(TAGS)
    expect(text).to_contain_text("javascript:alert(4)")
    expect(text).to_contain_text("{{7*7}}")
    expect(text.locator(".unseen").first).to_have_text("␛")  # the escape, spelt out
    expect(text.locator(".unseen", has_text="U+202E")).to_have_count(1)  # the override turns nothing round
    expect(page.locator(".call .tool-name", has_text=TAGS).first).to_be_visible()
    page.locator("summary", has_text="Raw JSON").click()
    look(page)
    page.keyboard.press("c")
    expect(page.locator(".comparison")).to_be_visible()
    look(page)
    page.keyboard.press("t")
    expect(page.locator("main")).to_contain_text("No tokens were recorded")


def test_hostile_addresses(hostile_page: Page, hostile: Site) -> None:
    for query in (f"text={quote(TAGS)}", f"step={quote(TAGS)}", f"sort={quote(TAGS)}", "text=%E0%A4%A"):
        go(hostile_page, f"{hostile.address}#/run/hostile?{query}")
        look(hostile_page)


def test_the_export(browser: Browser, hostile: Site, tmp_path: Path) -> None:
    folder = Path(hostile.ask("runs")["folder"])
    target = tmp_path / "hostile.html"
    run_verb(tmp_path, "view", str(folder / "hostile"), "--export", str(target))
    assert HOSTILE.split(" ")[0] not in target.read_text()
    page = new_page(browser)
    watch = Watch(page, target.as_uri())
    page.goto(target.as_uri())
    page.wait_for_selector("body[data-ready]")
    page.locator(".list tbody a").first.click()
    expect(page.locator("article.turn.user .text").first).to_contain_text(TAGS)
    look(page)
    page.context.close()
    assert not watch.problems, watch.problems


def test_a_foreign_page_gets_nothing(browser: Browser, site: Site) -> None:
    """Another origin in the same browser: it may neither read answers nor put the page into a frame."""
    page = new_page(browser)
    evil = "<!doctype html><p>evil</p>"
    page.route("http://evil.example/", lambda route: route.fulfill(content_type="text/html", body=evil))
    page.goto("http://evil.example/")
    read = page.evaluate(
        """address => Promise.all([{}, {mode: "no-cors"}].map(options =>
           fetch(address, options).then(answer => answer.text(), () => "").catch(() => "")))""",
        f"{site.address}api/runs",
    )
    assert all("agent" not in text for text in read)
    framed = page.evaluate(
        """address => new Promise(done => {
          const frame = document.createElement("iframe");
          frame.onload = () => done(frame.contentDocument ? "readable" : "closed");
          frame.src = address;
          document.body.append(frame);
        })""",
        site.address,
    )
    assert framed == "closed"
    page.context.close()
