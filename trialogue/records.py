"""The records of a run: files of JSON lines, each with its number and digest, and an index of conversations.

A line ends with `"digest":"N-HASH"`: the number of the line in its file, and a BLAKE2b hash (8 bytes) of the
number, a space and the line without this field. A line without a digest is read all the same: it came from
elsewhere. `index.jsonl` says of each conversation where it stands in its file and what a list shows of it, so
that ten thousand can be listed without reading them. It can be made again from the trajectories.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import Field, ValidationError

from trialogue.durable import append_bytes, write
from trialogue.errors import Blame, RunError
from trialogue.messages import Frozen
from trialogue.reading import explain, from_json, reading
from trialogue.secrets import redact
from trialogue.task import Side
from trialogue.trajectory import End, Trajectory, count_near_calls

_LONGEST_STAMP = 64
_STAMP = re.compile(rb',?"digest":"([1-9][0-9]{0,11})-([0-9a-f]{16})"\}\n?\Z')


def to_digest(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()


def stamp(line: str, number: int) -> str:
    """A JSON object on one line with its digest as the last field."""
    if not line.endswith("}"):
        raise ValueError(f"only a JSON object has a digest, not {line[:80]!r}")
    comma = "" if line == "{}" else ","
    digest = to_digest(b"%d " % number + line.encode())
    return f'{line[:-1]}{comma}"digest":"{number}-{digest}"}}'


def check_line(line: bytes) -> tuple[int | None, bool]:
    """The number in a line's digest, None where it has none, and whether the digest agrees."""
    start = max(0, len(line) - _LONGEST_STAMP)
    found = _STAMP.search(line, start)
    if found is None:
        return None, False
    number = int(found[1])
    return number, to_digest(b"%d " % number + line[: found.start()] + b"}").encode() == found[2]


def unstamp(line: bytes) -> bytes:
    """A line without its digest."""
    found = _STAMP.search(line, max(0, len(line) - _LONGEST_STAMP))
    return line if found is None else line[: found.start()] + b"}\n"


def append_records(path: Path, lines: Sequence[str]) -> list[int]:
    """Append JSON objects to a file of lines, each with its digest. Returns their lengths in bytes."""
    stamped = _stamp_all(lines, find_next(path))
    append_bytes(path, b"".join(stamped))
    return [len(line) for line in stamped]


def write_records(path: Path, lines: Sequence[str]) -> list[int]:
    """Write all lines of a file at once, each with its digest. Returns their lengths in bytes."""
    stamped = _stamp_all(lines, 1)
    write(path, b"".join(stamped).decode())
    return [len(line) for line in stamped]


def _stamp_all(lines: Sequence[str], first: int) -> list[bytes]:
    """Secrets are masked before the digest is computed, not after."""
    masked = redact("\n".join(lines)).split("\n") if lines else []
    return [f"{stamp(line, number)}\n".encode() for number, line in enumerate(masked, first)]


def find_next(path: Path) -> int:
    """The number of the next line of a file; it stands at the end of the last one."""
    try:
        with path.open("rb") as source:
            size = source.seek(0, 2)
            source.seek(max(0, size - _LONGEST_STAMP))
            if found := _STAMP.search(source.read()):
                return int(found[1]) + 1
            source.seek(0)
            return sum(1 for _ in source) + 1
    except FileNotFoundError:
        return 1


class Line(NamedTuple):
    """A line of a JSONL file: which one, where it begins and how long it is in bytes, and what it says."""

    number: int
    at: int
    length: int
    value: dict[str, Any]


def read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; a last line cut off by a crash is left out, but a
    file that does not even begin with an object is something else."""
    return ((line.number, line.value) for line in read_spans(file))


def read_spans(file: Path) -> Iterator[Line]:
    """The same with the place of each line."""
    try:
        source = file.open("rb")
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}") from None
    at = 0
    with source:
        for number, line in enumerate(source, 1):
            start, at = at, at + len(line)
            if not line.strip():
                continue
            try:
                value = from_json(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                begun = number > 1 or line.lstrip().startswith(b"{")
                if begun and not line.endswith(b"\n"):
                    return
                raise RunError(f"{file}, line {number}: {explain(error)}") from None
            if not isinstance(value, dict):
                raise RunError(f"{file}, line {number}: not a JSON object")
            stamped, agrees = check_line(line)
            if stamped is not None and not agrees:
                raise RunError(f"{file}, line {number}: was changed: its digest does not agree")
            plain = cast("dict[str, Any]", value)
            plain.pop("digest", None)  # also where another program wrote the line anew
            yield Line(number, start, len(line), plain)


# -- the index ---------------------------------------------------------------------------------------------

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
