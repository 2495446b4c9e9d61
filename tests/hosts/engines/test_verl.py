"""verl 0.9 on a CPU: `make test-verl`, in an environment of its own.

The real agent-loop manager runs on a local Ray; only the GPU server is replaced, by our engine over a tiny
model. Our own rollout draws the same tokens from the same model: what verl gets must be what we train on.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl lives in an environment of its own: make test-verl")

import ray
from omegaconf import OmegaConf
from ports import find_port
from safetensors.torch import load_file
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker, DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl_export import Exported, read_overrides, run_python
from verl_parts import Here, OneServerClient, SeededSampler, TinyServer

from trialogue.config import TrainConfig, load_config
from trialogue.engine.api import EngineSettings, OptimParams, Row
from trialogue.engine.torch_engine import TorchEngine
from trialogue.errors import ConfigError
from trialogue.hosts.conversations import to_figures
from trialogue.hosts.export import export_verl
from trialogue.hosts.verl import ConversationLoop, Sizes, open_conversations, to_outputs
from trialogue.learn.advantages import build_rows, find_advantage, has_signal, to_rows
from trialogue.learn.losses import PolicyLoss
from trialogue.learn.measure import measure
from trialogue.messages import Message
from trialogue.run import read_trajectories
from trialogue.score.reward import grade
from trialogue.talk.local import LocalModel, Sampling
from trialogue.talk.render.load import load_renderer
from trialogue.talk.rollout import RolloutSettings, derive_seed, rollout
from trialogue.task import Task
from trialogue.trajectory import Group, Reward, Tokens, Trajectory, Turn, in_order

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[3]
GROUP = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A local Ray."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    patient = {
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_gcs_server_request_timeout_seconds": "600",
        "RAY_health_check_timeout_ms": "600000",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
    }
    os.environ["RAY_AUTH_MODE"] = "disabled"
    port = find_port()
    log = tmp_path_factory.mktemp("ray") / "log"
    with log.open("w") as file:
        head = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "ray_head.py"), str(port)],
            env=os.environ | patient,
            stdout=file,
            stderr=file,
        )
    try:
        for attempt in range(20):
            try:
                ray.init(
                    f"{ray.util.get_node_ip_address()}:{port}",
                    log_to_driver=False,
                    runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
                )
                break
            except Exception:  # noqa: BLE001 - whatever it is, it is tried again
                if attempt == 19 or head.poll() is not None:
                    raise RuntimeError(log.read_text()[-2000:]) from None
                time.sleep(10)
        yield
    finally:
        ray.shutdown()
        head.terminate()
        head.wait(60)


def hold_ourselves(exported: Exported, tasks: list[Any]) -> list[Group]:
    """The same conversations in our own loop."""
    conversations = open_conversations(str(exported.folder / "config.json"))
    config = conversations.config
    sampler = SeededSampler(config.learner.model)
    _, renderer = load_renderer(config.learner.model)
    sampling = Sampling(reply_tokens=config.limits.reply_tokens, context_tokens=config.limits.context_tokens)

    def agent(task: Any, seed: int) -> LocalModel:
        return LocalModel(sampler, renderer, sampling, seed=seed, session=f"{seed:x}")

    async def hold() -> list[Group]:
        groups = rollout(
            conversations.domain,
            tasks,
            agent,
            conversations.parties.user,
            RolloutSettings(
                group_size=GROUP,
                limits=config.limits,
                seed=derive_seed(config.seed, "step", -1),
                redraws=0,
                grade=grade,
                name="0/",
            ),
        )
        return in_order([group async for group in groups], tasks)

    return asyncio.run(hold())


@dataclass
class Both:
    output: Any
    groups: list[Group]
    trajectories: list[Trajectory]
    """Ours, in the order of verl's rows."""
    asked: list[tuple[str, int]]


def to_batch(tasks: list[Any]) -> DataProto:
    def column(values: list[Any]) -> Any:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array

    rows = [(number, task, trial) for number, task in enumerate(tasks) for trial in range(GROUP)]
    return DataProto.from_dict(
        tensors={"dummy_tensor": torch.zeros(len(rows), 1)},
        non_tensors={
            "raw_prompt": column([[{"role": "user", "content": task.id}] for _, task, _ in rows]),
            "extra_info": column([{"task": task.model_dump_json()} for _, task, _ in rows]),
            "index": np.array([number for number, _, _ in rows]),
            "priority": np.array([trial for _, _, trial in rows]),
            "uid": column([task.id for _, task, _ in rows]),
        },
    )


