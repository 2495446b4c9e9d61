"""Conversation rules shared by several benchmarks: their own caps replace the counts of `limits`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trialogue.config import Limits
from trialogue.trajectory import Turn
from trialogue.world.domain import ConversationRules


@dataclass(frozen=True)
class BenchmarkRules(ConversationRules):
    """Only `is_over` caps a conversation: `limits.observations` and `limits.tool_errors` do not apply, and no
    conversation ends as stuck."""

    ends_stuck: bool = False

    def is_spent(self, limits: Limits, observations: int, failures: int) -> bool:
        return False


def count_messages(turns: Sequence[Turn]) -> int:
    """Number of messages. All tool results of one message count as one."""
    count = 0
    before = ""
    for turn in turns:
        role = turn.message.role
        count += role != "tool" or before != "tool"
        before = role
    return count
