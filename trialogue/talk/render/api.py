"""Convert messages to token ids and back, for one side of a conversation.

A renderer only appends: it renders the prompt once, then the messages since the last reply. Sampled ids are
never changed. Built-in formats are in `talk.render.templates` and `talk.render.tiny`. Other Hugging Face chat
templates are used through `talk.render.chat_template`, which refuses templates that rewrite earlier messages.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

from trialogue.errors import ConfigError
from trialogue.messages import Message
from trialogue.seams import split_reference
from trialogue.settings import RENDERERS
from trialogue.trajectory import Reply, Tokens, Turn
from trialogue.world.tools import Tool

if TYPE_CHECKING:
    from trialogue.talk.render.vocabulary import Vocabulary


class Renderer(Protocol):
    """One conversation format over one tokenizer. Stateless, so it may be shared."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a reply."""
        ...

    def start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The whole prompt, up to the start of the reply."""
        ...

    def extend(
        self, ids: Sequence[int], reply: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """The ids to append to a prompt `ids` and its sampled `reply`: the end of the turn if the reply was
        cut off before it, the new messages, and the start of the next reply. None if the format rewrites what
        `ids` shows; then a new row starts."""
        ...

    def write(self, message: Message) -> list[int]:
        """The reply that a model would sample for this message, including its end."""
        ...

    def parse(self, reply: Sequence[int]) -> Reply:
        """Parse a sampled reply. A broken call keeps its raw text as arguments, so that the model gets an
        error and can repair it."""
        ...


def find_renderer(tokenizer: Any, name: str | None = None) -> Renderer:
    """The renderer with this name, or the one that matches the control tokens and chat template of the
    tokenizer.

    `hermes` (the same as `qwen3`) and `qwen3-nothink` keep earlier reasoning in the prompt, so that a
    conversation is one row. `-exact` drops it where Qwen3's own template does, and starts a new row there.
    `template` uses any Hugging Face chat template that does not rewrite earlier messages. `module:name` and
    `path/to/file.py:name` are functions or classes of your own that take a `Vocabulary`.
    """
    from trialogue.talk.render import chat_template, templates, tiny
    from trialogue.talk.render.vocabulary import Vocabulary

    vocabulary = Vocabulary(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name; conversations here have tools
        template = tokenizer.get_chat_template(None, tools=[{}])
    chosen = name or guess_name(vocabulary.controls.keys(), template)
    if chosen is not None and split_reference(chosen) is not None:
        from trialogue.talk.render.own import find_own_renderer

        return find_own_renderer(chosen, vocabulary)
    match chosen:
        case "brief":
            return tiny.BriefRenderer(vocabulary)
        case "brief-tools":
            return tiny.BriefToolsRenderer(vocabulary)
        case "compact":
            return tiny.CompactRenderer(vocabulary)
        case "hermes" | "qwen3":
            return templates.HermesRenderer(vocabulary)
        case "qwen3-nothink":
            return templates.HermesRenderer(vocabulary, thinking=False)
        case "qwen3-exact" | "qwen3-nothink-exact":
            return templates.Qwen3Renderer(vocabulary, thinking=chosen == "qwen3-exact")
        case "llama3":
            return templates.Llama3Renderer(vocabulary)
        case "template":
            return chat_template.ChatTemplateRenderer(tokenizer, vocabulary)
        case None:
            raise ConfigError(
                "the tokenizer has neither known control tokens nor a chat template; name a renderer: "
                + ", ".join(RENDERERS)
            )
        case _:
            raise ConfigError(f"there is no renderer '{chosen}'; allowed are {', '.join(RENDERERS)}")


def guess_name(controls: Set[str], template: str | None) -> str | None:
    """The name of the renderer for these control tokens and this chat template."""
    from trialogue.talk.render.tiny import COMPACT_TOKENS

    if controls >= set(COMPACT_TOKENS):
        return "compact"
    # A template without tools defines no format of calls that could differ.
    template = (template or "").replace("\\n", "\n")
    free = "tools" not in template
    if {"<|im_start|>", "<|im_end|>"} <= controls and (free or '<tool_call>\n{"name":' in template):
        return "hermes"
    if {"<|start_header_id|>", "<|eot_id|>"} <= controls and (free or '"parameters": ' in template):
        return "llama3"
    return "template" if template else None


def with_tokens(
    turns: Sequence[Turn], tools: Sequence[Tool], renderer: Renderer, *, opens: bool = False
) -> list[Turn]:
    """The turns that one side sees, with `Tokens` for each of its replies as if they had been sampled: a
    teacher's conversation as training rows. Log-probabilities are 0. A greeting belongs to the prompt, unless
    the side `opens`."""
    done: list[Turn] = []
    row: list[int] = []
    reply: list[int] = []
    since = 0
    asked = opens
    for position, turn in enumerate(turns):
        asked = asked or turn.message.role == "user"
        if turn.message.role == "assistant" and asked:
            seen = [earlier.message for earlier in turns[:position]]
            added = renderer.extend(row, reply, seen[since:]) if reply else None
            start = added is None
            prompt = renderer.start(seen, tools) if added is None else added
            row = prompt if start else [*row, *reply, *prompt]
            reply = renderer.write(turn.message)
            since = position + 1
            tokens = Tokens(
                start=start, prompt=tuple(prompt), reply=tuple(reply), logprobs=(0.0,) * len(reply)
            )
            turn = turn.model_copy(update={"tokens": tokens})
        done.append(turn)
    return done
