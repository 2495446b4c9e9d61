"""A corpus of conversations: which ones are accepted, why others are rejected, and its files.

Decisions are made in the order of the tasks. So they depend neither on which conversation ended first nor on
how often the run was stopped.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, cast

from trialogue.config import Synthesis
from trialogue.durable import saving, sync
from trialogue.errors import ConfigError
from trialogue.messages import Message
from trialogue.records import write_records
from trialogue.score.contamination import find_writes
from trialogue.secrets import redact_data
from trialogue.talk.conversation import Party
from trialogue.talk.model import Model
from trialogue.talk.rollout import derive_seed
from trialogue.task import Task
from trialogue.trajectory import Trajectory
from trialogue.world.database import canonical
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain
from trialogue.world.tools import Tool

# -- as the agent sees it ----------------------------------------------------------------------------------


def to_messages(trajectory: Trajectory, domain: Domain) -> list[Message]:
    """The conversation as the agent sees it, with its policy first."""
    environment = domain.open(trajectory.task)
    party = Party("agent", cast("Model", None), environment.policy, environment.tools)
    return [turn.message for turn in party.sees(trajectory.turns)]


def to_said_text(trajectory: Trajectory) -> str:
    """Words and calls of a conversation, without ids that differ between recordings."""
    lines: list[str] = []
    for turn in trajectory.turns:
        message = turn.message
        lines.append(f"{turn.side}/{message.role}: {message.content}")
        lines += [f"{call.name} {canonical(call.arguments)}" for call in message.tool_calls]
    return "\n".join(lines)


# -- sifting -----------------------------------------------------------------------------------------------


class Doubles:
    """Finds duplicates: equal conversations by hash, similar ones by their word triples."""

    def __init__(self, similar: float) -> None:
        self._equal: dict[str, str] = {}
        self._index: Any = None
        self._similar = similar
        if similar < 1:
            from datasketch import MinHashLSH

            self._index = MinHashLSH(threshold=similar, num_perm=_PERMUTATIONS)
            self._prints: dict[str, Any] = {}

    def find(self, trajectory: Trajectory) -> tuple[str, str] | None:
        """(reason, id of the earlier conversation) for a duplicate; otherwise remember it and return None."""
        text = to_said_text(trajectory)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if digest in self._equal:
            return "duplicate", self._equal[digest]
        self._equal[digest] = trajectory.id
        if self._index is None:
            return None
        fingerprint = to_fingerprint(text)
        alike = [
            other
            for other in self._index.query(fingerprint)
            if self._prints[other].jaccard(fingerprint) >= self._similar
        ]
        if alike:
            return "near duplicate", min(alike)
        self._index.insert(trajectory.id, fingerprint)
        self._prints[trajectory.id] = fingerprint
        return None


_PERMUTATIONS = 128
_WORD = re.compile(r"\w+")


def to_fingerprint(text: str) -> Any:
    """The MinHash of a text's word triples."""
    from datasketch import MinHash

    words = _WORD.findall(text.lower())
    triples = {" ".join(words[place : place + 3]) for place in range(max(1, len(words) - 2))}
    fingerprint = MinHash(num_perm=_PERMUTATIONS, seed=1)
    fingerprint.update_batch([triple.encode("utf-8", "surrogatepass") for triple in sorted(triples)])
    return fingerprint


_SHARED = 8
"""Number of consecutive words that do not repeat by chance."""


class Forbidden:
    """Tasks that must not be trained on: the sets that a model will be tested on."""

    def __init__(self, sets: Sequence[str], data: str | None) -> None:
        self._writes: dict[frozenset[str], str] = {}
        self._phrases: dict[str, str] = {}
        for reference in sets:
            name, _, split = reference.rpartition("/")
            if not name:
                raise ConfigError(
                    f"'{reference}' names no split; write DOMAIN/SPLIT, such as tau2:retail/base"
                )
            domain = find_domain(name, data)
            for task in domain.tasks(split):
                where = f"{reference} {task.id}"
                writes = find_writes(domain, task)
                if writes:
                    self._writes.setdefault(writes, where)
                for phrase in to_phrases(task.instructions):
                    self._phrases.setdefault(phrase, where)
        self.is_empty = not sets

    def find(self, trajectory: Trajectory, domain: Domain, usual: frozenset[str]) -> str | None:
        """The forbidden task that a conversation reveals by its gold writes or by eight consecutive words."""
        if self.is_empty:
            return None
        writes = find_writes(domain, trajectory.task)
        if writes and writes in self._writes:
            return f"the gold writes are those of {self._writes[writes]}"
        said = [turn.message.content for turn in trajectory.turns if turn.side == "user"]
        for phrase in to_phrases("\n".join([trajectory.task.instructions, *said])):
            if phrase in self._phrases and phrase not in usual:
                return f"'{phrase}' is in {self._phrases[phrase]}"
        return None


