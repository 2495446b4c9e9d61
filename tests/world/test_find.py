"""Finding a domain by each kind of reference, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from trialogue import ConfigError, DomainError, find_domain
from trialogue.reading import from_json, locate

MODULE = """
from trialogue import Database, Domain, Record, Table
from trialogue.world.domain import from_list

class Loaf(Record):
    price: float

class Bakery(Database):
    loaves: Table[Loaf]

def make(name="bakery", data=None):
    return Domain(f"{name}:{data}", "Bake.", Bakery.load({}), from_list("bakery", []))

def breaks():
    raise RuntimeError("no flour")

class Holder:
    domain = make("held")

domain = make()
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that can be imported, in a folder of its own."""
    name = f"bakery_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / f"{name}.py"


def test_by_name() -> None:
    assert find_domain("shop").name == "shop"


def test_by_module(module: Path) -> None:
    assert find_domain(f"{module.stem}:domain").name == "bakery:None"
    assert find_domain(f"{module.stem}:make").name == "bakery:None"
    assert find_domain(f"{module.stem}:Holder.domain").name == "held:None"
    assert find_domain(f"{module.stem}:domain").reference == f"{module.stem}:domain"


def test_by_file_and_by_folder(module: Path, tmp_path: Path) -> None:
    assert find_domain(str(module)).name == "bakery:None"
    assert find_domain(find_domain(str(module)).reference).name == "bakery:None"
    assert find_domain(f"{module}:make").name == "bakery:None"
    assert find_domain(f"{module}:Holder.domain").name == "held:None"
    package = tmp_path / "inner" / "bread"
    package.mkdir(parents=True)
    (package / "recipes.py").write_text("NAME = 'bread'\n")
    (package / "__init__.py").write_text(MODULE + "\nfrom .recipes import NAME\ndomain = make(NAME)\n")
    assert find_domain(str(package)).name == "bread:None"
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "lone.py").write_text(MODULE.replace('make("held")', "None"))
    assert find_domain(str(lone)).name == "bakery:None"


def test_by_relative_path(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(module.parent)
    assert Path(find_domain(module.name).reference).is_absolute()


def install(folder: Path, lines: str) -> None:
    """What an installed package leaves behind."""
    info = folder / "bread-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bread\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trialogue.domains]\n{lines}\n")


def test_by_entry_point(module: Path, tmp_path: Path) -> None:
    name = module.stem
    install(
        tmp_path,
        f"bread = {name}:domain\nbreads = {name}:make\nburnt = {name}:breaks\n"
        f"gone = {name}:gone\nabsent = nowhere:domain\nthree = {name}:number\n",
    )
    assert find_domain("bread").name == "bakery:None"
    assert find_domain("bread").reference == "bread"
    assert find_domain("breads").name == "bakery:None"
    assert find_domain("breads:rye", data="grain").name == "rye:grain"
    for wrong, error, message in (
        ("burnt", DomainError, "'burnt' .*RuntimeError: no flour"),
        ("gone", DomainError, "entry point .*:gone.*AttributeError"),
        ("absent", DomainError, "No module named 'nowhere'"),
        ("three", ConfigError, "'three' is int, not a Domain"),
        ("burnt:rye", DomainError, "TypeError: breaks"),
        ("loaf", ConfigError, "it is none of absent, .*bread, breads, burnt, gone, shop, .*three, no path"),
    ):
        with pytest.raises(error, match=message):
            find_domain(wrong)


def test_wrong_modules(module: Path) -> None:
    name = module.stem
    (module.parent / "torn_module.py").write_text("def broken(:\n")
    (module.parent / "sour_module.py").write_text("1 / 0\n")
    (module.parent / "needy_module.py").write_text("import not_installed_anywhere\n")
    for wrong, error, message in (
        ("no_such_module:domain", ConfigError, "cannot import no_such_module: No module named"),
        ("needy_module:domain", ConfigError, "No module named 'not_installed_anywhere'"),
        (f"{name}:missing", ConfigError, f"{name} has no 'missing'"),
        (f"{name}:number", ConfigError, "is int, not a Domain"),
        (f"{name}:breaks", DomainError, "RuntimeError: no flour"),
        ("torn_module:domain", DomainError, "module torn_module: SyntaxError"),
        ("sour_module:domain", DomainError, "module sour_module: ZeroDivisionError"),
        (":domain", ConfigError, "it is neither module:name nor path/to/file.py:name"),
        ("..up:domain", ConfigError, "it is neither module:name nor"),
        ("nothing", ConfigError, "no domain 'nothing': it is none of .*shop"),
        ("", ConfigError, "no domain ''"),
    ):
        with pytest.raises(error, match=message):
            find_domain(wrong)


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / "sour.py").write_text("import trialogue\n1 / 0\n")
    (tmp_path / "two.py").write_text(MODULE.replace("domain = make()", "one = make()\ntwo = make('two')"))
    for wrong, error, message in (
        ("empty", ConfigError, "holds no Python file"),
        ("none.py", DomainError, "defines no domain; write `domain = Domain.load"),
        ("sour.py", DomainError, "ZeroDivisionError: division by zero"),
        ("two.py", DomainError, "defines 2 domains and none of them is called `domain`"),
        ("absent.py", ConfigError, "there is no such file or folder"),
        ("notes.md", ConfigError, "a domain is a folder or a .py file, and this is neither"),
        ("absent/", ConfigError, "there is no such file or folder"),
    ):
        with pytest.raises(error, match=message):
            find_domain(f"{tmp_path}/{wrong}")


def test_an_environment_inside_a_folder_is_not_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    name = f"flour_{abs(hash(tmp_path))}"
    (packages / f"{name}.py").write_text("\n\n\ndef sift():\n    raise RuntimeError('no flour')\n")
    (tmp_path / "domain.py").write_text(f"import {name}\n{name}.sift()\n")
    monkeypatch.syspath_prepend(str(packages))
    with pytest.raises(DomainError, match=r"no flour \(domain.py, line 2\)"):
        find_domain(str(tmp_path))


def test_our_own_code_inside_a_folder_is_not_its_own() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        from_json("{")
    assert locate(caught.value, Path(__file__).parents[2])[1].startswith(Path(__file__).name)
