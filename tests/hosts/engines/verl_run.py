"""Runs of an exported folder on this machine: its launch.sh, unchanged but for settings that a user could
give, on a local Ray with two workers on CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trialogue.config import TrainConfig, load_config
from trialogue.hosts.export import export_verl
from trialogue.run import read_trajectories
from trialogue.trajectory import Trajectory

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATIENCE = 3600
"""Seconds for one start: on a busy machine the imports of a dozen processes take minutes."""
LATE = "The current node timed out during startup"
"""Ray gives itself half a minute; on a busy machine it is tried again."""
MARK = "TRIALOGUE_VERL_RUN"
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = [
    "ray_kwargs.ray_init.num_cpus=64",  # logical: verl's queue waits without a word for those it asks for
    "+ray_kwargs.ray_init.num_gpus=2",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "+ray_kwargs.ray_init.address=local",  # not the Ray of another test
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.n_gpus_per_node=2",
    "trainer.nnodes=1",
    "trainer.device=cpu",
    "trainer.logger=[console,file]",
    "data.dataloader_num_workers=0",
    f"{MODEL}.external_lib=verl_worker",
    f"+{MODEL}.override_config.attn_implementation=sdpa",
    f"{ROLLOUT}.name=cpu",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.full_determinism=true",  # the server gets the seed of each reply
    f"{ACTOR}.use_torch_compile=false",
    f"{ACTOR}.fsdp_config.use_torch_compile=false",
    *(f"+{ACTOR}.fsdp_config.mixed_precision.{kind}_dtype=fp32" for kind in ("param", "reduce", "buffer")),
]


@dataclass
class VerlRun:
    """A folder and what came of its starts."""

    folder: Path
    config: TrainConfig
    steps: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """The metrics of each step; of one that ran twice, the last."""
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    restart: Callable[[], None] | None = None

    @classmethod
    def export(cls, config: TrainConfig, folder: Path, settings: dict[str, Any]) -> VerlRun:
        settings = {**settings, f"engine.verl.{ROLLOUT}.agent.num_workers": 1}
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        config = load_config(TrainConfig, None, words, config)
        export_verl(config, folder)
        return cls(folder, config)

    @property
    def metrics(self) -> Path:
        return self.folder / f"metrics-{self.starts}.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.starts}"

    def start(self, *words: str, **environment: str) -> None:
        self.starts += 1
        self.restart = partial(self.start, *words, **environment)
        own = {
            MARK: str(self.folder),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
            "TRIALOGUE_DOCTOR": "0",  # there is no GPU
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_platform",
            "VERL_FILE_LOGGER_PATH": str(self.metrics),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_agent_register_timeout_ms": "600000",
            "RAY_worker_register_timeout_seconds": "600",
            "RAY_gcs_server_request_timeout_seconds": "600",
            "RAY_health_check_timeout_ms": "600000",
            "RAY_DEDUP_LOGS": "0",
            "RAY_prestart_worker_first_driver": "0",  # as many as there are logical CPUs
        }
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [str(self.folder / "launch.sh"), *SETTINGS, *words],
                stdout=file,
                stderr=file,
                env=os.environ | own | environment,
            )

    def wait(self, until: Callable[[VerlRun], bool] | None = None) -> int | None:
        """Wait for the end, or until something has happened: gives the exit status. Leave nothing behind."""
        assert self.process is not None
        end = time.monotonic() + PATIENCE
        try:
            while (status := self.process.poll()) is None:
                if until is not None and until(self):
                    return None
                assert time.monotonic() < end, self.log.read_text()[-3000:]
                time.sleep(0.2)
                self.read(self.metrics)
        except BaseException:
            self.kill()
            raise
        self.read(self.metrics)
        self.kill()
        if LATE in self.log.read_text() and self.starts < 6 and self.restart is not None:
            self.restart()
            return self.wait(until)
        assert until is None, f"over too early: {self.log.read_text()[-5000:]}"
        return status

    def read(self, metrics: Path) -> None:
        lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.is_file() else []
        for record in map(json.loads, lines):  # a resumed run validates again, in a line of its own
            self.steps[record["step"]] = self.steps.get(record["step"], {}) | record["data"]

    def find_processes(self, name: str = "") -> list[int]:
        """The processes of this run, by the mark in their environment."""
        found: list[int] = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.folder}".encode() in (place / "environ").read_bytes().split(b"\0")
                if marked and name.encode() in (place / "cmdline").read_bytes():
                    found.append(int(place.name))
            except OSError:
                continue  # over, or somebody else's
        return [pid for pid in found if pid != os.getpid()]

    def kill(self, name: str = "") -> int:
        """SIGKILL to the processes of this run, or to one of that name."""
        pids = self.find_processes(name)[: 1 if name else None]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return len(pids)

    def read_conversations(self, kind: str = "step") -> dict[int, dict[str, list[Trajectory]]]:
        """The conversations of each step by id, all versions of those that were held twice."""
        steps: dict[int, dict[str, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
        for file in sorted((self.folder / "trajectories").glob(f"{kind}-*.jsonl")):
            step = int(file.name.split(".")[0].split("-")[1])
            for item in read_trajectories(file):
                steps[step][item.id].append(item)
        return steps

    def list_checkpoints(self) -> list[int]:
        return sorted(
            int(path.name.rsplit("_", 1)[1]) for path in self.folder.glob("checkpoints/global_step_*")
        )

    def read_weights(self, step: int) -> dict[str, torch.Tensor]:
        """A checkpoint's weights in float32, the workers' parts put together."""
        place = self.folder / "checkpoints" / f"global_step_{step}" / "actor"
        parts = [
            torch.load(place / f"model_world_size_2_rank_{rank}.pt", weights_only=False) for rank in (0, 1)
        ]
        return {name: torch.cat([part[name]._local_tensor for part in parts]) for name in parts[0]}

    def merge(self, step: int, folder: Path) -> Path:
        """By the command of the exported README."""
        place = self.folder / "checkpoints" / f"global_step_{step}" / "actor"
        words = ["merge", "--backend", "fsdp", "--local_dir", str(place), "--target_dir", str(folder)]
        run_python("-m", "verl.model_merger", *words)
        return folder


def run_python(*words: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
