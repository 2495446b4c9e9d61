"""Everything the two sides of a run are told: what a result depends on besides the models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from trialogue.talk.users import user_prompt
from trialogue.task import Task
from trialogue.world.domain import Domain
from trialogue.world.tools import Tool

SHOWN = 8
"""How many different policies or user prompts are written out; the hash covers them all."""
SCENARIO = "{instructions}"
"""Stands where a user's prompt has the instructions of a task."""


def collect_prompts(domain: Domain, tasks: Iterable[Task]) -> dict[str, Any]:
    """The policies, tools and user prompts of some tasks, each once, with a hash of all of them and one of
    the tasks themselves."""
    policies: dict[str, None] = {}
    users: dict[str, None] = {}
    tools: dict[str, dict[str, Any]] = {}
    user_tools: dict[str, dict[str, Any]] = {}
    content = hashlib.sha256()
    for task in tasks:
        content.update(task.model_dump_json().encode())
        try:
            environment = domain.open(task)
            told = user_prompt(domain, task.model_copy(update={"instructions": SCENARIO}))
        except Exception:  # noqa: BLE001 - its conversation fails, and is told of where it is held
            continue
        policies[environment.policy] = None
        users[told] = None
        _add(tools, environment.tools)
        _add(user_tools, environment.user_tools)
    whole = {
        "policies": list(policies),
        "users": list(users),
        "tools": [tools[name] for name in sorted(tools)],
        "user_tools": [user_tools[name] for name in sorted(user_tools)],
    }
    return {
        "hash": hash_prompts(whole),
        "tasks_hash": content.hexdigest()[:16],
        **whole,
        "policies": whole["policies"][:SHOWN],
        "users": whole["users"][:SHOWN],
    }


def _add(known: dict[str, dict[str, Any]], tools: Mapping[str, Tool]) -> None:
    for name, tool in tools.items():
        known.setdefault(name, tool.schema)


def hash_prompts(told: Any) -> str:
    """A short hash of what models are told, for results to be compared by."""
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
