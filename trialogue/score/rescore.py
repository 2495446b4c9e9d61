"""Grading recorded conversations again, from their file alone."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trialogue.activity import counting
from trialogue.digests import refuse_injured
from trialogue.errors import ConfigError, RunError
from trialogue.foreign import show_line
from trialogue.reading import describe, reading
from trialogue.run import find_run, judge_file, read_settings, read_trajectories
from trialogue.score.reward import PendingReward, regrade, with_reward
from trialogue.seams import Seam
from trialogue.settings import RewardSettings
from trialogue.talk.replay import Replay
from trialogue.trajectory import Reward, Trajectory
from trialogue.world.domain import Domain
from trialogue.world.find import find_recorded_domain


@dataclass(frozen=True, slots=True)
class Rescored:
    """One conversation graded again."""

    trajectory: Trajectory
    reward: Reward | None
    mismatches: list[str]

    @property
    def same(self) -> bool:
        """Whether the reward comes out as recorded, every tool answering as it did then."""
        recorded = self.trajectory.reward
        if recorded is None and not self.trajectory.is_failed:
            return not self.mismatches  # recorded ungraded: there is nothing to compare with
        return recorded == self.reward and not self.mismatches

    def to_data(self) -> dict[str, Any]:
        reward = self.reward
        return {
            "id": self.trajectory.id,
            "end": self.trajectory.end,
            "reward": None if reward is None else reward.value,
            "parts": {} if reward is None else reward.parts,
            "success": None if reward is None else reward.is_success,
            "why": [] if reward is None else list(reward.why),
            "recorded": None if self.trajectory.reward is None else self.trajectory.reward.value,
            "same": self.same,
            "tool_mismatches": self.mismatches,
        }

    def to_line(self) -> str:
        value = "unscored" if self.reward is None else f"{self.reward.value:.2f}"
        note = "" if self.same else "  DIFFERS from the record"
        reasons = self.mismatches or (self.reward.why if self.reward is not None and not self.same else ())
        reason = f"  {reasons[0]}" if reasons else ""
        return f"{self.trajectory.id}  {value}  {self.trajectory.end}{note}{reason}"


def rescore(
    path: Path,
    domain: str | None = None,
    data: str | None = None,
    reward: str | None = None,
    *,
    trust: bool = False,
) -> list[Rescored]:
    """Carry every recorded call out on a fresh environment and grade what comes of it. What a judge has
    answered is taken from the run's recording; nobody is asked. A domain or reward that only the record names
    is run as code where the record is trusted."""
    if path.is_dir():
        refuse_injured(path)
    recorded = find_recorded_reward(path, trust=trust or reward is not None)
    name = recorded.name if reward is None else reward
    domains: dict[str, Domain] = {}
    run = path if path.is_dir() else path.parent.parent
    judge = Replay(judge_file(run)) if judge_file(run).is_file() else None
    rows: list[Rescored] = []
    for trajectory in counting("grading again", read_trajectories(path)):
        reference = domain or str(trajectory.meta.get("domain") or trajectory.task.domain)
        if reference not in domains:
            found = find_recorded_domain(reference, path, data, trust=trust or domain is not None)
            found = with_reward(found, name, recorded.rules)
            domains[reference] = found if judge is None else replace(found, judge=judge)
        try:
            environment = domains[reference].open(trajectory.task)
            graded, mismatches = regrade(trajectory, environment)
            settled = asyncio.run(graded.ask()) if isinstance(graded, PendingReward) else graded
        except ConfigError:
            raise  # a mistake in the reward or the domain, not in this record
        except Exception as error:  # noqa: BLE001 - one record that cannot be carried out spoils no other
            settled, mismatches = None, [describe(error)]
        rows.append(Rescored(trajectory, settled, mismatches))
    return rows


def find_recorded_reward(path: Path, *, trust: bool = False) -> RewardSettings:
    """The reward settings of the run that a record belongs to. A name of code counts where the record is
    trusted."""
    run = find_run(path)
    if run is None or not (run / "config.json").is_file():
        return RewardSettings()
    with reading(run / "config.json", RunError):
        recorded = RewardSettings.model_validate(read_settings(run).get("reward", {}))
    code = Seam().find_code(recorded.name)
    if code is not None and not trust:
        raise ConfigError(
            f"{path} would run {code}: add --reward {shlex.quote(show_line(recorded.name))} to allow it, or "
            "--trust to allow everything that the record names"
        )
    return recorded
