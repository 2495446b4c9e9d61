"""The order of the rooms, read from the imports of every module and enforced.

A module's imports are taken from its syntax tree, wherever they stand. "At module level" means run when the
module is imported: not inside a function and not under `if TYPE_CHECKING`.
"""

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trialogue"

MAY_IMPORT = {
    "world": {"world"},
    "engine": {"engine"},
    "talk": {"world", "engine", "talk"},
    "score": {"world", "engine", "talk", "score"},
    "learn": {"world", "engine", "talk", "score", "learn"},
    "corpus": {"world", "engine", "talk", "score", "learn", "corpus"},
    "benchmarks": {"world", "engine", "talk", "score", "learn", "benchmarks"},
    "hosts": {"world", "engine", "talk", "score", "learn", "hosts"},
    "plan": {"world", "engine", "talk", "score", "learn", "hosts", "plan"},
    "view": {"view"},
    "cli": {
        "world",
        "engine",
        "talk",
        "score",
        "learn",
        "corpus",
        "benchmarks",
        "hosts",
        "plan",
        "view",
        "cli",
    },
}
HEAVY = {"torch", "transformers"}
LIGHT_ROOMS = {
    "",
    "world",
    "talk",
    "score",
    "corpus",
    "benchmarks",
    "plan",
    "view",
    "cli",
}  # "" is the top level
LIGHT_TOO = {"engine.api", "engine.hardware", "engine.shapes"}
MAY_BE_HEAVY = {"talk.local", "talk.render"}
EMPTY_NAMES = {"base", "common", "factory", "helper", "helpers", "manager", "util", "utils"}
LONGEST = 600
MAY_PRINT = {"output", "screen"}
PRINTS = {
    "print",
    "click.echo",
    "click.secho",
    "sys.stdout.write",
    "sys.stderr.write",
    "Console",
    "console.Console",
}
"""Calls that bring text to the terminal as it is; `output.echo` and `screen.Screen` escape it."""


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    at_module_level: bool


@dataclass(frozen=True)
class Module:
    """One source file; names are relative to the package, so `trialogue/talk/local.py` is `talk.local`."""

    name: str
    path: Path
    imports: tuple[Import, ...]

    @property
    def room(self) -> str:
        folder, _, rest = self.name.partition(".")
        return folder if rest or self.path.name == "__init__.py" else ""


def read_modules(package: Path) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        inside = [package.name, *parts[:-1]]
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        modules[name] = Module(name, path, tuple(find_imports(tree, inside, at_module_level=True)))
    return modules


def find_imports(node: ast.AST, inside: list[str], at_module_level: bool) -> Iterator[Import]:
    """Every import below a node, as dotted absolute names; `inside` is the package the module lies in."""
    match node:
        case ast.Import():
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_module_level)
        case ast.ImportFrom():
            start = inside[: len(inside) - node.level + 1] if node.level else []
            source = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(f"{source}.{alias.name}", node.lineno, at_module_level)
        case ast.Call(func=function, args=[ast.Constant(value=str(target)), *_]) if ast.unparse(
            function
        ).rpartition(".")[2] in {"import_module", "__import__"}:
            yield Import(target, node.lineno, at_module_level)
        case ast.If(test=test) if ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING":
            for child in node.body:
                yield from find_imports(child, inside, at_module_level=False)
            for child in node.orelse:
                yield from find_imports(child, inside, at_module_level)
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            at_module_level = False
    for child in ast.iter_child_nodes(node):
        yield from find_imports(child, inside, at_module_level)


def find_violations(package: Path) -> list[str]:
    modules = read_modules(package)
    return [
        f"{module.path.relative_to(package.parent)}{problem}"
        for module in modules.values()
        for problem in (
            *find_shape_problems(module),
            *find_print_problems(module),
            *find_order_problems(module, modules, package.name),
            *find_weight_problems(module, modules, package.name),
        )
    ]


