"""The packed update against row-by-row computation with the plain model."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trialogue.engine import LoraSettings, OptimParams, Row, blocks
from trialogue.engine.blocks import (
    attend_block,
    attend_block_plainly,
    backpropagate_block,
    backpropagate_block_plainly,
)
from trialogue.engine.cpu import logits, tree_kernels
from trialogue.engine.cpu.logits import CpuLogits
from trialogue.engine.logprobs import TokenLogprobs
from trialogue.engine.tree import grow_tree
from trialogue.engine.update import split_micro_batches
from trialogue.errors import EngineError


def compute_plainly(model, rows, temperature):
    """Loss of the whole step from one forward pass a row, and every row's log-probabilities."""
    total = sum(sum(row.mask) for row in rows)
    loss = torch.zeros(())
    everything = []
    for row in rows:
        logprobs = torch.log_softmax(model(torch.tensor([row.tokens])).logits[0] / temperature, dim=-1)
        chosen = logprobs[:-1].gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0]
        ratio = torch.exp(chosen - torch.tensor(row.logprobs[1:]))
        mask = torch.tensor(row.mask[1:], dtype=torch.bool)
        loss = loss - (ratio * torch.tensor(row.advantages[1:]))[mask].sum() / total
        everything.append([0.0, *chosen.tolist()])
    return loss, everything


