"""Launchers of `export verl`: the scripts are run with stand-ins for Slurm and Ray, the manifest is read.

A validator of shell scripts, of container files or of Kubernetes objects is used where one is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trialogue.cli.main import main
from trialogue.config import TrainConfig, load_config
from trialogue.hosts.launchers import FILES, RAY, VERL, Launcher, write_launcher
from trialogue.hosts.ray_nodes import count_needed, wait_for_nodes
from trialogue.plan.machine import read_tested

ROOT = Path(__file__).parents[2]


def write(folder: Path, launcher: Launcher, *words: str) -> Path:
    folder.mkdir(parents=True)
    config = load_config(TrainConfig, ROOT / "configs" / "paper-8b.toml", words)
    assert write_launcher(config, folder, launcher) == list(FILES[launcher])
    return folder


def stand_in(folder: Path, **programs: str) -> dict[str, str]:
    """Programs of these names that note how they were called; the text is what else they do."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, action in programs.items():
        file = bin_folder / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{action}\n', encoding="utf-8")
        file.chmod(0o755)
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def make_slurm(tmp_path: Path, python: str) -> tuple[Path, dict[str, str]]:
    folder = write(tmp_path / "run", "slurm")
    (folder / "launch.sh").write_text(
        f'#!/bin/sh\necho "launch $RAY_ADDRESS $*" >> {tmp_path}/calls\n', encoding="utf-8"
    )
    (folder / "launch.sh").chmod(0o755)
    on = 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"'  # srun: run what comes behind its options
    hosts = "printf 'one\\ntwo\\nthree\\n'"
    environment = stand_in(tmp_path, srun=on, scontrol=hosts, ray="sleep 0.3", python=python)
    known = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "64", "OPENAI_API_KEY": "sk-canary-1"}
    return folder, {**environment, **known}


def test_slurm_waits_for_its_nodes_and_then_launches(tmp_path: Path) -> None:
    folder, environment = make_slurm(tmp_path, "exit 0")
    done = run(["bash", str(folder / "slurm.sh"), "trainer.logger=console"], environment)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    waits = [place for place, call in enumerate(calls) if call.startswith("python")]
    assert [call.partition("--nodes")[2].split()[0] for call in calls if call.startswith("python")] == [
        "1",
        "3",
    ]
    head = next(place for place, call in enumerate(calls) if call.startswith("srun") and "--head" in call)
    assert "--nodelist=one" in calls[head]
    joined = [call for call in calls if call.startswith("srun") and "--address=one:6379" in call]
    assert sorted(call.partition("--nodelist=")[2].split()[0] for call in joined) == ["three", "two"]
    assert all(calls.index(call) > waits[0] for call in joined)  # not before the head was there
    assert [call for call in calls if call.startswith("launch")] == ["launch one:6379 trainer.logger=console"]
    assert calls.index("launch one:6379 trainer.logger=console") > waits[1]
    assert "sleep" not in (folder / "slurm.sh").read_text(encoding="utf-8")
    assert "sk-canary" not in "".join(calls)


def test_slurm_gives_up_where_nodes_do_not_come(tmp_path: Path) -> None:
    folder, environment = make_slurm(tmp_path, 'case "$*" in *"--nodes 3"*) exit 1 ;; esac')
    done = run(["bash", str(folder / "slurm.sh")], environment)
    assert done.returncode == 1
    assert "launch" not in (tmp_path / "calls").read_text(encoding="utf-8")


def test_ray_starts_joins_and_runs(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "ray", "engine.verl.trainer.nnodes=2")
    (folder / "launch.sh").write_text(f'#!/bin/sh\necho "launch $*" >> {tmp_path}/calls\n', encoding="utf-8")
    (folder / "launch.sh").chmod(0o755)
    environment = stand_in(tmp_path, ray="", python="")
    script = str(folder / "ray.sh")
    for words in (["head"], ["join", "first"], ["run", "a=b"]):
        assert run(["bash", script, *words], environment).returncode == 0
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert calls[0].startswith("ray start --head --port=6379")
    assert calls[1].startswith("ray start --address=first:6379")
    assert "--nodes 2" in calls[2]
    assert calls[3] == "launch a=b"
    assert run(["bash", script], environment).returncode == 2
    assert run(["bash", script, "join"], environment).returncode != 0


