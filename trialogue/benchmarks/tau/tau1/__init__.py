"""The first TAU-bench: retail and airline.

The user opens, and only the first call of a message is executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trialogue.benchmarks.folder import find_version, read_text
from trialogue.benchmarks.rules import BenchmarkRules
from trialogue.benchmarks.tau.tau1 import data as files
from trialogue.benchmarks.tau.tau1.grade import grade_tau1
from trialogue.benchmarks.tau.tau1.tools import Tau1AirlineTools, Tau1RetailTools
from trialogue.benchmarks.tau.tau1.world import Tau1Domain
from trialogue.benchmarks.toolkit import to_raw_tools
from trialogue.errors import ConfigError
from trialogue.reading import reading
from trialogue.task import Task
from trialogue.trajectory import Turn
from trialogue.world.tools import Tool

NAMES = {"retail": Tau1RetailTools, "airline": Tau1AirlineTools}
MAX_STEPS = 30
"""Maximum number of messages of the agent."""


def find(name: str = "", data: str | None = None) -> Tau1Domain:
    """The domain `retail` or `airline`; `data` is a folder with the benchmark's files."""
    if name not in NAMES:
        raise ConfigError(f"there is no 'tau:{name}'; allowed are {', '.join(NAMES)}")
    folder = files.find_tau1_folder(data, name)
    with reading(folder, ConfigError):
        return _find(name, folder)


@lru_cache(maxsize=8)
def _find(domain: str, folder: Path) -> Tau1Domain:
    toolkit = NAMES[domain]
    known = to_raw_tools(toolkit)
    tools = {name: known[name] for name in sorted(known.keys() - toolkit.later)}
    schemas = files.read_schemas(folder)
    if schemas is not None:
        with reading(folder / "tools", ConfigError):
            functions = {shape["function"]["name"]: shape["function"] for shape in schemas}
            tools = {
                name: Tool(name, shape["description"], shape["parameters"], tool.run, tool.writes, tool.ends)
                for name, shape in functions.items()
                if (tool := tools.get(name)) is not None
            }
    around = files.read_user_prompt(folder)
    writes = frozenset(tool.name for tool in tools.values() if tool.writes)
    name = f"tau:{domain}"
    policy = read_text(folder, "wiki")
    with reading(folder / "data", ConfigError):
        database = toolkit.load(files.read_database(folder, domain))
    own = [part for part, given in (("tools", schemas), ("user prompt", around)) if given is None]

    def user_prompt(task: Task) -> str:
        before, after = around or ("", "")
        return f"{before}\n\nInstruction: {task.instructions}\n{after}"

    return Tau1Domain(
        name=name,
        policy=policy,
        database=database,
        tasks=files.find_tau1_tasks(folder, domain, name, writes),
        reward=grade_tau1,
        user_prompt=user_prompt if around is not None else None,
        rules=Tau1Rules(),
        reference=name,
        notes={
            "benchmark": "TAU1",
            "version": find_version(folder),
            "wording": f"{' and '.join(own)} in our own words: not comparable" if own else "official",
        },
        agent_tools=tools,
    )


@dataclass(frozen=True)
class Tau1Rules(BenchmarkRules):
    """The user opens by answering a greeting that the agent does not see. The answer to the agent's thirtieth
    message is the last message."""

    user_cue: str | None = "Hi! How can I help you today?"
    stop_anywhere: bool = True
    first_call_only: bool = True

    def is_over(self, turns: Sequence[Turn]) -> bool:
        said = sum(turn.message.role == "assistant" for turn in turns)
        return said >= MAX_STEPS and turns[-1].message.role != "assistant"