@pytest.mark.parametrize("budget", [100_000, 120])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
async def test_gradients_equal_row_by_row(
    kind, budget, checkpointing, compiled, make_model, make_rows, open_engine, loss, monkeypatch
):
    if not compiled:
        monkeypatch.setattr(tree_kernels, "load_tree_kernels", lambda *, is_half: None)
    model = make_model(kind)
    engine = open_engine(
        copy.deepcopy(model), max_tokens_per_micro_batch=budget, gradient_checkpointing=checkpointing
    )
    rows = make_rows(seed=budget, count=12)
    outputs = await engine.forward_backward(rows, loss, temperature=0.8)
    expected, logprobs = compute_plainly(model, rows, 0.8)
    expected.backward()
    assert outputs.metrics["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert outputs.metrics["rows"] == len(rows)
    for (name, found), wanted in zip(engine.model.named_parameters(), model.parameters(), strict=True):
        assert found.grad is not None, name
        difference = (found.grad - wanted.grad).norm() / wanted.grad.norm()
        assert difference < 1e-5, name
    for row, found, wanted in zip(rows, outputs.logprobs, logprobs, strict=True):
        masked = [value for value, mask in zip(wanted, row.mask, strict=True) if mask]
        assert found == pytest.approx(masked, abs=1e-4)


async def test_forward_gives_every_token_of_every_row(kind, make_model, make_rows, open_engine):
    model = make_model(kind)
    engine = open_engine(copy.deepcopy(model), max_tokens_per_micro_batch=150)
    rows = [*make_rows(seed=4, count=8), Row([5], [0], [0.0], [0.0])]
    found = await engine.forward(rows, temperature=1.3)
    _, wanted = compute_plainly(model, rows[:-1], 1.3)
    for one, other in zip(found, [*wanted, [0.0]], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


async def test_a_shared_trained_token_counts_for_each_row_by_its_own_advantage(make_model, open_engine, loss):
    """Two rows with the same tokens and opposite advantages cancel."""
    tokens = list(range(20, 60))
    mask = [0] * 10 + [1] * 30
    rows = [Row(tokens, mask, [-6.0] * 40, [sign] * 40) for sign in (1.0, -1.0)]
    engine = open_engine("qwen3")
    outputs = await engine.forward_backward(rows, loss)
    assert engine.update.computed_tokens == len(tokens)
    assert outputs.logprobs[0] == outputs.logprobs[1]
    assert all(parameter.grad.abs().max() < 1e-7 for parameter in engine.model.parameters())


async def test_a_prefix_is_computed_once(make_rows, open_engine, loss):
    draw = random.Random(0)
    trunk = [draw.randrange(300) for _ in range(100)]
    rows = []
    for task in range(3):
        opening = [draw.randrange(300) for _ in range(30)]
        for _ in range(4):
            tokens = trunk + opening + [task, *(draw.randrange(300) for _ in range(20))]
            rows.append(Row(tokens, [0] * 131 + [1] * 20, [-5.0] * 151, [1.0] * 151))
    engine = open_engine("llama")
    await engine.forward_backward(rows, loss)
    assert engine.update.computed_tokens == 100 + 3 * 31 + 12 * 20
    assert sum(len(row.tokens) for row in rows) == 12 * 151


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
async def test_operations_are_those_that_torch_counts(kind, make_model, open_engine, loss):
    """Attention is counted between a token and those before it, by torch between all."""
    model = make_model(kind)
    model.set_attn_implementation("eager")
    tokens = [place % 300 for place in range(7, 7 + 13 * 40, 13)]
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.tensor([tokens])).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    known, back = (counter.get_flop_counts()["Global"] for counter in (forward, backward))
    products, attention = known[torch.ops.aten.mm], known[torch.ops.aten.bmm] * 39 / 80
    assert back[torch.ops.aten.mm] == 2 * products
    engine, adapters = open_engine(kind), open_engine(kind, lora=LoraSettings(r=4))
    await engine.forward([Row(tokens, [0] * 40, [0.0] * 40, [0.0] * 40)])
    assert engine.update.operations == pytest.approx(products + attention, rel=0.02)
    row = Row(tokens, [0] + [1] * 39, [-5.0] * 40, [1.0] * 40)
    await engine.forward_backward([row], loss)
    assert engine.update.operations == pytest.approx(4 * (products + attention), rel=0.02)
    await adapters.forward_backward([row], loss)
    assert adapters.update.operations == pytest.approx(2 * products + 3 * attention, rel=0.02)


async def test_tokens_after_the_last_trained_one_and_rows_without_any_cost_nothing(open_engine, loss):
    engine = open_engine("llama")
    tokens = list(range(1, 51))
    mask = [0] * 5 + [1] * 5 + [0] * 40
    empty = Row(tokens[::-1], [0] * 50, [0.0] * 50, [0.0] * 50)
    outputs = await engine.forward_backward([Row(tokens, mask, [-5.0] * 50, [1.0] * 50), empty], loss)
    assert engine.update.computed_tokens == 10
    assert [len(values) for values in outputs.logprobs] == [5, 0]


async def test_the_batch_tells_rows_turns_and_totals(make_rows, open_engine):
    rows = [
        Row(
            row.tokens,
            row.mask,
            row.logprobs,
            row.advantages,
            reference_logprobs=[value - 1 for value in row.logprobs],
            turns=list(range(len(row.tokens))),
        )
        for row in make_rows(seed=9, count=7)
    ]
    seen = []

    class Look:
        name = "look"

        def __call__(self, new_logprobs, batch):
            seen.append(batch)
            return new_logprobs.sum() * 0, {"smallest_min": float(batch.rows), "tokens": len(new_logprobs)}

    engine = open_engine("llama", max_tokens_per_micro_batch=100)
    outputs = await engine.forward_backward(rows, Look())
    total = sum(sum(row.mask) for row in rows)
    assert len(seen) > 1
    assert outputs.metrics["tokens"] == total
    assert outputs.metrics["smallest_min"] == min(batch.rows for batch in seen)
    assert sum(batch.rows for batch in seen) == len(rows)
    for batch in seen:
        assert (batch.total_conversations, batch.total_tokens) == (len(rows), total)
        assert torch.equal(batch.row.bincount(minlength=batch.rows), batch.conversation_tokens)
        assert torch.allclose(batch.reference_logprobs, batch.old_logprobs - 1)
        assert not batch.entropy.requires_grad
        assert bool((batch.entropy > 0).all())
        starts = batch.row.diff(prepend=torch.tensor([-1])) != 0
        assert bool((batch.turns.diff(prepend=torch.tensor([0]))[~starts] > 0).all())


@pytest.mark.parametrize(
    "row",
    [
        Row([1, 2], [1, 1], [0.0, 0.0], [0.0, 0.0]),
        Row([1, 2], [0], [0.0, 0.0], [0.0, 0.0]),
        Row([1, 2], [0, 1], [0.0, 0.0], [0.0, 0.0], turns=[1]),
    ],
)
async def test_malformed_rows_are_refused(open_engine, loss, row):
    with pytest.raises(EngineError, match="row"):
        await open_engine("llama").forward_backward([row], loss)


async def test_a_gradient_that_is_not_finite_is_dropped(make_rows, open_engine, loss):
    engine = open_engine("llama")
    rows = make_rows(seed=5, count=4)
    before = copy.deepcopy(engine.model.state_dict())

    class Broken:
        name = "broken"

        def __call__(self, new_logprobs, batch):
            return new_logprobs.sum() * torch.nan, {}

    await engine.forward_backward(rows, Broken())
    metrics = await engine.optim_step(OptimParams(learning_rate=1e-2))
    assert metrics["skipped"] == 1
    assert engine.update.skipped == 1
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())
    assert await engine.publish() == 0
    await engine.forward_backward(rows, loss)
    metrics = await engine.optim_step(OptimParams(learning_rate=1e-2))
    assert metrics["skipped"] == 0
    assert any(not torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())


