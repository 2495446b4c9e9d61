"""A run of 10,000 conversations of 50 turns: how fast it opens, whether it scrolls, what the server holds."""

import os
import subprocess
import sys
from pathlib import Path

from looking import Watch, serve
from playwright.sync_api import Browser, expect

ROOT = Path(__file__).parents[3]
LOAD = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""How much slower everything is than on a machine that does nothing else."""

WATCH = """
window.long = [];
new PerformanceObserver(list => window.long.push(...list.getEntries().map(entry => entry.duration)))
  .observe({type: "longtask", buffered: true});
"""


def test_ten_thousand_conversations(browser: Browser, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "speed" / "view.py"), "--make", str(tmp_path)], check=True)
    with serve(tmp_path) as site:
        context = browser.new_context(viewport={"width": 1280, "height": 860})
        page = context.new_page()
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
        expect(page.locator('.list tbody tr[aria-rowindex="10001"] td.words')).to_be_visible(timeout=10_000)
        long = page.evaluate("window.long")
        pages = int(Path(f"/proc/{site.process}/statm").read_text().split()[1])
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        longest = max(long, default=0.0)
        print(f"\nopened {opened:.2f} s, longest task {longest:.0f} ms, {megabytes:.0f} MB, load {LOAD:.1f}")
        context.close()
        assert not watch.problems, watch.problems
        assert opened < 3.0 * LOAD  # speed/view.py tells how fast; here it is only to be no worse by far
        assert longest < 200 * LOAD
        assert megabytes < 200
