"""The official wording of prompts and tools, read from the user's copy of the benchmark.

It comes from a checkout's Python files, which are parsed and never run, or from a file of schemas. Without
both, our own wording is used, and results are not comparable with published ones.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from trialogue.benchmarks.folder import read_json_file, read_python, read_texts
from trialogue.errors import ConfigError
from trialogue.reading import reading
from trialogue.world.tools import Tool

INSTRUCTION = """\
You are a service agent. Help the user and follow the policy below.
Each of your messages is either text for the user or calls of tools, never both."""
SOLO_INSTRUCTION = """\
You are a service agent. Solve the ticket below by calling tools, and follow the policy.
There is nobody to talk to. When you are done, call the tool `done` alone."""
SCHEMA_FILE = "prompts_and_tools.json"


@dataclass(frozen=True, slots=True)
class OfficialWording:
    """The wording of one domain."""

    source: str = "our own words: not comparable with published results"
    system: str = f"<instructions>\n{INSTRUCTION}\n</instructions>\n<policy>\n{{policy}}\n</policy>"
    """The system prompt, with a placeholder `{policy}`."""
    solo: str = (
        f"<instructions>\n{SOLO_INSTRUCTION}\n</instructions>\n<policy>\n{{policy}}\n</policy>\n"
        "<ticket>\n{ticket}\n</ticket>"
    )
    agent_tools: Mapping[str, Mapping[str, Any]] | None = None
    """Schemas by name. None: our own."""
    user_tools: Mapping[str, Mapping[str, Any]] | None = None
    docs: Documents | None = None


@dataclass(slots=True)
class Documents:
    """Texts from the docstrings of a checkout."""

    tools: dict[str, str] = field(default_factory=lambda: {})
    models: dict[str, str] = field(default_factory=lambda: {})
    fields: dict[str, dict[str, str]] = field(default_factory=lambda: {})


def find_wording(folder: Path, domain: str) -> OfficialWording:
    """The best wording available near a domain's data folder."""
    for root in folder.parents[:6]:
        source = root / "src" / "tau2"
        if (source / "agent" / "llm_agent.py").is_file():
            return read_checkout(source, domain)
        for place in (root, root / "tau2-golden"):
            for name in (f"{SCHEMA_FILE}.gz", SCHEMA_FILE):
                if (place / name).is_file():
                    return read_schema_file(place / name, domain)
    return OfficialWording()


def read_schema_file(path: Path, domain: str) -> OfficialWording:
    """Prompts and schemas of all domains in one JSON file."""
    shapes: dict[str, Any] = read_json_file(path)
    with reading(path, ConfigError):
        if domain not in shapes:
            return OfficialWording()
        about = shapes[domain]
        return OfficialWording(
            f"official ({path.name})",
            system=about["agent_system_prompt"].replace(about["policy"], "{policy}"),
            agent_tools={shape["function"]["name"]: shape["function"] for shape in about["agent_tools"]},
            user_tools={
                shape["function"]["name"]: shape["function"] for shape in about.get("user_tools") or ()
            },
        )


def read_checkout(source: Path, domain: str) -> OfficialWording:
    """Prompts from the agent's module and descriptions from the docstrings of the domain's modules."""
    texts = read_texts(source / "agent" / "llm_agent.py")
    docs = Documents()
    for path in sorted((source / "domains" / domain.removesuffix("-workflow")).glob("*.py")):
        _read_documents(path, docs)
    with reading(source / "agent" / "llm_agent.py", ConfigError):
        system = texts["SYSTEM_PROMPT"].replace("{agent_instruction}", texts["AGENT_INSTRUCTION"])
        solo = texts["AGENT_SOLO_INSTRUCTION"].replace("{stop_function_name}", "done")
        solo = texts["SYSTEM_PROMPT_SOLO"].replace("{agent_instruction}", solo)
    return OfficialWording(
        "official (checkout)",
        system.replace("{domain_policy}", "{policy}"),
        solo.replace("{domain_policy}", "{policy}"),
        docs=docs,
    )