async def test_optim_step_is_adamw_with_clipping_and_decay_on_matrices(
    make_model, make_rows, open_engine, loss
):
    model = make_model("llama")
    engine = open_engine(copy.deepcopy(model))
    rows = make_rows(seed=6, count=4)
    matrices = [value for value in model.parameters() if value.ndim > 1]
    vectors = [value for value in model.parameters() if value.ndim < 2]
    plain = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3, weight_decay=0.1
    )
    for group in plain.param_groups:
        group["betas"], group["eps"] = (0.9, 0.95), 1e-8
    for _ in range(2):
        await engine.forward_backward(rows, loss)
        metrics = await engine.optim_step(OptimParams(learning_rate=3e-3, weight_decay=0.1, grad_clip=0.01))
        plain.zero_grad()
        compute_plainly(model, rows, 1.0)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        plain.step()
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for found, wanted in zip(engine.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(found, wanted, atol=2e-4)
    with pytest.raises(EngineError, match="forward_backward"):
        await engine.optim_step(OptimParams(learning_rate=1.0))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", [1 << 26, 100, 1])
def test_both_ways_to_attend_agree(heads, causal, scores, monkeypatch):
    monkeypatch.setattr(blocks, "SCORES_AT_ONCE", scores)  # all queries at once, some of them, each alone
    torch.manual_seed(0)
    query, grad = torch.randn(2, 2 * heads, 9, 8), torch.randn(2, 2 * heads, 9, 8)
    key, value = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    output, sums = attend_block(query, key, value, scaling=0.3, causal=causal)
    plain = attend_block_plainly(query, key, value, scaling=0.3, causal=causal)
    assert torch.allclose(output, plain[0], atol=1e-5)
    assert torch.allclose(sums, plain[1], atol=1e-5)
    # output and sums may be those over more keys than these
    arguments = (grad, query, key, value, output + 0.1, sums + 0.5)
    for one, other in zip(
        backpropagate_block(*arguments, scaling=0.3, causal=causal),
        backpropagate_block_plainly(*arguments, scaling=0.3, causal=causal),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [3, 11, 100])
def test_chunked_logprobs_and_entropy(chunk, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(logits, "load_kernel", lambda: None)
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((11, 8), (30, 8), (30,)))
    targets, grad_output = torch.randint(30, (11,)), torch.randn(11)
    logprobs, entropy = TokenLogprobs.apply(hidden, weight, bias, targets, 0.7, chunk, True, CpuLogits())
    found = torch.autograd.grad((logprobs * grad_output).sum(), (hidden, weight, bias))
    whole = torch.log_softmax((hidden @ weight.T + bias) / 0.7, -1)
    chosen = whole.gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((chosen * grad_output).sum(), (hidden, weight, bias))
    assert torch.allclose(logprobs, chosen, atol=1e-5)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(-1), atol=1e-5)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [2, 11])
