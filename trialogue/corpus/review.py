"""Verdicts about conversations by a program, a judge with a rubric, or a person, stored beside the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from trialogue.corpus.verify import Flaw
from trialogue.durable import mend
from trialogue.errors import GradeError, ModelError, RunError
from trialogue.messages import Frozen, Message
from trialogue.reading import find_object, from_json, read_table
from trialogue.records import append_records, read_lines, write_records
from trialogue.talk.model import Model, ModelSource
from trialogue.trajectory import Trajectory, Turn
from trialogue.world.domain import Domain

Stage = Literal["program", "sift", "judge", "review"]


class Verdict(Frozen):
    """The verdict of one stage about one conversation."""

    id: str
    stage: Stage
    accepted: bool
    reasons: tuple[str, ...] = ()
    note: str = ""
    by: str = ""
    """The model or person that gave the verdict."""
    scores: dict[str, int] = {}
    flaws: tuple[Flaw, ...] = ()


class Verdicts:
    """The recorded verdicts of a folder. A later verdict of the same stage replaces an earlier one."""

    def __init__(self, path: Path) -> None:
        self.file = path / "verdicts.jsonl" if path.is_dir() else path.with_suffix(".verdicts.jsonl")
        self._known: dict[tuple[str, Stage], Verdict] = {}
        if not self.file.exists():
            return
        mend(self.file)
        for number, line in read_lines(self.file):
            try:
                verdict = Verdict.model_validate(line)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                raise RunError(f"{self.file}, line {number}: not a verdict: {first['msg']}") from None
            self._known[verdict.id, verdict.stage] = verdict

    def has(self, identity: str, stage: Stage) -> bool:
        return (identity, stage) in self._known

    def find(self, identity: str) -> list[Verdict]:
        """The verdicts of the judge and the reviewer about a conversation, if any."""
        stages: tuple[Stage, ...] = ("judge", "review")
        return [self._known[identity, stage] for stage in stages if (identity, stage) in self._known]

    def add(self, verdict: Verdict) -> None:
        append_records(self.file, [verdict.model_dump_json(exclude_defaults=True)])
        self._known[verdict.id, verdict.stage] = verdict


def review(
    trajectories: Sequence[Trajectory],
    verdicts: Verdicts,
    show: Callable[[Trajectory, str], None],
    ask: Callable[[str], str],
    by: str,
) -> int:
    """Let a person decide about conversations one by one. Returns the number of decisions."""
    waiting = [item for item in trajectories if not verdicts.has(item.id, "review")]
    decided = 0
    for number, item in enumerate(waiting, 1):
        show(item, f"{number} of {len(waiting)}")
        while True:
            try:
                word, _, note = ask(QUESTION).strip().partition(" ")
            except EOFError:
                return decided
            if word in ("q", "quit"):
                return decided
            if word in ("s", "skip"):
                break
            accepted = {"a": True, "accept": True, "r": False, "reject": False}.get(word)
            if accepted is None or (not accepted and not note.strip()):
                continue  # ask again: a rejection needs a reason
            reasons = () if accepted else (note.strip(),)
            verdicts.add(
                Verdict(
                    id=item.id, stage="review", accepted=accepted, reasons=reasons, note=note.strip(), by=by
                )
            )
            decided += 1
            break
    return decided


def write_reviewed(file: Path, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Write accepted and rejected conversations with their verdicts beside a JSONL file."""
    verdicts = Verdicts(file)
    counts: dict[str, Any] = {}
    for name, wanted in (("accepted", True), ("rejected", False)):
        lines: list[str] = []
        for item in trajectories:
            found = [verdict for verdict in verdicts.find(item.id) if verdict.stage == "review"]
            if found and found[0].accepted is wanted:
                kept = [
                    *item.meta.get("verdicts", ()),
                    found[0].model_dump(mode="json", exclude_defaults=True),
                ]
                lines.append(item.model_copy(update={"meta": {**item.meta, "verdicts": kept}}).to_json())
        write_records(file.with_suffix(f".{name}.jsonl"), lines)
        counts[name] = len(lines)
    return counts


QUESTION = "a [NOTE] accept · r REASON reject · s skip · q stop > "


# -- the judge ---------------------------------------------------------------------------------------------

