"""The public face: `trialogue.__all__` is sorted, true and documented, and costs no heavy import."""

import subprocess
import sys
from pathlib import Path

import pytest

import trialogue
from tools.site import is_documented, is_documented_below

NAMES = list(trialogue.__all__)


def test_all_is_sorted_and_without_doubles() -> None:
    assert sorted(set(NAMES)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves_and_is_documented(name: str) -> None:
    thing = getattr(trialogue, name)
    assert name.startswith("__") or is_documented(name, thing), f"trialogue.{name} has no docstring"


def test_a_name_without_docstring_is_noticed(tmp_path: Path) -> None:
    class Bare:
        pass

    class InheritsError(ValueError):
        pass

    class Told:
        """Said."""

    assert not is_documented("Bare", Bare)
    assert not is_documented("InheritsError", InheritsError)
    assert is_documented("Told", Told)
    assert not is_documented("NoSuchConstant", 3)
    source = tmp_path / "source.py"
    source.write_text('End = int\n"""How it ended."""\nSide = int\n')
    assert is_documented_below("End", source)
    assert not is_documented_below("Side", source)


def test_import_is_light() -> None:
    program = "import sys, trialogue; print(*sorted({'torch', 'transformers', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
