"""Answers to the page's requests as plain data: all runs, one run, its conversations, one conversation.

The server returns them one at a time; an export embeds some of them in a file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, cast

from trialogue.config import (
    EvalConfig,
    Section,
    SftConfig,
    SynthesizeConfig,
    TrainConfig,
    difference_from_defaults,
    to_config,
)
from trialogue.errors import ConfigError, RunError
from trialogue.records import Entry, unstamp
from trialogue.trajectory import SUCCESS, tell_near_calls
from trialogue.view.run_reader import RunRecords, find_runs, to_place
from trialogue.view.tokens import to_shown_tokens

POINTS = 600
"""Maximum number of points of a curve; longer curves are thinned."""
SPARKS = 60
PAGE = 200
"""Maximum number of conversations in one answer."""
_SEARCH_SECONDS = 0.4
"""Time limit of a text search; the answer then says how far it got."""
SERIES = (
    *("reward", "reward_spread", "success", "turns", "tool_calls", "tool_errors", "reply_tokens", "cut_off"),
    *("entropy", "kl", "clip_share", "logprob_gap", "grad_norm", "learning_rate", "loss", "validation_loss"),
    *("no_signal", "failed", "cost", "unique_replies", "outcome", "compliant"),
)
FILTERS = (
    *("part", "step", "end", "blame", "family", "level", "reward", "verdict", "task", "text", "lost", "sort"),
)
"""Filters of the list of conversations, under the names used in the page's address."""
INJURIES = 20
"""Maximum number of injured records listed."""
Query = Mapping[str, str]


