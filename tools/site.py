"""Build the documentation site from the Markdown files of the repository: `make docs`.

The files keep their paths, so that links stay valid. A page of the public names is added. The build fails if
a link is broken, a page is missing from the menu, or a public name has no docstring.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import trialogue

ROOT = Path(__file__).parents[1]
PAGES = ROOT / ".site" / "pages"
NAMES = "docs/names.md"
HALVES = {
    "For domains": ("errors", "messages", "task", "trajectory", "world"),
    "For agents, users and training": ("config", "engine", "learn", "score", "talk"),
}
"""The two halves of the public names, and the packages of each."""


def main(zensical: str) -> int:
    shutil.rmtree(PAGES.parent, ignore_errors=True)
    copy_pages()
    faults = [f"trialogue.{name} has no docstring" for name in find_undocumented()]
    pages = {page.relative_to(PAGES).as_posix() for page in PAGES.rglob("*.md")}
    faults += [f"{page} is in no menu: name it in zensical.toml" for page in sorted(pages - find_menu())]
    for fault in faults:
        print(f"docs: {fault}", file=sys.stderr)
    done = subprocess.run([ROOT / zensical, "build", "--clean", "--strict"], cwd=ROOT, check=False)
    return int(bool(faults or done.returncode))


def copy_pages() -> None:
    shutil.copytree(ROOT / "docs", PAGES / "docs")
    shutil.copytree(
        ROOT / "examples", PAGES / "examples", ignore=shutil.ignore_patterns("__pycache__", "*.md")
    )
    for file in ROOT.glob("*.md"):
        name = "index.md" if file.name == "README.md" else file.name
        (PAGES / name).write_text(file.read_text(encoding="utf-8").replace("](LICENSE)", "](LICENSE.md)"))
    (PAGES / "LICENSE.md").write_text(f"# Licence\n\n```text\n{(ROOT / 'LICENSE').read_text()}```\n")
    (PAGES / NAMES).write_text(write_names(), encoding="utf-8")


def write_names() -> str:
    """The page of the public names: two halves, ordered by module."""
    homes = trialogue.find_homes()
    lines = [
        "# Public names",
        "",
        "Everything here is imported from `trialogue` itself: `from trialogue import Domain`.",
        "",
    ]
    for title, packages in HALVES.items():
        lines += [f"## {title}", ""]
        for home in sorted({home for home in homes.values() if home.split(".")[1] in packages}):
            lines += [f"### `{home}`", ""]
            for name in sorted(name for name in homes if homes[name] == home):
                lines += [f"::: {home}.{name}", ""]
    return "\n".join(lines)


def find_menu() -> set[str]:
    """The pages in the menu of zensical.toml."""
    entries: list[Any] = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    found: set[str] = set()
    while entries:
        (target,) = entries.pop().values()
        if isinstance(target, str):
            found.add(target)
        else:
            entries += target
    return found


def find_undocumented() -> list[str]:
    """Public names without their own docstring."""
    return [name for name in trialogue.__all__ if not is_documented(name, getattr(trialogue, name))]


def is_documented(name: str, thing: object) -> bool:
    """Whether a class or function has a docstring, or an alias or constant a string below it."""
    if inspect.isclass(thing):
        text = vars(thing).get("__doc__") or ""
        return bool(text.strip()) and not text.startswith(f"{name}(")  # dataclass generates a docstring
    if inspect.isroutine(thing) or inspect.ismodule(thing):
        return bool((thing.__doc__ or "").strip())
    home = trialogue.find_homes().get(name)
    return home is not None and is_documented_below(name, Path(str(import_module(home).__file__)))


def is_documented_below(name: str, path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if found == name and text.strip():
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
