"""Before verl: waiting for Ray's nodes and looking at the folder as each of them sees it, with a real Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import find_port

from trialogue.hosts.ray_nodes import count_nodes, wait_for_nodes
from trialogue.plan.cluster import look_at_ray

RAY = Path(sys.executable).with_name("ray")
SMALL = {
    "trainer.n_gpus_per_node": 0,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}
PATIENCE = 600


def start(*words: str, hiding: Path | None = None) -> None:
    """Start a node of Ray, with an empty folder in place of one that it shall not see."""
    command = [str(RAY), "start", "--disable-usage-stats", "--num-cpus=4", *words]
    if hiding is not None:
        command = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {hiding} && exec "$@"', "sh", *command]
    subprocess.run(command, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)


def find_processes(word: str) -> list[int]:
    """Processes whose command names a folder of ours."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if word in (place / "cmdline").read_text(errors="replace"):
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    port = find_port()
    place = Path(f"/tmp/ray-{port}")  # Ray's sockets want a short path
    start("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={place}")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        for number in find_processes(f"{place}/"):
            if number != os.getpid():
                os.kill(number, 15)
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.timeout(3 * PATIENCE)
def test_nodes_are_waited_for_and_a_folder_that_one_does_not_see_is_told(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    told: list[str] = []
    assert wait_for_nodes(lambda: count_nodes(address), 1, PATIENCE, told.append)
    assert not wait_for_nodes(lambda: count_nodes(address), 2, 1, told.append)
    found = {one.name: one for one in look_at_ray(tmp_path, SMALL)}
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(found, "ok")
    assert found["shared folder"].found.endswith("seen by all 1 nodes")
    short = {one.name: one for one in look_at_ray(tmp_path, {})}
    assert short["Ray's processors"].state == short["Ray's GPUs"].state == "fail"
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a node that sees another folder needs a mount of its own, which needs root")
    shared = tmp_path / "shared"
    shared.mkdir()
    start(f"--address={address}", hiding=shared)
    assert wait_for_nodes(lambda: count_nodes(address), 2, PATIENCE, told.append)
    found = {one.name: one for one in look_at_ray(shared, SMALL)}
    assert found["shared folder"].state == "fail"
    assert "is not seen by 1 of 2" in found["shared folder"].found
    assert list(shared.iterdir()) == []  # what was written to look is gone