class Answers:
    """Answers about the runs in a folder. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._records: dict[str, RunRecords] = {}
        self._lock = Lock()

    def find(self) -> dict[str, RunRecords]:
        """The runs now in the folder, by name."""
        with self._lock:
            known = self._records
            self._records = {
                name: known[name] if name in known else RunRecords(path)
                for name, path in find_runs(self.root).items()
            }
            return self._records

    def read_ahead(self) -> None:
        """Read the most recently written run, which is likely to be asked for first."""
        newest = max(self.find().values(), key=RunRecords.written, default=None)
        if newest is not None:
            newest.refresh()

    def open(self, name: str) -> RunRecords:
        """The records of a run. Only runs found in the folder can be opened."""
        records = self._records.get(name) or self.find().get(name)
        if records is None:
            raise RunError(f"there is no run '{name}'")
        return records

    def runs(self) -> list[dict[str, Any]]:
        """One line per run, the newest first."""
        lines: list[dict[str, Any]] = []
        for name, records in self.find().items():
            records.refresh_metrics()
            lines.append(to_run_line(name, records))
        return sorted(lines, key=lambda line: str(line["created"]), reverse=True)

    def run(self, name: str) -> dict[str, Any]:
        """Everything that the page of a run shows above its list of conversations."""
        records = self.open(name)
        records.refresh()
        return {**to_run_line(name, records), **to_overview(records)}

    def conversations(self, name: str, query: Query) -> dict[str, Any]:
        """One page of the filtered list of conversations."""
        records = self.open(name)
        records.refresh()
        offset, limit = _number(query, "offset", 0), min(_number(query, "limit", PAGE), PAGE)
        chosen = choose(records, query)
        if query.get("text"):
            return search(records, chosen, query["text"], offset, limit)
        rows = [to_row(entry, records) for entry in chosen[offset : offset + limit]]
        return {"total": len(chosen), "offset": offset, "rows": rows, "version": records.version}

    def conversation(self, name: str, identity: str, query: Query) -> dict[str, Any]:
        """One conversation without token ids, with its siblings and its neighbours in the list."""
        records = self.open(name)
        records.refresh()
        entry = records.find(identity)
        if entry is None:
            raise RunError(f"run '{name}' has no conversation '{identity}'")
        trajectory = read_trajectory(records, entry)
        for turn in trajectory["turns"]:
            if tokens := turn.pop("tokens", None):
                turn["sampled"] = len(tokens["reply"])
        chosen = [] if query.get("text") else choose(records, query)
        place = next((number for number, item in enumerate(chosen) if item.id == identity), None)
        return {
            "entry": to_row(entry, records),
            "trajectory": trajectory,
            "seconds": records.read_seconds(identity),
            "siblings": [to_row(item, records) for item in records.siblings(entry)],
            "place": place,
            "total": len(chosen),
            "previous": chosen[place - 1].id if place else None,
            "next": chosen[place + 1].id if place is not None and place + 1 < len(chosen) else None,
            "decision": records.decisions.get(identity),
            "prompts": records.read_json("prompts.json"),
        }

    def tokens(self, name: str, identity: str) -> dict[str, Any]:
        """The sampled and the observed tokens of a conversation, as in its training rows."""
        records = self.open(name)
        entry = records.find(identity)
        if entry is None:
            raise RunError(f"run '{name}' has no conversation '{identity}'")
        turns = read_trajectory(records, entry)["turns"]
        return {"advantage": entry.advantage, "turns": to_shown_tokens(turns, records.path)}


# -- one run -------------------------------------------------------------------------------------------------


def to_run_line(name: str, records: RunRecords) -> dict[str, Any]:
    """A run in the list of runs."""
    about, config, result = records.about, records.read_json("config.json"), records.read_json("result.json")
    kind = about.get("kind", "")
    steps, checks = records.steps, records.evaluations
    figures = result or (checks[-1] if checks else {})
    curve = [line.get("loss" if kind == "sft" else "reward") for line in steps]
    costs = [line["cost"] for line in records.metrics if line.get("cost") is not None]
    return {
        "name": name,
        "kind": kind,
        "domain": about.get("domain", ""),
        "state": about.get("state", ""),
        "created": about.get("created", ""),
        "ended": about.get("ended"),
        "written": records.written(),
        "seed": about.get("seed"),
        "model": config.get("learner" if kind in ("train", "sft") else "agent", {}).get("model", ""),
        "user": config.get("user", {}).get("model", "") if kind != "sft" else "",
        "step": steps[-1]["step"] if steps else None,
        "steps": (steps[-1].get("steps") if steps else None) or config.get("training", {}).get("steps"),
        "curve": thin([value for value in curve if value is not None], SPARKS),
        "pass1": [figures.get(key) for key in ("pass^1", "pass^1_low", "pass^1_high")],
        "reward": figures.get("reward"),
        "cost": sum(costs) if costs else None,
    }


def to_overview(records: RunRecords) -> dict[str, Any]:
    """Curves, health and facets of a run."""
    steps = records.steps
    shown = thin(steps, POINTS)
    numbers = [line["step"] for line in shown]
    series = {key: [line.get(key) for line in shown] for key in SERIES}
    tools, breaches = Counter[str](), Counter[str]()
    for line in shown:
        tools.update(line.get("tools", {}))
        breaches.update(line.get("breaches", {}))
    entries = list(records.entries())
    recent = steps[-10:]
    near = sum(entry.near_calls for entry in entries)
    return {
        "version": records.version,
        "scanning": records.scanning or records.is_inspecting,
        "count": len(entries),
        "injuries": records.injuries[:INJURIES],
        "injured": len(records.injuries),
        "broken": sum(file.broken for file in records.files.values()),
        "command": records.about.get("command", []),
        "versions": records.about.get("versions", {}),
        "changed": find_changed(records),
        "result": records.read_json("result.json"),
        "steps_shown": numbers,
        "series": {key: values for key, values in series.items() if any(v is not None for v in values)},
        "tools": {
            name: [line.get("tools", {}).get(name, 0) for line in shown] for name, _ in tools.most_common(8)
        },
        "breaches": {rule: [find_share(line, rule) for line in shown] for rule, _ in breaches.most_common(5)},
        "families": {
            name: [line.get("families", {}).get(name) for line in shown]
            for name in sorted({name for line in shown for name in line.get("families", {})})[:8]
        },
        "seconds": to_seconds(records, numbers),
        "checks": [
            {"step": line["step"], **{key: line.get(key) for key in ("pass^1", "pass^1_low", "pass^1_high")}}
            for line in records.evaluations
            if "step" in line
        ],
        "health": {
            "no_signal": _mean([line["no_signal"] for line in recent if "no_signal" in line]),
            "ends": dict(Counter(entry.end for entry in entries).most_common()),
            "blame": dict(Counter(entry.blame for entry in entries if entry.blame).most_common()),
            "near_calls": tell_near_calls(near) if near else None,
            "warnings": [
                {"step": line["step"], "text": text}
                for line in [line for line in records.metrics if "step" in line][-100:]
                for text in line.get("warnings", ())
            ][-5:],
        },
        "decisions": count_decisions(records),
        "facets": {
            "family": sorted({entry.family for entry in entries if entry.family}),
            "level": sorted({entry.level for entry in entries if entry.level}),
            "files": [
                {"part": to_place(name).part, "step": to_place(name).step} for name in sorted(records.files)
            ],
        },
    }


def find_share(line: Mapping[str, Any], rule: str) -> float | None:
    """The share of a step's conversations that break a rule. None: its rules were not checked."""
    held = line.get("conversations")
    return line["breaches"].get(rule, 0) / held if held and "breaches" in line else None


