"""Built-in conversation formats of large models: where turns begin and end, and how calls are written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trialogue.messages import Message
from trialogue.talk.render.parse import Marks, read_hermes, read_llama
from trialogue.talk.render.vocabulary import Pieces, TurnRenderer, Vocabulary
from trialogue.trajectory import Reply
from trialogue.world.tools import Tool


def to_json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_HERMES_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_HERMES_CALLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class HermesRenderer(TurnRenderer):
    """ChatML turns with Hermes tool calls: Qwen3, Qwen2.5, SmolLM2 and many others.

    Earlier reasoning is kept. `thinking=False` starts each reply with the empty, closed reasoning block that
    makes Qwen3 answer directly. If `<tool_call>` and similar marks are control tokens they are written as
    such. Otherwise they are text, and only turns are safe from forgery.
    """

    def __init__(self, vocabulary: Vocabulary, thinking: bool = True) -> None:
        super().__init__(vocabulary)
        self.name = "hermes" if thinking else "qwen3-nothink"
        self._start = vocabulary.get("<|im_start|>")
        self.end = vocabulary.get("<|im_end|>")
        self._marks = Marks.of(vocabulary)
        more = [found for name in ("<|endoftext|>",) if (found := vocabulary.find(name)) is not None]
        self.ends, self.stop_tokens = (self.end,), (self.end, self._start, *more)
        self._bare_prompt: Pieces = [self._start, "assistant\n"]
        empty: Pieces = [self._marks.think, "\n\n", self._marks.end_think, "\n\n"]
        self.prompt = self._bare_prompt if thinking else [*self._bare_prompt, *empty]
        self.after = ["\n"]

    def open(self, system: str | None, tools: Sequence[Tool]) -> Pieces:
        pieces: Pieces = [] if system is None else [system]
        if tools:
            pieces += ["\n\n"] if pieces else []
            schemas = "".join("\n" + to_json_text(tool.schema) for tool in tools)
            pieces += [_HERMES_TOOLS, schemas, *self._mark(_HERMES_CALLS)]
        return [self._start, "system\n", *pieces, self.end, "\n"] if pieces else []

    def observe(self, messages: Sequence[Message]) -> Pieces:
        pieces: Pieces = []
        for role, group in groupby(messages, key=lambda message: message.role):
            if role == "tool":
                pieces += [self._start, "user"]
                for message in group:
                    pieces += ["\n", *self._mark("<tool_response>"), "\n", message.content, "\n"]
                    pieces += self._mark("</tool_response>")
                pieces += [self.end, "\n"]
                continue
            for message in group:
                pieces += [self._start, f"{role}\n", message.content, self.end, "\n"]
        return pieces

    def say(self, message: Message) -> Pieces:
        pieces: Pieces = []
        content = message.content
        if message.reasoning:
            pieces += [self._marks.think, "\n", message.reasoning.strip("\n"), "\n", self._marks.end_think]
            pieces += ["\n\n"]
            content = content.lstrip("\n")
        pieces += [content]
        for number, call in enumerate(message.tool_calls):
            arguments = call.arguments if isinstance(call.arguments, str) else to_json_text(call.arguments)
            pieces += ["\n"] if message.content or number else []
            pieces += [
                self._marks.call,
                f'\n{{"name": {to_json_text(call.name)}, "arguments": {arguments}}}\n',
            ]
            pieces += [self._marks.end_call]
        return pieces

    def read(self, pieces: Pieces) -> Reply:
        return read_hermes(pieces, self._marks, self.vocabulary)

    def _mark(self, text: str) -> Pieces:
        """Text of the format. Tags in it become control tokens if the vocabulary has them."""
        parts = re.split(r"(</?tool_(?:call|response)>)", text)
        return [part if (found := self.vocabulary.find(part)) is None else found for part in parts if part]


class Qwen3Renderer(HermesRenderer):
    """Qwen3's own history: reasoning before the last user message is dropped.

    Such a prompt does not continue the previous one, so a new row starts there.
    """

    def __init__(self, vocabulary: Vocabulary, thinking: bool = True) -> None:
        super().__init__(vocabulary, thinking)
        self.name = "qwen3-exact" if thinking else "qwen3-nothink-exact"
        self._thinking = thinking
        vocabulary.get("<think>")

    def extend(
        self, ids: Sequence[int], reply: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        thought = self._marks.think in ids or self._marks.think in reply
        if thought and any(is_query(message) for message in messages):
            return None
        # An empty reasoning block is shown only while its reply is sampled.
        if not self._thinking or (self._marks.end_think in reply and not self.parse(reply).reasoning):
            return None
        return super().extend(ids, reply, messages)

    def _lay(self, messages: Sequence[Message]) -> list[int]:
        last = max(
            (place for place, message in enumerate(messages) if is_query(message)), default=len(messages)
        )
        encode = self.vocabulary.encode
        opening = encode(self._bare_prompt)
        ids: list[int] = []
        place = 0
        for own, group in groupby(messages, key=lambda message: message.role == "assistant"):
            members = list(group)
            if not own:
                ids += encode(self.observe(members))
            for offset, message in enumerate(members if own else ()):
                if place + offset < last:
                    message = message.model_copy(update={"reasoning": None})
                ids += opening + self.write(message) + encode(self.after)
            place += len(members)
        return ids + encode(self.prompt)


def is_query(message: Message) -> bool:
    """Whether Qwen3's template treats it as a user's question and not as a tool result."""
    text = message.content
    wrapped = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message.role == "user" and not wrapped


_LLAMA_TOOLS = (
    "You have access to the following functions. To call a function, please respond with JSON for a function "
    'call.Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
    "value}.Do not use variables.\n\n"
)


class Llama3Renderer(TurnRenderer):
    """Llama 3.1 and later, with tools in the system message and the fixed date of Meta's template.

    As in the template, a call is the whole message. The template cannot render text before a call or several
    calls: `<|python_tag|>` separates text from calls, and `;` separates calls. Reasoning is not rendered.
    """

    name = "llama3"

    def __init__(self, vocabulary: Vocabulary, date: str = "26 Jul 2024") -> None:
        super().__init__(vocabulary)
        self._begin = vocabulary.find("<|begin_of_text|>")
        self._header = vocabulary.get("<|start_header_id|>")
        self._end_header = vocabulary.get("<|end_header_id|>")
        self._python_tag = vocabulary.find("<|python_tag|>")
        self._date = date
        self.end = vocabulary.get("<|eot_id|>")
        found = [vocabulary.find(name) for name in ("<|eom_id|>", "<|end_of_text|>")]
        message_end, text_end = found
        self.ends = (self.end,) if message_end is None else (self.end, message_end)
        more = () if text_end is None else (text_end,)
        self.stop_tokens = (*self.ends, *more, self._header)
        self.prompt, self.after = self._head("assistant"), []

    def _head(self, role: str) -> Pieces:
        return [self._header, role, self._end_header, "\n\n"]

    def open(self, system: str | None, tools: Sequence[Tool]) -> Pieces:
        pieces: Pieces = [] if self._begin is None else [self._begin]
        pieces += [*self._head("system"), "Environment: ipython\n" if tools else ""]
        pieces += [f"Cutting Knowledge Date: December 2023\nToday Date: {self._date}\n\n"]
        if tools:
            schemas = [json.dumps(tool.schema, ensure_ascii=False, indent=4) for tool in tools]
            pieces += [_LLAMA_TOOLS, *(f"{schema}\n\n" for schema in schemas)]
        return [*pieces, (system or "").strip(), self.end]

    def observe(self, messages: Sequence[Message]) -> Pieces:
        pieces: Pieces = []
        for message in messages:
            tool = message.role == "tool"
            text = to_json_text(message.content) if tool else message.content.strip()
            pieces += [*self._head("ipython" if tool else message.role), text, self.end]
        return pieces

    def say(self, message: Message) -> Pieces:
        pieces: Pieces = [message.content.strip()]
        if message.tool_calls:
            if pieces != [""]:
                pieces += [self._python_tag if self._python_tag is not None else "\n"]
            calls = [
                f'{{"name": {to_json_text(call.name)}, "parameters": {to_json_text(call.arguments)}}}'
                for call in message.tool_calls
            ]
            pieces += ["; ".join(calls)]
        return pieces

    def read(self, pieces: Pieces) -> Reply:
        return read_llama(pieces, self._python_tag, self.vocabulary)
