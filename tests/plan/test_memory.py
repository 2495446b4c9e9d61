"""Memory of a GPU: sums worked by hand, the smallest change that fits, peaks that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trialogue.config import PlanConfig, load_config
from trialogue.engine.hardware import GPUS, Gpu
from trialogue.engine.shapes import find_shape
from trialogue.plan.layout import change, to_layout
from trialogue.plan.memory import find_changes, find_smallest_change, measure_memory

ROOT = Path(__file__).parents[2]
H100 = GPUS["h100"]


def read(size: str, *words: str) -> PlanConfig:
    return load_config(PlanConfig, ROOT / "configs" / f"paper-{size}.toml", words)


def measure(config: PlanConfig, gpus: int, gpu: Gpu = H100) -> object:
    return measure_memory(config, to_layout(config, gpus), find_shape(config.learner.model), gpu)


def test_training_state_is_sixteen_bytes_a_parameter_over_all_gpus() -> None:
    config, shape = read("32b"), find_shape("Qwen/Qwen3-32B")
    memory = measure_memory(config, to_layout(config, 32), shape, H100)
    state = sum(memory.update[name] for name in ("weights", "gradients", "moments"))
    assert state == pytest.approx(16 * shape.parameters / 32 / 1e9)
    assert memory.sampling["sampling weights"] == pytest.approx(2 * shape.parameters / 2 / 1e9)
    # The script offloads the moments of the 32B: they are on the GPU in the update only.
    assert memory.update["moments"] > 0 == memory.sampling["moments"]
    # 64 layers, 8 KV heads of 128, two of them bfloat16 numbers; two GPUs hold half of the heads each.
    room = 0.8 * 85e9 - shape.parameters * 2 / 2 - 2e9
    assert memory.cache_tokens == int(room / (2 * 64 * 8 * 128 * 2 / 2))
    logits = 8192 * 151936 * 8 / 1e9
    assert memory.update["logits"] == pytest.approx(logits)


def test_adapters_and_offloading_take_away_what_they_should() -> None:
    config, shape = read("8b", "learner.lora_rank=32"), find_shape("Qwen/Qwen3-8B")
    memory = measure_memory(config, to_layout(config, 8), shape, H100)
    assert memory.update["moments"] == pytest.approx(8 * shape.count_lora(32) / 8 / 1e9)
    assert memory.update["weights"] == pytest.approx(
        (4 * shape.count_lora(32) + 4 * shape.parameters) / 8 / 1e9
    )
    always = change(read("8b"), {"engine.verl.actor_rollout_ref.actor.fsdp_config.offload_policy": True})
    kept = measure_memory(always, to_layout(always, 8), shape, H100)
    assert [kept.update[name] for name in ("weights", "gradients", "moments")] == [0, 0, 0]


def test_what_fits_needs_no_change_and_fits_on_more() -> None:
    for size in ("8b", "14b", "32b"):
        config = read(size)
        shape = find_shape(config.learner.model)
        fits = [measure_memory(config, to_layout(config, n), shape, H100).fits for n in (2, 8, 32, 64, 256)]
        assert fits == sorted(fits)
        assert fits[2:] == [True, True, True]


@pytest.mark.parametrize(("size", "gpus"), [("8b", 1), ("8b", 8), ("14b", 8), ("32b", 8)])
def test_the_smallest_change_fits_and_no_single_cheaper_one_does(size: str, gpus: int) -> None:
    config = read(size)
    shape, layout = find_shape(config.learner.model), to_layout(config, gpus)
    assert not measure_memory(config, layout, shape, H100).fits
    found = find_smallest_change(config, gpus, shape, H100)
    assert found is not None
    assert found[0] == gpus
    changed = change(config, found[1])
    assert measure_memory(changed, to_layout(changed, gpus), shape, H100).fits
    prices = {json.dumps(settings): price for price, settings in find_changes(config, layout)}
    price = prices.get(json.dumps(found[1]))  # none where it takes several
    for cheaper, settings in find_changes(config, layout):
        if price is not None and cheaper < price:
            smaller = change(config, settings)
            assert not measure_memory(smaller, to_layout(smaller, gpus), shape, H100).fits


def test_more_gpus_are_named_where_settings_do_not_help() -> None:
    config = read("32b")
    shape = find_shape(config.learner.model)
    small = H100.model_copy(update={"gigabytes": 24.0})
    found = find_smallest_change(config, 2, shape, small)
    assert found is None or found[0] > 2


SMOLLM2 = {
    "peak memory of the update, 8 rows, prompt 512, up to 128 trained": (512 + 8 * 128, 4),
    "peak memory of the step, prompt 512, 8 × 128 new in 1 turn, bfloat16": (512 + 8 * 128, 2),
    "peak memory of the step, prompt 512, 8 × 512 new in 4 turns, bfloat16": (512 + 8 * (512 + 96), 2),
    "peak memory of the step, prompt 2,048, 8 × 512 new in 4 turns, bfloat16": (2048 + 8 * (512 + 96), 2),
}
"""Recorded peaks of our engine with SmolLM2 on a CPU: distinct tokens of the update, bytes of a number."""


@pytest.mark.parametrize("name", SMOLLM2)
def test_recorded_peaks_are_predicted_within_thirty_percent(name: str) -> None:
    tokens, size = SMOLLM2[name]
    lines = json.loads((ROOT / "speed" / "results.json").read_text(encoding="utf-8"))
    measured = {line["name"]: line["ours"] for line in lines}[name]
    words = ["learner.model=smollm2", f"learner.micro_batch_tokens={tokens}", "plan.gpus=1"]
    config = load_config(PlanConfig, None, [*words, "learner.cache_gigabytes=0.001"])
    cpu = Gpu(name="cpu", gigabytes=16, tflops=0.1, bandwidth=18, link=18, number_bytes=size)
    parts = dict(measure_memory(config, to_layout(config, 1), find_shape("smollm2"), cpu).update)
    parts.pop("sampling weights")  # on a CPU the sampler reads the weights of the update
    predicted = sum(parts.values()) + 0.4  # Python, torch and transformers themselves
    assert predicted == pytest.approx(measured, rel=0.3)