def to_seconds(records: RunRecords, steps: Sequence[int]) -> dict[str, list[float]]:
    """Wall-clock seconds of each step. Conversations overlap, so the rollout time is divided in proportion
    to the time spent in agent, user and tools."""
    if not any(records.seconds.get(step, {}).get("update") for step in steps):
        return {}
    parts: dict[str, list[float]] = {name: [] for name in ("agent", "user", "tools", "update", "evaluate")}
    for step in steps:
        spent = records.seconds.get(step, {})
        talked = sum(spent.get(side, 0.0) for side in ("agent", "user", "tools"))
        for side in ("agent", "user", "tools"):
            share = spent.get(side, 0.0) / talked if talked else float(side == "agent")
            parts[side].append(round(spent.get("rollout", 0.0) * share, 3))
        parts["update"].append(round(spent.get("update", 0.0), 3))
        parts["evaluate"].append(round(spent.get("evaluate", 0.0), 3))
    return parts


def find_changed(records: RunRecords) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    kinds: dict[str, type[Section]] = {"train": TrainConfig, "sft": SftConfig, "synthesize": SynthesizeConfig}
    kind = kinds.get(str(records.about.get("kind")), EvalConfig)
    try:
        return difference_from_defaults(to_config(kind, records.read_json("config.json"), "config.json"))
    except ConfigError:  # written by another version
        return {}


# -- conversations -------------------------------------------------------------------------------------------


def to_row(entry: Entry, records: RunRecords) -> dict[str, Any]:
    """A conversation in a list, with the outcomes of its group."""
    place = to_place(entry.file)
    row = entry.model_dump(exclude={"at", "bytes", "spent", "file"})
    group = [[item.id, find_outcome(item)] for item in records.siblings(entry)]
    verdicts = to_verdicts(records.decisions.get(entry.id, {}))
    facts = {"outcome": find_outcome(entry), "part": place.part, "step": place.step}
    return {**row, **facts, "group": group, "verdicts": verdicts}


def choose(records: RunRecords, query: Query) -> list[Entry]:
    """The conversations that pass every filter except the text search, in the requested order."""
    wanted = tuple((key, query[key]) for key in FILTERS if query.get(key) and key != "text")
    return _choose(records, records.version, wanted)


@lru_cache(maxsize=16)
def _choose(records: RunRecords, version: int, wanted: tuple[tuple[str, str], ...]) -> list[Entry]:
    query = dict(wanted)
    order = query.pop("sort", "new")
    lost = query.pop("lost", "")
    verdict = query.pop("verdict", "")
    chosen = [entry for entry in records.entries() if _passes(entry, query)]
    if verdict:
        chosen = [entry for entry in chosen if verdict in to_verdicts(records.decisions.get(entry.id, {}))]
    if lost:
        groups = records.groups()
        chosen = [entry for entry in chosen if is_lost_by_all(groups[entry.file, entry.task])]
    match order.removeprefix("-"):
        case "reward":
            chosen.sort(key=lambda entry: -1.0 if entry.reward is None else entry.reward)
        case "turns":
            chosen.sort(key=lambda entry: entry.turns)
        case "tokens":
            chosen.sort(key=lambda entry: entry.tokens)
        case "advantage":
            chosen.sort(key=lambda entry: entry.advantage or 0.0)
        case _:
            chosen.sort(key=lambda entry: -(to_place(entry.file).step or 0))
    return chosen[::-1] if order.startswith("-") else chosen


