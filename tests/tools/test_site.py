"""What the documentation site is made of, without the program that builds it: `make docs` runs the whole."""

from __future__ import annotations

import trialogue
from tools.site import ROOT, find_menu, write_names


def test_the_menu_names_every_page_and_no_other() -> None:
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages |= {page.name for page in ROOT.glob("*.md")} - {"README.md"}
    assert find_menu() == pages | {"index.md", "LICENSE.md", "docs/names.md"}


def test_every_public_name_is_on_its_page() -> None:
    page = write_names()
    listed = [line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")]
    assert sorted(listed) == trialogue.__all__
