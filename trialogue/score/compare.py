"""Does one user stand for another? The same tasks and agent with several users, and what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from trialogue.activity import counting
from trialogue.config import EvalConfig
from trialogue.digests import refuse_injured
from trialogue.run import read_trajectories
from trialogue.score.audit import Case, audit, find_values, has_value
from trialogue.score.evaluate import Progress, evaluate
from trialogue.score.metrics import by_task, pass_hats
from trialogue.trajectory import Trajectory
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain, find_recorded_domain


async def compare_users(
    users: Sequence[str], config: EvalConfig, progress: Progress | None = None
) -> dict[str, Any]:
    """Evaluate the agent with each user in turn, and lay the figures side by side."""
    stem = config.run.name or "compare"
    held: dict[str, list[Trajectory]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for number, user in enumerate(users):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", user).strip("-")
        name = None if config.run.name is None else f"{stem}-{number + 1}-{slug}"
        speaker = config.user.model_copy(update={"model": user})
        settings = {"user": speaker, "run": config.run.model_copy(update={"name": name})}
        result = await evaluate(config.model_copy(update=settings), progress=progress)
        path = Path(result["run"])
        held[user] = [item for item in read_trajectories(path) if not item.is_failed]
        domain = find_domain(config.domain, config.data)
        rows[user] = {**measure_user(domain, held[user]), "failed": result["failed"], "run": str(path)}
        rows[user]["cost"] = result["cost"]
    pairs = {f"{one} / {other}": agree(held[one], held[other]) for one, other in combinations(users, 2)}
    return {"domain": config.domain, "agent": config.agent.model, "users": rows, "agreement": pairs}


def measure_user(domain: Domain, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """How a user behaved in some conversations, and how its agent fared."""
    cases = [Case(domain, item) for item in trajectories]
    texts = [said.text for case in cases for said in case.said]
    openings = [case.said[0].text.lower() for case in cases if case.said]
    findings = Counter(finding.kind for item in trajectories for finding in audit(domain, item))
    told = [reveal(case) for case in cases]
    first = [counts[0] / sum(counts) for counts in told if sum(counts)]
    intervals = pass_hats(by_task(trajectories))
    return {
        "conversations": len(trajectories),
        "pass^1": intervals[1].value if intervals else None,
        "pass^1_low": intervals[1].low if intervals else None,
        "pass^1_high": intervals[1].high if intervals else None,
        "user_turns": _mean(len(case.said) for case in cases),
        "words_per_turn": _mean(len(text.split()) for text in texts),
        "findings_per_100": 100 * sum(findings.values()) / len(trajectories) if trajectories else None,
        "findings": dict(findings.most_common()),
        "distinct_openings": len(set(openings)) / len(openings) if openings else None,
        "distinct_opening_pairs": _distinct_pairs(openings),
        "revealed_per_turn": _mean(count for counts in told for count in counts),
        "revealed_at_once": _mean(first),
        "ends": dict(Counter(item.end for item in trajectories).most_common()),
    }


def reveal(case: Case) -> list[int]:
    """How many values of its scenario a user tells for the first time in each of its texts."""
    values = {fact.value.lower() for _, fact in case.facts if fact.value is not None}
    if not values:
        values = {value.lower() for value in find_values(case.task.instructions)}
    counts: list[int] = []
    for said in case.said:
        new = {value for value in values if has_value(said.text, value)}
        values -= new
        counts.append(len(new))
    return counts or [0]


def agree(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> dict[str, Any]:
    """On how many conversations of the same task and trial the outcome is the same, beyond chance (kappa)."""
    outcomes = [
        {(item.task.id, item.trial): item.is_success for item in items if not item.excluded}
        for items in (one, other)
    ]
    both = sorted(outcomes[0].keys() & outcomes[1].keys())
    if not both:
        return {"conversations": 0, "same": None, "kappa": None}
    same = fmean(outcomes[0][key] == outcomes[1][key] for key in both)
    shares = [fmean(outcome[key] for key in both) for outcome in outcomes]
    chance = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    kappa = (same - chance) / (1 - chance) if chance < 1 else 1.0
    return {"conversations": len(both), "same": same, "kappa": kappa}


def _distinct_pairs(texts: Sequence[str]) -> float | None:
    """The share of different pairs of neighbouring words: 1 where no two openings share any."""
    pairs = [pair for text in texts for pair in zip(text.split(), text.split()[1:], strict=False)]
    return len(set(pairs)) / len(pairs) if pairs else None


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def audit_file(
    path: Path, domain: str | None = None, data: str | None = None, *, trust: bool = False
) -> list[dict[str, Any]]:
    """What the rules find in recorded conversations; failed ones have nothing to look at. A domain that only
    the record names is run as code where the record is trusted."""
    if path.is_dir():
        refuse_injured(path)
    domains: dict[str, Domain] = {}
    rows: list[dict[str, Any]] = []
    for item in counting("auditing users", read_trajectories(path)):
        if item.end == "error":
            continue
        reference = domain or str(item.meta.get("domain") or item.task.domain)
        if reference not in domains:
            domains[reference] = find_recorded_domain(
                reference, path, data, trust=trust or domain is not None
            )
        findings = [finding.model_dump() for finding in audit(domains[reference], item)]
        rows.append({"id": item.id, "end": item.end, "findings": findings})
    return rows
