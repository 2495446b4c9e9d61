"""`make setup` shows that it goes on, and fails where pip does.

A script stands in for the interpreter. It makes a `.venv` whose Python takes its time: the real pip would
need a network. Another stands in for `sleep`, so that a second passes in a hundredth.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin
printf '#!/bin/sh\\n{sleep} 2\\nexit {status}\\n' > .venv/bin/python
chmod +x .venv/bin/python
"""


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_setup_says_what_it_installs_and_how_far_it_is(status: int, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    sleep = shutil.which("sleep")
    scripts = {
        "python": PYTHON.format(status=status, sleep=sleep),
        "sleep": f"#!/bin/sh\nexec {sleep} 0.01\n",
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"PYTHON={tmp_path / 'python'}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode == 0) == (status == 0), done.stderr
    assert (tmp_path / ".venv" / ".stamp").exists() == (status == 0)
    assert "GB on disk" in done.stdout
    assert re.search(r"^  \d+ s: \d+ MB in \.venv$", done.stdout, re.MULTILINE)
