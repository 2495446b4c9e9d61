"""The domain of a run, and who takes part besides the agent: the user, judges and the audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trialogue.config import AuditSettings, EvalConfig, Speaker, SynthesizeConfig, TrainConfig
from trialogue.score.reward import grade, with_reward
from trialogue.score.verdict import find_audit
from trialogue.talk.budget import Account
from trialogue.talk.find import add_tool_model, find_model
from trialogue.talk.model import ModelSource, close_source
from trialogue.talk.near_calls import to_lenient
from trialogue.talk.replay import Recorder, is_asked, is_language_model
from trialogue.talk.rollout import Audit, RolloutSettings
from trialogue.talk.users import set_user_prompt
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain

PlayConfig = EvalConfig | SynthesizeConfig | TrainConfig
"""A configuration of a verb that holds conversations."""


@dataclass(slots=True)
class Parties:
    """The user of a run and its audit, opened once and closed once."""

    user: ModelSource
    account: Account = field(default_factory=Account)
    audit: Audit | None = None
    exclude: bool = False
    opened: list[Any] = field(default_factory=lambda: [])
    """Everything that has to be closed."""

    def record(self, speaker: Speaker, run: Path) -> None:
        """Record every reply of a user behind an endpoint, so that the run can be replayed."""
        if is_asked(speaker):
            self.user = Recorder(self.user, run / "recordings" / "user.jsonl")

    def to_settings(self, config: PlayConfig) -> RolloutSettings:
        """How this run holds and grades conversations."""
        return RolloutSettings(
            concurrency=config.rollout.concurrency,
            limits=config.limits,
            seed=config.seed,
            redraws=config.rollout.redraws,
            grade=grade,
            audit=self.audit,
            exclude=self.exclude,
        )

    async def close(self) -> None:
        for source in self.opened:
            await close_source(source)


def open_parties(config: PlayConfig, *, is_played: bool = True) -> tuple[Domain, Parties]:
    """The domain and the parties that settings name, with one account. When nothing is played, no model has
    to answer for simulated tools."""
    account = Account(config.budget)
    domain = with_reward(find_domain(config.domain, config.data), config.reward.name, config.reward.rules)
    domain = set_user_prompt(domain, config.user)
    if config.renderer.lenient:
        domain = to_lenient(domain)
    if is_played:
        domain = add_tool_model(domain, config.simulator, config.limits, config.seed, account)
    wanted = settle_audit(config)

    def find(speaker: Speaker, role: str) -> ModelSource:
        return find_model(speaker, "user", domain, config.limits, config.seed, account, role)

    opened: list[Any] = [user := find(config.user, "user")]
    judge = None
    if wanted.judge.model:
        opened.append(judge := find(wanted.judge, "auditor"))
    audit = find_audit(wanted, config.user, domain, judge)
    if domain.tool_model is not None:
        opened.append(domain.tool_model)
    return domain, Parties(user, account, audit, wanted.policy == "exclude", opened)


def settle_audit(config: PlayConfig) -> AuditSettings:
    """How the user is audited. By default a language model's faults do not reach what is learned from."""
    if isinstance(config, SynthesizeConfig):
        return AuditSettings(policy="keep")
    if config.audit.policy is not None:
        return config.audit
    learns = isinstance(config, TrainConfig) and is_language_model(config.user)
    return config.audit.model_copy(update={"policy": "exclude" if learns else "report"})