def test_waiting_for_nodes_ends_with_the_last_one_or_in_time() -> None:
    now, told = [0.0], list[str]()

    def pause(seconds: float) -> None:
        now[0] += seconds

    numbers = iter([0, 1, 1, 4])
    assert wait_for_nodes(lambda: next(numbers), 4, 600, told.append, lambda: now[0], pause)
    assert told == [
        "0 of 4 nodes of Ray are there",
        "1 of 4 nodes of Ray are there",
        "4 of 4 nodes of Ray are there",
    ]
    assert not wait_for_nodes(lambda: 3, 4, 20, told.append, lambda: now[0], pause)
    assert told[-1] == "only 3 of 4 nodes of Ray are there after 20 s"
    assert 20 <= now[0] - 6 <= 24


def test_processors_that_verl_asks_for() -> None:
    assert count_needed({}) == (1, 8, 3 * 8 + 8 + 2)
    units = {"transfer_queue.backend.SimpleStorage.num_data_storage_units": 1}
    assert count_needed({"trainer.nnodes": "2", "trainer.n_gpus_per_node": "1", **units}) == (2, 1, 9)


def read_job(folder: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((folder / "rayjob.yaml").read_text(encoding="utf-8"))


def test_the_manifest_asks_for_what_verl_needs(tmp_path: Path) -> None:
    folder = write(tmp_path / "Paper 8B!", "k8s")
    job = read_job(folder)
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("ray.io/v1", "RayJob", "paper-8b")
    spec = job["spec"]
    assert spec["entrypoint"] == f"{folder}/launch.sh"
    [workers] = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 4
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["resources"]["limits"] == container["resources"]["requests"]
    head = spec["rayClusterSpec"]["headGroupSpec"]
    cpus = int(container["resources"]["limits"]["cpu"]) * 4
    cpus += int(head["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert cpus >= count_needed({"trainer.nnodes": 4})[2]
    for group in (head, workers):
        inside = group["template"]["spec"]
        places = {mount["name"]: mount["mountPath"] for mount in inside["containers"][0]["volumeMounts"]}
        assert places == {"runs": str(tmp_path), "memory": "/dev/shm"}
        assert set(places) == {volume["name"] for volume in inside["volumes"]}
        [key] = inside["containers"][0]["env"]
        assert key["valueFrom"]["secretKeyRef"] == {"name": "paper-8b-keys", "key": "OPENAI_API_KEY"}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert spec["rayClusterSpec"]["rayVersion"] == RAY


def test_versions_are_those_that_were_tested() -> None:
    assert read_tested()["verl"]["ray"] == RAY
    assert read_tested()["verl"]["verl"] == VERL


def find_tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize(("launcher", "file"), [("slurm", "slurm.sh"), ("ray", "ray.sh")])
def test_scripts_are_bash(launcher: Launcher, file: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", launcher)
    assert os.access(folder / file, os.X_OK)
    assert run(["bash", "-n", str(folder / file)], dict(os.environ)).stderr == ""


@pytest.mark.parametrize(("launcher", "file"), [("slurm", "slurm.sh"), ("ray", "ray.sh")])
def test_shellcheck_finds_nothing(launcher: Launcher, file: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", launcher)
    done = run([find_tool("shellcheck"), str(folder / file)], dict(os.environ))
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "k8s")
    done = run([find_tool("hadolint"), str(folder / "Containerfile")], dict(os.environ))
    assert done.returncode == 0, done.stdout


def test_pods_are_those_of_kubernetes(tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    spec = read_job(write(tmp_path / "run", "k8s"))["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": group["template"]["spec"],
        }
        validate.validate(pod, "1.33", strict=True)
        with pytest.raises(validate.ValidationError):
            validate.validate({**pod, "spec": {**pod["spec"], "containerz": []}}, "1.33", strict=True)


@pytest.mark.parametrize("launcher", list(FILES))
def test_the_verb_writes_them_beside_the_rest(launcher: Launcher, tmp_path: Path) -> None:
    words = [
        "export",
        "verl",
        "shop",
        "training.steps=1",
        "training.tasks_per_step=2",
        "training.eval_every=0",
    ]
    words += ["optimizer.schedule=constant", "--out", str(tmp_path / "out"), "--launcher", launcher]
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["launchers"] == list(FILES[launcher])
    assert all((tmp_path / "out" / name).is_file() for name in ("launch.sh", *told["launchers"]))
    text = "".join((tmp_path / "out" / name).read_text(encoding="utf-8") for name in told["launchers"])
    assert "§" not in text
