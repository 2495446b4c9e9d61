"""Train language-model agents that talk with users and use tools.

An agent, a simulated user and a set of tools over a database hold a conversation; the outcome is graded; the
agent's own tokens are reinforced.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trialogue.errors import (
        ConfigError,
        DomainError,
        EngineError,
        GradeError,
        ModelError,
        RecordNotFound,
        RunError,
        ToolError,
        TrialogueError,
    )
    from trialogue.messages import Message, ToolCall
    from trialogue.talk.conversation import converse
    from trialogue.talk.model import Model
    from trialogue.talk.party import Party
    from trialogue.talk.rollout import RolloutSettings, rollout
    from trialogue.task import Assertion, Call, Expected, Setup, Task
    from trialogue.trajectory import Group, Reply, Reward, Tokens, Trajectory, Turn
    from trialogue.world.database import Change, Database, Record, Table
    from trialogue.world.domain import Domain, Environment
    from trialogue.world.find import find_domain
    from trialogue.world.tools import Tool, ToolResult, tool

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    # OpenMP reads this when torch is loaded. Threads that wait for each other spin a moment, then sleep:
    # beside another process on the same cores, endless spinning makes an update take three times as long.
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}

_HOME = {
    "Assertion": "trialogue.task",
    "Call": "trialogue.task",
    "Change": "trialogue.world.database",
    "ConfigError": "trialogue.errors",
    "Database": "trialogue.world.database",
    "Domain": "trialogue.world.domain",
    "DomainError": "trialogue.errors",
    "EngineError": "trialogue.errors",
    "Environment": "trialogue.world.domain",
    "Expected": "trialogue.task",
    "GradeError": "trialogue.errors",
    "Group": "trialogue.trajectory",
    "Message": "trialogue.messages",
    "Model": "trialogue.talk.model",
    "ModelError": "trialogue.errors",
    "Party": "trialogue.talk.party",
    "Record": "trialogue.world.database",
    "RecordNotFound": "trialogue.errors",
    "Reply": "trialogue.trajectory",
    "Reward": "trialogue.trajectory",
    "RolloutSettings": "trialogue.talk.rollout",
    "RunError": "trialogue.errors",
    "Setup": "trialogue.task",
    "Table": "trialogue.world.database",
    "Task": "trialogue.task",
    "Tokens": "trialogue.trajectory",
    "Tool": "trialogue.world.tools",
    "ToolCall": "trialogue.messages",
    "ToolError": "trialogue.errors",
    "ToolResult": "trialogue.world.tools",
    "Trajectory": "trialogue.trajectory",
    "TrialogueError": "trialogue.errors",
    "Turn": "trialogue.trajectory",
    "converse": "trialogue.talk.conversation",
    "find_domain": "trialogue.world.find",
    "rollout": "trialogue.talk.rollout",
    "tool": "trialogue.world.tools",
}
"""Where each public name lives: imported when it is asked for, so that the command line starts at once."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trialogue' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


__all__ = [
    "Assertion",
    "Call",
    "Change",
    "ConfigError",
    "Database",
    "Domain",
    "DomainError",
    "EngineError",
    "Environment",
    "Expected",
    "GradeError",
    "Group",
    "Message",
    "Model",
    "ModelError",
    "Party",
    "Record",
    "RecordNotFound",
    "Reply",
    "Reward",
    "RolloutSettings",
    "RunError",
    "Setup",
    "Table",
    "Task",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "Trajectory",
    "TrialogueError",
    "Turn",
    "converse",
    "find_domain",
    "rollout",
    "tool",
]