@pytest.fixture(scope="module")
def both(exported: Exported) -> Both:
    """verl's worker and our rollout, each in this process."""
    tasks = open_conversations(str(exported.folder / "config.json")).domain.tasks("train", 4)
    server = TinyServer(exported.config.learner.model)
    worker = AgentLoopWorker(exported.verl, OneServerClient(exported.verl, Here(server)))
    output = asyncio.run(worker.generate_sequences(to_batch(tasks)))
    groups = hold_ourselves(exported, tasks)
    ours = {item.id: item for group in groups for item in (*group.trajectories, *group.failed)}
    ordered = [ours[f"0/{task.id}/{trial}"] for task in tasks for trial in range(GROUP)]
    return Both(output, groups, ordered, server.asked)


def test_the_manager_on_ray_gives_the_same(both: Both, exported: Exported, cluster: None) -> None:
    tasks = open_conversations(str(exported.folder / "config.json")).domain.tasks("train", 4)
    server = ray.remote(TinyServer).remote(exported.config.learner.model)
    manager = AgentLoopManager.create(config=exported.verl, llm_client=OneServerClient(exported.verl, server))
    output = manager.generate_sequences(to_batch(tasks))
    assert output.batch.keys() == both.output.batch.keys()
    for name, found in output.batch.items():
        expected = both.output.batch[name]
        assert torch.allclose(found.float(), expected.float(), atol=1e-6), name
    for name in [*both.output.meta_info["reward_extra_keys"], "conversation"]:
        assert output.non_tensor_batch[name].tolist() == both.output.non_tensor_batch[name].tolist()
    assert output.meta_info["reward_extra_keys"] == both.output.meta_info["reward_extra_keys"]
    assert set(ray.get(server.list_asked.remote())) == set(both.asked)


def test_the_conversations_go_every_way(both: Both) -> None:
    held = both.trajectories
    assert {item.end for item in held} == {"user_stop", "too_long", "error"}
    assert {item.blame for item in held if item.end == "error"} == {"user"}
    assert max(sum(turn.side == "user" for turn in item.turns) for item in held) >= 3
    assert any(turn.failed for item in held for turn in item.turns)
    assert {item.value for item in held if item.reward is not None} == {0.0, 1.0}


def test_verl_gets_the_rows_we_would_train_on(both: Both, exported: Exported) -> None:
    batch = both.output.batch
    width = exported.verl.actor_rollout_ref.rollout.prompt_length
    for number, trajectory in enumerate(both.trajectories):
        [row] = to_rows(trajectory, 0.0)
        attended = batch["attention_mask"][number].bool()
        assert batch["input_ids"][number][attended].tolist() == row.tokens
        start = int(attended[:width].sum())
        length = len(row.tokens) - start
        mask = [0] * length if trajectory.end == "error" else row.mask[start:]
        assert batch["response_mask"][number].tolist() == mask + [0] * (160 - length)
        assert sum(row.mask[:start]) == 0
        logprobs = batch["rollout_log_probs"][number].tolist()
        assert logprobs[:length] == pytest.approx(row.logprobs[start:], abs=1e-6)
        scores = batch["rm_scores"][number].tolist()
        reward = 0.0 if trajectory.reward is None else trajectory.value
        assert scores[length - 1] == sum(scores) == reward
    lengths = [len(to_rows(item, 0.0)[0].tokens) for item in both.trajectories]
    assert max(lengths) > 140  # the longest were cut off at the limit of 160


def test_figures_and_turns_travel_along(both: Both) -> None:
    extras = both.output.non_tensor_batch
    keys = both.output.meta_info["reward_extra_keys"]
    assert set(keys) == set(to_figures(both.trajectories[:1]))
    held = [number for number, item in enumerate(both.trajectories) if item.end != "error"]
    expected = measure(both.groups)
    for name in ("turns", "tool_calls", "tool_errors", "response_tokens", "cut_off", "success"):
        assert np.mean([extras[name][number] for number in held]) == pytest.approx(expected[name]), name
    assert sum(extras["failed"]) == expected["failed"] == GROUP
    for number, item in enumerate(both.trajectories):
        told = extras["conversation"][number]
        assert (told["id"], told["end"], told["error"], told["blame"]) == (
            item.id,
            item.end,
            item.error,
            item.blame,
        )
        assert told["turns"] == [
            {
                "side": turn.side,
                "role": turn.message.role,
                "tokens": len(turn.tokens.reply) if turn.tokens is not None else 0,
                "tools": [call.name for call in turn.message.tool_calls],
                "failed": turn.failed,
            }
            for turn in item.turns
        ]
        assert {name: extras[name][number] for name in keys} == to_figures([item])
        assert (extras["min_global_steps"][number], extras["max_global_steps"][number]) == (3, 3)
        assert extras["__num_turns__"][number] == len(item.turns)


def test_one_request_id_for_each_conversation(both: Both) -> None:
    asked: dict[str, list[int]] = {}
    for identity, length in both.asked:
        asked.setdefault(identity, []).append(length)
    assert set(asked) == {f"{item.seed:x}" for item in both.trajectories}
    assert all(lengths == sorted(lengths) for lengths in asked.values())
    assert max(map(len, asked.values())) >= 4


