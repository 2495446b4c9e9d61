"""The engine on one GPU, which is a fake one: the numbers of the CPU, few waits, no mixed devices.

What only CUDA can show (its own kernels, its speed) is not shown here.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trialogue.engine import EngineSettings, LoraSettings, OptimParams, Row, SamplingParams, blocks
from trialogue.engine.attention import attend_with_sum
from trialogue.engine.torch_engine import TorchEngine
from trialogue.engine.transfer import send
from trialogue.engine.tree import TreePlan, grow_tree
from trialogue.errors import OutOfMemory

pytestmark = pytest.mark.training

VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "recomputed": {"gradient_checkpointing": True},
    "adapters": {"lora": LoraSettings(r=4, alpha=8)},
    "adapters, recomputed": {"lora": LoraSettings(r=4, alpha=8), "gradient_checkpointing": True},
}


def open_on(device: str, model: Any, **settings: Any) -> TorchEngine:
    precision = settings.pop("precision", "float32")
    return TorchEngine(copy.deepcopy(model), EngineSettings(device=device, precision=precision, **settings))


def open_both(model: Any, **settings: Any) -> tuple[TorchEngine, TorchEngine]:
    """The same on the GPU and on the CPU; adapters begin at random places, so they are copied."""
    here, there = open_on("cpu", model, **settings), open_on("fakegpu", model, **settings)
    states = [engine.model.state_dict() for engine in (here, there)]
    draw = torch.Generator().manual_seed(1)
    for name, value in states[0].items():
        if "lora_" in name:  # the second factor is 0 at the beginning, and hides the first
            value.copy_(torch.randn(value.shape, generator=draw) * 0.1)
        states[1][name].copy_(value)
    return there, here


def join_gradients(engine: TorchEngine) -> Tensor:
    found = [value.grad for value in engine.update.parameters.values()]
    return torch.cat([grad.flatten().cpu() for grad in found if grad is not None])


# -- the device itself ---------------------------------------------------------------------------------------


def test_tensors_of_mixed_devices_are_refused(gpu):
    there = torch.ones(3, device=gpu.device)
    for mix in (
        lambda: there + torch.ones(3),
        lambda: torch.cat([there, torch.ones(3)]),
        lambda: there[torch.tensor([0])],
        lambda: torch.nn.functional.linear(there, torch.ones(2, 3)),
    ):
        with pytest.raises(RuntimeError, match=r"[Ee]xpected all tensors to be on the same device|indices"):
            mix()
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a number may come from anywhere, as with CUDA


def test_what_makes_the_host_wait_is_counted(gpu):
    there = torch.ones(3, device=gpu.device)
    for wait in (
        there[0].item,
        there.cpu,
        there.tolist,
        there.nonzero,
        lambda: bool(there.any()),
        lambda: there[there > 0],
        lambda: torch.tensor([1.0], device=gpu.device),
        there.unique,
    ):
        with gpu.counting() as counts:
            wait()
        assert counts.syncs >= 1
    with gpu.counting() as counts:
        (there @ there + there[1:].sum()).exp_()
        there.view(3, 1).expand(3, 4)
    assert (counts.syncs, counts.kernels) == (0, 4)


def test_one_copy_sends_many_tensors_and_is_not_waited_for(gpu):
    given = [
        torch.arange(3),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([True]),
        torch.tensor([], dtype=torch.long),
    ]
    with gpu.counting() as counts:
        found = send(given, gpu.device)
    assert (counts.to_device, counts.syncs) == (1, 0)
    for one, other in zip(found, given, strict=True):
        assert one.device == gpu.device
        assert one.dtype == other.dtype
        assert one.cpu().equal(other)


# -- sampling ------------------------------------------------------------------------------------------------


async def test_conversations_are_those_of_the_cpu(gpu, kind, make_model, converse):
    params = SamplingParams(max_tokens=7, temperature=0.8, top_p=0.9, stop_tokens=(5,), seed=3)
    policy = list(range(2, 60))
    for greedy in (False, True):
        chosen = SamplingParams(max_tokens=7, temperature=0.0) if greedy else params
        found = []
        for device in ("fakegpu", "cpu"):
            engine = open_on(device, make_model(kind))
            found.append([await converse(engine, name, policy, chosen, 3, 7) for name in ("a", "b", None)])
        for (tokens, logprobs), (expected, wanted) in zip(*found, strict=True):
            assert tokens == expected
            assert logprobs == pytest.approx(wanted, abs=1e-4)


async def count_steps(gpu: Any, engine: TorchEngine, *params: SamplingParams) -> list[Any]:
    """Counts of each step in which three conversations with a shared prefix are sampled."""
    found: list[Any] = []
    step = engine.sampler.step

    def watched() -> Any:
        with gpu.counting() as counts:
            ended = step()
        found.append(counts)
        return ended

    engine.sampler.step = watched
    prompts = [[*range(2, 60), 100 + number] for number in range(3)]
    for chosen in params:
        await engine.sample(prompts, chosen)
    return found


PLAIN = SamplingParams(max_tokens=6, temperature=0.8, seed=3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_a_decode_step_waits_once(gpu, kind, precision, make_model):
    engine = open_on("fakegpu", make_model(kind), precision=precision)
    nucleus = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.8, seed=3)
    steps = await count_steps(gpu, engine, PLAIN, nucleus, SamplingParams(max_tokens=6, temperature=0.0))
    assert len(steps) == 18
    # It was 23 waits and 14 copies: for each list of numbers, each question about one, each result.
    assert max(counts.syncs for counts in steps) <= 2
    decoding = [*steps[1:6], *steps[7:12], *steps[13:]]
    assert {(counts.syncs, counts.to_host) for counts in decoding} == {(1, 1)}
    assert max(counts.to_device for counts in decoding) <= 3


async def test_no_step_rounds_the_weights_again(gpu, make_model):
    engine = open_on("fakegpu", make_model("qwen3"), precision="bfloat16")
    first, *others = await count_steps(gpu, engine, PLAIN)
    matrices = [value for value in engine.model.parameters() if value.ndim == 2]
    layers = sum(type(module) is torch.nn.Linear for module in engine.model.modules())
    smallest = min(value.numel() for value in matrices) * 2
    assert first.names["aten::copy_"] - others[0].names["aten::copy_"] >= layers
    # What a step takes beside what it leaves is less than any rounded matrix.
    assert min(counts.peak - counts.used for counts in others[:3]) > 0
    cast = [(counts.peak - counts.used) / smallest for counts in others[:3]]
    held = sum(value.numel() * 2 for value in matrices)
    assert max(cast) * smallest < held / 4
    # After an update the next sample is one of the new weights, not of the rounded old ones.
    prompt = [[4, 9, 7, 12]]
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    (before,) = await engine.sample(prompt, greedy)
    await engine.scale_matrices(2.0)
    (after,) = await engine.sample(prompt, greedy)
    assert before.logprobs != after.logprobs
    await engine.scale_matrices(0.5)
    (again,) = await engine.sample(prompt, greedy)
    assert before.logprobs == again.logprobs


def test_log_sums_of_the_sampler_are_not_rounded(gpu):
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 1, 16), (2, 2, 33, 16), (2, 2, 33, 16))
    query, key, value = (torch.randn(shape, generator=draw).bfloat16() * 2 for shape in shapes)
    bias = torch.zeros(2, 1, 1, 33, dtype=torch.bfloat16)
    bias[..., 30:] = -torch.inf
    there = (tensor.to(gpu.device) for tensor in (query, key, value))
    output, sums = attend_with_sum(*there, 0.3, bias.to(gpu.device))
    keys, values = (tensor.double().repeat_interleave(2, 1) for tensor in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * 0.3 + bias.double()
    assert sums.dtype == torch.float32
    assert torch.allclose(sums.cpu().double(), scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(output.cpu().double(), scores.softmax(-1) @ values, atol=0.03)
    rounded = (query.bfloat16() @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3 + bias).logsumexp(-1)
    assert (rounded.double() - scores.logsumexp(-1)).abs().max() > 0.01  # as it was


# -- the update ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
async def test_losses_and_gradients_are_those_of_the_cpu(gpu, kind, variant, make_model, make_rows, loss):
    engines = open_both(make_model(kind), **VARIANTS[variant])
    if "adapters" in variant:
        engines[0].model.float()  # frozen weights are rounded on a GPU
        for (name, value), known in zip(
            engines[0].model.named_parameters(), engines[1].model.parameters(), strict=True
        ):
            value.data.copy_(known.data)
            assert value.requires_grad == ("lora_" in name)
    rows = make_rows(seed=3, count=10)
    found, wanted = [await engine.forward_backward(rows, loss) for engine in engines]
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert one == pytest.approx(other, abs=2e-4)
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-4)
    gradients = [join_gradients(engine) for engine in engines]
    assert torch.allclose(*gradients, atol=2e-4 * float(gradients[1].abs().max()))
    norms = [(await engine.optim_step(OptimParams(learning_rate=1e-2)))["grad_norm"] for engine in engines]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    scored = [await engine.forward(rows) for engine in engines]
    for one, other in zip(*scored, strict=True):
        assert one == pytest.approx(other, abs=2e-2)  # Adam divides small gradients by their own size


@pytest.mark.parametrize("variant", VARIANTS)
async def test_bfloat16_is_float32_but_for_rounding(gpu, kind, variant, make_model, make_rows, loss):
    there, here = open_both(make_model(kind), **VARIANTS[variant])
    rounded = open_on("fakegpu", make_model(kind), precision="bfloat16", **VARIANTS[variant])
    with torch.no_grad():
        for value, known in zip(rounded.model.parameters(), there.model.parameters(), strict=True):
            value.copy_(known)
    rows = make_rows(seed=3, count=10)
    with gpu.counting() as counts:
        found = await rounded.forward_backward(rows, loss)
    wanted = await here.forward_backward(rows, loss)
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert one == pytest.approx(other, abs=0.4)
    similarity = torch.nn.functional.cosine_similarity(join_gradients(rounded), join_gradients(here), dim=0)
    assert similarity > 0.99
    assert {value.grad.dtype for value in rounded.update.parameters.values()} == {torch.float32}
    assert counts.syncs == 2  # the metrics and the log-probabilities of one micro-batch
    assert counts.names["aten::_scaled_dot_product_flash_attention"] > 0
    assert counts.names["aten::_scaled_dot_product_flash_attention_backward"] > 0


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("width", [16, 20])
def test_attention_along_a_tree_is_that_of_each_row(gpu, heads, width, monkeypatch):
    """Flash attention with its log-sums merged per prefix, where the width suits it, against plain attention
    of each row in float64; the same by matmuls, a few scores at a time."""
    rows = [list(range(40)), [*range(30), 90, 91, 92], [*range(30), 90, 80], [7, 8, 9], list(range(20))]
    plan = TreePlan(grow_tree(rows, shortest=2), gpu.device)
    count, draw = len(plan.tree.tokens), torch.Generator().manual_seed(heads)
    given = [torch.randn(size, count, width, generator=draw).bfloat16() for size in (heads, 2, 2)]
    upstream = torch.randn(count, heads, width, generator=draw).bfloat16()
    exact = [tensor.double().requires_grad_() for tensor in given]
    wanted = torch.zeros(count, heads, width, dtype=torch.float64)
    seen = torch.zeros(count, dtype=torch.bool)
    for path in plan.tree.paths:
        places = torch.cat([torch.arange(start, stop) for start, stop in path])
        query, key, value = (tensor[:, places] for tensor in exact)
        key, value = (tensor.repeat_interleave(heads // 2, 0) for tensor in (key, value))
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
        new = ~seen[places]  # a shared token counts once
        wanted = wanted.index_put((places[new],), found.transpose(0, 1)[new])
        seen[places] = True
    (wanted * upstream.double()).sum().backward()
    for at_once in (1 << 26, 64):
        monkeypatch.setattr(blocks, "SCORES_AT_ONCE", at_once)
        there = [tensor.to(gpu.device).requires_grad_() for tensor in given]
        with gpu.counting() as counts:
            output = plan.attend(0, *there, 0.3)
            (output * upstream.to(gpu.device)).sum().backward()
        fused = [name for name in counts.names if "flash" in name]
        assert len(fused) == (2 if width % 8 == 0 else 0)
        assert torch.allclose(output.detach().cpu().double(), wanted.detach(), atol=0.03)
        for one, other in zip(there, exact, strict=True):
            close = 0.02 * float(other.grad.abs().max())
            assert torch.allclose(one.grad.cpu().double(), other.grad, atol=close)


# -- files and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["all weights", "adapters"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_what_is_saved_goes_on_there_and_elsewhere(
    gpu, variant, precision, tmp_path: Path, make_model, make_rows, loss
):
    settings = {"precision": precision, **VARIANTS[variant]}
    engine = open_on("fakegpu", make_model("qwen3"), **settings)
    rows = make_rows(seed=3, count=6)

    async def learn(learner: TorchEngine) -> None:
        await learner.forward_backward(rows, loss)
        await learner.optim_step(OptimParams(learning_rate=1e-2))
        await learner.publish()

    await learn(engine)
    await engine.save_state(tmp_path / "state")
    await learn(engine)
    other = open_on("fakegpu", make_model("qwen3", seed=5), **settings)
    if variant == "adapters":
        with torch.no_grad():
            for name, value in other.model.named_parameters():
                if "lora_" not in name:
                    value.copy_(engine.model.get_parameter(name))
    await other.load_state(tmp_path / "state")
    moments = [value for state in other.update.optimizer.state.values() for value in state.values()]
    assert {value.device for value in moments} == {gpu.device}
    await learn(other)
    assert await other.forward(rows) == await engine.forward(rows)
    if variant == "all weights" and precision == "float32":
        here = open_on("cpu", make_model("qwen3", seed=5))
        await here.load_state(tmp_path / "state")
        await learn(here)
        for one, known in zip(await here.forward(rows), await engine.forward(rows), strict=True):
            assert one == pytest.approx(known, abs=2e-2)


async def test_too_little_memory_is_told_in_one_line_and_survived(gpu, make_model, make_rows, loss):
    engine = open_on("fakegpu", make_model("qwen3"), max_tokens_per_micro_batch=512)
    rows = make_rows(seed=3, count=10)
    scores = await engine.forward(rows)
    held = gpu.read().used
    with gpu.memory(1 << 18), pytest.raises(OutOfMemory) as told:
        await engine.forward_backward(rows, loss)
    line = str(told.value)
    assert "\n" not in line
    assert "learner.micro_batch_tokens (now 512)" in line
    assert "learner.gradient_checkpointing=true" in line
    assert "learner.lora_rank" in line
    assert told.value.is_unchanged
    assert gpu.read().used <= held  # what the failed call held is free again
    with gpu.memory(1 << 10), pytest.raises(OutOfMemory, match="lower learner") as told:
        await engine.sample([[1, 2, 3] * 100], PLAIN)
    assert "\n" not in str(told.value)
    assert await engine.forward(rows) == scores
    await engine.forward_backward(rows, loss)
    # The optimizer's moments are made in the first step: weights may have changed by then.
    with gpu.memory(1 << 10), pytest.raises(OutOfMemory) as told:
        await engine.optim_step(OptimParams(learning_rate=1e-2))
    assert not told.value.is_unchanged
    await engine.forward_backward(rows, loss)
    await engine.optim_step(OptimParams(learning_rate=1e-2))


def test_a_model_that_does_not_fit_is_told_in_one_line(gpu, make_model):
    with gpu.memory(1 << 10), pytest.raises(OutOfMemory, match="to load the model"):
        open_on("fakegpu", make_model("qwen3"))


# -- shapes of large models ----------------------------------------------------------------------------------

SHAPES = {"8b": (4096, 36, 32, 12288), "14b": (5120, 40, 40, 17408), "32b": (5120, 64, 64, 25600)}
"""Width, layers, heads and feed-forward width of Qwen3."""


async def measure_peak(
    gpu: Any, size: str, length: int, layers: int | None, loss: Any, lora: bool = False
) -> tuple[int, int]:
    """Weights, and bytes that learning from one row takes at most beside them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width, depth, heads, forward = SHAPES[size]
    config = Qwen3Config(
        hidden_size=width,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=forward,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.to_empty(device=gpu.device)
    settings = EngineSettings(
        device="fakegpu",
        gradient_checkpointing=True,
        max_tokens_per_micro_batch=length,
        lora=LoraSettings() if lora else None,
    )
    engine = TorchEngine(model.to(torch.bfloat16) if lora else model, settings)
    weights = sum(value.numel() for value in engine.model.parameters())
    gc.collect()
    before = gpu.read().used
    row = Row([1] * length, [0] + [1] * (length - 1), [0.0] * length, [1.0] * length)
    with gpu.counting() as counts:
        await engine.forward_backward([row], loss)
    assert counts.syncs == 2
    return weights, counts.peak - before


@pytest.mark.parametrize("lora", [False, True])
async def test_memory_of_an_update_grows_linearly_with_the_row(gpu, lora, loss):
    lengths = (16384, 32768, 65536)
    with gpu.shapes_only():
        found = [(await measure_peak(gpu, "8b", length, 2, loss, lora))[1] for length in lengths]
    print(f"adapters: {lora}", [round(value / 1e9, 2) for value in found])
    assert found[2] - found[1] <= 2.05 * (found[1] - found[0])


@pytest.mark.parametrize(("size", "lora"), [*((size, False) for size in SHAPES), ("8b", True)])
async def test_a_row_of_32k_tokens(gpu, size, lora, loss):
    """Gradients take 4 bytes a weight. What else is needed at most is bounded, with recomputation."""
    with gpu.shapes_only():
        weights, peak = await measure_peak(gpu, size, 32768, None, loss, lora)
    print(f"{size}, adapters: {lora}: {weights / 1e9:.1f}B weights, {peak / 1e9:.1f} GB beside them")
    assert peak < (22e9 if lora else weights * 4 + 20e9)