def _read_documents(path: Path, docs: Documents) -> None:
    for node in ast.walk(read_python(path)):
        if not isinstance(node, ast.ClassDef):
            continue
        text = ast.get_docstring(node)
        if text:
            docs.models[node.name] = text
        for inner in node.body:
            match inner:
                case ast.FunctionDef(decorator_list=marks) if any("is_tool" in ast.unparse(m) for m in marks):
                    docs.tools[inner.name] = ast.get_docstring(inner) or ""
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(keywords=keywords)):
                    for keyword in keywords:
                        if keyword.arg == "description" and isinstance(keyword.value, ast.Constant):
                            docs.fields.setdefault(node.name, {})[name] = str(keyword.value.value)
                case _:
                    pass


def apply(wording: OfficialWording, tools: Mapping[str, Tool], side: str) -> dict[str, Tool]:
    """The tools in this wording, in the benchmark's order."""
    shapes = wording.agent_tools if side == "agent" else wording.user_tools
    if shapes is not None:
        return {
            name: _rename(tools[name], str(shape["description"]), cast("dict[str, Any]", shape["parameters"]))
            for name, shape in shapes.items()
            if name in tools
        }
    docs = wording.docs
    if docs is None:
        return dict(tools)
    return {name: _document(tool, docs) for name, tool in tools.items() if name in docs.tools}


def _rename(tool: Tool, description: str, parameters: dict[str, Any]) -> Tool:
    return Tool(tool.name, description, parameters, tool.run, tool.writes, tool.ends)


def _document(tool: Tool, docs: Documents) -> Tool:
    description, notes = parse_google(docs.tools[tool.name])
    parameters = copy.deepcopy(tool.parameters)
    for name, shape in parameters["properties"].items():
        _describe(shape, notes.get(name))
    for model, shape in parameters.get("$defs", {}).items():
        if "properties" in shape:
            _describe(shape, docs.models.get(model))
        for name, inner in shape.get("properties", {}).items():
            _describe(inner, docs.fields.get(model, {}).get(name))
    return _rename(tool, description or tool.name, parameters)


def _describe(shape: dict[str, Any], text: str | None) -> None:
    shape.pop("description", None)
    if text is not None:
        shape["description"] = text


_TITLES = (
    "Arguments|Args|Parameters|Params|Raises|Exceptions|Except|Attributes|Example|Examples|Returns|Yields"
)
_TITLE = re.compile(rf"^({_TITLES}):[ \t]*$", re.MULTILINE)


def parse_google(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's description (first line, blank line, rest) and the notes on its parameters.

    >>> parse_google("Book it.\\nNow.\\n\\nArgs:\\n    name: Who.\\n        Really.\\n    day: When.")
    ('Book it.\\n\\nNow.', {'name': 'Who.\\nReally.', 'day': 'When.'})
    """
    text = inspect.cleandoc(text)
    titles = list(_TITLE.finditer(text))
    first, _, rest = text[: titles[0].start() if titles else len(text)].partition("\n")
    description = "\n\n".join(part for part in (first, rest.strip()) if part)
    notes: dict[str, str] = {}
    for title, following in zip(titles, [*titles[1:], None], strict=False):
        if title[1] in ("Arguments", "Args", "Parameters", "Params"):
            section = text[title.end() : following.start() if following else len(text)].strip("\n")
            notes.update(_entries(section))
    return description, notes


def _entries(section: str) -> Iterator[tuple[str, str]]:
    indent = section[: len(section) - len(section.lstrip())]
    for entry in re.split(rf"^{indent}(?=\S)", section, flags=re.MULTILINE)[1:]:
        head, _, note = entry.partition(":")
        first, line_break, rest = note.removeprefix(" ").partition("\n")
        note = f"{first}\n{inspect.cleandoc(rest)}" if line_break else first
        yield head.split("(")[0].strip(), note.strip("\n")
