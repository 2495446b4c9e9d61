"""The whole loop with its model on a GPU, which is a fake one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trialogue.config import TrainConfig, load_config
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import EngineError
from trialogue.learn.advantages import to_rows
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.run import read_about, read_config, read_lines, read_trajectories

pytestmark = pytest.mark.training


def find_run(config: Any) -> Path:
    return Path(config.run.directory) / config.run.name


def read_metrics(run: Any) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(run / "metrics.jsonl")]


async def test_training_on_it_is_training_on_the_cpu(gpu, train_config, trained):
    """In float32 the same conversations are sampled, learned from, and sampled again."""
    found = []
    for device in ("fakegpu", "cpu"):
        config = train_config(
            learner__model=str(trained),
            learner__device=device,
            learner__precision="float32",
            optimizer__learning_rate=1e-3,
            run__name=device,
        )
        found.append(read_metrics(await train(config)))
    for there, here in zip(*found, strict=True):
        for name in ("reward", "loss", "grad_norm", "entropy"):
            assert there.get(name) == pytest.approx(here.get(name), rel=2e-3, abs=2e-4), name
    assert any(line.get("grad_norm", 0) > 0 for line in found[0])
    assert read_config(TrainConfig, find_run(config)).engine.name == "torch"  # what `auto` was


async def test_what_is_computed_in_a_second_is_recorded(gpu, train_config, trained):
    """Not among the metrics, which are equal for equal seeds. Both devices have the same operations."""
    operations: list[list[float]] = []
    for device in ("fakegpu", "cpu"):
        seen: list[dict[str, Any]] = []
        config = train_config(
            learner__model=str(trained),
            learner__device=device,
            learner__precision="float32",
            learner__peak_tflops=1e-6,
            run__name=device,
        )
        run = await train(config, watch=lambda step, metrics, seen=seen: seen.append(metrics))
        assert not any("mfu" in line or "tokens_per_second" in line for line in read_metrics(run))
        lines = [line for _, line in read_lines(run / "timings.jsonl") if "rollout" in line]
        shown = [metrics for metrics in seen if "tokens_per_second" in metrics]
        for line, metrics in zip(lines, shown, strict=True):
            held = read_trajectories(run / "trajectories" / f"step-{line['step']:06d}.jsonl")
            rows = [row for item in held if "advantage" in item.meta for row in to_rows(item, 0.0)]
            tokens = line["tokens_per_second"] * (line["rollout"] + line["update"])
            assert tokens == pytest.approx(sum(len(row.tokens) for row in rows), rel=0.3)
            assert line.get("mfu") == pytest.approx(metrics.get("mfu"), abs=1e-3)
        operations.append([line.get("mfu", 0.0) * 1e6 * line["update"] for line in lines])
    assert operations[0] == pytest.approx(operations[1], rel=0.3)  # the seconds on record are rounded
    assert max(operations[0]) > 1e6


@pytest.mark.parametrize("more", [{}, {"learner__lora_rank": 4}])
async def test_bfloat16_trains_and_is_saved(gpu, train_config, trained, more):
    run = await train(train_config(learner__model=str(trained), learner__device="fakegpu", **more))
    lines = read_metrics(run)
    assert len(lines) == 3
    gaps = [line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line]
    assert gaps
    assert max(gaps) < 0.3
    assert (run / "model" / ("adapter_config.json" if more else "model.safetensors")).is_file()


async def test_a_full_gpu_stops_the_run_in_one_line_and_it_goes_on_with_less(
    gpu, train_config, trained, monkeypatch
):
    config = train_config(learner__model=str(trained), learner__device="fakegpu")
    learn = TorchEngine.forward_backward
    calls = 0

    async def fill_up(self: TorchEngine, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            with gpu.memory(1 << 12):
                return await learn(self, *arguments, **options)
        return await learn(self, *arguments, **options)

    monkeypatch.setattr(TorchEngine, "forward_backward", fill_up)
    with pytest.raises(EngineError) as told:
        await train(config)
    line = str(told.value)
    print(line)
    assert "\n" not in line
    assert "learner.micro_batch_tokens (now 16384)" in line
    assert "saved after step" in line
    run = find_run(config)
    assert read_about(run)["state"] == "failed"
    assert list((run / "checkpoints").glob("step-*"))
    monkeypatch.undo()
    less = load_config(
        TrainConfig,
        None,
        ["learner.micro_batch_tokens=64", "rollout.concurrency=8"],
        read_config(TrainConfig, run),
    )
    await train(less, resume=run)
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all("grad_norm" in line or line.get("skipped") for line in lines)


async def test_imitation_on_a_full_gpu_is_saved_too(gpu, sft_config, monkeypatch):
    config = sft_config(learner__device="fakegpu")
    learn = TorchEngine.forward_backward
    calls = 0

    async def fill_up(self: TorchEngine, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        with gpu.memory(1 << (40 if calls < 3 else 12)):
            return await learn(self, *arguments, **options)

    monkeypatch.setattr(TorchEngine, "forward_backward", fill_up)
    with pytest.raises(EngineError, match="saved after step 2: continue with --resume"):
        await sft(config)
    run = find_run(config)
    monkeypatch.undo()
    await sft(config, resume=run)
    assert read_about(run)["state"] == "finished"