def test_conversations_are_recorded(both: Both, exported: Exported) -> None:
    [file] = (exported.folder / "trajectories").glob(f"step-000000.*.{os.getpid()}.jsonl")
    recorded = {item.id: item for item in read_trajectories(file)}
    for item in both.trajectories:
        assert [turn.message for turn in recorded[item.id].turns] == [turn.message for turn in item.turns]
        assert recorded[item.id].reward == item.reward


def make_loop(exported: Exported, *more: str) -> ConversationLoop:
    """One loop as verl's worker makes it, with the server in this process."""

    verl = OmegaConf.merge(exported.verl, OmegaConf.from_dotlist(list(more)))
    tokenizer, _ = load_renderer(exported.config.learner.model)
    return ConversationLoop(
        trainer_config=DictConfigWrap(verl),
        server_manager=OneServerClient(verl, Here(TinyServer(exported.config.learner.model))),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(verl.data),
        settings=str(exported.folder / "config.json"),
        tools=None,
    )


SAMPLING = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def to_row(exported: Exported, number: int, **more: Any) -> dict[str, Any]:
    task = open_conversations(str(exported.folder / "config.json")).domain.tasks("train", 4)[number]
    return {"raw_prompt": [], "extra_info": {"task": task.model_dump_json()}, "priority": 0, **more}


async def test_the_newer_trainer_never_sees_a_failed_conversation(exported: Exported) -> None:
    loop = make_loop(exported)
    assert await loop.run(SAMPLING, **to_row(exported, 3, session_id=0, global_steps=1)) == []
    [held] = await loop.run(SAMPLING, **to_row(exported, 0, session_id=0, global_steps=1))
    assert sum(held.response_mask) > 0
    assert held.extra_fields["conversation"]["id"].startswith("1/")


def test_the_older_trainer_is_refused(exported: Exported) -> None:
    with pytest.raises(ConfigError, match=r"leave trainer\.use_v1=true"):
        make_loop(exported, "trainer.use_v1=false")


async def test_training_and_validation_have_files_and_seeds_of_their_own(exported: Exported) -> None:
    """Where verl is to be deterministic, each reply is drawn by the seed our own loop would draw it with."""
    loop = make_loop(exported, "actor_rollout_ref.rollout.full_determinism=true")
    asked: list[int] = []
    generate = loop.server_manager.generate

    async def note(*arguments: Any, sampling_params: dict[str, Any], **options: Any) -> Any:
        asked.append(sampling_params["seed"])
        return await generate(*arguments, sampling_params=sampling_params, **options)

    loop.server_manager.generate = note
    row = to_row(exported, 0, session_id=0, global_steps=7)
    watched = {**row, "extra_info": {**row["extra_info"], "purpose": "dev"}}
    for given in (row, watched):
        assert await loop.run(SAMPLING, **given)
    found = {
        file.name.split(".")[0]: list(read_trajectories(file))
        for file in (exported.folder / "trajectories").glob("*-000007.*")
    }
    assert {name: [item.id for item in items] for name, items in found.items()} == {
        "step-000007": ["7/train-0/0"],
        "dev-000007": ["dev-7/train-0/0"],
    }
    [[item], [other]] = found["step-000007"], found["dev-000007"]
    assert item.seed == derive_seed(derive_seed(0, "step", 6), "7/", "train-0", 0, 0) != other.seed
    assert len(set(asked)) == len(asked) >= 4


def test_a_local_users_weights_are_not_the_agents() -> None:
    turns = (
        Turn(
            side="user",
            message=Message(role="user", content="Paint it."),
            tokens=Tokens(prompt=(1,), reply=(2,), logprobs=(-1.0,), version=0),
        ),
        Turn(
            side="agent",
            message=Message(role="assistant", content="Done."),
            tokens=Tokens(start=True, prompt=(1, 2), reply=(3,), logprobs=(-1.0,), version=7),
        ),
    )
    task = Task(id="one", domain="wall", instructions="You want a blue wall.")
    held = Trajectory(id="one", task=task, turns=turns, end="user_stop", reward=Reward(value=1.0))
    [output] = to_outputs([held], Sizes(12, 20), 0)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (7, 7)


