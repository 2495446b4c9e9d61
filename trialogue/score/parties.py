"""The set-up of a run: its world, and who takes part besides the agent: the user, judges, auditors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trialogue.config import AuditSettings, EvalConfig, Speaker, SynthesizeConfig, TrainConfig
from trialogue.score.verdict import find_audit
from trialogue.talk.budget import Account
from trialogue.talk.find import equip, find_model
from trialogue.talk.model import ModelSource, close_source
from trialogue.talk.near_calls import to_lenient
from trialogue.talk.replay import Recorder, is_asked
from trialogue.talk.rollout import Audit
from trialogue.talk.users import dress
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain


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


def set_up(
    config: EvalConfig | SynthesizeConfig | TrainConfig, *, is_played: bool = True
) -> tuple[Domain, Cast]:
    """The domain and the cast that settings name, one account between them. Where nothing is played nobody
    has to answer for simulated tools."""
    account = Account(config.budget)
    domain = dress(find_domain(config.domain, config.data), config.user)
    if config.renderer.lenient:
        domain = to_lenient(domain)
    if is_played:
        domain = equip(domain, config.simulator, config.limits, config.seed, account)
    cast = find_cast(config, domain, account)
    if domain.tool_model is not None:
        cast.made.append(domain.tool_model)
    return domain, cast


def find_cast(config: EvalConfig | SynthesizeConfig | TrainConfig, domain: Domain, account: Account) -> Cast:
    """The cast that settings name."""
    wanted = AuditSettings(policy="keep") if isinstance(config, SynthesizeConfig) else config.audit

    def find(speaker: Speaker, role: str) -> ModelSource:
        return find_model(speaker, "user", domain, config.limits, config.seed, account, role)

    made = [user := find(config.user, "user")]
    judge = None
    if wanted.judge.model:
        made.append(judge := find(wanted.judge, "auditor"))
    audit = find_audit(wanted, config.user, domain, judge)
    return Cast(user, account, audit, wanted.policy == "exclude", made)
