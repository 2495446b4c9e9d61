"""Conversations for the training loop of another library: one domain, one user, one reward."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trialogue.config import LossSettings, TrainConfig
from trialogue.errors import ConfigError
from trialogue.records import append_records
from trialogue.score.metrics import called
from trialogue.score.parties import Parties, open_parties
from trialogue.talk.model import ModelSource
from trialogue.talk.rollout import attempt, derive_seed
from trialogue.task import Task
from trialogue.trajectory import Trajectory
from trialogue.world.domain import Domain


@dataclass(frozen=True, slots=True)
class Conversations:
    """The domain, user and settings that all conversations of one process share."""

    config: TrainConfig
    domain: Domain
    parties: Parties
    folder: str
    """Where the configuration came from and records go."""

    @classmethod
    def open(cls, config: TrainConfig, folder: str) -> Conversations:
        return cls(config, *open_parties(config), folder)

    async def hold_until_graded(
        self, task: Task, trial: int, step: int, agent: ModelSource, watch: bool = False
    ) -> list[Trajectory]:
        """Hold a conversation and draw again while it fails. The last one counts; the others are recorded.
        Steps count from 1, and seeds and names are those of our own loop. `watch` is an evaluation."""
        seed = derive_seed(self.config.seed, "step", step - 1)
        name = f"dev-{step}/" if watch else f"{step}/"
        settings = replace(self.parties.to_settings(self.config), seed=seed, name=name)
        held: list[Trajectory] = []
        for draw in range(settings.redraws + 1):
            trajectory = await attempt(
                self.domain, task, agent, self.parties.user, settings, trial=trial, draw=draw
            )
            held.append(trajectory)
            if not is_left_out(trajectory):
                break
        return held

    def record(self, step: int, trajectories: Sequence[Trajectory], watch: bool = False) -> None:
        """Write the conversations as our own loop does, to a file that only this process writes."""
        kind = "dev" if watch else "step"
        own = f"{kind}-{step:06d}.{socket.gethostname()}.{os.getpid()}.jsonl"
        target = Path(self.folder) / "trajectories" / own
        target.parent.mkdir(parents=True, exist_ok=True)
        append_records(target, [trajectory.to_json() for trajectory in trajectories])


def refuse_rows(loss: LossSettings, renderer: str) -> None:
    """Raise where verl would count a conversation of several rows once for each row."""
    counted = [f"loss.name={loss.name}"] if loss.name == "gspo" else []
    counted += [f"loss.reduction={loss.reduction}"] if loss.reduction == "row" else []
    if counted:
        raise ConfigError(
            f"renderer '{renderer}' rewrites earlier turns, so a conversation is several rows, and verl "
            f"counts each of them as a conversation with {' and '.join(counted)}; set loss.reduction=token "
            "or constant and a loss.name other than gspo, or take a renderer that keeps history (without "
            "-exact)"
        )


def is_left_out(trajectory: Trajectory) -> bool:
    """Whether nothing is learned from a conversation: it failed, or the audit excluded it."""
    return trajectory.is_failed or trajectory.excluded


def to_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The figures of one conversation, always under the same names: the last of those that were held for it,
    and how many of all failed or were excluded."""
    trajectory = trajectories[-1]
    turns = trajectory.turns
    return {
        "success": float(not is_left_out(trajectory) and trajectory.is_success),
        "failed": float(sum(item.is_failed for item in trajectories)),
        "excluded": float(sum(item.excluded for item in trajectories)),
        "turns": float(len(turns)),
        "user_turns": float(sum(turn.side == "user" and turn.message.role == "user" for turn in turns)),
        "tool_calls": float(len(called(trajectory))),
        "tool_errors": float(sum(turn.failed for turn in turns)),
        "response_tokens": float(
            sum(len(turn.tokens.reply) for turn in turns if turn.side == "agent" and turn.tokens is not None)
        ),
        "cut_off": float(trajectory.end == "too_long"),
        "out_of_turns": float(trajectory.end == "max_turns"),
        "stuck": float(sum(item.end == "stuck" for item in trajectories)),
    }
