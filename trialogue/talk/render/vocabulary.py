"""A tokenizer that keeps text and control tokens apart.

Renderers write and read *pieces*: a string is text, a number is the id of a control token. Text is encoded by
a copy of the tokenizer without control tokens. So `<|im_end|>` in a user's message or a tool result is
ordinary text and never ends a turn.

`TurnRenderer` is the common part of the built-in formats, in `tiny` and `templates`: prompts that only grow.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from trialogue.errors import ConfigError
from trialogue.messages import Message
from trialogue.trajectory import Reply
from trialogue.world.tools import Tool

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Piece = str | int
Pieces = list[Piece]

_MARKUP = frozenset("<>[]|{}")


class Vocabulary:
    """Converts pieces to ids and back. Takes a `tokenizers.Tokenizer` or a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer: Tokenizer = find_backend(tokenizer)
        added = self.tokenizer.get_added_tokens_decoder()
        self.controls: dict[str, int] = {
            token.content: number
            for number, token in added.items()
            if token.special or not _MARKUP.isdisjoint(token.content)
        }
        self._control_ids = frozenset(self.controls.values())
        self._plain = _without_controls(self.tokenizer, self.controls)
        self._encode_text = lru_cache(maxsize=1024)(self._encode_text_anew)
        self._check()

    def find(self, token: str) -> int | None:
        """The id of a control token; None if the vocabulary does not have it."""
        return self.controls.get(token)

    def get(self, token: str) -> int:
        """The id of a control token that must exist."""
        if token not in self.controls:
            known = ", ".join(sorted(self.controls)[:20]) or "none"
            raise ConfigError(f"the tokenizer has no control token '{token}'; it has: {known}")
        return self.controls[token]

    def encode(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of pieces. Adjacent texts are joined first, as in a rendered template."""
        ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                text.append(piece)
                continue
            ids.extend(self._encode_text("".join(text)))
            text.clear()
            ids.append(piece)
        ids.extend(self._encode_text("".join(text)))
        return ids

    def texts(self) -> list[str]:
        """The text of each token that is not a control token."""
        return [
            self.decode([number])
            for number in range(self.tokenizer.get_vocab_size())
            if number not in self._control_ids
        ]

    def split(self, ids: Sequence[int]) -> Pieces:
        """Pieces of ids: control tokens stay numbers, ids between them are decoded."""
        pieces: Pieces = []
        start = 0
        for position, number in enumerate(ids):
            if number in self._control_ids:
                if start < position:
                    pieces.append(self.decode(ids[start:position]))
                pieces.append(number)
                start = position + 1
        if start < len(ids):
            pieces.append(self.decode(ids[start:]))
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def to_text(self, pieces: Iterable[Piece]) -> str:
        """Pieces as one text, control tokens by their names."""
        return "".join(piece if isinstance(piece, str) else self.decode([piece]) for piece in pieces)

    def _encode_text_anew(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        # A lone surrogate, for example from a broken JSON escape, has no encoding.
        sound = text.encode("utf-8", "replace").decode()
        return tuple(self._plain.encode(sound, add_special_tokens=False).ids)

    def _check(self) -> None:
        """Refuse a tokenizer that encodes plain text as control tokens."""
        for token, number in self.controls.items():
            for text in (token, f" {token}", f"a{token}a", f"\n{token}\n"):
                if not self._control_ids.isdisjoint(self._encode_text_anew(text)):
                    raise ConfigError(
                        f"the tokenizer reads the text {token!r} as the control token {number} even with "
                        "its added tokens removed, so a user could forge turns; use a byte-level BPE"
                    )


def find_backend(tokenizer: Any) -> Tokenizer:
    """The `tokenizers.Tokenizer` of a tokenizer."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"rendering needs a fast tokenizer (one with a tokenizer.json), not {type(tokenizer).__name__}"
        )
    return backend


def _without_controls(tokenizer: Tokenizer, controls: Iterable[str]) -> Tokenizer:
    """A copy with the same words but no control tokens."""
    from tokenizers import Tokenizer

    shape = cast("dict[str, Any]", json.loads(tokenizer.to_str()))
    names = set(controls)
    shape["added_tokens"] = [token for token in shape["added_tokens"] if token["content"] not in names]
    shape["post_processor"] = None
    plain = Tokenizer.from_str(json.dumps(shape))
    plain.no_truncation()
    plain.no_padding()
    return plain


class TurnRenderer(ABC):
    """Renders turns one after the other. A reply is always encoded separately from its prompt, as if sampled.

    A format converts the opening, the messages of others and its own replies to pieces, and pieces back to a
    reply.
    """

    name: str
    end: int
    """The control token that ends a reply."""
    ends: tuple[int, ...]
    """`end`, and other tokens that may end a reply."""
    stop_tokens: tuple[int, ...]
    prompt: Pieces
    """The pieces that start a reply."""
    after: Pieces
    """The pieces after the end of a reply."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def open(self, system: str | None, tools: Sequence[Tool]) -> Pieces:
        """The beginning of a conversation."""

    @abstractmethod
    def observe(self, messages: Sequence[Message]) -> Pieces:
        """Messages of others; none is an assistant's."""

    @abstractmethod
    def say(self, message: Message) -> Pieces:
        """An own message without its end."""

    @abstractmethod
    def read(self, pieces: Pieces) -> Reply:
        """Parse an own message; its end was removed."""

    def start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        system = messages[0].content if messages and messages[0].role == "system" else None
        ids = self.vocabulary.encode(self.open(system, tools))
        return ids + self._lay(messages if system is None else messages[1:])

    def extend(
        self, ids: Sequence[int], reply: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        closed = bool(reply) and reply[-1] in self.ends
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
