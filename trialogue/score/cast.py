"""Who takes part in a run besides the agent: the user, and whoever judges and audits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trialogue.config import AuditSettings, Limits, Speaker
from trialogue.score.verdict import find_audit
from trialogue.talk.find import find_model
from trialogue.talk.model import ModelSource, close_source
from trialogue.talk.rollout import Audit
from trialogue.world.domain import Domain


@dataclass(slots=True)
class Cast:
    """The user of a run and its audit, made once and closed once."""

    user: ModelSource
    audit: Audit | None = None
    exclude: bool = False
    made: list[Any] = field(default_factory=lambda: [])
    """Everything that has to be closed."""

    async def close(self) -> None:
        for source in self.made:
            await close_source(source)


def find_cast(user: Speaker, audit: AuditSettings, domain: Domain, limits: Limits, seed: int) -> Cast:
    """The cast that settings name."""
    speaks = find_model(user, "user", domain, limits, seed)
    made = [speaks]
    judge = None
    if audit.judge.model:
        judge = find_model(audit.judge, "user", domain, limits, seed)
        made.append(judge)
    return Cast(speaks, find_audit(audit, user, domain, judge), audit.policy == "exclude", made)
