"""The public face: `trialogue.__all__` is sorted, true and documented, and costs no heavy import."""

import ast
import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import trialogue

NAMES = list(trialogue.__all__)


def is_described(name: str, thing: object) -> bool:
    """Classes and functions by a docstring of their own; an alias or constant by a string right below it."""
    if inspect.isclass(thing):
        text = vars(thing).get("__doc__") or ""
        return bool(text.strip()) and not text.startswith(f"{name}(")  # a dataclass writes itself one
    if inspect.isroutine(thing) or inspect.ismodule(thing):
        return bool((thing.__doc__ or "").strip())
    return any(is_described_below(name, path) for path in Path(trialogue.__file__).parent.rglob("*.py"))


def is_described_below(name: str, path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if found == name and text.strip():
                return True
    return False


def test_all_is_sorted_and_without_doubles() -> None:
    assert sorted(set(NAMES)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves_and_is_described(name: str) -> None:
    thing = getattr(trialogue, name)
    assert name.startswith("__") or is_described(name, thing), f"trialogue.{name} has no docstring"


def test_a_name_without_docstring_is_noticed(tmp_path: Path) -> None:
    class Bare:
        pass

    class InheritsError(ValueError):
        pass

    class Told:
        """Said."""

    assert not is_described("Bare", Bare)
    assert not is_described("InheritsError", InheritsError)
    assert is_described("Told", Told)
    assert not is_described("NoSuchConstant", 3)
    source = tmp_path / "source.py"
    source.write_text('End = int\n"""How it ended."""\nSide = int\n')
    assert is_described_below("End", source)
    assert not is_described_below("Side", source)


def test_import_is_light() -> None:
    program = "import sys, trialogue; print(*sorted({'torch', 'transformers', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
