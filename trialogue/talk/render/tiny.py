"""Formats with few tokens, for models of a few million weights that are trained from scratch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from trialogue.messages import Message, ToolCall
from trialogue.talk.render.parse import Arguments, Found, cut, is_writable, read_compact, to_calls
from trialogue.talk.render.vocabulary import Pieces, TurnRenderer, Vocabulary
from trialogue.trajectory import Reply
from trialogue.world.tools import Tool

_PART = re.compile(r"(?<![^\s:=*|])([^\s:=*|]+)([:=*]) ?(.*)", re.DOTALL)


COMPACT_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")
"""Control tokens that a tokenizer for the compact format needs, each one id."""


class CompactRenderer(TurnRenderer):
    """Texts as they are, with little around them.

    `<|system|>policy⏎cancel_order(order_id,reason?)<|user|>Hi<|assistant|><|call|>cancel_order{"order_id":"W1"}
    <|end|><|tool|>cancelled<|assistant|>Done.<|end|>`: one id per role, one line per tool; the next role ends
    an observed message. Reasoning is not rendered.
    """

    name = "compact"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        _, self.end, self._system, self._user, self._assistant, self._tool, self._call = map(
            vocabulary.get, COMPACT_TOKENS
        )
        self.ends, self.prompt, self.after = (self.end,), [self._assistant], []
        # A model that starts another side's turn has ended its own.
        self.stop_tokens = (self.end, self._system, self._user, self._assistant, self._tool)

    def open(self, system: str | None, tools: Sequence[Tool]) -> Pieces:
        lines = [system] if system else []
        lines += [to_signature(tool) for tool in tools]
        return [self._system, "\n".join(lines)] if lines else []

    def observe(self, messages: Sequence[Message]) -> Pieces:
        roles = {"user": self._user, "tool": self._tool, "system": self._system}
        return [piece for message in messages for piece in (roles[message.role], message.content)]

    def say(self, message: Message) -> Pieces:
        pieces: Pieces = [message.content]
        for call in message.tool_calls:
            pieces += [self._call, to_compact(call)]
        return pieces

    def read(self, pieces: Pieces) -> Reply:
        content, rest = cut(pieces, self._call)
        calls: list[Pieces] = []
        while rest is not None:
            call, rest = cut(rest, self._call)
            calls.append(call)
        found = [read_compact(self.vocabulary.to_text(call)) for call in calls]
        return Reply(self.vocabulary.to_text(content), to_calls(found))


def to_signature(tool: Tool) -> str:
    """A tool on one line: `cancel_order(order_id,reason?)`. A question mark marks an optional argument."""
    required = set(tool.parameters.get("required", ()))
    names = tool.parameters.get("properties", {})
    return f"{tool.name}({','.join(name if name in required else f'{name}?' for name in names)})"


def to_compact(call: ToolCall) -> str:
    """`cancel_order{"order_id":"W1"}`"""
    if isinstance(call.arguments, str):
        return f"{call.name}{'' if call.arguments.startswith('{') else ' '}{call.arguments}"
    return call.name + json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))


class BriefRenderer(CompactRenderer):
    """The roles of the compact format with the shortest texts.

    Every word follows a space and every value follows its key, in the user's words, in calls and in results.
    So a value that must be copied has the same ids everywhere:

    <|system|> Service desk<|user|> I'm Mira Tolen.<|assistant|><|call|> find_customer name: Mira Tolen<|end|>
    <|tool|> customer_id: C1234 | order_ids* W1234, W3456 | vip= true<|assistant|> Hello!<|end|>

    `key:` is followed by text, `key*` by texts separated by commas, `key=` by JSON. Tools are not described,
    and of the policy only the title is shown: the model learns both from training. Reasoning is not rendered.
    """

    name = "brief"

    @property
    def roles(self) -> dict[str, int]:
        """The control tokens by name, for code that writes this format directly."""
        return {
            "user": self._user,
            "assistant": self._assistant,
            "tool": self._tool,
            "call": self._call,
            "end": self.end,
        }

    def open(self, system: str | None, tools: Sequence[Tool]) -> Pieces:
        title = next((line.strip("# ") for line in (system or "").splitlines() if line.strip("# ")), "")
        return [self._system, f" {title}"] if title else []

    def observe(self, messages: Sequence[Message]) -> Pieces:
        texts = [to_brief_result(item.content) if item.role == "tool" else item.content for item in messages]
        briefer = [
            message.model_copy(update={"content": f" {text}"})
            for message, text in zip(messages, texts, strict=True)
        ]
        return super().observe(briefer)

    def say(self, message: Message) -> Pieces:
        pieces: Pieces = [f" {message.content}"] if message.content or not message.tool_calls else []
        for call in message.tool_calls:
            pieces += [self._call, f" {to_brief_call(call)}"]
        return pieces

    def read(self, pieces: Pieces) -> Reply:
        content, rest = cut(pieces, self._call)
        calls: list[Found] = []
        while rest is not None:
            call, rest = cut(rest, self._call)
            calls.append(from_brief_call(self.vocabulary.to_text(call)))
        return Reply(self.vocabulary.to_text(content).removeprefix(" "), to_calls(calls))


class BriefToolsRenderer(BriefRenderer):
    """The brief format with the names of tools and of their parameters behind the title."""

    name = "brief-tools"

    def open(self, system: str | None, tools: Sequence[Tool]) -> Pieces:
        listed = [" ".join([tool.name, *tool.parameters.get("properties", {})]) for tool in tools]
        opened = super().open(system, tools) or [self._system]
        return [*opened, *(f" | {text}" for text in listed)]


def to_brief_call(call: ToolCall) -> str:
    """`cancel_order order_id: W1234 | reason: found cheaper`."""
    if isinstance(call.arguments, str):
        return f"{call.name} {call.arguments}"
    return f"{call.name} {' | '.join(_part(key, value) for key, value in call.arguments.items())}".rstrip(" ")


def from_brief_call(text: str) -> Found:
    """The name and arguments of a brief call; the raw text if they cannot be parsed."""
    name, _, rest = text.removeprefix(" ").partition(" ")
    arguments: Arguments = {}
    for part in rest.split(" | ") if rest else ():
        found = _PART.fullmatch(part)
        if found is None:
            return name, rest
        key, mark, value = found.groups()
        if mark == ":":
            arguments[key] = value
        elif mark == "*":
            arguments[key] = value.split(", ") if value else []
        else:
            try:
                arguments[key] = json.loads(value)
            except (ValueError, RecursionError):
                return name, rest
    return name, arguments if is_writable(arguments) else rest


def _part(key: str, value: Any) -> str:
    if isinstance(value, str) and is_plain(value):
        return f"{key}: {value}"
    if isinstance(value, list):
        texts = cast("list[Any]", value)
        if all(isinstance(text, str) and text and is_plain(text) and ", " not in text for text in texts):
            return f"{key}* {', '.join(texts)}".rstrip(" ")
    # A bar would end the part; in JSON it only occurs inside a text.
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("|", "\\u007c")
    return f"{key}= {written}"


def is_plain(text: str) -> bool:
    """Whether a text can be written unquoted and parsed again."""
    return (
        " | " not in text
        and not text.endswith((" |", " "))
        and not text.startswith(("| ", " "))
        and text != "|"
    )


def to_brief_result(text: str) -> str:
    """A tool's result. JSON objects become parts as in a call; other texts are unchanged."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict | list):
        return text
    return " | ".join(_flatten(value))


def _flatten(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in cast("dict[str, Any]", value).items():
            yield from _flatten(inner, name)
    elif isinstance(value, list) and any(
        isinstance(inner, dict | list) for inner in cast("list[Any]", value)
    ):
        for inner in cast("list[Any]", value):
            yield from _flatten(inner, key)
    else:
        yield _part(key or "value", value)
