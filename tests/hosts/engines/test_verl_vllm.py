"""verl's trainer with its own vLLM servers on CPUs: `make test-verl-vllm`, in an environment of both."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl and vLLM live in an environment of their own: make test-verl-vllm")
pytest.importorskip("vllm", reason="verl and vLLM live in an environment of their own: make test-verl-vllm")

from verl_run import MODEL, ROLLOUT, VerlRun

from trialogue.config import TrainConfig

pytestmark = pytest.mark.timeout(14400)
STEPS = 4
USUAL = {
    "tasks.families": ["plain"],
    "training.steps": STEPS,
    "training.eval_every": 0,
    "optimizer.learning_rate": 5e-4,
}
SETTINGS = [
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.enforce_eager=true",
    f"{ROLLOUT}.free_cache_engine=false",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    f"{ROLLOUT}.full_determinism=false",
    f"{ROLLOUT}.max_num_seqs=16",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
    f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=verl_unpacked.Extension",
    f"{MODEL}.external_lib=verl_worker",
]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def run_steps(config: TrainConfig, folder: Path, *words: str) -> VerlRun:
    run = VerlRun.export(config, folder, USUAL)
    run.start(*SETTINGS, *words, **ENVIRONMENT)
    assert run.wait() == 0, run.log.read_text()[-5000:]
    assert sorted(run.steps) == [*range(1, STEPS + 1)]
    return run


def read_column(run: VerlRun, name: str) -> list[float]:
    return [run.steps[step][name] for step in sorted(run.steps)]


def test_verls_own_vllm_has_the_weights_of_every_step(config: TrainConfig, tmp_path: Path) -> None:
    run = run_steps(config, tmp_path / "run")
    gaps = read_column(run, "training/rollout_probs_diff_max")
    print("reward", read_column(run, "critic/score/mean"), "probs_diff_max", gaps)
    assert max(gaps) < 1e-4
    assert max(read_column(run, "actor/grad_norm")[:-1]) > 0  # or nothing would have been sent


def test_conversations_go_on_with_new_weights(config: TrainConfig, tmp_path: Path) -> None:
    """verl's asynchronous trainer cuts replies short when it updates, and has them continued."""
    run = run_steps(config, tmp_path / "run", "trainer.v1.trainer_mode=colocate_async")
    names = ["trajectory_staleness", "trajectory_staleness_worst", "trajectory_spans"]
    found = {name: read_column(run, f"training/off_policy/{name}/max") for name in names}
    print("reward", read_column(run, "critic/score/mean"), found)
    assert max(found["trajectory_staleness_worst"]) >= 1
