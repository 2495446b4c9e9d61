# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportMissingModuleSource=false
"""Send metrics to experiment trackers through their own packages.

Nothing depends on them: the run directory contains everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from trialogue.errors import ConfigError


class Tracker(NamedTuple):
    """An open tracker: `log(step, figures)`, and `close()` at the end."""

    log: Callable[[int, dict[str, float]], Any]
    close: Callable[[], Any]


class Trackers:
    """The trackers of a run; called with each step and its metrics, like every watcher."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._open: list[Tracker] = []
        for name in self.names:
            _find_package(name)  # fail before the run starts

    def started(self, run: Path) -> None:
        """Open the trackers under the name of the run."""
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        self._open = [OPENERS[name](run, config) for name in self.names]

    def __call__(self, step: int, metrics: dict[str, Any]) -> None:
        if metrics.get("kind") in ("talk", "stopping"):
            return
        figures = to_flat_figures(metrics, "eval/" if metrics.get("kind") == "eval" else "")
        for tracker in self._open:
            tracker.log(step, figures)

    def close(self) -> None:
        for tracker in self._open:
            tracker.close()
        self._open = []


def to_flat_figures(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in nested figures, under names such as `tools/get_order`."""
    flat: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            flat |= to_flat_figures(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "step":
            flat[prefix + key] = float(value)
    return flat


def _find_package(name: str) -> None:
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise ConfigError(f"run.track has '{name}', which is not installed; install it: pip install {name}")


def _open_tensorboard(run: Path, config: dict[str, Any]) -> Tracker:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run / "tensorboard"))

    def log(step: int, figures: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        writer.add_event(Event(wall_time=time(), step=step, summary=Summary(value=values)))
        writer.flush()

    return Tracker(log, writer.close)


def _open_wandb(run: Path, config: dict[str, Any]) -> Tracker:
    import wandb

    opened: Any = wandb.init(project="trialogue", name=run.name, dir=str(run), config=config)

    def log(step: int, figures: dict[str, float]) -> None:
        opened.log({**figures, "step": step})

    return Tracker(log, opened.finish)


def _open_trackio(run: Path, config: dict[str, Any]) -> Tracker:
    import trackio as package

    trackio: Any = package
    trackio.init(project="trialogue", name=run.name, config=config, embed=False)

    def log(step: int, figures: dict[str, float]) -> None:
        trackio.log(figures, step=step)

    return Tracker(log, trackio.finish)


OPENERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
}
