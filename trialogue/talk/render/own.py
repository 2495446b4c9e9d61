"""A renderer from outside the package, named by `learner.renderer` or by a speaker's `renderer`.

The name, `module:name` or `path/to/file.py:name`, is that of a function or class that takes a `Vocabulary`
and makes a `Renderer`. What it returns is checked, and an exception in it names its file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from trialogue.errors import ConfigError
from trialogue.messages import Message
from trialogue.seams import check_signature, describe_type, describe_value, load_seam, loading, raise_bug
from trialogue.talk.render.api import Renderer
from trialogue.talk.render.vocabulary import Vocabulary
from trialogue.trajectory import Reply
from trialogue.world.tools import Tool

CALLS = {
    "start": ("messages", "tools"),
    "extend": ("ids", "reply", "messages"),
    "write": ("message",),
    "parse": ("reply",),
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OwnRenderer:
    """A renderer of the caller's own, under the name by which it was found."""

    name: str
    inner: Renderer
    what: str

    @property
    def vocabulary(self) -> Vocabulary:
        return self.inner.vocabulary

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self.inner.stop_tokens

    def start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self._to_ids(self._call(lambda: self.inner.start(messages, tools)), "start")

    def extend(
        self, ids: Sequence[int], reply: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        found = self._call(lambda: self.inner.extend(ids, reply, messages))
        return None if found is None else self._to_ids(found, "extend")

    def write(self, message: Message) -> list[int]:
        return self._to_ids(self._call(lambda: self.inner.write(message)), "write")

    def parse(self, reply: Sequence[int]) -> Reply:
        found: Any = self._call(lambda: self.inner.parse(reply))
        if not isinstance(found, Reply):
            raise ConfigError(f"{self.what}: parse returned {describe_type(found)}, not a Reply")
        return found

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise_bug(error, self.what)
            raise

    def _to_ids(self, found: Any, verb: str) -> list[int]:
        ids = cast("list[Any]", found) if isinstance(found, list) else None
        if ids is None or not all(isinstance(item, int) for item in ids):
            raise ConfigError(f"{self.what}: {verb} returned {describe_type(found)}, not a list of token ids")
        return ids


def find_own_renderer(reference: str, vocabulary: Vocabulary) -> Renderer:
    """The renderer that a reference names, over a vocabulary."""
    make: Any = load_seam(reference, "renderer")
    what = f"renderer {describe_value(make)}"
    check_signature(make, ("vocabulary",), "renderer")
    with loading(what):
        found: Any = make(vocabulary)
    parts = ("name", "vocabulary", "stop_tokens", *CALLS)
    missing = [part for part in parts if not hasattr(found, part)]
    if missing:
        raise ConfigError(f"{what}: {describe_type(found)} is no Renderer, it lacks {', '.join(missing)}")
    for verb, arguments in CALLS.items():
        check_signature(getattr(found, verb), arguments, f"{what}: {verb}")
    return OwnRenderer(reference, found, what)
