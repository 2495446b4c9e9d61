"""Cheap checks of every step. Each gives a warning that says what to do.

Warnings are in the metrics of the step, in the terminal and on the page. Conversations that cannot be learned
from are left out. A run that makes no progress for several steps is stopped and can be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from trialogue.config import CheckSettings
from trialogue.engine.api import Row
from trialogue.errors import EngineError
from trialogue.learn.overfit import find_overfit
from trialogue.trajectory import Group, Trajectory, tell_near_calls, tell_no_success

if TYPE_CHECKING:
    from trialogue.learn.advantages import Values


class Checks:
    """The checks of a run. `streaks` counts steps in a row and is saved in checkpoints."""

    def __init__(
        self, settings: CheckSettings | None = None, streaks: Mapping[str, int] | None = None
    ) -> None:
        self.settings = settings or CheckSettings()
        self.streaks: dict[str, int] = {"no_signal": 0, "broken": 0, "failed": 0, **(streaks or {})}
        self._found: dict[str, list[str]] = {}

    def find(self, kind: str, text: str) -> None:
        self._found.setdefault(kind, []).append(text)

    def collect(self) -> list[str]:
        """The warnings since the last call, one of each kind."""
        found, self._found = self._found, {}
        return [
            texts[0] + (f" ({len(texts)} times in this step)" if len(texts) > 1 else "")
            for texts in found.values()
        ]

    def see_group(self, group: Group, advantages: Values, *, sum_to_zero: bool = True) -> None:
        """Rewards must be in their range, and the built-in advantages of a group must sum to zero."""
        low, high = self.settings.rewards
        for value in (item.value for item in group.trajectories):
            if not low <= value <= high:
                self.find(
                    "reward",
                    f"a reward of task {group.task.id} is {value:g}, outside {low:g} to {high:g}: "
                    "correct the reward function, or set checks.rewards to its range",
                )
        numbers = [value for value in advantages if isinstance(value, int | float)]
        total = sum(numbers)
        if sum_to_zero and not abs(total) <= 1e-4 * max(1.0, sum(map(abs, numbers))):
            self.find(
                "advantage",
                f"the advantages of task {group.task.id} sum to {total:.3g} instead of 0: "
                "the step is biased; report it with the run's seed",
            )

    def is_masked_right(self, trajectory: Trajectory, rows: Sequence[Row]) -> bool:
        """Whether the mask covers exactly the sampled ids, each with a finite log-probability."""
        sampled = [
            turn.tokens for turn in trajectory.turns if turn.side == "agent" and turn.tokens is not None
        ]
        wanted = sum(len(tokens.reply) for tokens in sampled)
        trained = sum(sum(row.mask) for row in rows)
        if trained != wanted:
            self.find(
                "mask",
                f"{trained} tokens of {trajectory.id} would be trained on but {wanted} were sampled: it is "
                "left out; the model's template and its renderer disagree, try another learner.renderer",
            )
            return False
        if not all(isfinite(value) for tokens in sampled for value in tokens.logprobs):
            self.find("logprobs", f"{trajectory.id} has log-probabilities that are not finite: left out")
            return False
        return True

    def see_update(self, metrics: dict[str, Any], *, stale: bool = False) -> None:
        """Check the metrics of an update. `stale` means that older weights sampled some of the rows."""
        gap, bound = metrics.get("logprob_gap"), self.settings.logprob_gap
        if gap is not None and bound and not stale and gap > bound:
            self.find(
                "gap",
                f"sampler and trainer differ by {gap:.3g} per token (over {bound:g}): the ratios are off; "
                "set loss.importance_cap=2 and look for weights or a precision that only one of them has",
            )
        entropy, least = metrics.get("entropy"), self.settings.entropy
        if entropy is not None and entropy < least:
            self.find(
                "entropy",
                f"the entropy is {entropy:.2g} nats per token (under {least:g}): the agent hardly varies "
                "any more; raise training.temperature, lower the learning rate, or set loss.kl",
            )
        loss = metrics.get("loss")
        broken = bool(metrics.get("skipped")) or (loss is not None and not isfinite(loss))
        if loss is not None:
            if broken:
                self.find(
                    "finite",
                    "the loss or the gradient is not finite: that update was skipped and changed no weights; "
                    "lower the learning rate if it happens again",
                )
            self._count("broken", broken, "had no finite gradient; lower optimizer.learning_rate")

    def see_conversations(self, metrics: Mapping[str, Any], rows: int) -> None:
        """Check that there was something to learn from, and that tool calls were parsed as calls."""
        self.see_near_calls(metrics)
        if not metrics["conversations"]:
            blame = max(metrics["blame"].items(), key=lambda item: item[1], default=("nobody", 0))[0]
            self.find(
                "failed",
                f"every conversation of the step failed (mostly blamed: {blame}): nothing was learned; "
                "the errors are in the run's trajectories",
            )
        self._count(
            "failed", not metrics["conversations"], "had only failed conversations; correct what failed"
        )
        if not metrics["conversations"]:
            return
        self.streaks["no_signal"] = 0 if rows else self.streaks["no_signal"] + 1
        if self.streaks["no_signal"] >= self.settings.no_signal_steps:
            steps, reward = self.streaks["no_signal"], metrics.get("reward", 0.0)
            advice = "too hard: take lower tasks.levels or a cold start" if reward < 0.5 else "too easy"
            self.find(
                "no_signal",
                f"no group had any signal for {steps} steps (reward {reward:.2f}): the tasks "
                f"are {advice}; larger groups, a higher temperature or training.redraw_no_signal find some",
            )

    def see_near_calls(self, metrics: Mapping[str, Any]) -> None:
        if near := metrics.get("near_calls"):
            self.find("near_calls", tell_near_calls(near))

    def see_success(self, metrics: Mapping[str, Any]) -> None:
        """Check that a success rate of 0 is the agent's doing, not a reward that counts nothing as one."""
        if found := metrics.get("no_success"):
            self.find("success", tell_no_success(*found))

    def see_evaluations(self, lines: Sequence[Mapping[str, Any]], group_size: int) -> None:
        """Check for overfitting, from the metrics of the run up to an evaluation."""
        found = find_overfit(lines, group_size, self.settings.overfit_evaluations, self.settings.rewards)
        if found is not None:
            self.find("overfit", found)

    def _count(self, name: str, happened: bool, what: str) -> None:
        self.streaks[name] = self.streaks[name] + 1 if happened else 0
        if self.streaks[name] >= self.settings.broken_steps:
            raise EngineError(f"{self.streaks[name]} steps in a row {what}, then continue with --resume")


def to_finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics that every JSON reader accepts: a number that is not finite becomes null."""
    return {
        key: None if isinstance(value, float) and not isfinite(value) else value
        for key, value in metrics.items()
    }