PROMPTS: dict[str, Any] = read_table(__file__, "prompts.toml")["judge"]
RUBRIC: dict[str, str] = PROMPTS["rubric"]
"""The points of a judge: each gets a score from 1 (bad) to 5 (good)."""
LOWEST = 4
"""A lower score in any point rejects a conversation."""


class _Judgement(Frozen):
    scores: dict[str, int]
    reasons: tuple[str, ...] = ()
    model_config = Frozen.model_config | {"extra": "ignore"}


class _Score(Frozen):
    value: int = Field(ge=1, le=5)


async def judge_all(
    trajectories: Sequence[Trajectory], domain: Domain, judge: ModelSource, name: str, at_once: int = 32
) -> AsyncGenerator[Verdict]:
    """Judge several conversations at the same time. An unreadable answer is an error."""
    room = asyncio.Semaphore(at_once)

    async def one(item: Trajectory) -> Verdict:
        async with room:
            return await judge_one(item, domain, judge(item.task, item.seed), name)

    jobs = [asyncio.create_task(one(item)) for item in trajectories]
    try:
        for job in asyncio.as_completed(jobs):
            yield await job
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def judge_one(trajectory: Trajectory, domain: Domain, model: Model, name: str) -> Verdict:
    """Judge one conversation. An unreadable answer is asked for once more."""
    rubric = "\n".join(f"- {point}: {meaning}" for point, meaning in RUBRIC.items())
    keys = ", ".join(f'"{point}": 1-5' for point in RUBRIC)
    system = PROMPTS["instructions"].format(rubric=rubric, keys=keys)
    turns = [
        Turn(side="user", message=Message(role="system", content=system)),
        Turn(side="agent", message=Message(role="user", content=to_transcript(trajectory, domain))),
    ]
    problem = ""
    for _ in range(2):
        answer = (await model.reply(turns, [])).content
        try:
            return read_judgement(trajectory.id, answer, name)
        except GradeError as error:
            problem = str(error)
            turns += [
                Turn(side="user", message=Message(role="assistant", content=answer or "(nothing)")),
                Turn(
                    side="agent",
                    message=Message(role="user", content=f"{problem}. Answer with the JSON object."),
                ),
            ]
    raise ModelError(f"the answer of the judge {name} cannot be read: {problem}", "judge")


def read_judgement(identity: str, answer: str, name: str) -> Verdict:
    """Convert a judge's answer to a verdict."""
    found = find_object(answer)
    try:
        judgement = _Judgement.model_validate(from_json(found) if found else None)
        for value in judgement.scores.values():
            _Score(value=value)
    except (ValueError, RecursionError) as error:
        line = str(error).splitlines()[0]
        raise GradeError(f"'{answer[:80]}' is not a judgement: {line}") from None
    missing = sorted(set(RUBRIC) - set(judgement.scores))
    if missing:
        raise GradeError(f"the judgement has no score for {', '.join(missing)}")
    low = tuple(point for point in RUBRIC if judgement.scores[point] < LOWEST)
    return Verdict(
        id=identity,
        stage="judge",
        accepted=not low,
        reasons=low,
        note="; ".join(judgement.reasons),
        by=name,
        scores={point: judgement.scores[point] for point in RUBRIC},
    )


def to_transcript(trajectory: Trajectory, domain: Domain) -> str:
    """Policy, scenario and conversation as a judge or a person reads them."""
    lines = [
        "# Policy of the agent",
        domain.open(trajectory.task).policy.strip(),
        "# Scenario of the user",
        trajectory.task.instructions.strip(),
        "# Transcript",
        *to_transcript_lines(trajectory),
        f"(ended by {trajectory.end})",
    ]
    return "\n\n".join(lines[:5]) + "\n" + "\n".join(lines[5:])


def to_transcript_lines(trajectory: Trajectory) -> list[str]:
    lines: list[str] = []
    for turn in trajectory.turns:
        message = turn.message
        if message.role == "tool":
            lines.append(f"TOOL: {message.content}")
        elif message.content:
            lines.append(f"{turn.side.upper()}: {message.content}")
        for call in message.tool_calls:
            arguments: Any = call.arguments
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            lines.append(f"{turn.side.upper()} CALLS {call.name} {shown}")
    return lines
