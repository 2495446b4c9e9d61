"""Saving, resuming and low-rank adapters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trialogue.durable import put_back
from trialogue.engine import LoraSettings, OptimParams, SamplingParams
from trialogue.errors import EngineError

OPTIM = OptimParams(learning_rate=1e-2, weight_decay=0.01)


async def train(engine, rows, loss, steps):
    for _ in range(steps):
        await engine.forward_backward(rows, loss)
        await engine.optim_step(OPTIM)
        await engine.publish()


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.update.parameters.items()}


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4, alpha=8)])
async def test_resuming_continues_bit_for_bit(
    kind, lora, make_model, make_rows, open_engine, loss, tmp_path: Path
):
    rows = make_rows(seed=1, count=5)
    params = SamplingParams(max_tokens=6)
    engine = open_engine(make_model(kind), lora=lora)
    await train(engine, rows, loss, 2)
    await engine.sample([[1, 2, 3]], params)
    await engine.save_state(tmp_path / "state")
    await train(engine, rows, loss, 2)
    sampled = await engine.sample([[1, 2, 3]], params)

    resumed = open_engine(make_model(kind), lora=lora)
    await resumed.load_state(tmp_path / "state")
    assert resumed.weight_version == 2
    await train(resumed, rows, loss, 2)
    for name, value in weights(engine).items():
        assert torch.equal(value, weights(resumed)[name]), name
    # Unseeded requests are numbered, and the numbering resumes too.
    assert await resumed.sample([[1, 2, 3]], params) == sampled


async def test_a_state_that_is_being_replaced_is_never_lost(
    make_model, open_engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = open_engine(make_model("llama"))
    await engine.save_state(tmp_path / "state")
    rename, left = Path.rename, [1]

    def counted(self: Path, to: Path) -> Path:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", counted)
    with pytest.raises(KeyboardInterrupt):
        await engine.save_state(tmp_path / "state")
    monkeypatch.setattr(Path, "rename", rename)
    put_back(tmp_path)
    await open_engine(make_model("llama")).load_state(tmp_path / "state")
    await engine.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]


async def test_the_folder_is_a_transformers_model(
    kind, make_model, make_rows, open_engine, loss, tmp_path: Path
):
    engine = open_engine(make_model(kind))
    await train(engine, make_rows(seed=2, count=3), loss, 1)
    await engine.save_state(tmp_path / "state")
    config = json.loads((tmp_path / "state" / "config.json").read_text(encoding="utf-8"))
    assert "trialogue" not in json.dumps(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "state").eval()
    (row,) = make_rows(seed=3, count=1)
    (logprobs,) = await engine.forward([row])
    with torch.no_grad():
        plain = torch.log_softmax(model(torch.tensor([row.tokens])).logits[0], -1)
    wanted = plain[:-1].gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0].tolist()
    assert logprobs[1:] == pytest.approx(wanted, abs=1e-4)
    again = open_engine(str(tmp_path / "state"))
    assert (await again.forward([row]))[0] == logprobs


async def test_adapters_train_alone_and_load_onto_their_base(
    make_model, make_rows, open_engine, loss, tmp_path: Path
):
    make_model("llama").save_pretrained(tmp_path / "base")
    rows = make_rows(seed=4, count=4)
    engine = open_engine(tmp_path / "base", lora=LoraSettings(r=4, target_modules=("q_proj", "v_proj")))
    assert engine.capabilities.trains == "lora"
    assert all("lora" in name for name in engine.update.parameters)
    before = await engine.forward(rows)
    await train(engine, rows, loss, 2)
    after = await engine.forward(rows)
    assert after != before
    await engine.save_state(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(value.numel() for value in saved.values()) < 5000
    loaded = open_engine(tmp_path / "adapter")
    assert await loaded.forward(rows) == after
    await loaded.load_state(tmp_path / "adapter")
    await train(loaded, rows, loss, 1)
    await train(engine, rows, loss, 1)
    assert await loaded.forward(rows) == await engine.forward(rows)


async def test_saving_over_a_state_leaves_one_complete_folder(make_rows, open_engine, loss, tmp_path: Path):
    engine = open_engine("llama")
    await engine.save_state(tmp_path / "state")
    await train(engine, make_rows(seed=5, count=3), loss, 1)
    await engine.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    assert json.loads((tmp_path / "state" / "engine.json").read_text(encoding="utf-8"))["weight_version"] == 1


async def test_a_failed_save_leaves_the_old_state(make_rows, open_engine, loss, tmp_path: Path, monkeypatch):
    engine = open_engine("llama")
    await engine.save_state(tmp_path / "state")
    monkeypatch.setattr(
        "trialogue.engine.state.save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        await engine.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    await engine.load_state(tmp_path / "state")


async def test_what_cannot_be_loaded_is_said(make_model, open_engine, tmp_path: Path):
    engine = open_engine("llama")
    with pytest.raises(EngineError, match=r"engine\.json"):
        await engine.load_state(tmp_path)
    await engine.save_state(tmp_path / "state")
    adapted = open_engine("llama", lora=LoraSettings(r=2))
    with pytest.raises(EngineError, match="LoRA"):
        await adapted.load_state(tmp_path / "state")
