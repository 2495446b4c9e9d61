"""One short line for each conversation of a run, so that ten thousand can be listed without reading them.

`index.jsonl` says of each conversation where it stands in its file and what a list of conversations shows.
It is written beside the trajectories and can always be made again from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from trialogue.errors import Blame, RunError
from trialogue.lines import read_lines, read_spans
from trialogue.messages import Frozen
from trialogue.reading import reading
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
    success: bool | None = None
    """Whether it counts as solved, where its reward says so itself."""
    without_rules: float | None = None
    """What it would be worth without the rules of the policy."""
    compliance: float | None = None
    """The share of the policy's rules that were kept."""
    breaches: int = 0
    """How many of them were broken."""
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
        success=None if trajectory.reward is None else trajectory.reward.success,
        without_rules=None if trajectory.reward is None else trajectory.reward.outcome,
        compliance=None if trajectory.reward is None else trajectory.reward.compliance,
        breaches=0 if trajectory.reward is None else len(trajectory.reward.breaches),
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


def to_index(name: str, items: Iterable[Trajectory], at: int, lengths: Iterable[int]) -> Iterator[str]:
    """The lines of the index for conversations that stand one after the other in a file, from `at` on."""
    for item, length in zip(items, lengths, strict=True):
        yield to_entry(item, name, at, length).model_dump_json(exclude_defaults=True)
        at += length


def remake_index(files: Iterable[Path]) -> Iterator[str]:
    """The lines of the index for all conversations in these files."""
    for file in files:
        for line in read_spans(file):
            with reading(f"{file}, line {line.number}", RunError):
                item = Trajectory.model_validate(line.value)
            yield to_entry(item, file.stem, line.at, line.length).model_dump_json(exclude_defaults=True)


def is_listed(path: Path) -> bool:
    """Whether the index of a run reaches to the end of every file."""
    reach: dict[str, int] = {}
    try:
        for _, line in read_lines(path / "index.jsonl") if (path / "index.jsonl").exists() else ():
            entry = Entry.model_validate(line)
            reach[entry.file] = entry.at + entry.bytes
    except (RunError, ValidationError):
        return False
    files = (path / "trajectories").glob("*.jsonl")
    return reach == {file.stem: size for file in files if (size := file.stat().st_size)}
