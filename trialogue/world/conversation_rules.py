"""The rules of a conversation: who opens it, who may end it, and when it is over.

The defaults are what `talk.conversation` does in every domain. A benchmark whose loop differs subclasses
`ConversationRules` and puts its rules into `Domain.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trialogue.config import Limits
from trialogue.task import Side, Task
from trialogue.trajectory import Turn

STOP = "###STOP###"
"""What a simulated user writes to end the conversation."""
_QUOTES = tuple("\"'`\u2018\u201c\u201e\u00ab<([{")


def _keep(task: Task, model: Any) -> Any:
    return model


@dataclass(frozen=True)
class ConversationRules:
    """What a domain decides about its conversations."""

    opens: Side = "user"
    """Who speaks first. A greeting of the domain comes before."""
    user_cue: str | None = None
    """Words of the agent that a user who opens is given to answer. The agent does not see them."""
    stop_tokens: tuple[str, ...] = (STOP,)
    """Words with which the user ends the conversation."""
    stop_anywhere: bool = False
    """True: a stop token anywhere in the user's text ends it. False: it must close the message."""
    first_call_only: bool = False
    """True: keep only the first tool call of a message."""
    grade_at_cap: bool = False
    """True: grade a conversation that reached a cap, instead of giving it 0."""
    adapt_agent: Callable[[Task, Any], Any] = _keep
    """Wraps the agent's model, for example so that it writes its calls as text."""

    def most_calls(self, limits: Limits) -> int:
        """Number of tool calls to keep of one message. The first one beyond `limits.calls` is refused."""
        return 1 if self.first_call_only or limits.first_call_only else limits.calls + 1

    def is_spent(self, limits: Limits, observations: int, failures: int) -> bool:
        """Whether the limits' counts are reached. Asked after each tool result and each message."""
        return observations >= limits.observations or failures >= limits.tool_errors

    def is_over(self, turns: Sequence[Turn]) -> bool:
        """Whether a cap of the domain's own is reached. Asked after each message with its tool results,
        before anything that the message says is taken as its end."""
        return False

    def is_last(self, turns: Sequence[Turn]) -> bool:
        """Whether the message just said, which has no calls, ends the conversation."""
        return turns[-1].side == "user" and self.is_stop(turns[-1].message.content)

    def is_stop(self, text: str) -> bool:
        """Whether the user ends the conversation with this text. A sentence that mentions the stop token,
        quoted or in its middle, does not: the token has to close the message."""
        if self.stop_anywhere:
            return any(token in text for token in self.stop_tokens)
        text = text.rstrip()
        for token in self.stop_tokens:
            before = text.removesuffix(token)
            if before != text and not (before[-1:].isalnum() or before[-1:] in _QUOTES):
                return True
        return False
