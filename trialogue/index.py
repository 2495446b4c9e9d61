"""One short line for each conversation of a run, so that ten thousand can be listed without reading them.

`index.jsonl` says of each conversation where it stands in its file and what a list of conversations shows.
It is written beside the trajectories and can always be made again from them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pydantic import Field

from trialogue.errors import Blame
from trialogue.messages import Frozen
from trialogue.task import Side
from trialogue.trajectory import End, Trajectory, count_near_calls

_SHOWN = 100
"""Letters of the first words of the user."""


class Spent(NamedTuple):
    """Tokens one side was billed for."""

    prompt: int
    completion: int


class Entry(Frozen):
    """A conversation in a list."""

    file: str
    """Name of the file in `trajectories/`, without its ending."""
    at: int = Field(ge=0)
    """Where its line begins, in bytes."""
    bytes: int = Field(gt=0)
    """How long the line is, its end included."""
    id: str
    task: str
    family: str = ""
    level: int = 0
    trial: int = 0
    end: End
    reward: float | None = None
    blame: Blame | None = None
    findings: int = 0
    """What the audit of the user found."""
    excluded: bool = False
    advantage: float | None = None
    turns: int = 0
    refused: int = 0
    """Calls that were refused or malformed."""
    near_calls: int = 0
    """Replies that look like tool calls but were not read as calls."""
    tokens: int = 0
    """Tokens the agent sampled."""
    tools: dict[str, int] = Field(default_factory=dict[str, int])
    """Calls of the agent by tool."""
    spent: dict[Side, Spent] = Field(default_factory=dict[Side, Spent])
    says: str = ""
    """How the user begins."""


def to_entry(trajectory: Trajectory, file: str, at: int, length: int) -> Entry:
    """What a list shows of a conversation."""
    tools: Counter[str] = Counter()
    spent: dict[Side, Spent] = {}
    refused = tokens = 0
    says = ""
    for turn in trajectory.turns:
        refused += turn.failed
        if turn.side == "agent":
            tools.update(call.name for call in turn.message.tool_calls)
            tokens += len(turn.tokens.reply) if turn.tokens is not None else 0
        elif not says:
            says = " ".join(turn.message.content[: 2 * _SHOWN].split())[:_SHOWN]
        if turn.usage is not None:
            before = spent.get(turn.side, Spent(0, 0))
            spent[turn.side] = Spent(
                before.prompt + turn.usage.prompt, before.completion + turn.usage.completion
            )
    advantage = trajectory.meta.get("advantage")
    return Entry(
        file=file,
        at=at,
        bytes=length,
        id=trajectory.id,
        task=trajectory.task.id,
        family=trajectory.task.family,
        level=trajectory.task.level,
        trial=trajectory.trial,
        end=trajectory.end,
        reward=None if trajectory.reward is None else trajectory.reward.value,
        blame=trajectory.blame,
        findings=len(trajectory.findings),
        excluded=trajectory.excluded,
        advantage=float(advantage) if isinstance(advantage, int | float) else None,
        turns=len(trajectory.turns),
        refused=refused,
        near_calls=count_near_calls([trajectory]),
        tokens=tokens,
        tools=dict(tools),
        spent=spent,
        says=says,
    )
