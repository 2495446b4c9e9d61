"""An exported folder as verl reads it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from trialogue.config import TrainConfig
from trialogue.hosts.export import export_verl
from trialogue.hosts.verl import open_conversations


def read_overrides(folder: Path) -> list[str]:
    """The settings a launch script hands to verl."""
    words = shlex.split(
        (folder / "launch.sh").read_text(encoding="utf-8").replace("\\\n", " "), comments=True
    )
    return words[words.index("verl.trainer.main_ppo") + 1 : -1]


def compose_verl(folder: Path, *more: str) -> Any:
    """What verl's own loader makes of a launch script."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*read_overrides(folder), *more])


@dataclass
class Exported:
    folder: Path
    config: TrainConfig
    verl: Any


def export_tiny(config: TrainConfig, folder: Path) -> Exported:
    """Export settings, and read them back with rows as short as the tiny model's."""
    export_verl(config, folder)
    verl = compose_verl(
        folder,
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "data.max_prompt_length=32",
        "data.max_response_length=160",
    )
    return Exported(folder, open_conversations(str(folder / "config.json")).config, verl)


def run_python(*words: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