def find_shape_problems(module: Module) -> Iterator[str]:
    lines = len(module.path.read_text(encoding="utf-8").splitlines())
    if lines > LONGEST:
        yield f": {lines} lines; over {LONGEST} a file holds two things"
    for word in EMPTY_NAMES.intersection(module.name.split(".")):
        yield f": `{word}` says nothing about what is inside"
    if module.room and module.room not in MAY_IMPORT:
        yield f": `{module.room}` is not a room of the house"


def find_print_problems(module: Module) -> Iterator[str]:
    """Words of others reach the terminal through one place, which escapes what would act on it."""
    if module.name in MAY_PRINT:
        return
    for node in ast.walk(ast.parse(module.path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in PRINTS or called.endswith(".console.Console"):
            yield f":{node.lineno}: calls {called}; print through `output` or `screen`"
        elif called == "Text" and not all(isinstance(word, ast.Constant) for word in node.args):
            yield f":{node.lineno}: makes a rich Text of its own; `screen.one_line` and `block` escape it"
        elif called.rpartition(".")[2] == "from_markup":
            yield f":{node.lineno}: reads rich markup, which others may have written"


def find_order_problems(module: Module, modules: dict[str, Module], package: str) -> Iterator[str]:
    if not module.name:  # the package's __init__ is the public face: it may name any room
        return
    for found in module.imports:
        target = find_target(found, modules, package)
        if target is None:
            continue
        where = f":{found.line}: "
        if not target:
            if not found.target.endswith("__"):
                yield f"{where}imports through the package root; name the module that defines it"
            continue
        room = target.partition(".")[0] if target.partition(".")[0] in MAY_IMPORT else ""
        if room == "cli" and module.room != "cli" and module.name != "__main__":
            yield f"{where}only the command line imports the command line"
        elif not module.room and room and found.at_module_level and module.name != "__main__":
            yield f"{where}a top-level module imports `{room}` at module level"
        elif module.room == "cli" and room not in ("", "cli") and found.at_module_level:
            yield f"{where}a verb imports `{room}` at module level"
        elif module.room in MAY_IMPORT and room and room not in MAY_IMPORT[module.room]:
            yield f"{where}`{module.room}` may not import `{room}`"


def find_weight_problems(module: Module, modules: dict[str, Module], package: str) -> Iterator[str]:
    """Light modules reach no heavy library when imported, neither themselves nor through another module."""
    if not is_light(module):
        return
    came_from: dict[str, str] = {}
    waiting = deque([module.name])
    seen = {module.name}
    while waiting:
        name = waiting.popleft()
        for found in modules[name].imports:
            if not found.at_module_level:
                continue
            library = found.target.partition(".")[0]
            if library in HEAVY:
                chain = [name]
                while chain[0] != module.name:
                    chain.insert(0, came_from[chain[0]])
                through = f" through {' → '.join(chain[1:])}" if chain[1:] else ""
                yield f":{found.line if not through else 1}: imports {library} at module level{through}"
                return
            target = find_target(found, modules, package)
            while target:  # importing a.b.c runs a and a.b too
                if target in modules and target not in seen:
                    seen.add(target)
                    came_from[target] = name
                    waiting.append(target)
                target = target.rpartition(".")[0]


def is_light(module: Module) -> bool:
    if module.name in MAY_BE_HEAVY:
        return False
    return module.room in LIGHT_ROOMS or module.name in LIGHT_TOO


def find_target(found: Import, modules: dict[str, Module], package: str) -> str | None:
    """The module an import lands in, relative to the package: "" is the root, None is somebody else's."""
    root, _, target = found.target.partition(".")
    if root != package:
        return None
    folders = {name.rpartition(".")[0] for name in modules}
    while target and target not in modules and target not in folders and target not in MAY_IMPORT:
        target = target.rpartition(".")[0]
    return target


def test_the_house_keeps_its_order() -> None:
    violations = find_violations(PACKAGE)
    assert (PACKAGE / "__init__.py").exists()
    assert not violations, "\n".join(["", *violations])


SOUND = {
    "__init__.py": "from trialogue.talk.models import Model\n__version__ = '1'\n",
    "errors.py": "import json\n",
    "cli/__init__.py": "",
    "cli/main.py": "from trialogue import __version__\ndef train():\n    from trialogue.learn import train\n",
    "world/__init__.py": "",
    "world/tools.py": "from trialogue.errors import ToolError\n",
    "engine/__init__.py": "",
    "engine/api.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    "engine/update.py": "import torch\n",
    "talk/__init__.py": "",
    "talk/models.py": "from ..world import tools\nfrom .. import errors\nimport trialogue.engine.api\n",
    "talk/local.py": "import torch\nfrom trialogue.engine import update\n",
    "talk/openai.py": "def reply():\n    import transformers\n",
    "score/__init__.py": "from trialogue import talk\n",
    "learn/train.py": "import torch\nimport trialogue.score\n",
    "hosts/verl.py": "from trialogue.learn.train import train\n",
    "view/page.py": "from trialogue.errors import RunError\n",
}


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "trialogue"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


def test_a_sound_tree_has_no_violations(tmp_path: Path) -> None:
    assert find_violations(write_tree(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("world/late.py", "from trialogue.talk import models", ":1: `world` may not import `talk`"),
        ("world/side.py", "import trialogue.engine.api", ":1: `world` may not import `engine`"),
        ("engine/side.py", "from ..world import tools", ":1: `engine` may not import `world`"),
        ("talk/late.py", "def f():\n    from trialogue import score", ":2: `talk` may not import `score`"),
        ("talk/far.py", "import trialogue.hosts.verl", ":1: `talk` may not import `hosts`"),
        (
            "score/late.py",
            "if TYPE_CHECKING:\n    import trialogue.learn",
            ":2: `score` may not import `learn`",
        ),
        ("learn/late.py", "from ..hosts.verl import run", ":1: `learn` may not import `hosts`"),
        ("learn/look.py", "from trialogue.view import page", ":1: `learn` may not import `view`"),
        ("view/reach.py", "import_module('trialogue.talk.models')", ":1: `view` may not import `talk`"),
        ("score/verbs.py", "from trialogue.cli import main", ":1: only the command line imports"),
        ("score/root.py", "from trialogue import Model", ":1: imports through the package root"),
        ("score/bare.py", "import trialogue", ":1: imports through the package root"),
        ("run.py", "import trialogue.world.tools", ":1: a top-level module imports `world`"),
        (
            "cli/learn.py",
            "try:\n    from ..learn import train\nfinally: pass",
            ":2: a verb imports `learn`",
        ),
        ("config.py", "import torch", ":1: imports torch at module level"),
        ("engine/api.py", "import torch.nn as nn", ":1: imports torch at module level"),
        ("world/heavy.py", "from transformers import AutoModel", ":1: imports transformers at module level"),
        ("talk/heavy.py", "class A:\n    import torch", ":2: imports torch at module level"),
        ("score/heavy.py", "if True:\n    import torch", ":2: imports torch at module level"),
        (
            "score/chain.py",
            "from trialogue.talk import local",
            "imports torch at module level through talk.local",
        ),
        ("talk/long.py", "#\n" * 601, ": 601 lines; over 600"),
        ("score/loud.py", "print(1)", ":1: calls print; print through `output`"),
        ("view/loud.py", "import click\nclick.echo(error)", ":2: calls click.echo"),
        ("view/bare.py", "from rich.console import Console\nConsole()", ":2: calls Console"),
        ("view/text.py", "from rich.text import Text\nText(name)", ":2: makes a rich Text"),
        ("score/utils.py", "", ": `utils` says nothing"),
        ("talk/base/turn.py", "", ": `base` says nothing"),
        ("attic/box.py", "", ": `attic` is not a room"),
    ],
)
def test_each_violation_is_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    violations = find_violations(write_tree(tmp_path, {**SOUND, path: text}))
    found = [violation for violation in violations if violation.startswith(f"trialogue/{path}")]
    assert any(expected in violation for violation in found), violations
