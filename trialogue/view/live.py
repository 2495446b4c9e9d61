"""Progress of training: on a terminal a block redrawn in place, elsewhere a line of `key=value` per step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trialogue.activity import ACTIVITY, silence, to_duration
from trialogue.output import echo
from trialogue.screen import Screen, one_line
from trialogue.trajectory import differs

Watch = Callable[[int, dict[str, Any]], None]
_BLOCKS = "▁▂▃▄▅▆▇█"
NO_SIGNAL = (
    "nothing was learned: in every step, all conversations of a task got the same reward. "
    "Start from a model that solves some of the tasks (trialogue sft DOMAIN), or sample more and more varied "
    "conversations (training.group_size, training.temperature)"
)
CUT_OFF = (
    "nothing was learned: most replies were cut off at limits.reply_tokens before they said anything. A "
    "model that cannot yet hold such a conversation must first imitate some (trialogue sft DOMAIN)"
)


@contextmanager
def show_steps(quiet: bool = False, title: str = "", steps: int | None = None) -> Generator[Steps]:
    """Show training progress: pass the result to `train` or `sft` as `watch`, and its `started` too."""
    console = Screen(stderr=True)
    shown = Steps(title, steps)
    if quiet:
        yield shown
    elif not console.is_terminal or not sys.stdout.isatty():
        shown.tell = _print
        yield shown
    else:
        with (
            silence(),
            Live(get_renderable=shown.draw, console=console, refresh_per_second=4, transient=True),
        ):
            yield shown


def _print(line: str) -> None:
    ACTIVITY.said = monotonic()
    echo(line)


class Steps:
    """The state of a training run as shown; called with each step and its metrics."""

    def __init__(self, title: str = "", steps: int | None = None) -> None:
        self.title, self.steps = title, steps
        self.tell: Callable[[str], None] | None = None
        self.run: Path | None = None
        self.step = 0
        self.rewards: list[float] = []
        self.last: dict[str, Any] = {}
        self.passed: tuple[float, float, float] | None = None
        self.held_out_warnings: list[str] = []
        self.cost = 0.0
        self.failed = 0
        self.user_faults = 0
        self.changed = 0  # steps that changed the weights
        self.talking: tuple[int, int] | None = None
        self.stopping = False
        self.began = monotonic()
        self.stepped: float | None = self.began
        """When the last step ended. None: the next step is the first of a part that began some time ago."""
        self.durations: list[float] = []
        self._said = 0.0

    def started(self, run: Path) -> None:
        """Take the run directory as soon as it exists."""
        self.run = run

    def __call__(self, step: int, metrics: dict[str, Any]) -> None:
        kind = metrics.get("kind")
        if kind == "talk":
            self.talking = (metrics["done"], metrics["of"])
            return
        if kind == "stopping":
            self.stopping = True
            if self.tell:
                self.tell(
                    "stopping: the step in progress will be finished and saved, then the run ends; "
                    "press Ctrl-C again to end at once without it"
                )
            return
        self.step = step
        if (steps := metrics.get("steps", self.steps)) != self.steps:  # next part of a demonstration
            self.steps, self.durations, self.stepped = steps, [], None
        if kind == "eval":
            self.held_out_warnings = list(metrics.get("warnings", ()))
        if kind == "eval" and "pass^1" in metrics:
            self.passed = (metrics["pass^1"], metrics["pass^1_low"], metrics["pass^1_high"])
        elif kind is None:
            now = monotonic()
            if self.stepped is not None:
                self.durations.append(now - self.stepped)
            self.stepped = now
            self.last = metrics
            self.changed += not metrics.get("skipped")
            stuck = metrics.get("stuck", {}).get("user", 0)
            self.failed += metrics.get("failed", 0) - stuck
            self.user_faults += metrics.get("excluded", 0) + stuck
            self.cost += metrics.get("cost") or 0.0
            self.talking = None
            if "reward" in metrics:
                self.rewards.append(metrics["reward"])
        if self.tell:
            self._say(metrics)

    def find_fault(self) -> str | None:
        """Why nothing was learned, if no step changed the weights."""
        if not self.last or self.changed:
            return None
        return CUT_OFF if self.last.get("cut_off", 0.0) > 0.5 else NO_SIGNAL

    def _say(self, metrics: dict[str, Any]) -> None:
        """Write a line; where steps are short, at most one every two seconds."""
        passed = monotonic() - self.began
        small = "loss" in metrics and "reward" not in metrics and "validation_loss" not in metrics
        small = small and not metrics.get("warnings")
        if small and passed - self._said < 2 and self.step != self.steps:
            return
        self._said = passed
        words = [f"step={self.step}" + (f"/{self.steps}" if self.steps else "")]
        for name, key in (
            ("reward", "reward"),
            ("pass1", "pass^1"),
            ("turns", "turns"),
            ("no_signal", "no_signal"),
            ("entropy", "entropy"),
            ("loss", "loss"),
            ("validation", "validation_loss"),
        ):
            if metrics.get(key) is not None:
                words.append(f"{name}={metrics[key]:.3f}")
            if key == "reward" and self._has_success(metrics):
                words.append(f"success={metrics['success']:.3f}")
            if key == "pass^1" and "compliant" in metrics:
                words.append(f"outcome={metrics['outcome']:.3f} compliant={metrics['compliant']:.3f}")
        words += [f"user_faults={self.user_faults}"] * bool(self.user_faults)
        words += [f"errors={self.failed}"] * bool(self.failed) + [f"cost={self.cost:.4f}"] * bool(self.cost)
        assert self.tell is not None
        words.append(f"s={passed:.1f}")
        if (left := self._estimate()) is not None:
            words.append(f"left={to_duration(left).replace(' ', '')}")
        self.tell(" ".join(words))
        for warning in metrics.get("warnings", ()):
            echo(f"  warning: {warning}", err=True)

    def _has_success(self, metrics: dict[str, Any]) -> bool:
        """Whether a step's share of successes is another figure than its reward."""
        return metrics.get("kind") is None and differs(metrics.get("reward"), metrics.get("success"))

    def _pace(self) -> float:
        recent = self.durations[1:][-8:] or self.durations  # the first one includes the start-up
        return sum(recent) / len(recent)

    def _estimate(self) -> float | None:
        """Seconds left at the pace of the last steps."""
        if not self.durations or not self.steps:
            return None
        return self._pace() * max(0, self.steps - self.step)

    # -- the block -----------------------------------------------------------------------------------------

    def draw(self) -> RenderableType:
        return Group(self._head(), self._progress(), self._figures(), self._foot())

    def _head(self) -> Text:
        head = one_line(self.title, "bold")
        head.overflow, head.no_wrap = "ellipsis", True
        if self.run is not None:
            head.append_text(one_line(f" · {self.run}", "default"))
        return head

    def _progress(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        done, of = self.talking or (0, 0)
        partly = self.step + (done / of if of else 0.0)
        talk = f"rollout {done}/{of}" if done < of else "update" if of else ""
        errors = f"  ·  {self.failed} error{'s' if self.failed != 1 else ''}" if self.failed else ""
        row.add_row(
            f"step {self.step}/{self.steps or '?'}",
            ProgressBar(total=self.steps or 1, completed=partly if self.steps else 0, width=32),
            one_line(f"{talk}{errors}"),
        )
        return row

    def _figures(self) -> Text:
        parts: list[str] = []
        if self.rewards:
            parts.append(f"reward {self.rewards[-1]:.2f} {spark(self.rewards[-16:])}")
            if self._has_success(self.last):
                parts.append(f"success {self.last['success']:.2f}")
        elif "loss" in self.last:
            parts.append(f"loss {self.last['loss']:.3f}")
        if "compliant" in self.last:
            parts.append(f"policy kept {self.last['compliant']:.0%}")
        if self.passed is not None:
            parts.append("pass^1 {:.2f} ({:.2f}–{:.2f})".format(*self.passed))
        if "turns" in self.last:
            parts.append(f"turns {self.last['turns']:.1f}")
        if "no_signal" in self.last:
            parts.append(f"no signal {self.last['no_signal']:.0%}")
        if self.durations:
            parts.append(f"{self._pace():.1f} s/step")
            if (left := self._estimate()) is not None:
                parts.append(f"eta {to_duration(left)}")
        if self.cost:
            parts.append(f"cost {self.cost:.4f}")
        return one_line("   ".join(parts) or ACTIVITY.describe() or "starting …")

    def _foot(self) -> Text:
        if self.stopping:
            return one_line("finishing and saving the step; press ctrl-c again to stop now", "yellow")
        look = f"trialogue view {self.run.parent}" if self.run is not None else "trialogue view"
        if warnings := [*self.last.get("warnings", ()), *self.held_out_warnings]:
            return one_line(f"warning: {warnings[0]}", "yellow")
        return one_line(f"watch: {look}        stop: ctrl-c once saves and ends", "bright_black")


def spark(values: list[float]) -> str:
    """A curve drawn with block characters.

    >>> spark([0.0, 0.5, 1.0])
    '▁▅█'
    """
    low, high = min(values), max(values)
    return "".join(_BLOCKS[round((value - low) / ((high - low) or 1.0) * 7)] for value in values)
