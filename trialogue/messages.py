"""Messages and tool calls, and their way to and from the OpenAI chat shape.

A message is kept in its speaker's own perspective: the agent's messages have role `assistant`, the user's
have role `user`; `talk.conversation` turns them round for whoever listens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

Role = Literal["system", "user", "assistant", "tool"]


class Frozen(BaseModel):
    """What touches disk or wire: immutable, and nothing unknown in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolCall(Frozen):
    """One call of a tool. `arguments` is the raw text where it was not a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] | str = {}

    def to_openai(self) -> dict[str, Any]:
        """The shape endpoints accept: a malformed call is told as a well-formed one, since many refuse a
        history that holds a broken name or arguments that are no JSON."""
        arguments = self.arguments
        shown = {"malformed": arguments} if isinstance(arguments, str) else arguments
        text = json.dumps(shown, ensure_ascii=False)
        name = re.sub(r"[^A-Za-z0-9_-]", "_", self.name)[:64] or "unnamed"
        return {"id": self.id, "type": "function", "function": {"name": name, "arguments": text}}


class Message(Frozen):
    """One message of a conversation."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """The dictionary that chat-completion endpoints and chat templates take."""
        shape: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            shape["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if self.tool_call_id is not None:
            shape["tool_call_id"] = self.tool_call_id
        return shape


def to_arguments(text: str) -> dict[str, Any] | str:
    """Parse a call's arguments; the text itself comes back where it is not a JSON object."""
    try:
        value: object = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text


def from_openai(shape: Mapping[str, Any]) -> Message:
    """Read one message of the OpenAI shape, as endpoints and data sets write it."""
    calls: list[ToolCall] = []
    for number, call in enumerate(shape.get("tool_calls") or ()):
        function = cast("Mapping[str, Any]", call.get("function") or call)
        raw = cast("dict[str, Any] | str", function.get("arguments") or {})
        arguments = to_arguments(raw) if isinstance(raw, str) else raw
        calls.append(
            ToolCall(id=str(call.get("id") or f"call_{number}"), name=function["name"], arguments=arguments)
        )
    content = shape.get("content")
    if isinstance(content, list):  # content parts
        content = "".join(str(part.get("text", "")) for part in cast("list[Mapping[str, Any]]", content))
    return Message(
        role=shape["role"],
        content=content or "",
        reasoning=shape.get("reasoning") or shape.get("reasoning_content"),
        tool_calls=tuple(calls),
        tool_call_id=shape.get("tool_call_id"),
    )
