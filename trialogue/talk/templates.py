"""Formats of conversation written out by hand: where a turn begins, how a call looks, what ends it.

`TurnRenderer` is what they share: prompts that only grow. A format says how the opening, the messages of the
others and its own replies become pieces (see `talk.vocabulary`), and how pieces become a reply again.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trialogue.messages import Message, ToolCall, to_arguments
from trialogue.talk.vocabulary import Pieces, Vocabulary
from trialogue.trajectory import Reply
from trialogue.world.tools import Tool


class TurnRenderer(ABC):
    """Lays turns end to end. A reply is always encoded apart from the prompt before it, as if sampled."""

    name: str
    end: int
    """The control token that ends a reply."""
    stop_tokens: tuple[int, ...]
    prompt: Pieces
    """Opens a reply."""
    after: Pieces
    """What the format puts behind the end of a reply."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def open(self, system: str | None, tools: Sequence[Tool]) -> Pieces:
        """What a conversation begins with."""

    @abstractmethod
    def observe(self, messages: Sequence[Message]) -> Pieces:
        """Messages of others, none of them an assistant's."""

    @abstractmethod
    def say(self, message: Message) -> Pieces:
        """An own message, without its end."""

    @abstractmethod
    def read(self, pieces: Pieces) -> Reply:
        """An own message again, its end taken off."""

    def start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        system = messages[0].content if messages and messages[0].role == "system" else None
        ids = self.vocabulary.encode(self.open(system, tools))
        return ids + self._lay(messages if system is None else messages[1:])

    def extend(
        self, ids: Sequence[int], reply: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        closed = bool(reply) and reply[-1] == self.end
        closing: Pieces = [*self.after] if closed else [self.end, *self.after]
        return self.vocabulary.encode(closing) + self._lay(messages)

    def write(self, message: Message) -> list[int]:
        return self.vocabulary.encode([*self.say(message), self.end])

    def parse(self, reply: Sequence[int]) -> Reply:
        stopped = bool(reply) and reply[-1] in self.stop_tokens
        return self.read(self.vocabulary.split(reply[:-1] if stopped else reply))

    def _lay(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        opening = self.vocabulary.encode(self.prompt)
        for own, group in groupby(messages, key=lambda message: message.role == "assistant"):
            if not own:
                ids += self.vocabulary.encode(self.observe(list(group)))
                continue
            for message in group:
                ids += opening + self.write(message) + self.vocabulary.encode(self.after)
        return ids + opening


COMPACT_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")
"""Control tokens that a tokenizer for the compact format needs, each one id."""


class CompactRenderer(TurnRenderer):
    """As few tokens as possible, for tiny models that learn the format from nothing.

    `<|system|>policy⏎cancel_order(order_id,reason?)<|user|>Hi<|assistant|><|call|>cancel_order{"order_id":"W1"}
    <|end|><|tool|>cancelled<|assistant|>Done.<|end|>`: one id per role, one line per tool, the next role ends
    what was observed. Reasoning is not written.
    """

    name = "compact"

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        _, self.end, self._system, self._user, self._assistant, self._tool, self._call = map(
            vocabulary.get, COMPACT_TOKENS
        )
        self.prompt, self.after = [self._assistant], []
        # A model that opens somebody else's turn has finished its own.
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
        content, *calls = divide(pieces, self._call)
        texts = [self.vocabulary.to_text(call) for call in calls]
        return Reply(self.vocabulary.to_text(content), to_calls([from_compact(text) for text in texts]))


def to_signature(tool: Tool) -> str:
    """A tool on one line: `cancel_order(order_id,reason?)`, a question mark where it may be left out."""
    required = set(tool.parameters.get("required", ()))
    names = tool.parameters.get("properties", {})
    return f"{tool.name}({','.join(name if name in required else f'{name}?' for name in names)})"


def to_compact(call: ToolCall) -> str:
    if isinstance(call.arguments, str):
        gap = " " if re.match(r"[^\s{]", call.arguments) else ""
        return f"{call.name}{gap}{call.arguments}"
    return call.name + to_json(call.arguments, compact=True)


def from_compact(text: str) -> tuple[str, dict[str, Any] | str]:
    """The name and arguments of a compact call."""
    found = re.match(r"\s*([^\s{]*)(.*)", text, re.DOTALL)
    assert found is not None
    return found[1], read_arguments(found[2].strip())


def divide(pieces: Pieces, mark: int) -> list[Pieces]:
    """Cut pieces at every mark."""
    parts: list[Pieces] = [[]]
    for piece in pieces:
        if piece == mark:
            parts.append([])
        else:
            parts[-1].append(piece)
    return parts


def to_calls(found: Sequence[tuple[str, dict[str, Any] | str]]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=f"call_{number}", name=name, arguments=arguments)
        for number, (name, arguments) in enumerate(found)
    )


def to_json(value: Any, compact: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)


def read_arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments; the raw text where they are no JSON object that can be written down again."""
    arguments = to_arguments(text)
    try:
        to_json(arguments).encode()
    except (UnicodeEncodeError, RecursionError):  # half a surrogate pair: a tool's answer could not be kept
        return text
    return arguments
