"""`make setup` shows that it goes on, and fails where pip does.

A script stands in for the interpreter. It makes a `.venv` whose Python takes its time: the real pip would
need a network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin
printf '#!/bin/sh\\nsleep 20\\nexit {status}\\n' > .venv/bin/python
chmod +x .venv/bin/python
"""


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_setup_says_what_it_installs_and_how_far_it_is(status: int, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON.format(status=status))
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode == 0) == (status == 0), done.stderr
    assert (tmp_path / ".venv" / ".stamp").exists() == (status == 0)
    assert "GB on disk" in done.stdout
    assert re.search(r"^  \d+ s: \d+ MB in \.venv$", done.stdout, re.MULTILINE)
