"""The policy's rules, held against what the teacher is about to say or do.

A rule may ask for a look-up that no argument needs, such as finding the customer whose number the user has
told already, and it may mind words that the user would understand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trialogue.messages import Message, ToolCall
from trialogue.seams import raise_bug
from trialogue.talk.teacher.search import Search, is_source, list_arguments
from trialogue.task import Call
from trialogue.trajectory import Turn
from trialogue.world.domain import Domain
from trialogue.world.events import Events
from trialogue.world.policy_rules import Rule

MOST_TRIED = 30
"""Look-ups tried for one rule."""


class Rulebook:
    """The rules of a domain, also those that are only reported, and the conversation so far."""

    def __init__(self, domain: Domain) -> None:
        self.rules = domain.policy_rules
        self.policy = domain.policy
        self.turns: list[Turn] = []
        self._broken: frozenset[str] | None = frozenset()

    def follow(self, turns: Sequence[Turn]) -> None:
        """Take in the conversation as the agent sees it."""
        self.turns = [turn for turn in turns if turn.message.role != "system"]
        self._broken = None

    @property
    def broken(self) -> frozenset[str]:
        """The rules that the conversation breaks so far."""
        if self._broken is None:
            self._broken = self.foresee(())
        return self._broken

    def foresee(self, following: Iterable[Turn]) -> frozenset[str]:
        """The rules that the conversation would break with these turns."""
        events = Events([*self.turns, *following], self.policy)
        return frozenset(rule.name for rule in self.rules if _is_broken(rule, events))

    def may_say(self, text: str) -> bool:
        """Whether these words break no rule that is not broken anyway."""
        if not self.rules:
            return True
        broken = self.foresee([say(text)])
        return not broken or broken <= self.broken

    def find_look_up(self, calls: Sequence[Call], proposal: str, search: Search) -> Call | None:
        """The look-up that a rule asks for before some calls can be proposed and made. None if there is
        none."""
        if not self.rules:
            return None
        ahead = [say(proposal), hear("Yes, please.")] if proposal else []
        for number, call in enumerate(calls):
            result = search.try_call(search.environment.tools[call.name], dict(call.arguments))
            ahead += make(call, result or "{}", f"ahead_{number}")
        broken = self.foresee(ahead)
        if not broken or broken <= self.broken:
            return None
        for call, result in list_look_ups(search):
            if self.foresee([*make(call, result, "look"), *ahead]) < broken:
                return call
        return None


def _is_broken(rule: Rule, events: Events) -> bool:
    try:
        return any(wrong for _, wrong in rule.check(events))
    except Exception as error:
        raise_bug(error, f"policy rule {rule.name!r}")
        raise


def list_look_ups(search: Search) -> Iterator[tuple[Call, str]]:
    """Look-ups with values that are known, and what they show."""
    pool = search.list_candidates(False)
    tried = 0
    for tool in filter(is_source, search.environment.tools.values()):
        for arguments, _ in list_arguments(tool, pool):
            tried += 1
            if tried > MOST_TRIED:
                return
            result = search.try_plainly(tool, arguments)
            if result is not None:
                yield Call(name=tool.name, arguments=arguments), result.text


def say(text: str) -> Turn:
    return Turn(side="agent", message=Message(role="assistant", content=text))


def hear(text: str) -> Turn:
    return Turn(side="user", message=Message(role="user", content=text))


def make(call: Call, result: str, identity: str) -> list[Turn]:
    """A call of the agent and its result."""
    made = ToolCall(id=identity, name=call.name, arguments=dict(call.arguments))
    return [
        Turn(side="agent", message=Message(role="assistant", tool_calls=(made,))),
        Turn(side="agent", message=Message(role="tool", content=result, tool_call_id=identity)),
    ]
