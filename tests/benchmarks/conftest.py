"""Entry points of the benchmarks."""

import os
import tomllib
from pathlib import Path

import pytest


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Entry points as pyproject.toml has them, in place of those of an older installation or of none."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    points = settings["project"]["entry-points"]["trialogue.domains"]
    folder = tmp_path / "announced"
    about = folder / "trialogue-0.dist-info"  # of several with one name, the first on the path counts
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trialogue\nVersion: 0\n")
    lines = ["[trialogue.domains]", *(f"{name} = {value}" for name, value in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), root]))
    return folder
