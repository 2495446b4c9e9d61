"""Our loop against SkyRL's server (jax on a CPU) with the official client: `make test-tinker`, in an
environment of its own. The torch engine with the same adapters says what has to come out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

pytest.importorskip("tinker", reason="the client lives in an environment of its own: make test-tinker")
pytest.importorskip("skyrl", reason="SkyRL's server lives in an environment of its own: make test-tinker")

from ports import find_port, wait_until_up
from safetensors.torch import load_file

from trialogue.config import LossSettings, TrainConfig, load_config
from trialogue.engine.api import EngineSettings, OptimParams, Row, SamplingParams
from trialogue.engine.tinker import TinkerEngine
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import EngineError
from trialogue.learn.losses import PolicyLoss
from trialogue.learn.train import train
from trialogue.run import read_lines, read_trajectories

pytestmark = pytest.mark.timeout(3600)
os.environ["TINKER_API_KEY"] = "tml-none"
RANK = 8
BACKEND = {
    "max_lora_adapters": 8,
    "max_lora_rank": RANK,
    # jax compiles anew for each size of a batch; these leave it the lengths alone.
    "sample_max_num_sequences": 12,
    "train_micro_batch_size": 1,
}


@dataclass
class Server:
    url: str
    base: str
    checkpoints: Path


@pytest.fixture(scope="module")
def server(clerk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("skyrl")
    port = find_port()
    options = {
        "base-model": str(clerk),
        "backend": "jax",
        "backend-config": json.dumps(BACKEND),
        "database-url": f"sqlite:///{folder}/tinker.db",
        "checkpoints-base": str(folder / "checkpoints"),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "tinker_server.py"), str(port), *words],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(f"{url}/api/v1/healthz", process, folder / "log")
        yield Server(url, str(clerk), folder / "checkpoints")
    finally:
        process.terminate()
        process.wait(60)


def open_engine(server: Server) -> TinkerEngine:
    return TinkerEngine(server.base, server.url, reduction="sequence_mean", rank=RANK)


def take_adapter(engine: TinkerEngine, server: Server, name: str, folder: Path) -> Path:
    """The adapter the service has now, as a peft folder."""
    saved = engine.trainer.save_weights_for_sampler(name).result().path
    [archive] = list(server.checkpoints.rglob(f"{saved.rsplit('/', 1)[1]}*.tar.gz"))
    target = folder / name
    with tarfile.open(archive) as file:
        file.extractall(target, filter="data")
    [found] = list(target.rglob("adapter_config.json"))
    # SkyRL does not say which matrices it adapts, and peft would take it for some of them only.
    names = load_file(found.with_name("adapter_model.safetensors"))
    targets = sorted({name.split(".")[-3] for name in names})
    known = {"base_model_name_or_path": server.base, "target_modules": targets}
    found.write_text(json.dumps(json.loads(found.read_text()) | known))
    if found.parent != target:
        shutil.copytree(found.parent, target, dirs_exist_ok=True)
    return target


def make_rows(vocabulary: int) -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    rows: list[Row] = []
    for length in (9, 16, 16, 5):
        tokens = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        mask = [int(place > 2 and place % 4 != 0) for place in range(length)]
        old = (-5.5 + torch.randn(length, generator=generator)).tolist()
        advantage = float(torch.randn((), generator=generator))
        rows.append(Row(tokens, mask, old, [advantage] * length, [-5.0] * length))
    return rows


@pytest.mark.parametrize("reduction", ["token", "row", "constant"])
async def test_log_probabilities_and_updates_agree(server: Server, tmp_path: Path, reduction: str) -> None:
    remote = open_engine(server)
    before = take_adapter(remote, server, f"before-{reduction}", tmp_path)
    local = TorchEngine(before, EngineSettings(device="cpu"))
    rows = make_rows(local.capabilities.vocabulary)
    ours, theirs = await local.forward(rows), await remote.forward(rows)
    gap = max(
        abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert gap < 1e-4

    loss = PolicyLoss(LossSettings(reduction=reduction, constant=32.0, kl=0.05, dual_clip=2.0))
    step = OptimParams(learning_rate=1.0, eps=1.0, betas=(0.0, 0.0), grad_clip=0.0)  # moves by the gradient
    found, known = await remote.forward_backward(rows, loss), await local.forward_backward(rows, loss)
    assert found.metrics["loss"] == pytest.approx(known.metrics["loss"], rel=1e-4, abs=1e-6)
    await remote.optim_step(step)
    await local.optim_step(step)
    await local.save_state(tmp_path / "local")
    after = load_file(
        take_adapter(remote, server, f"after-{reduction}", tmp_path) / "adapter_model.safetensors"
    )
    start = load_file(before / "adapter_model.safetensors")
    expected = load_file(tmp_path / "local" / "adapter_model.safetensors")
    assert after.keys() == expected.keys() == start.keys()
    one, other = (
        torch.cat([(tree[name] - start[name]).float().flatten() for name in sorted(start)])
        for tree in (after, expected)
    )
    cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    ratio = float(one.norm() / other.norm())
    print(f"{reduction}: log-probabilities within {gap:.1e}, cosine {cosine:.6f}, length {ratio:.4f}")
    assert cosine > 0.999
    assert ratio == pytest.approx(1, abs=0.01)
    assert other.norm() > 0
    with pytest.raises(EngineError, match="no gradient"):
        await remote.optim_step(step)
    with pytest.raises(EngineError, match="temperature 1"):
        await remote.forward(rows, 0.5)


async def test_sampled_tokens_have_the_log_probabilities_of_the_update(server: Server) -> None:
    engine = open_engine(server)
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    prompt = [4, 9, 7, 12]
    [reply] = await engine.sample([prompt], params)
    tokens = prompt + reply.tokens
    row = Row(tokens, [0] * 4 + [1] * len(reply.tokens), [0.0] * len(tokens), [0.0] * len(tokens))
    [scored] = await engine.forward([row])
    assert scored[4:] == pytest.approx(reply.logprobs, abs=1e-4)


async def test_our_loop_trains_on_the_service(server: Server, questions: TrainConfig, tmp_path: Path) -> None:
    """Three steps on the built-in shop."""
    settings = {
        "learner.model": server.base,
        "engine.name": "tinker",
        "engine.url": server.url,
        "engine.reduction": "sequence_mean",
        "learner.lora_rank": RANK,
        "optimizer.gradient_clip": 0.0,
        "optimizer.learning_rate": 1e-2,
        "limits.reply_tokens": 32,
        "limits.context_tokens": 512,
        "training.temperature": 1.0,
        "training.checkpoint_every": 2,
        "run.directory": str(tmp_path),
        "run.name": "service",
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    run = await train(load_config(TrainConfig, None, overrides, questions))
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    assert [line["step"] for line in lines] == [1, 2, 3]
    updated = [line for line in lines if "loss" in line]
    assert updated
    assert max(line["logprob_gap_max"] for line in updated) < 1e-3
    print("reward", [round(line["reward"], 3) for line in lines])
    versions = [
        {
            turn.tokens.version
            for item in read_trajectories(file)
            for turn in item.turns
            if turn.tokens is not None
        }
        for file in sorted((run / "trajectories").iterdir())
    ]
    assert all(len(version) == 1 for version in versions)
    assert versions[0] == {0}
    state = json.loads((run / "model" / "tinker.json").read_text())
    assert state["path"].startswith("tinker://")
    assert fmean(line["reward"] for line in lines) > 0

    engine = open_engine(server)
    await engine.load_state(run / "model")
    assert engine.weight_version == state["weight_version"] >= 1
    [reply] = await engine.sample([[4, 9]], replace(SamplingParams(max_tokens=4), temperature=0.0))
    assert len(reply.tokens) == 4
