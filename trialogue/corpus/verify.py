"""Check a recorded conversation for flaws that its reward may not show.

Each check reads the conversation as the agent saw it and reports the turn and the flaw. Checks of sentences
understand English only. Confirmations are required only if the policy requires them.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from trialogue.config import Synthesis
from trialogue.errors import DomainError, GradeError
from trialogue.messages import Frozen, ToolCall
from trialogue.score.audit import audit
from trialogue.score.reward import PendingReward, regrade
from trialogue.talk.evidence import Evidence, is_permitted
from trialogue.trajectory import Trajectory, Turn
from trialogue.world.database import canonical
from trialogue.world.domain import Domain, Environment
from trialogue.world.events import find_leaves
from trialogue.world.simulated import SimulatedEnvironment
from trialogue.world.speech import (
    ELSE,
    EXCUSED,
    POSSIBLE,
    PROPOSES,
    REFUSES,
    is_proposal,
    is_yes,
    split_sentences,
)
from trialogue.world.tools import Tool, shorten

Check = Literal[
    "schema",
    "invented id",
    "ungrounded argument",
    "contradiction",
    "confirmation",
    "premature stop",
    "repeated call",
    "user",
    "simulation",
    "replay",
    "outcome",
]

FREE_TEXT = Synthesis().free_text


class Flaw(Frozen):
    """A flaw and the turn in which it occurs."""

    check: Check
    turn: int
    text: str


def verify(trajectory: Trajectory, domain: Domain, free_text: Sequence[str] = FREE_TEXT) -> list[Flaw]:
    """All flaws of a conversation, in the order of its turns."""
    environment = domain.open(trajectory.task)
    reading = _Reading(environment, frozenset(free_text))
    for number, turn in enumerate(trajectory.turns):
        reading.read(number, turn)
    reading.close(trajectory)
    found = reading.flaws
    found += [
        Flaw(check="user", turn=finding.turn, text=f"{finding.kind}: {finding.evidence}")
        for finding in audit(domain, trajectory)
    ]
    if isinstance(environment, SimulatedEnvironment):
        found += find_simulation_problems(trajectory, environment)
    elif not environment.remote:
        found += find_replay_problems(trajectory, environment)
    return sorted(found, key=lambda flaw: flaw.turn)


def find_replay_problems(trajectory: Trajectory, environment: Environment) -> Iterator[Flaw]:
    """Differences between the record and its calls and reward in a fresh environment."""
    last = len(trajectory.turns) - 1
    try:
        reward, mismatches = regrade(trajectory, environment)
    except GradeError as error:
        yield Flaw(check="replay", turn=last, text=str(error))
        return
    for text in mismatches:
        yield Flaw(check="replay", turn=last, text=shorten(text))
    if isinstance(reward, PendingReward):  # do not ask a judge; use the recorded reward
        reward.close()
        reward = trajectory.reward
    if reward is not None and not reward.is_success:
        why = "; ".join(reward.why)
        yield Flaw(check="outcome", turn=last, text=f"the outcome is worth {reward.value:g}: {why}")


def find_simulation_problems(trajectory: Trajectory, environment: SimulatedEnvironment) -> Iterator[Flaw]:
    """Answers of simulated tools that contradict their database."""
    steps = environment.retrace(trajectory)
    last = len(trajectory.turns) - 1
    while True:
        try:
            step = next(steps)
        except StopIteration:
            return
        except DomainError as error:
            yield Flaw(check="simulation", turn=last, text=str(error))
            return
        evidence = Evidence()
        for known in (step.before, step.after, step.arguments):
            evidence.add_text(json.dumps(known, ensure_ascii=False))
        if not step.observed.failed:
            for value in evidence.find_unknown_values(step.observed.message.content):
                text = f"{step.name} returned {value}, which is neither in the database nor in the call"
                yield Flaw(check="simulation", turn=step.turn, text=text)


_DEMANDS = re.compile(
    r"\bconfirm|\b(?:explicit|clear) (?:yes|consent|approval|permission)|\bwait for a (?:clear )?yes",
    re.IGNORECASE,
)
_CLAIMS = re.compile(
    r"\b(?:has|have) (?:now |just |successfully )*been \w+(?:ed|en|id|et|de)\b"
    r"|\b(?:is|are) now \w+(?:ed|en)\b"
    r"|\b(?:i've|i have) (?:now |just |successfully )*(?!asked|checked|looked|located|verified|identified|"
    r"found|noted|reviewed|confirmed|received)\w+ed\b|\bsuccessfully\b|^\W*(?:it is |it's |all )?done\b",
    re.IGNORECASE,
)
_STATES = re.compile(
    r"\b(?:is|are|was|were)\b(?! (?:not|n't))(?: now| currently)?:? +(.+?)[.!]*$|: +(.+?)[.!]*$",
    re.IGNORECASE,
)


class _Reading:
    """The state while a conversation is read turn by turn."""

    def __init__(self, environment: Environment, free_text: frozenset[str]) -> None:
        self.tools: Mapping[str, Tool] = environment.tools
        self.free_text = free_text
        self.flaws: list[Flaw] = []
        self.evidence = Evidence()
        self.evidence.add_text(environment.policy)
        for tool in self.tools.values():
            self.evidence.add_text(tool.description)
        for field, values in find_choices(environment):
            self.evidence.add_choices(field, values)
        self.demands = _DEMANDS.search(environment.policy) is not None
        self.agreed = False
        self.said = ""
        """The agent's last words."""
        self.writes = 0
        self.refused = False
        """Whether the last write was refused."""
        self.waiting: list[ToolCall] = []
        self.made: set[str] = set()
        """Calls since the last message of the user or the last write."""
        self.written: set[str] = set()

    def note(self, check: Check, turn: int, text: str) -> None:
        self.flaws.append(Flaw(check=check, turn=turn, text=text))

    def read(self, number: int, turn: Turn) -> None:
        message = turn.message
        if turn.side == "user":
            if message.role == "user" and not message.tool_calls:
                self._add_user_text(message.content)
        elif message.role == "tool":
            self._observe(number, turn)
        elif message.tool_calls:
            for call in message.tool_calls:
                self._check_call(number, call)
                self.waiting.append(call)
        else:
            self._check_words(number, message.content)
            self.said = message.content

    # -- what the agent learns ----------------------------------------------------------------------------

    def _add_user_text(self, text: str) -> None:
        self.agreed = is_proposal(self.said) and is_yes(text)
        self.evidence.add_text(text)
        self.made.clear()

    def _observe(self, number: int, turn: Turn) -> None:
        call = self.waiting.pop(0) if self.waiting else None
        if call is None or call.id != turn.message.tool_call_id:
            self.note("replay", number, "a tool result without its call")
            return
        tool = self.tools.get(call.name)
        if tool is not None and tool.changes:
            self.refused = turn.failed
            self.writes += not turn.failed
            if not turn.failed:
                self.made.clear()
                self.evidence.forget(call.arguments)
        self.evidence.add_result(turn.message.content)

    # -- what the agent does ------------------------------------------------------------------------------

    def _check_call(self, number: int, call: ToolCall) -> None:
        tool = self.tools.get(call.name)
        if tool is None:
            self.note("schema", number, f"there is no tool {shorten(call.name)}")
            return
        if isinstance(call.arguments, str):
            self.note("schema", number, f"{call.name}: the arguments are not a JSON object")
            return
        for text in find_schema_faults(tool, call.arguments):
            self.note("schema", number, f"{call.name}: {text}")
        properties: Mapping[str, Any] = tool.parameters.get("properties", {})
        for name, value in call.arguments.items():
            schema: Any = properties.get(name, {})
            for leaf in find_leaves(value):
                self._check_value(number, call.name, name, leaf, schema)
        if self.demands and tool.changes and not self.agreed:
            self.note(
                "confirmation", number, f"{call.name} changes something without a confirmation by the user"
            )
        same = canonical([call.name, call.arguments])
        if same in self.made or same in self.written:
            self.note("repeated call", number, f"{call.name} was called with the same arguments before")
        self.made.add(same)
        if tool.writes:
            self.written.add(same)

    def _check_value(self, number: int, tool: str, name: str, leaf: Any, schema: Any) -> None:
        if is_permitted(leaf, schema) or self.evidence.holds(leaf):
            return
        shown = f"{tool}: {name} = {shorten(repr(leaf))} was never mentioned"
        unknown = self.evidence.find_unknown(leaf)
        if isinstance(leaf, str) and any(any(sign.isdigit() for sign in piece) for piece in unknown):
            self.note("invented id", number, shown)
        elif not (name in self.free_text or f"{tool}.{name}" in self.free_text):
            self.note("ungrounded argument", number, shown)

    # -- what the agent says ------------------------------------------------------------------------------

    def _check_words(self, number: int, text: str) -> None:
        for value in self.evidence.find_unknown_values(text):
            self.note("contradiction", number, f"{value} is in no tool result and was never said")
        sentences = split_sentences(text)
        statements = [part for part in sentences if not part.endswith("?") and not PROPOSES.search(part)]
        for sentence in statements:
            for problem in self._find_false_statements(sentence):
                self.note("contradiction", number, problem)
        turned_down = any(REFUSES.search(part) and not EXCUSED.search(part) for part in sentences)
        claims = any(_CLAIMS.search(part) and not POSSIBLE.search(part) for part in statements)
        if claims and not turned_down and (self.refused or not self.writes):
            what = "the last change was refused" if self.refused else "nothing was changed"
            self.note("contradiction", number, f"it reports a change, but {what}")

    def _find_false_statements(self, sentence: str) -> Iterator[str]:
        """Fields to which a sentence gives another value than the tools did."""
        stated = _STATES.search(sentence)
        if stated is None:
            return
        value = next(part for part in stated.groups() if part is not None)
        before = sentence[: stated.start()]
        records = self.evidence.find_records(sentence)
        fields = () if REFUSES.search(sentence) else self.evidence.find_fields(before, records)
        for field, known in fields:  # what cannot be done to a field says nothing about its value
            if not any(self.evidence.states(sentence, each) for each in known):
                yield f"it says the {field} is {shorten(value)}, the tools said {shorten(known[-1])}"
                return
        for record in records:
            for field, known, other in self.evidence.find_swapped(value, record):
                yield f"it says {other}, the tools said the {field} is {known}"
                return

    # -- how it ends --------------------------------------------------------------------------------------

    def close(self, trajectory: Trajectory) -> None:
        last = len(trajectory.turns) - 1
        if trajectory.end not in ("user_stop", "agent_stop"):
            self.note("premature stop", last, f"nobody ended it: {trajectory.end}")
        if trajectory.end != "user_stop":
            return
        if (
            trajectory.turns
            and trajectory.turns[-1].side == "user"
            and trajectory.turns[-1].message.role == "tool"
        ):
            return  # the user left through a tool
        asking = [part for part in split_sentences(self.said) if part.endswith("?")]
        pending = [part for part in asking if not ELSE.search(part)]
        if not self.said:
            self.note("premature stop", last, "the user left before the agent had said anything")
        elif pending and not any(ELSE.search(part) for part in asking):
            self.note("premature stop", last, f"the user left a question open: {shorten(pending[-1])}")


def find_choices(environment: Environment) -> Iterator[tuple[str, list[str]]]:
    """The fields of records whose value is one of a few texts."""
    for schema in type(environment.database).schemas().values():
        for field, shape in schema.get("properties", {}).items():
            values = [value for value in shape.get("enum", ()) if isinstance(value, str)]
            if values:
                yield field, values


def find_schema_faults(tool: Tool, arguments: dict[str, Any]) -> list[str]:
    """Violations of a tool's schema by arguments."""
    validator = _find_validator(canonical(tool.parameters))
    faults: list[str] = []
    for error in validator.iter_errors(arguments):
        where = ".".join(str(part) for part in error.absolute_path)
        faults.append(shorten(f"{where}: {error.message}" if where else error.message))
    return faults


@lru_cache(maxsize=1024)
def _find_validator(parameters: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(parameters))
