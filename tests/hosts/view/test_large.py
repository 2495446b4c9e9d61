"""A run of 10,000 conversations of 50 turns: how fast it opens, whether it scrolls, what the server holds."""

import os
from pathlib import Path

from looking import Watch, new_page, serve
from playwright.sync_api import Browser, expect

from speed.view import make_run, read_processor

WATCH = """
window.long = [];
new PerformanceObserver(list => window.long.push(...list.getEntries().map(entry => entry.duration)))
  .observe({type: "longtask", buffered: true});
"""


def test_ten_thousand_conversations(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path)
    with serve(tmp_path) as site:
        page = new_page(browser)
        watch = Watch(page, site.address)
        page.add_init_script(WATCH)
        page.goto(site.to("large"))
        page.wait_for_selector(".list tbody tr td.words")
        opened = page.evaluate("performance.now()") / 1000
        expect(page.locator(".count")).to_have_text("10,000 conversations")
        assert page.locator(".list tbody tr").count() < 100  # only what is in sight
        page.evaluate("window.long.length = 0")
        box = page.locator(".scroll")
        box.hover()
        for _ in range(40):
            page.mouse.wheel(0, 2500)
            page.wait_for_timeout(40)
        box.evaluate("node => { node.scrollTop = node.scrollHeight; }")
        expect(page.locator('.list tbody tr[aria-rowindex="10001"] td.words')).to_be_visible()
        long = page.evaluate("window.long")
        pages = int(Path(f"/proc/{site.process}/statm").read_text().split()[1])
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        longest = max(long, default=0.0)
        processor = read_processor(site.process)
        load = max(1.0, *os.getloadavg())
        print(
            f"\nopened {opened:.2f} s, longest task {longest:.0f} ms, {megabytes:.0f} MB, "
            f"server {processor:.2f} s, load {load:.1f}"
        )
        page.context.close()
        assert not watch.problems, watch.problems
        # The clock of a busy machine says little: by it, opening is only to be no worse by far.
        assert opened < 3.0 * load
        assert longest < 200 * load
        assert processor < 3.0  # from its start on, with all that was scrolled through
        assert megabytes < 200
