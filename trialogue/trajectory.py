"""Turns, trajectories and groups: what a conversation leaves behind, and its JSONL form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import Field

from trialogue.errors import Blame
from trialogue.messages import Frozen, Message, ToolCall
from trialogue.task import Side, Task

End = Literal["user_stop", "agent_stop", "max_turns", "too_long", "stuck", "error"]
Finish = Literal["stop", "length"]


class Tokens(Frozen):
    """The exact ids behind one sampled message; a row of training data is these laid end to end.

    Example: policy and user `[5, 6, 7]`, reply `[8, 9]`, then a tool result `[3]` and reply `[4]` give
    `Tokens(start=True, prompt=(5, 6, 7), reply=(8, 9))` and `Tokens(prompt=(3,), reply=(4,))`:
    one row `5 6 7 8 9 3 4` with mask `0 0 0 1 1 0 1`.
    """

    start: bool = False
    """True where a new row begins: the first reply, or one whose template rewrote the history."""
    prompt: tuple[int, ...]
    """Ids laid before this reply: the whole prompt at a start, else only what was observed since."""
    reply: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per id of the reply, under the weights that sampled it."""
    version: int = 0
    """Number of the published weights that sampled the reply."""


class Usage(Frozen):
    """Tokens a reply was billed for: those of one call, or of several where answers could not be used."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    calls: int = 1
    last: int | None = None
    """Tokens of the last call alone, where there were several: the one whose answer was used."""

    @property
    def length(self) -> int:
        """How long the conversation was when the reply was given, whatever had been billed in vain before."""
        return self.prompt + self.completion if self.last is None else self.last

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt=self.prompt + other.prompt,
            completion=self.completion + other.completion,
            cached=self.cached + other.cached,
            calls=self.calls + other.calls,
            last=other.length,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answers, before the conversation makes a turn of it."""

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    tokens: Tokens | None = None
    finish: Finish = "stop"
    usage: Usage | None = None
    model: str | None = None
    has_patience: bool = False
    """Said by a user that leaves by itself when a conversation goes nowhere: a rule-based one, a person."""
    rejected: tuple[str, ...] | None = None
    """Of a guided user: what was wrong with the wordings that were not said."""


class Turn(Frozen):
    """One message. A tool's result belongs to the side that called the tool."""

    side: Side
    message: Message
    tokens: Tokens | None = None
    finish: Finish = "stop"
    failed: bool = False
    """On a tool's result: the tool refused or the call was malformed."""
    changes: dict[str, Any] = {}
    """On a simulated tool's result: what it changed, table by table, record by record."""
    usage: Usage | None = None
    model: str | None = None
    """Which model spoke, where it is not the same for the whole run."""
    rejected: tuple[str, ...] | None = None
    """Of a guided user: what was wrong with the wordings that were not said. None said as it is; one: the
    second wording was said; two: the rule's own sentence."""
    has_patience: bool = Field(default=False, exclude=True)
    """Said by a user that leaves by itself when a conversation goes nowhere."""
    seconds: float = Field(default=0.0, exclude=True)
    """Kept out of the trajectory file, so that equal seeds give equal bytes."""


class Difference(Frozen):
    """A place in the database that should look otherwise; None where there should be, or is, nothing."""

    path: str
    expected: Any = None
    actual: Any = None


SUCCESS = 1.0 - 1e-6
"""A reward from here on counts as a success, where it does not say itself what counts."""


class Breach(Frozen):
    """A rule of the policy that a conversation broke, where, and how it shows."""

    rule: str
    turn: int
    """Place of the message among the conversation's turns."""
    evidence: str
    policy: str = ""
    """The words of the policy that the rule stands for."""
    required: bool = True


class Reward(Frozen):
    """How well it went: a value, its parts, and evidence a person can read."""

    value: float
    success: bool | None = None
    """Whether the conversation counts as solved. None: where the value is 1 or more."""
    parts: dict[str, float] = {}
    why: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    """The first places where the database is not as it should be."""
    outcome: float | None = None
    """What the conversation would be worth without the rules of the policy. None: no rules were checked."""
    compliance: float | None = None
    """The share of the policy's rules that were kept."""
    breaches: tuple[Breach, ...] = ()

    @property
    def is_success(self) -> bool:
        """Whether the conversation counts as solved, in pass^k and everywhere else."""
        return self.value >= SUCCESS if self.success is None else self.success


Fault = Literal[
    "contradiction",
    "invention",
    "dump",
    "early_stop",
    "never_stops",
    "role",
    "quote",
    "ignored_question",
]
"""What a simulated user can do wrong."""