@pytest.mark.parametrize("room", [3, 20, 47])
async def test_nothing_outgrows_the_response(exported: Exported, room: int) -> None:
    rollout = "actor_rollout_ref.rollout"
    loop = make_loop(exported, f"{rollout}.response_length={room}", f"{rollout}.prompt_length=12")
    output = await loop.run(SAMPLING, **to_row(exported, 2))
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) <= room
    assert len(output.prompt_ids) <= 12
    assert output.extra_fields["conversation"]["end"] == "too_long"
    assert output.reward_score == 0.0
    told = output.extra_fields
    assert (told["min_global_steps"], told["max_global_steps"]) == (
        3,
        3,
    )  # whoever is cut has sampled nothing
    trained = [
        value for value, mask in zip(output.response_logprobs, output.response_mask, strict=True) if mask
    ]
    assert all(value < 0 for value in trained)


# -- the update ----------------------------------------------------------------------------------------------


@dataclass
class Updated:
    """An update by verl's engine, and what it was made of."""

    config: TrainConfig
    groups: list[Group]
    rows: int
    figures: dict[str, float]


def update_with_verl(both: Both, exported: Exported, folder: Path, loss: dict[str, Any]) -> Updated:
    config = load_config(
        TrainConfig, None, [f"loss.{key}={json.dumps(value)}" for key, value in loss.items()], exported.config
    )
    export_verl(config, folder / "export")
    kept = [group for group in both.groups if has_signal(group)]
    known = {group.task.id for group in kept}
    places = [number for number, item in enumerate(both.trajectories) if item.task.id in known]
    both.output[places].save_to_disk(folder / "rows.pkl")
    (folder / "overrides.json").write_text(json.dumps(read_overrides(folder / "export")))
    run_python(str(Path(__file__).parent / "verl_update.py"), str(folder))
    return Updated(config, kept, len(places), json.loads((folder / "result.json").read_text()))


def test_a_checkpoint_of_verl_becomes_a_folder_we_take(
    both: Both, exported: Exported, tmp_path: Path
) -> None:
    """By the command of docs/cluster.md, which writes bfloat16."""
    update_with_verl(both, exported, tmp_path, {})
    actor, folder = tmp_path / "actor", tmp_path / "folder"
    words = ["merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(folder)]
    run_python("-m", "verl.model_merger", *words)
    expected = load_file(tmp_path / "weights.safetensors")
    engine = TorchEngine(folder, EngineSettings(device="cpu"))
    found = engine.model.state_dict()
    before = load_file(Path(exported.config.learner.model) / "model.safetensors")
    assert all(found[name].equal(value.bfloat16().float()) for name, value in expected.items())
    assert any(not before[name].equal(value) for name, value in expected.items() if name in before)


@pytest.mark.parametrize(
    ("name", "reduction", "kl"), [("grpo", "token", 0.1), ("dr_grpo", "constant", 0.0), ("grpo", "row", 0.0)]
)
def test_verl_updates_as_we_do(
    both: Both, exported: Exported, tmp_path: Path, name: str, reduction: str, kl: float
) -> None:
    """Loss and gradient of verl's FSDP2 engine on verl's rows, against ours on ours, in float32."""
    loss = {
        "name": name,
        "reduction": reduction,
        "constant": 64.0,
        "kl": kl,
        "clip_low": 0.1,
        "dual_clip": 2.0,
    }
    updated = update_with_verl(both, exported, tmp_path, loss)
    config, theirs = updated.config, updated.figures
    rows = build_rows(updated.groups, find_advantage(config.advantage.name, config.loss.name))
    assert len(rows) == updated.rows >= GROUP
    rows = [
        Row(
            row.tokens,
            row.mask,
            shift(row.logprobs),
            row.advantages,
            shift(row.logprobs, 0.3) if kl else None,
            row.id,
        )
        for row in rows
    ]
    engine = TorchEngine(config.learner.model, EngineSettings(device="cpu"))

    async def update() -> tuple[dict[str, float], dict[str, float], dict[str, torch.Tensor]]:
        outputs = await engine.forward_backward(rows, PolicyLoss(config.loss))
        gradient = {key: value.grad.clone() for key, value in engine.update.parameters.items()}
        optim = OptimParams(
            learning_rate=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            grad_clip=config.optimizer.gradient_clip,
        )
        return outputs.metrics, await engine.optim_step(optim), gradient

    ours, step, gradient = asyncio.run(update())
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-4, abs=1e-6)
    assert theirs["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
    found = load_file(tmp_path / "gradient.safetensors")
    assert found.keys() == gradient.keys()
    one, other = (
        torch.cat([tree[key].flatten().double() for key in sorted(tree)]) for tree in (found, gradient)
    )
    cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    print(f"{name}/{reduction}: loss {theirs['loss']:.6f} and {ours['loss']:.6f}, cosine {cosine:.8f}")
    assert cosine > 0.99999
    assert one.norm() > 0


def shift(logprobs: list[float], by: float = 0.15) -> list[float]:
    """Log-probabilities of an older policy, so that ratios are not one and some are clipped."""
    return [value + by * ((number % 5) - 2) if value else 0.0 for number, value in enumerate(logprobs)]
