"""`trialogue doctor`: what it finds, asks and shows; a real server on loopback is the endpoint."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command import run_verb
from endpoint import Endpoint

from trialogue.cli.main import main
from trialogue.config import TrainConfig, load_config
from trialogue.hosts.ray_nodes import is_listening
from trialogue.plan import cluster
from trialogue.plan.cluster import compare_cpus, look_at_ray, read_words
from trialogue.plan.doctor import examine, read_exported
from trialogue.plan.machine import (
    look_at_compiler,
    look_at_disk,
    look_at_fit,
    look_at_packages,
    look_at_python,
    read_tested,
)
from trialogue.world.scaffold import write_domain

KEY = "sk-canary-8080"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "RAY_ADDRESS", "VERL_PLATFORM", "TRIALOGUE_DATA"):
        monkeypatch.delenv(name, raising=False)


def ask(*words: str) -> Any:
    return CliRunner().invoke(main, ["doctor", *words])


def read(*words: str) -> dict[str, Any]:
    done = ask(*words, "--json")
    return json.loads(done.stdout)


def find(found: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    [one] = [one for one in found if one["name"] == name]
    return one


def test_a_machine_that_runs_these_tests_lacks_nothing() -> None:
    done = ask()
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "nothing is missing"
    assert {"Python", "processor", "C compiler", "torch", "GPUs"} <= {
        line[6:].partition(":")[0] for line in done.output.splitlines()[:-1]
    }


def test_a_run_of_the_shop_can_begin(tmp_path: Path) -> None:
    told = read("shop", f"run.directory={tmp_path}/runs")
    assert told["ok"]
    assert find(told["findings"], "domain")["state"] == "ok"
    assert find(told["findings"], "model")["found"].startswith("tiny, 0.00133 billion")


def test_what_is_missing_is_told_with_what_to_do_and_exits_with_1() -> None:
    done = ask("tau:retail", "learner.model=Qwen/Qwen3-8B", "--user", "openai:gpt-4.1", "learner.device=cuda")
    assert done.exit_code == 1
    lines = {line[6:].partition(":")[0]: line for line in done.output.splitlines()}
    assert lines["domain"].startswith("fail")
    assert "--data DIR" in lines["domain"]
    assert lines["key"] == "fail  key: OPENAI_API_KEY is not set. Export OPENAI_API_KEY: user needs it"
    assert lines["model"].startswith("warn")
    assert "asking openai" not in done.output  # nobody is asked without a key


def test_a_model_that_is_not_here_is_no_problem_where_it_may_be_on_a_hub() -> None:
    for model, state in (("Qwen/Qwen3-8B", "warn"), ("some/other-7B", "warn"), ("runs/none", "fail")):
        assert find(read("shop", f"learner.model={model}")["findings"], "model")["state"] == state


def test_too_few_tasks_for_a_step_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_domain(Path("bakery"))
    told = read("bakery", "training.tasks_per_step=500")
    assert not told["ok"]
    assert "lower training.tasks_per_step" in find(told["findings"], "domain")["remedy"]


def test_an_endpoint_is_asked_as_often_as_was_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with Endpoint(lambda request, asked: "yes") as endpoint:
        words = ("--user", "openai:helper", f"user.base_url={endpoint.url}", "user.concurrency=5")
        done = ask("shop", *words, "--probes", "16")
        assert done.exit_code == 0, done.output
        told = "asking openai:helper (user) 6 times, 5 at once, for at most 32 tokens each"
        assert told in done.output
        assert len(endpoint.requests) == 6
        assert {request["max_tokens"] for request in endpoint.requests} == {32}
        assert {request["authorization"] for request in endpoint.requests} == {f"Bearer {KEY}"}
        assert KEY not in done.output
        assert "5 at once: " in done.output
        few = ask("shop", *words, "--probes", "2")
        assert "3 times, 2 at once" in few.output
        assert len(endpoint.requests) == 6 + 3
        none = ask("shop", *words, "--probes", "-1")
        assert none.exit_code == 0
        assert len(endpoint.requests) == 9


def test_an_endpoint_that_refuses_is_a_problem_and_never_shows_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with Endpoint(lambda request, asked: (401, {"error": {"message": f"bad key {KEY}"}})) as endpoint:
        done = ask("shop", "--user", "openai:helper", f"user.base_url={endpoint.url}")
        assert done.exit_code == 1
        assert "401" in done.output
        assert KEY not in done.output
        assert len(endpoint.requests) == 1  # the others were not sent any more


def test_an_endpoint_that_fails_under_load_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def script(request: dict[str, Any], asked: int) -> Any:
        return "yes" if asked % 2 == 0 else (429, {"error": {"message": "slow down"}})

    with Endpoint(script) as endpoint:
        told = read("shop", "--user", "openai:helper", f"user.base_url={endpoint.url}", "--probes", "8")
    one = find(told["findings"], "user openai:helper")
    assert one["state"] == "warn"
    assert "4 failed" in one["found"]
    assert "user.requests_per_minute" in one["remedy"]
    assert told["ok"]


def test_nobody_at_the_address_is_a_problem() -> None:
    done = ask("shop", "--user", "openai:helper", "user.base_url=http://127.0.0.1:9/v1")
    assert done.exit_code == 1
    done = ask("shop", "engine.name=vllm", "engine.url=http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "Start the server, or correct engine.url" in done.output


def test_versions_and_tools_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_at_python((3, 10, 1), "train").state == "fail"
    assert look_at_python((3, 13, 0), "train").state == "ok"
    assert look_at_python((3, 13, 0), "verl").state == "fail"
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert look_at_compiler().state == "warn"
    tested = read_tested()["train"]["numpy"]
    monkeypatch.setitem(read_tested()["train"], "numpy", "1.0.0")
    by_name = {one.name: one for one in look_at_packages("train")}
    assert (by_name["numpy"].state, by_name["numpy"].remedy) == ("warn", "The tests ran with 1.0.0")
    monkeypatch.setitem(read_tested()["train"], "numpy", tested)
    absent = [one for one in look_at_packages("verl") if one.name in ("verl", "TransferQueue")]
    if absent and absent[0].state == "fail":  # nobody installed verl beside the tests
        assert absent[0].remedy == "pip install 'trialogue[verl]'"


def test_room_for_checkpoints(tmp_path: Path) -> None:
    assert look_at_disk(tmp_path / "not" / "yet", 0.001, 3).state == "ok"
    small = look_at_disk(tmp_path, 1e9, 3)
    assert small.state == "fail"
    assert "1000000000.0 GB needed for 3 checkpoints" in small.found
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid():  # root may write anywhere
        assert look_at_disk(closed / "runs", 0.001, 3).state == "fail"


def test_a_run_that_does_not_fit_on_the_gpus_there_is_told_what_does() -> None:
    config = load_config(TrainConfig, Path(__file__).parents[2] / "configs" / "paper-32b.toml")
    assert look_at_fit(config, 85.0, is_exported=True).state == "ok"
    small = look_at_fit(config, 48.0, is_exported=True)
    assert small.state == "warn"
    assert small.remedy


# -- before verl --------------------------------------------------------------------------------------------


def export(folder: Path, *words: str) -> Path:
    settings = ("training.steps=1", "training.tasks_per_step=2", "training.eval_tasks=2")
    usual = (*settings, "optimizer.schedule=constant", "--out", str(folder))
    done = run_verb(Path.cwd(), "export", "verl", *words, *usual)
    assert done.returncode == 0, done.stderr
    return folder


def test_an_exported_folder_is_looked_at_with_what_its_workers_share_together(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", "shop", "user.concurrency=64")
    assert json.loads((folder / "config.json").read_text())["user"]["concurrency"] == 8
    assert read_exported(folder).user.concurrency == 64
    told = read("--exported", str(folder), "trainer.nnodes=1", "trainer.n_gpus_per_node=2")
    names = {one["name"] for one in told["findings"]}
    assert {"verl", "ray", "domain", "disk"} <= names
    assert find(told["findings"], "GPUs")["state"] == "fail"
    missing = ask("--exported", str(tmp_path))
    assert missing.exit_code == 1
    assert "no launch.sh" in missing.output


def test_with_a_platform_of_ones_own_no_gpu_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(tmp_path / "out", "shop")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    found = {one.name: one for one in examine(read_exported(folder), -1, lambda text: None, folder)}
    assert found["GPUs"].state == "ok"


def test_a_folder_of_somebody_else_runs_no_code_and_sends_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    write_domain(Path("bakery"))
    code = tmp_path / "bakery" / "domain.py"
    code.write_text(code.read_text(encoding="utf-8") + "\nopen('was-run', 'w').close()\n", encoding="utf-8")

    def examine_anew(*more: str) -> subprocess.CompletedProcess[str]:
        return run_verb(tmp_path, "doctor", "--exported", str(folder), *more)

    with Endpoint(lambda request, asked: "yes") as endpoint:
        words = ("--user", "openai:helper", f"user.base_url={endpoint.url}")
        folder = export(tmp_path / "out", "bakery", *words)
        Path("was-run").unlink()
        refused = examine_anew()
        assert refused.returncode == 2
        assert "--trust" in refused.stderr
        assert not Path("was-run").exists()
        assert endpoint.requests == []
        examine_anew("--trust", "--probes", "1")
        assert Path("was-run").exists()
        assert len(endpoint.requests) == 2


def test_launch_looks_first_and_stops_where_something_is_missing(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", "shop")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(folder / "launch.sh"), "trainer.nnodes=3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "fail  GPUs" in done.stdout
    assert "main_ppo" not in done.stderr  # verl was not even started
    skipped = {**environment, "TRIALOGUE_DOCTOR": "0"}
    done = subprocess.run(command, env=skipped, capture_output=True, text=True, timeout=100, check=False)
    assert "fail  GPUs" not in done.stdout


def test_a_ray_that_is_gone_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_version", lambda package: "2.60.0")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    [gone] = look_at_ray(tmp_path, {})
    assert (gone.state, gone.found) == ("fail", "nobody listens at 127.0.0.1:9")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(cluster, "NOTE", tmp_path / "note")
    (tmp_path / "note").write_text("127.0.0.1:9\n", encoding="utf-8")
    noted, fresh, processors = look_at_ray(tmp_path, {"ray_kwargs.ray_init.num_cpus": 64})
    assert (noted.state, fresh.state, processors.state) == ("warn", "ok", "ok")
    (tmp_path / "note").unlink()
    alone = list(look_at_ray(tmp_path, {"ray_kwargs.ray_init.num_cpus": 4}))
    assert [one.state for one in alone] == ["ok", "fail"]
    assert not is_listening("ray://127.0.0.1:9")
    assert is_listening("auto")


def test_too_few_processors_of_ray_are_a_problem_because_verl_would_hang(tmp_path: Path) -> None:
    assert compare_cpus(34, 34).state == "ok"
    few = compare_cpus(8, 34)
    assert few.state == "fail"
    assert "ray_kwargs.ray_init.num_cpus=34" in few.remedy
    words = read_words(("trainer.nnodes=2", "+a.b='x'", "~gone"))
    assert words == {"trainer.nnodes": "2", "a.b": "x"}
    if not [one for one in look_at_packages("verl") if one.name == "ray" and one.state != "fail"]:
        assert list(look_at_ray(tmp_path, words)) == []  # told by the packages


# -- a few minutes of the real thing ------------------------------------------------------------------------


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smoke_trains_and_writes_a_report(tmp_path: Path) -> None:
    out = tmp_path / "smoke"
    done = ask("--smoke", "--minutes", "0.5", "--out", str(out))
    assert done.exit_code == 0, done.output
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["step"]["measured_seconds"] > 0
    assert report["step"]["predicted_seconds"] > 0
    assert report["summary"]["test_tasks"] >= 32
    assert {one["name"] for one in report["findings"]} >= {"Python", "torch"}
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "| a step, predicted |" in text
    assert (out / "rl" / "metrics.jsonl").is_file()