def test_rounded_probabilities_lose_nothing_of_tokens_that_are_nearly_certain(chunk, compiled, monkeypatch):
    """In bfloat16 0.999 is 1, but the gradient is that of 0.999; with a chunk of 2 nothing is kept."""
    if not compiled:
        monkeypatch.setattr(logits, "load_kernel", lambda: None)
    torch.manual_seed(0)
    hidden, weight = torch.eye(11, 16), torch.randn(48, 16)
    targets = torch.arange(11)
    weight[targets, targets] += torch.linspace(5, 14, 11)  # from some to nearly all of the probability
    inputs = [tensor.bfloat16().float().requires_grad_() for tensor in (hidden, weight)]
    rounded = inputs[0].bfloat16()
    logprobs, _ = TokenLogprobs.apply(rounded, inputs[1], None, targets, 1.0, chunk, True, CpuLogits())
    wanted = (inputs[0] @ inputs[1].T).log_softmax(-1)[targets, targets]
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    found, expected = (torch.autograd.grad(values.sum(), inputs) for values in (logprobs, wanted))
    for one, other in zip(found, expected, strict=True):
        assert bool(((one - other).norm(dim=1) <= 3e-2 * other.norm(dim=1)).all())


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF])  # kinds of what is no number
@pytest.mark.parametrize("place", [3, 38])  # in a whole vector, and in what is left over
def test_logits_that_are_no_numbers_stay_none(bits, place, kept):
    spoiled = torch.zeros(1, 40)
    spoiled[0, place] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    found = CpuLogits().normalize(spoiled, torch.tensor([3]), kept)
    assert all(part is not None and bool(part.isnan().any()) for part in found)


@pytest.mark.parametrize("chunk", [3, 100])
def test_a_second_backward_pass_finds_what_the_first_did(chunk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    logprobs, _ = TokenLogprobs.apply(
        hidden, weight, None, torch.randint(30, (11,)), 1.0, chunk, True, CpuLogits()
    )
    first, second = (
        torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True) for _ in range(2)
    )
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(first, second, strict=True))


def test_a_tree_spells_its_rows():
    draw = random.Random(1)
    for _ in range(200):
        rows = [
            [draw.randrange(3) for _ in range(draw.randrange(1, 12))] for _ in range(draw.randrange(1, 8))
        ]
        tree = grow_tree(rows, shortest=draw.choice([1, 2, 4]))
        for row, path in zip(rows, tree.paths, strict=True):
            packed = [index for start, stop in path for index in range(start, stop)]
            assert [tree.tokens[index] for index in packed] == row
            assert [tree.positions[index] for index in packed] == list(range(len(row)))
            assert [tree.previous[index] for index in packed] == [-1, *packed[:-1]]
            nodes = {node.start: node for node in tree.nodes}
            for start, stop in path[:-1]:
                assert stop <= path[-1][0] < nodes[start].below
        assert len(tree.tokens) <= sum(map(len, rows))


def test_micro_batches_keep_sharers_together():
    trunk, other = list(range(50)), list(range(100, 150))
    rows = [[*(trunk if number % 2 else other), number] for number in range(200, 206)]
    assert split_micro_batches(rows, 60) == [[1, 3, 5], [0, 2, 4]]
    assert [len(batch) for batch in split_micro_batches(rows, 10)] == [1] * 6
    assert split_micro_batches([], 10) == []


async def test_matrices_are_halved_and_doubled_without_a_trace(make_model, open_engine):
    engine = open_engine(make_model("qwen3"))
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    row = Row([5, 9, 2, 7], [0] * 4, [0.0] * 4, [0.0] * 4)
    [scores] = await engine.forward([row])
    await engine.scale_matrices(0.5)
    [halved] = await engine.forward([row])
    assert max(abs(one - other) for one, other in zip(scores, halved, strict=True)) > 1e-3
    for name, value in engine.model.state_dict().items():
        assert value.equal(before[name] / 2 if value.ndim == 2 else before[name]), name
    await engine.scale_matrices(2.0)
    assert all(value.equal(before[name]) for name, value in engine.model.state_dict().items())