def _passes(entry: Entry, query: Mapping[str, str]) -> bool:
    place = to_place(entry.file)
    for key, value in query.items():
        match key:
            case "part":
                passes = place.part == value
            case "step":
                passes = str(place.step) == value
            case "reward":
                passes = find_outcome(entry) == value
            case "task":
                passes = value.lower() in entry.task.lower()
            case "level":
                passes = str(entry.level) == value
            case _:
                passes = getattr(entry, key) == value
        if not passes:
            return False
    return True


def find_outcome(entry: Entry) -> str:
    """`won`, `lost`, `between`, or `none` without a reward."""
    if entry.reward is None:
        return "none"
    if entry.success is not None:
        return "won" if entry.success else "lost"
    return "won" if entry.reward >= SUCCESS else "lost" if entry.reward <= 0 else "between"


def is_lost_by_all(group: Sequence[Entry]) -> bool:
    """Whether none of a task's conversations was won."""
    return all(find_outcome(entry) != "won" for entry in group)


def to_verdicts(decision: Mapping[str, Any]) -> list[str]:
    """The filter values that match a decision about a synthesised conversation. `to review` marks those that
    `trialogue review` will show to a person."""
    if not decision:
        return []
    reviewed = any(verdict.get("stage") == "review" for verdict in decision.get("verdicts", ()))
    accepted = bool(decision.get("accepted"))
    waiting = ["to review"] if accepted and not reviewed else []
    return [
        "accepted" if accepted else "rejected",
        *waiting,
        *(["reviewed"] if reviewed else []),
        *decision.get("reasons", ()),
    ]


def count_decisions(records: RunRecords) -> dict[str, int]:
    """Number of conversations per verdict; empty without decisions."""
    counts = Counter(verdict for decision in records.decisions.values() for verdict in to_verdicts(decision))
    first = ("accepted", "to review", "reviewed", "rejected")
    return {name: counts[name] for name in first if counts[name]} | {
        name: count for name, count in counts.most_common() if name not in first
    }


def search(
    records: RunRecords, chosen: Sequence[Entry], text: str, offset: int, limit: int
) -> dict[str, Any]:
    """Conversations that contain a text in a message, call or result, ignoring case.

    Searches from position `offset` for a limited time; `reached` is the position to continue from.
    """
    pattern = re.compile(re.escape(json.dumps(text, ensure_ascii=False)[1:-1].encode()), re.IGNORECASE)
    until = monotonic() + _SEARCH_SECONDS
    rows: list[dict[str, Any]] = []
    reached = offset
    for entry in chosen[offset:]:
        if monotonic() > until or len(rows) >= limit:
            break
        reached += 1
        line = records.read(entry)
        if pattern.search(line) and (found := find_text(json.loads(line), text)):
            rows.append({**to_row(entry, records), "found": found})
    return {"total": len(chosen), "reached": reached, "rows": rows, "version": records.version}


def find_text(trajectory: dict[str, Any], text: str) -> str:
    """The words around the first occurrence of a text in a conversation; empty if it does not occur."""
    wanted = text.lower()
    for turn in trajectory["turns"]:
        message = turn["message"]
        calls = [
            f"{call['name']} {json.dumps(call.get('arguments', {}), ensure_ascii=False)}"
            for call in message.get("tool_calls", ())
        ]
        for words in (message.get("content", ""), message.get("reasoning") or "", *calls):
            at = words.lower().find(wanted)
            if at >= 0:
                return words[max(0, at - 40) : at + len(text) + 60]
    return ""


def read_trajectory(records: RunRecords, entry: Entry) -> dict[str, Any]:
    """Read a conversation from its file. It may be gone if the run was started again."""
    try:
        value: Any = json.loads(unstamp(records.read(entry)))
    except (OSError, ValueError):
        raise RunError(f"conversation '{entry.id}' cannot be read; its run may have changed") from None
    return cast("dict[str, Any]", value)


def thin(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` evenly spaced values of a list, always with the last one."""
    if len(values) <= most:
        return list(values)
    stride = len(values) / most
    return [values[round((number + 1) * stride) - 1] for number in range(most)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(query: Query, key: str, default: int) -> int:
    text = query.get(key, "")
    return int(text) if text.isdecimal() and len(text) < 12 else default
