"""A renderer made from any Hugging Face chat template that only appends.

This is tested when the renderer is created, with small conversations that have several user turns, tool calls
and reasoning: rendered step by step they must equal the template's rendering of the whole. A template that
rewrites earlier messages is refused, because its prompts could not grow by appending ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

from trialogue.errors import ConfigError
from trialogue.messages import Message, ToolCall
from trialogue.talk.render.bounded_template import BoundedTemplate
from trialogue.talk.render.parse import Marks, read_hermes, read_llama
from trialogue.talk.render.vocabulary import Pieces, Vocabulary
from trialogue.trajectory import Reply
from trialogue.world.tools import Tool

# Control tokens in text are replaced by private characters before rendering and restored as plain text.
_OPEN, _CLOSE = "\ue000", "\ue001"
_HIDDEN = re.compile(f"{_OPEN}(\\d*){_CLOSE}")


class ChatTemplateRenderer:
    """Renders with the tokenizer's template. User and tool text cannot become template syntax."""

    name = "template"

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer has no chat template; name a renderer such as 'hermes'")
        self.vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._template = BoundedTemplate(tokenizer)
        self._names = sorted(vocabulary.controls, key=len, reverse=True)
        alternatives = "|".join(re.escape(name) for name in self._names)
        self._controls = re.compile(f"({alternatives})" if alternatives else r"(?!)")
        self._to_hide = re.compile(f"{alternatives}|{_OPEN}" if alternatives else _OPEN)
        self._tail = self._find_tail()
        self._tail_text = vocabulary.to_text(self._tail)
        self.end = cast("int", self._tail[0])
        eos = vocabulary.find(str(getattr(tokenizer, "eos_token", "") or ""))
        self.stop_tokens = (self.end,) if eos in (None, self.end) else (self.end, eos)
        self._marks = Marks.of(vocabulary)
        self._python_tag = vocabulary.find("<|python_tag|>")
        self._hermes = True
        self._calls: str | None = self._try_calls()
        self._try_prefixes()

    def start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        if tools and self._calls is not None:
            raise ConfigError(f"this chat template cannot be used with tools: {self._calls}; try 'hermes'")
        return self.vocabulary.encode(self._split(self._render(messages, tools, prompt=True)))

    def extend(
        self, ids: Sequence[int], reply: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        # The same messages behind a stand-in for the reply; what was before does not matter to a template
        # that only appends.
        results = takewhile(lambda message: message.role == "tool", messages)
        calls = tuple(ToolCall(id=result.tool_call_id or "call_0", name="tool") for result in results)
        before = [_USER, Message(role="assistant", content="" if calls else "x", tool_calls=calls)]
        try:
            shown = self._render(before, ())
        except ConfigError:  # the template allows only one call per message
            before[1] = before[1].model_copy(update={"tool_calls": calls[:1]})
            shown = self._render(before, ())
        whole = self._render([*before, *messages], (), prompt=True)
        if not whole.startswith(shown) or not shown.endswith(self._tail_text):
            return None
        pieces = [*self._tail, *self._split(whole[len(shown) :])]
        return self.vocabulary.encode(pieces[1:] if reply and reply[-1] == self.end else pieces)

    def write(self, message: Message) -> list[int]:
        asked = self._render([_USER], (), prompt=True)
        whole = self._render([_USER, message], ())
        if not whole.startswith(asked) or not whole.endswith(self._tail_text):
            raise ConfigError("the chat template shows a reply differently from how it is made")
        said = whole[len(asked) : len(whole) - len(self._tail_text)]
        return [*self.vocabulary.encode(self._split(said)), self.end]

    def parse(self, reply: Sequence[int]) -> Reply:
        stopped = bool(reply) and reply[-1] in self.stop_tokens
        pieces = self.vocabulary.split(reply[:-1] if stopped else reply)
        if self._hermes:
            return read_hermes(pieces, self._marks, self.vocabulary)
        return read_llama(pieces, self._python_tag, self.vocabulary)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool = False) -> str:
        shapes: list[dict[str, Any]] = []
        for message in messages:
            shape = message.to_openai()
            if message.reasoning is not None:
                shape["reasoning_content"] = message.reasoning
            for call, made in zip(message.tool_calls, shape.get("tool_calls", ()), strict=False):
                made["function"] = {"name": call.name, "arguments": call.arguments}
            shapes.append(self._hide(shape))
        schemas = [self._hide(tool.schema) for tool in tools]
        return self._template.render(shapes, schemas or None, prompt)

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._to_hide.sub(self._hide_one, value)
        if isinstance(value, Mapping):
            shape = cast("Mapping[str, Any]", value)
            return {self._hide(key): self._hide(inner) for key, inner in shape.items()}
        if isinstance(value, list):
            return [self._hide(item) for item in cast("list[Any]", value)]
        return value

    def _hide_one(self, found: re.Match[str]) -> str:
        number = "" if found[0] == _OPEN else self._names.index(found[0])
        return f"{_OPEN}{number}{_CLOSE}"

    def _split(self, text: str) -> Pieces:
        """Rendered text as pieces. Control tokens in it can only come from the template."""
        parts = self._controls.split(text)
        return [
            self.vocabulary.controls[part]
            if number % 2
            else _HIDDEN.sub(lambda found: self._names[int(found[1])] if found[1] else _OPEN, part)
            for number, part in enumerate(parts)
            if part
        ]

    def _find_tail(self) -> Pieces:
        """The tokens after a reply: its end and what the template appends to it."""
        text = self._render([_USER, Message(role="assistant", content="zyx")], ())
        tail = self._split(text.rpartition("zyx")[2])
        if not tail or not isinstance(tail[0], int):
            raise ConfigError("the chat template ends a reply with no control token; name another renderer")
        return tail

    def _try_calls(self) -> str | None:
        """Why tools cannot be used, or None."""
        call = ToolCall(id="call_0", name="look", arguments={"key": "W1"})
        message = Message(role="assistant", tool_calls=(call,))
        try:
            if _TOOL.name not in self._render([_USER], [_TOOL]):
                return "it does not show them"
            reply = self.write(message)
        except ConfigError as error:
            return str(error)
        if self.parse(reply).tool_calls != (call,):
            self._hermes = False
        known = self.parse(reply).tool_calls == (call,)
        return None if known else "its way of writing a call is not known"

    def _try_prefixes(self) -> None:
        for what, tools, messages in _probes():
            if tools and self._calls is not None:
                continue
            row: list[int] = []
            reply: list[int] = []
            since = 0
            for place, message in enumerate(messages):
                if message.role != "assistant":
                    continue
                added = (
                    self.extend(row, reply, messages[since:place])
                    if row
                    else self.start(messages[:place], tools)
                )
                row += [*reply, *added] if added is not None else []
                reply, since = self.write(message), place + 1
            added = self.extend(row, reply, messages[since:])
            laid = [*row, *reply, *(added or [])]
            wanted = self._render(messages, tools, prompt=True)
            own = self._tokenizer(wanted, add_special_tokens=False)["input_ids"]
            if added is None or self.vocabulary.decode(laid) != self.vocabulary.decode(own):
                raise ConfigError(
                    f"the chat template rewrites what it has shown before ({what}), so prompts cannot grow "
                    "by appending; name a renderer that keeps history, such as 'qwen3' or 'hermes', or one "
                    "that starts new rows, such as 'qwen3-exact'"
                )


_USER = Message(role="user", content="Hello")
_TOOL = Tool(
    "look",
    "Look something up.",
    {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    lambda database, arguments: None,
)


def _probes() -> Iterable[tuple[str, list[Tool], list[Message]]]:
    def said(content: str = "", keys: str = "", reasoning: str | None = None) -> Message:
        calls = [
            ToolCall(id=f"call_{place}", name="look", arguments={"key": key})
            for place, key in enumerate(keys)
        ]
        return Message(role="assistant", content=content, tool_calls=tuple(calls), reasoning=reasoning)

    system = Message(role="system", content="Be kind.")
    results = [
        Message(role="tool", content=f"found {place}", tool_call_id=f"call_{place}") for place in (0, 1)
    ]
    more = Message(role="user", content="And then?")
    yield "several user turns", [], [system, _USER, said("Hi."), more, said("Well."), _USER]
    called = [system, _USER, said(keys="a"), results[0], said("There."), more]
    yield "tool calls", [_TOOL], [*called, said(keys="b"), results[0]]
    thought = said("There.", reasoning="So it is.")
    yield "reasoning", [], [system, _USER, thought, more, thought, _USER]
