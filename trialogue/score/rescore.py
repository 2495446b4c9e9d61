"""Grading recorded conversations again, from their file alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trialogue.run import read_trajectories
from trialogue.score.reward import regrade
from trialogue.trajectory import Reward, Trajectory
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain


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
        if recorded is None and self.trajectory.end != "error":
            return not self.mismatches  # recorded ungraded: there is nothing to compare with
        return recorded == self.reward and not self.mismatches

    def to_data(self) -> dict[str, Any]:
        reward = self.reward
        return {
            "id": self.trajectory.id,
            "end": self.trajectory.end,
            "reward": None if reward is None else reward.value,
            "parts": {} if reward is None else reward.parts,
            "why": [] if reward is None else list(reward.why),
            "recorded": None if self.trajectory.reward is None else self.trajectory.reward.value,
            "same": self.same,
            "tool_mismatches": self.mismatches,
        }

    def to_line(self) -> str:
        value = "unscored" if self.reward is None else f"{self.reward.value:.2f}"
        note = "" if self.same else "  DIFFERS from the record"
        reason = f"  {self.mismatches[0]}" if self.mismatches else ""
        return f"{self.trajectory.id}  {value}  {self.trajectory.end}{note}{reason}"


def rescore(path: Path, domain: str | None = None, data: str | None = None) -> list[Rescored]:
    """Carry every recorded call out on a fresh environment and grade what comes of it."""
    domains: dict[str, Domain] = {}
    rows: list[Rescored] = []
    for trajectory in read_trajectories(path):
        reference = domain or str(trajectory.meta.get("domain") or trajectory.task.domain)
        if reference not in domains:
            domains[reference] = find_domain(reference, data)
        try:
            environment = domains[reference].open(trajectory.task)
            reward, mismatches = regrade(trajectory, environment)
            settled = reward if reward is None or isinstance(reward, Reward) else asyncio.run(_settle(reward))
        except Exception as error:  # noqa: BLE001 - one record that cannot be carried out spoils no other
            settled, mismatches = None, [f"{type(error).__name__}: {error}"]
        rows.append(Rescored(trajectory, settled, mismatches))
    return rows


async def _settle(reward: Awaitable[Reward]) -> Reward:
    return await reward
