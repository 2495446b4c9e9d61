"""Where the benchmarks' data lies: beside the repository, or where TRIALOGUE_DATA says."""

import os
from pathlib import Path

import pytest

DEFAULT = Path(__file__).parents[4] / "shared" / "benchmarks"


@pytest.fixture(scope="session")
def data() -> Path:
    folder = Path(os.environ.get("TRIALOGUE_DATA") or DEFAULT)
    if not (folder / "tau2-bench").is_dir():
        pytest.skip(f"no benchmark data: {folder} has no tau2-bench; set TRIALOGUE_DATA")
    return folder
