"""Agents and users of somebody's own: every accepted form plays, every mistake names its line."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from trialogue.config import Limits, Speaker
from trialogue.errors import ConfigError
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.talk.own import to_reply
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.scripted import ScriptedModel
from trialogue.task import Task
from trialogue.trajectory import Group, Trajectory
from trialogue.world.domains.shop import domain as SHOP

CALL = """{"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function",
    "function": {"name": "find_orders", "arguments": '{"phone": "555-0000"}'}}]}"""
BODY = f"""
    SEEN.append((messages, tools))
    if messages[-1]["role"] == "tool":
        return "Goodbye."
    return {CALL}
"""
FORMS = {
    "function": f"async def agent(messages, tools):{BODY}",
    "other names": f"async def agent(m, t):\n    messages, tools = m, t{BODY}",
    "bound": f"""
class Own:
    async def speak(self, messages, tools):{BODY.replace(chr(10), chr(10) + "    ")}
agent = Own().speak
""",
    "object": f"""
class Own:
    async def __call__(self, messages, tools):{BODY.replace(chr(10), chr(10) + "    ")}
agent = Own()
""",
    "class": f"""
class agent:
    async def __call__(self, messages, tools):{BODY.replace(chr(10), chr(10) + "    ")}
""",
    "closure": f"""
async def speak(messages, tools):{BODY}
def agent(task, seed):
    return speak
""",
    "decorated": f"""
import functools
def same(function):
    @functools.wraps(function)
    def inner(*given):
        return function(*given)
    return inner
@same
async def agent(messages, tools):{BODY}
""",
    "message object": f"""
class Message:
    def __init__(self, shape):
        self.shape = shape
    def model_dump(self):
        return {{"refusal": None, **self.shape}}
async def speak(messages, tools):{BODY}
async def agent(messages, tools):
    found = await speak(messages, tools)
    return found if isinstance(found, str) else Message(found)
""",
}
MODEL = """
from trialogue.talk.model import Model
from trialogue.messages import ToolCall
from trialogue.trajectory import Reply

class Own:
    def __init__(self, *given):
        self.given = given
    async def reply(self, turns, tools):
        SEEN.append(([turn.message.to_openai() for turn in turns], [tool.schema for tool in tools]))
        if turns[-1].message.role == "tool":
            return Reply("Goodbye.")
        return Reply(tool_calls=(ToolCall(id="c1", name="find_orders", arguments={"phone": "555-0000"}),))
"""
FORMS |= {
    "source": MODEL + "def agent(task, seed):\n    return Own(task, seed)\n",
    "lambda": MODEL + "agent = lambda *_: Own()\n",
    "class of models": MODEL.replace("class Own", "class agent"),
    "class by task": MODEL.replace("class Own", "class agent")
    .replace("*given", "task, seed", 1)
    .replace("= given", "= task, seed"),
    "model": MODEL + "agent = Own()\n",
}


def write(folder: Path, code: str) -> str:
    (folder / "mine.py").write_text(f"SEEN = []\n{code}")
    return f"{folder / 'mine.py'}:agent"


async def gather(groups: AsyncGenerator[Group]) -> list[Trajectory]:
    return [item async for group in groups for item in group.everything]


def say(task: Task, seed: int) -> ScriptedModel:
    return ScriptedModel(["I want to return it.", "###STOP###"])


def hold(agent: Any, user: Any = None, **more: Any) -> list[Trajectory]:
    """Conversations of two tasks with an agent, and a user who says two things."""
    user = user or say
    settings = RolloutSettings(grade=grade, redraws=0, **more)
    return asyncio.run(gather(rollout(SHOP, SHOP.tasks("test", 2), agent, user, settings)))


@pytest.mark.parametrize("code", FORMS.values(), ids=FORMS)
def test_every_form_speaks_and_calls_tools(tmp_path: Path, code: str) -> None:
    source = find_model(Speaker(model=write(tmp_path, code)), "agent", SHOP, Limits())
    first, second = hold(source)
    for item in (first, second):
        assert item.error is None
        said = [(turn.side, turn.message.role, turn.message.content) for turn in item.turns]
        assert said[0] == ("user", "user", "I want to return it.")
        assert said[1] == ("agent", "assistant", "")
        assert item.turns[1].message.tool_calls[0].arguments == {"phone": "555-0000"}
        assert said[2][:2] == ("agent", "tool")
        assert said[3] == ("agent", "assistant", "Goodbye.")
    messages, tools = read_seen(tmp_path)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[0]["content"] == SHOP.policy
    [call] = messages[2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"phone": "555-0000"}
    assert messages[3]["tool_call_id"] == call["id"]
    assert {tool["function"]["name"] for tool in tools} == set(SHOP.database.tools)


def read_seen(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the code in a folder was given last."""
    path = str((folder / "mine.py").resolve())
    [module] = [module for module in sys.modules.values() if getattr(module, "__file__", None) == path]
    return vars(module)["SEEN"][-1]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "find_orders", "arguments": {"phone": "555-0000"}},
        {"name": "find_orders", "args": {"phone": "555-0000"}},
        {"type": "function", "function": {"name": "find_orders", "input": {"phone": "555-0000"}}},
        {"type": "function", "function": "find_orders"},
        "find_orders",
    ],
)
def test_a_tool_call_of_another_shape_is_refused(call: Any) -> None:
    wanted = '; a call must be {"id": "1", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
    with pytest.raises(ConfigError, match=r"^the agent mine returned the tool call .*" + re.escape(wanted)):
        to_reply({"tool_calls": [call]}, "the agent mine")
    with pytest.raises(ConfigError, match="returned tool_calls that are"):
        to_reply({"tool_calls": {"function": call}}, "the agent mine")
