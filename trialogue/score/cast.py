"""Who takes part in a run besides the agent: the user, and whoever judges and audits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trialogue.config import EvalConfig, Speaker, TrainConfig
from trialogue.score.verdict import find_audit
from trialogue.talk.account import Account
from trialogue.talk.find import find_model
from trialogue.talk.model import ModelSource, close_source
from trialogue.talk.replay import Recorder, is_asked
from trialogue.talk.rollout import Audit
from trialogue.world.domain import Domain


@dataclass(slots=True)
class Cast:
    """The user of a run and its audit, made once and closed once."""

    user: ModelSource
    account: Account = field(default_factory=Account)
    audit: Audit | None = None
    exclude: bool = False
    made: list[Any] = field(default_factory=lambda: [])
    """Everything that has to be closed."""

    def record(self, speaker: Speaker, run: Path) -> None:
        """Write down every reply of a user that has to be asked, so that the run can be told again."""
        if is_asked(speaker):
            self.user = Recorder(self.user, run / "recordings" / "user.jsonl")

    async def close(self) -> None:
        for source in self.made:
            await close_source(source)


def find_cast(config: EvalConfig | TrainConfig, domain: Domain, account: Account) -> Cast:
    """The cast that settings name."""

    def find(speaker: Speaker, role: str) -> ModelSource:
        return find_model(speaker, "user", domain, config.limits, config.seed, account, role)

    made = [user := find(config.user, "user")]
    judge = None
    if config.audit.judge.model:
        made.append(judge := find(config.audit.judge, "auditor"))
    audit = find_audit(config.audit, config.user, domain, judge)
    return Cast(user, account, audit, config.audit.policy == "exclude", made)
