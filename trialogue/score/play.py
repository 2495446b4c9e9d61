"""Play: a person holds one conversation of a domain, on either side, and is told how it was graded."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trialogue.config import EvalConfig
from trialogue.errors import ConfigError, TrialogueError
from trialogue.score.evaluate import find_tasks
from trialogue.score.reward import PendingReward, grade, regrade
from trialogue.talk.conversation import Party, explain_end
from trialogue.talk.find import add_tool_model, find_model
from trialogue.talk.human import HumanModel
from trialogue.talk.model import Model, close_source
from trialogue.talk.near_calls import to_lenient
from trialogue.talk.rollout import RolloutSettings, attempt
from trialogue.task import SPLITS, Side, Task
from trialogue.trajectory import Trajectory
from trialogue.world.database import Change
from trialogue.world.domain import Domain


@dataclass(frozen=True, slots=True)
class Played:
    """A conversation a person took part in, why it ended, and what it changed."""

    trajectory: Trajectory
    ended: str
    changes: list[Change]

    def to_data(self) -> dict[str, Any]:
        reward = self.trajectory.reward
        return {
            "task": self.trajectory.task.id,
            "end": self.trajectory.end,
            "reward": None if reward is None else reward.value,
            "parts": {} if reward is None else reward.parts,
            "success": None if reward is None else reward.is_success,
            "why": [] if reward is None else list(reward.why),
            "changes": [change._asdict() for change in self.changes],
            "error": self.trajectory.error,
            "blame": self.trajectory.blame,
            "trajectory": json.loads(self.trajectory.to_json()),
        }


def find_task(domain: Domain, config: EvalConfig, identity: str | None, any_split: bool = False) -> Task:
    """The task of that id, in the split of the configuration or in any; without an id the seed chooses."""
    try:
        tasks = find_tasks(domain, config)
    except TrialogueError:
        if not any_split or identity is not None:
            raise
        tasks = domain.tasks("all", None, config.seed)
    if identity is None:
        return tasks[config.seed % len(tasks)]
    known = {task.id: task for task in tasks}
    for split in SPLITS if any_split else ():
        with suppress(TrialogueError):  # a domain need not have every split
            known.update({task.id: task for task in domain.tasks(split, None, config.seed)})
    if identity not in known:
        some = ", ".join(list(known)[:8]) + (", …" if len(known) > 8 else "")
        where = "" if any_split else f" in split '{config.tasks.split}'"
        raise ConfigError(f"{domain.name} has no task '{identity}'{where}; it has {some}")
    return known[identity]


async def play(domain: Domain, task: Task, config: EvalConfig, person: HumanModel) -> Played:
    """Hold the conversation. A person who leaves raises KeyboardInterrupt."""
    other: Side = "user" if person.side == "agent" else "agent"
    speaker = config.user if other == "user" else config.agent
    domain = add_tool_model(domain, config.simulator, config.limits, config.seed)
    domain = to_lenient(domain) if config.renderer.lenient and other == "agent" else domain
    opposite = find_model(speaker, other, domain, config.limits, config.seed)
    if other == "agent" and speaker.model == "oracle" and not speaker.mix and domain.oracle is None:
        person.note = (
            f"{domain.name} has no oracle: the agent is `gold`, which looks the answer up in the task and "
            "makes its calls whatever you say. Name another with --agent."
        )

    def sit(task: Task, seed: int) -> Model:
        return person

    watched = person.watch(opposite)
    agent, user = (sit, watched) if person.side == "agent" else (watched, sit)
    try:
        settings = RolloutSettings(limits=config.limits, seed=config.seed, grade=grade)
        trajectory = await attempt(domain, task, agent, user, settings)
    finally:
        await close_source(opposite)
    person.show_calls(trajectory.turns)
    person.show(Party(person.side, person, "", {}).sees(trajectory.turns))
    environment = domain.open(task)
    ended = explain_end(trajectory, domain, config.limits)
    if environment.remote:
        return Played(trajectory, ended, [])
    again, _ = regrade(trajectory, environment)
    if isinstance(
        again, PendingReward
    ):  # a judge has spoken already; here only what was changed is of interest
        again.close()
    return Played(trajectory, ended, environment.difference())