class Finding(Frozen):
    """One thing the user did wrong, with the evidence."""

    kind: Fault
    turn: int
    """Place of the message among the conversation's turns."""
    evidence: str
    by: Literal["rules", "judge"] = "rules"


class Trajectory(Frozen):
    """One conversation from its first message to its end."""

    id: str
    task: Task
    trial: int = 0
    seed: int = 0
    turns: tuple[Turn, ...]
    end: End
    reward: Reward | None = None
    """None where the conversation failed (`end` is `error`, or `stuck` by the user's fault): it never counts
    as 0 or 1."""
    error: str | None = None
    blame: Blame | None = None
    """Who spoilt it: on a conversation that failed or got stuck, and `user` where the audit of the user found
    something."""
    findings: tuple[Finding, ...] = ()
    """What the audit of the user found."""
    excluded: bool = False
    """True where the run leaves conversations with findings out: graded, on record, in no baseline."""
    meta: dict[str, Any] = {}

    @property
    def value(self) -> float:
        """The reward as a number; asking a failed conversation for it is a mistake."""
        if self.reward is None:
            raise ValueError(f"conversation {self.id} ended in '{self.end}' and has no reward")
        return self.reward.value

    @property
    def is_success(self) -> bool:
        """Whether it was graded and counts as solved."""
        return self.reward is not None and self.reward.is_success

    @property
    def is_failed(self) -> bool:
        """Whether it has no reward, by its end: something broke, or it got stuck by the user's fault."""
        return self.end == "error" or (self.end == "stuck" and self.blame == "user")

    def to_json(self) -> str:
        return self.model_dump_json(exclude_defaults=True)


def count_near_calls(trajectories: Iterable[Trajectory]) -> int:
    """Replies that look like tool calls but were not read as calls (`meta.near_calls`)."""
    found = (item.meta.get("near_calls") for item in trajectories)
    return sum(number for number in found if isinstance(number, int))


def count_stuck(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Conversations that got stuck, by the side to blame."""
    blamed = [item.blame or "agent" for item in trajectories if item.end == "stuck"]
    return {side: blamed.count(side) for side in ("agent", "user") if side in blamed}


def tell_stuck(stuck: Mapping[str, int]) -> str:
    """What to say about them."""
    agent, user = stuck.get("agent", 0), stuck.get("user", 0)
    return (
        f"stuck: {agent + user} conversations went nowhere and were ended: {agent} because of the agent "
        f"(reward 0), {user} because of the user (no reward, drawn again)"
    )


def tell_near_calls(number: int) -> str:
    """What to say about them, and what to do."""
    what = "replies look like tool calls" if number > 1 else "reply looks like a tool call"
    return (
        f"near calls: {number} {what} but not in the form that was asked for, and went to the user as text: "
        "fine-tune the model (trialogue sft DOMAIN), or set renderer.lenient=true to read such replies as "
        "calls"
    )


def differs(reward: float | None, success: float | None) -> bool:
    """Whether a mean reward says something else than the share of successes, beyond rounding."""
    return reward is not None and success is not None and abs(reward - success) >= 0.0005


def find_no_success(trajectories: Iterable[Trajectory]) -> tuple[float, float] | None:
    """The lowest and highest reward, where rewards vary, none counts as a success and none says what does."""
    rewards = [item.reward for item in trajectories if item.reward is not None]
    if not rewards or any(item.success is not None or item.is_success for item in rewards):
        return None
    values = [item.value for item in rewards]
    return (min(values), max(values)) if min(values) < max(values) else None


def tell_no_success(low: float, high: float) -> str:
    """What to say about them, and what to do."""
    return (
        f"success: no conversation counts as a success, although the rewards vary from {low:.3g} to "
        f"{high:.3g}: a reward counts from 1 on, unless it says what does: return Reward(value=…, success=…)"
    )


class Group(Frozen):
    """The conversations of one task; `failed` ones are kept for the record and never scored."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    failed: tuple[Trajectory, ...] = ()
    excluded: tuple[Trajectory, ...] = ()
    """Those spoilt by the user, where the run leaves them out: graded, but in no baseline."""

    @property
    def everything(self) -> tuple[Trajectory, ...]:
        """Graded, failed and excluded conversations."""
        return (*self.trajectories, *self.failed, *self.excluded)


H = TypeVar("H", Group, Trajectory)


def in_order(items: Iterable[H], tasks: Sequence[Task]) -> list[H]:
    """By task and trial, so that nothing depends on which conversation was over first."""
    place = {task.id: number for number, task in enumerate(tasks)}

    def find_place(item: Group | Trajectory) -> tuple[int, int, str]:
        first = place.get(item.task.id, len(place))
        return (first, item.trial, item.id) if isinstance(item, Trajectory) else (first, 0, "")

    return sorted(items, key=find_place)