def to_phrases(text: str) -> set[str]:
    """All sequences of eight words."""
    words = _WORD.findall(text.lower())
    return {" ".join(words[place : place + _SHARED]) for place in range(len(words) - _SHARED + 1)}


def find_usual(tasks: Sequence[Task]) -> frozenset[str]:
    """Phrases in more than a twentieth of the tasks: they are the wording of the domain."""
    counts = Counter(phrase for task in tasks for phrase in to_phrases(task.instructions))
    return frozenset(phrase for phrase, count in counts.items() if count > max(2, len(tasks) / 20))


@dataclass(slots=True)
class Sieve:
    """Decides about conversations one by one and remembers the accepted ones."""

    domain: Domain
    settings: Synthesis
    families: int
    forbidden: Forbidden
    usual: frozenset[str]
    doubles: Doubles = field(init=False)
    taken: Counter[str] = field(default_factory=Counter[str], init=False)

    def __post_init__(self) -> None:
        self.doubles = Doubles(self.settings.similar)

    def find_reason(self, trajectory: Trajectory) -> tuple[str, str] | None:
        """Why a verified conversation is rejected: (reason, evidence), or None."""
        given_away = self.forbidden.find(trajectory, self.domain, self.usual)
        if given_away:
            return "contaminated", given_away
        family = trajectory.task.family
        share = self.settings.balance * self.settings.count / max(1, self.families)
        if self.settings.balance and self.families > 1 and self.taken[family] >= ceil(share):
            return "balance", f"there are {self.taken[family]} of family '{family}' already"
        double = self.doubles.find(trajectory)
        if double is not None:
            return double[0], f"like {double[1]}"
        self.taken[family] += 1
        return None


def find_split(task: Task, settings: Synthesis, seed: int) -> str:
    """`train` or `validation`: all conversations of a scenario are in the same part."""
    scenario = task.family if settings.split_by == "family" else task.id
    chance = derive_seed(seed, "validation", scenario) / 2**48
    return "validation" if chance < settings.validation else "train"


# -- files -------------------------------------------------------------------------------------------------


def write_lines(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories as JSON lines. After a crash the file is either the old or the new one."""
    write_records(path, [item.to_json() for item in trajectories])


def write_parquet(path: Path, trajectories: Sequence[Trajectory], domain: Domain) -> None:
    """Write conversations in the OpenAI format that TRL and others read: `messages` and `tools`.

    `tools` is JSON text, because rows may have different tools and a column of structures would give each
    tool the parameters of all others."""
    import pyarrow
    from pyarrow import parquet

    call = pyarrow.struct(
        [
            ("id", pyarrow.string()),
            ("type", pyarrow.string()),
            ("function", pyarrow.struct([("name", pyarrow.string()), ("arguments", pyarrow.string())])),
        ]
    )
    message = pyarrow.struct(
        [
            ("role", pyarrow.string()),
            ("content", pyarrow.string()),
            ("tool_calls", pyarrow.list_(call)),
            ("tool_call_id", pyarrow.string()),
        ]
    )
    schema = pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("task", pyarrow.string()),
            ("split", pyarrow.string()),
            ("scenario", pyarrow.string()),
            ("messages", pyarrow.list_(message)),
            ("tools", pyarrow.string()),
            ("reward", pyarrow.float64()),
            ("provenance", pyarrow.string()),
        ]
    )
    rows = [
        {
            "id": item.id,
            "task": item.task.id,
            "split": item.task.split,
            "scenario": f"{item.task.domain}/{item.task.family}",
            "messages": [message.to_openai() for message in to_messages(item, domain)],
            "tools": to_schemas(domain.open(item.task).tools.values()),
            "reward": None if item.reward is None else item.reward.value,
            "provenance": json.dumps(item.meta.get("provenance"), ensure_ascii=False),
        }
        for item in trajectories
    ]
    table = pyarrow.Table.from_pylist(redact_data(rows), schema)
    partial = path.with_suffix(path.suffix + ".partial")
    with saving(path):
        parquet.write_table(table, partial, compression="zstd")
        sync(partial)
        partial.replace(path)
        sync(path.parent)


def to_schemas(tools: Iterable[Tool]) -> str:
    return json.dumps([tool.schema for tool in tools], ensure_ascii=False)
