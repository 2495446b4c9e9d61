"""Read TAU-bench from a checkout, whose Python files are parsed and never run, or from exported JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trialogue.benchmarks.folder import Missing, find_data, read_assigned, read_data, read_python
from trialogue.errors import ConfigError
from trialogue.reading import from_json, reading
from trialogue.task import SPLITS, Call, Expected, Task
from trialogue.world.domain import TaskSource

TABLES = {"retail": ("orders", "products", "users"), "airline": ("flights", "reservations", "users")}
HELP = "Get it with `git clone https://github.com/sierra-research/tau-bench` and name that folder"


def find_tau1_folder(data: str | None, domain: str) -> Path:
    """The folder of one domain: data, tasks, wiki and tools."""
    places = [
        f"{place}{domain}"
        for place in ("tau_bench/envs/", "envs/", "tau-bench-v1/", "tau-bench/tau_bench/envs/")
    ]
    return find_data(data, [*places, domain], f"tau:{domain}", HELP)


def read_database(folder: Path, domain: str) -> dict[str, Any]:
    return {table: read_data(folder / "data", table) for table in TABLES[domain]}


def find_tau1_tasks(folder: Path, domain: str, name: str, writes: frozenset[str]) -> TaskSource:
    """A task source over the splits that exist."""
    known: dict[str, list[Task]] = {}

    def read(split: str) -> list[Task]:
        if split not in known:
            with reading(folder / f"tasks_{split}", ConfigError):
                raw = read_raw_tasks(folder, split)
                known[split] = [
                    to_tau1_task(item, f"{split}-{number}", name, split, writes)
                    for number, item in enumerate(raw)
                ]
        return known[split]

    def find(
        split: str,
        count: int | None = None,
        seed: int = 0,
        *,
        levels: Sequence[int] = (),
        families: Sequence[str] = (),
    ) -> list[Task]:
        there = [item for item in SPLITS if has_split(folder, item)]
        if split != "all" and split not in there:
            raise ConfigError(f"{name} has no split '{split}'; it has {', '.join([*there, 'all'])}")
        chosen = [task for item in (there if split == "all" else [split]) for task in read(item)]
        if levels or families:
            return []
        return chosen[:count]

    return find


def has_split(folder: Path, split: str) -> bool:
    names = (f"tasks_{split}.py", f"tasks_{split}.json", f"tasks_{split}.json.gz")
    return any((folder / name).is_file() for name in names)


def read_raw_tasks(folder: Path, split: str) -> list[dict[str, Any]]:
    """The tasks of a split as plain data."""
    path = folder / f"tasks_{split}.py"
    if not path.is_file():
        return read_data(folder, f"tasks_{split}")
    for name, value in read_assigned(path).items():
        if name.startswith("TASKS") and isinstance(value, ast.List):
            return from_json(json.dumps([_to_plain(item) for item in value.elts]))
    raise ConfigError(f"{path} assigns no list of tasks")


def _to_plain(node: ast.expr) -> Any:
    """Convert literals to values, and calls such as `Task(user_id=…)` to dictionaries of their arguments."""
    match node:
        case ast.Call(keywords=keywords):
            return {str(keyword.arg): _to_plain(keyword.value) for keyword in keywords}
        case ast.List(elts=items):
            return [_to_plain(item) for item in items]
        case _:
            return ast.literal_eval(node)


def to_tau1_task(
    raw: Mapping[str, Any], identity: str, domain: str, split: str, writes: frozenset[str]
) -> Task:
    """One task of the benchmark."""
    calls = tuple(Call(name=item["name"], arguments=item["kwargs"]) for item in raw["actions"])
    return Task(
        id=identity,
        domain=domain,
        instructions=raw["instruction"],
        expected=Expected(
            calls=calls,
            say=tuple(raw["outputs"]),
            nothing=not raw["outputs"] and not any(call.name in writes for call in calls),
        ),
        split=split,
        meta={"user_id": raw["user_id"]},
    )


def read_schemas(folder: Path) -> list[dict[str, Any]] | None:
    """The schemas of the tools: exported, or the dictionaries that `get_info` returns in a checkout."""
    tools = folder / "tools"
    if tools.is_dir():
        order = _read_order(tools / "__init__.py")
        found: dict[str, dict[str, Any]] = {}
        for path in sorted(tools.glob("*.py")):
            for node in ast.walk(read_python(path)):
                if isinstance(node, ast.ClassDef):
                    for shape in _returned(node, "get_info"):
                        found[node.name] = from_json(json.dumps(shape))
        return [found[name] for name in order if name in found]
    try:
        return read_data(folder, "tools_info")
    except Missing:
        return None


def _read_order(path: Path) -> list[str]:
    value = read_assigned(path).get("ALL_TOOLS")
    if not isinstance(value, ast.List):
        raise ConfigError(f"{path} assigns no ALL_TOOLS")
    return [item.id for item in value.elts if isinstance(item, ast.Name)]


def _returned(owner: ast.ClassDef, function: str) -> list[Any]:
    return [
        ast.literal_eval(inner.value)
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name == function
        for inner in node.body
        if isinstance(inner, ast.Return) and inner.value is not None
    ]


def read_user_prompt(folder: Path) -> tuple[str, str] | None:
    """The prompt of the benchmark's user before and after the instruction; None without a checkout."""
    path = folder.parent / "user.py"
    if not path.is_file():
        return None
    for owner in read_python(path).body:
        if not isinstance(owner, ast.ClassDef) or owner.name != "LLMUserSimulationEnv":
            continue
        for node in ast.walk(owner):
            match node:
                case ast.Return(
                    value=ast.JoinedStr(
                        values=[ast.Constant(value=before), ast.FormattedValue(), ast.Constant(value=after)]
                    )
                ):
                    return str(before), str(after)
                case _:
                    pass
    return None
