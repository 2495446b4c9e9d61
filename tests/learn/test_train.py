"""The loop of reinforcement learning, run whole on a tiny model: files, determinism, resuming, learning."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trialogue.cli.main import main
from trialogue.cli.options import Asked
from trialogue.config import EngineChoice, EvalConfig, Limits, Optimizer, SftConfig, Speaker, TrainConfig
from trialogue.digests import list_now
from trialogue.errors import ConfigError, RunError
from trialogue.learn.advantages import build_rows, dr_grpo, has_signal
from trialogue.learn.collect import Collector, choose_tasks
from trialogue.learn.sft import sft
from trialogue.learn.train import to_optim, train
from trialogue.records import append_records
from trialogue.run import Run, list_checkpoints, read_about, read_config, read_lines, read_trajectories
from trialogue.score.parties import Parties
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.task import Task
from trialogue.trajectory import Group, Reward, Tokens, Trajectory, Turn
from trialogue.world.find import find_domain

Configure = Callable[..., TrainConfig]


def read_metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(run / "metrics.jsonl") if line.get("kind") == kind]


def assert_same(first: Path, second: Path) -> None:
    """Two runs that went the same way: metrics and conversations by the byte, weights by the bit."""
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    files = sorted(path.name for path in (first / "trajectories").iterdir())
    assert files == sorted(path.name for path in (second / "trajectories").iterdir())
    for name in files:
        one, other = (run / "trajectories" / name for run in (first, second))
        assert one.read_bytes() == other.read_bytes(), name
    one, other = (load_file(run / "model" / "model.safetensors") for run in (first, second))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.training
async def test_reward_rises(train_config: Configure, trained: Path) -> None:
    run = await train(
        train_config(
            learner__model=str(trained),
            training__steps=24,
            training__tasks_per_step=6,
            training__group_size=8,
            training__eval_every=24,
            optimizer__learning_rate=2e-3,
        )
    )
    rewards = [line["reward"] for line in read_metrics(run)]
    assert fmean(rewards[:3]) < 0.4
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.35
    before, after = read_metrics(run, "eval")
    assert (before["pass^1"], after["pass^1"]) == (0.0, 1.0)  # greedy on tasks it never trained on
    assert max(line["logprob_gap_max"] for line in read_metrics(run) if "loss" in line) < 1e-4


async def test_a_run_leaves_what_is_documented(train_config: Configure, trained: Path) -> None:
    seen: list[tuple[int, str | None]] = []
    config = train_config(
        learner__model=str(trained),
        training__steps=4,
        training__eval_every=2,
        training__checkpoint_every=1,
        training__keep_checkpoints=2,
    )
    run = await train(config, watch=lambda step, metrics: seen.append((step, metrics.get("kind"))))
    expected = [(0, "eval"), (1, None), (2, None), (2, "eval"), (3, None), (4, None), (4, "eval")]
    assert [entry for entry in seen if entry[1] != "talk"] == expected
    assert [(line["step"], line.get("kind")) for _, line in read_lines(run / "metrics.jsonl")] == expected
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert (about["kind"], about["state"], about["seed"]) == ("train", "finished", 0)
    kept = TrainConfig.model_validate_json((run / "config.json").read_text(encoding="utf-8"))
    assert kept == config.model_copy(update={"engine": EngineChoice(name="torch")})  # what `auto` was

    first = read_metrics(run)[0]
    assert first["conversations"] == 12
    assert first["tools"].keys() <= {"paint"}
    assert set(first["families"]) == {"inside", "outside"}
    names = ["loss", "entropy", "logprob_gap", "clip_share", "grad_norm", "learning_rate", "unique_4grams"]
    assert all(isinstance(first[name], float) for name in names)
    phases: dict[int, set[str]] = {}
    for _, line in read_lines(run / "timings.jsonl"):
        if "step" in line:
            phases.setdefault(line["step"], set()).update(line.keys() - {"step"})
    assert phases[0] == {"evaluate"}
    assert phases[1] == {"rollout", "update", "tokens_per_second"}
    assert phases[4] == {"rollout", "update", "tokens_per_second", "evaluate"}

    files = {path.stem for path in (run / "trajectories").iterdir()}
    assert files == {f"step-00000{step}" for step in (1, 2, 3, 4)} | {
        f"eval-00000{step}" for step in (0, 2, 4)
    }
    held = list(read_trajectories(run / "trajectories" / "step-000002.jsonl"))
    assert len(held) == len({item.id for item in held}) == 12
    assert all(item.id.startswith("2/train-") for item in held)
    versions = {turn.tokens.version for item in held for turn in item.turns if turn.tokens is not None}
    assert versions == {1}  # talked with the weights that step 1 published
    assert [path.name for path in list_checkpoints(run)] == ["step-000003", "step-000004"]


async def test_a_run_that_is_late_ends_with_its_best_weights(train_config: Configure, trained: Path) -> None:
    config = train_config(
        learner__model=str(trained),
        training__steps=9,
        training__eval_every=4,
        training__patience=3,
        training__keep_checkpoints=1,
    )
    asked: list[bool] = []
    run = await train(config, is_late=lambda: asked.append(True) or len(asked) == 2)
    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    assert [line["step"] for line in lines if "kind" not in line] == [1, 2]
    checks = [(line["pass^1"], line["step"]) for line in lines if line.get("kind") == "eval"]
    assert [step for _, step in checks] == [0, 2]
    assert read_about(run)["state"] == "finished"
    best = run / "checkpoints" / f"step-{max(checks)[1]:06d}" / "model.safetensors"
    model = load_file(run / "model" / "model.safetensors")
    assert all(bool((value == model[name]).all()) for name, value in load_file(best).items())


async def test_a_checkpoint_is_an_agent(train_config: Configure, trained: Path) -> None:
    config = train_config(learner__model=str(trained), training__steps=1)
    run = await train(config)
    domain = find_domain(config.domain)
    for folder in (run, run / "model", list_checkpoints(run)[-1]):
        agent = find_model(Speaker(model=str(folder)), "agent", domain, config.limits)
        user = find_model(config.user, "user", domain, config.limits)
        groups = rollout(
            domain, domain.tasks("dev", 1), agent, user, RolloutSettings(limits=config.limits, grade=grade)
        )
        [group] = [group async for group in groups]
        [talk] = group.trajectories
        assert talk.end == "user_stop"
        assert talk.turns[1].message.tool_calls[0].name == "paint"
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert model.config.vocab_size == len(tokenizer)
    weights = load_file(run / "model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].equal(model.get_input_embeddings().weight)


async def test_the_same_seed_gives_the_same_run(train_config: Configure, trained: Path) -> None:
    def make(name: str, seed: int = 3) -> TrainConfig:
        return train_config(
            learner__model=str(trained),
            seed=seed,
            run__name=name,
            training__steps=2,
            training__group_size=8,
            training__eval_every=1,
            training__mini_batches=2,
            optimizer__learning_rate=1e-3,
            loss__kl=0.1,
        )

    first, second, other = [await train(make(*one)) for one in (("one",), ("two",), ("three", 4))]
    assert_same(first, second)
    assert (first / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes()
    assert read_metrics(first)[1]["kl"] > 0


@pytest.mark.parametrize("stop", [1, 2])
async def test_stopping_and_resuming_changes_nothing(
    train_config: Configure, trained: Path, stop: int, crash: Callable[[Path], None]
) -> None:
    def make(name: str) -> TrainConfig:
        return train_config(
            learner__model=str(trained),
            run__name=name,
            training__steps=4,
            training__eval_every=2,
            training__curriculum=0.2,
            tasks__levels=[1, 2],
        )

    def interrupt(step: int, metrics: dict[str, Any]) -> None:
        if step == stop and "kind" not in metrics:
            os.kill(os.getpid(), signal.SIGINT)

    whole = await train(make("whole"))
    parts = await train(make("parts"), watch=interrupt)
    assert json.loads((parts / "run.json").read_text(encoding="utf-8"))["state"] == "stopped"
    assert [path.name for path in list_checkpoints(parts)] == [f"step-00000{stop}"]
    # What a crash leaves behind after the checkpoint is forgotten.
    crash(parts)
    append_records(parts / "metrics.jsonl", [json.dumps({"step": stop + 1})])
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')
    (parts / "trajectories" / f"step-00000{stop + 1}.jsonl").write_text("{", encoding="utf-8")
    await train(read_config(TrainConfig, parts), resume=parts)
    assert_same(whole, parts)
    assert json.loads((parts / "run.json").read_text(encoding="utf-8"))["state"] == "finished"


def test_a_run_can_be_extended_and_nothing_else_about_it_changed(
    train_config: Configure, trained: Path
) -> None:
    def make(name: str, **more: object) -> TrainConfig:
        return train_config(learner__model=str(trained), run__name=name, **more)

    whole = asyncio.run(train(make("whole", training__steps=3)))
    parts = asyncio.run(train(make("parts", training__steps=1)))
    for word in ("training.group_size=8", "optimizer.learning_rate=1e-6", "seed=7"):
        done = CliRunner().invoke(main, ["train", word, "--resume", str(parts)])
        assert done.exit_code == 2, done.output
    assert "are seed=0; leave yours out" in done.output
    file = parts.parent / "other.toml"
    file.write_text("seed = 0\n", encoding="utf-8")
    done = CliRunner().invoke(main, ["train", "--config", str(file), "--resume", str(parts)])
    assert (done.exit_code, "leave the config file" in done.output) == (2, True)
    with pytest.raises(ConfigError, match=r"are training.group_size=4"):
        asyncio.run(train(make("parts", training__steps=1, training__group_size=8), resume=parts))
    done = CliRunner().invoke(
        main, ["train", "training.steps=2", "--trust", "--resume", str(parts), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert read_config(TrainConfig, parts).training.steps == 2
    more = make("parts", training__steps=3)
    asyncio.run(train(TrainConfig(domain=more.domain, training=more.training), resume=parts))
    assert_same(whole, parts)


async def test_an_importance_cap_needs_whole_steps(train_config: Configure) -> None:
    wrong = train_config(loss__importance_cap=2.0, training__mini_batches=2)
    with pytest.raises(ConfigError, match=r"set training.mini_batches=1 or loss.importance_cap=0"):
        await train(wrong)
    assert not (Path(wrong.run.directory) / "train").exists()


async def test_a_run_that_cannot_be_set_up_is_let_go_of(
    train_config: Configure, sft_config: Callable[..., SftConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = train_config(stragglers__policy="cut", training__redraw_no_signal=1)
    with pytest.raises(ConfigError, match="redraw_no_signal needs whole steps"):
        await train(wrong)
    path = Path(wrong.run.directory) / "train"
    assert read_about(path)["state"] == "failed"
    Run.resume(path).close("failed")  # nobody holds it any more

    def load(*given: object) -> None:
        raise AssertionError("weights are loaded for nothing")

    monkeypatch.setattr("trialogue.learn.train.load_learner", load)
    monkeypatch.setattr("trialogue.learn.sft.load_learner", load)
    with pytest.raises(RunError, match="exists; resume it"):
        await train(wrong)
    with pytest.raises(RunError, match="exists; resume it"):
        await sft(sft_config(run__name="train"))


def test_a_trained_agent_speaks_where_and_as_it_learned(
    train_config: Configure, trained: Path, wall: str, tmp_path: Path
) -> None:
    config = train_config(learner__model=str(trained))
    run = Run.create(config.run, "train", config.domain, config, config.seed)
    shutil.copytree(trained / "model", run.path / "model")
    run.close("finished")
    done = CliRunner().invoke(
        main, ["chat", str(run.path), "--trust", "--json"], input="Paint it.\n###STOP###\n"
    )
    assert done.exit_code == 0, done.output
    played = json.loads(done.stdout)
    assert (played["trajectory"]["task"]["domain"], played["end"]) == ("wall", "user_stop")
    for agent in (run.path, f"local:{run.path}", run.path / "model"):
        limits = Asked("shop", options={"agent": str(agent)}).to_config(EvalConfig).limits
        assert (limits.reply_tokens, limits.context_tokens) == (12, 128)
    file = tmp_path / "limits.toml"
    file.write_text("[limits]\nreply_tokens = 20\n", encoding="utf-8")
    agent = {"agent": str(run.path)}
    given = Asked("shop", ("limits.context_tokens=99",), str(file), options=agent).to_config(EvalConfig)
    assert (given.limits.reply_tokens, given.limits.context_tokens) == (20, 99)
    assert Asked("shop", options={"agent": "oracle"}).to_config(EvalConfig).limits == Limits()


async def test_a_damaged_checkpoint_is_left_out(
    train_config: Configure, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(name: str) -> TrainConfig:
        return train_config(
            learner__model=str(trained), run__name=name, training__steps=3, training__checkpoint_every=1
        )

    whole = await train(make("whole"))
    run = await train(make("parts"))
    newest = list_checkpoints(run)[-1]
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    await train(read_config(TrainConfig, run), resume=run)
    assert "step-000003 is damaged and skipped: model.safetensors has changed" in caplog.text
    assert_same(whole, run)


@pytest.mark.timeout(300)  # a process of its own takes its time to load everything on a busy machine
def test_control_c_saves_and_the_run_goes_on(train_config: Configure, trained: Path, tmp_path: Path) -> None:
    config = train_config(learner__model=str(trained), training__steps=500)
    pressed: list[int] = []

    def press(step: int, metrics: dict[str, Any]) -> None:
        if "kind" not in metrics and not pressed:
            pressed.append(step)
            signal.raise_signal(signal.SIGINT)

    run = asyncio.run(train(config, watch=press))
    assert pressed == [1]
    [checkpoint] = list_checkpoints(run)
    reached = int(checkpoint.name.removeprefix("step-"))
    assert 1 <= reached < 500
    assert read_metrics(run)[-1]["step"] == reached
    shortened = config.model_copy(
        update={"training": config.training.model_copy(update={"steps": reached + 1})}
    )
    (run / "config.json").write_text(shortened.model_dump_json(), encoding="utf-8")
    list_now(run)
    asyncio.run(train(read_config(TrainConfig, run), resume=run))
    assert [line["step"] for line in read_metrics(run)] == list(range(1, reached + 2))


async def test_groups_without_signal_are_counted_and_skipped(train_config: Configure, blank: Path) -> None:
    run = await train(train_config(training__steps=2))  # random weights never paint blue
    for line in read_metrics(run):
        assert (line["no_signal"], line["skipped"], line["reward"]) == (1.0, 1.0, 0.0)
        assert "loss" not in line
    weights = load_file(run / "model" / "model.safetensors")
    assert all(value.equal(weights[name]) for name, value in load_file(blank / "model.safetensors").items())


async def test_groups_without_signal_are_drawn_again(train_config: Configure) -> None:
    run = await train(train_config(training__steps=1, training__redraw_no_signal=2))
    [line] = read_metrics(run)
    assert line["redrawn_groups"] == 6
    assert line["conversations"] == 36  # figures are of all that were held
    assert len(list(read_trajectories(run / "trajectories" / "step-000001.jsonl"))) == 36


async def test_failed_conversations_enter_no_baseline(
    train_config: Configure, trained: Path, troubled_wall: str
) -> None:
    config = train_config(
        domain=troubled_wall, learner__model=str(trained), training__steps=1, rollout__redraws=0
    )
    run = await train(config)
    [line] = read_metrics(run)
    assert line["blame"] == {"user": line["failed"]}
    assert 0 < line["failed"] < 12
    assert line["conversations"] + line["failed"] == 12
    held = list(read_trajectories(run / "trajectories" / "step-000001.jsonl"))
    failed = {item.id for item in held if item.end == "error"}
    assert len(failed) == line["failed"]
    assert all(item.reward is None for item in held if item.id in failed)
    assert line["reward"] == fmean(item.value for item in held if item.id not in failed)


def talk(identity: str, value: float | None) -> Trajectory:
    tokens = Tokens(start=True, prompt=(1, 2), reply=(3,), logprobs=(-1.0,))
    message = {"role": "assistant", "content": "…"}
    turn = Turn(side="agent", message=message, tokens=tokens)  # type: ignore[arg-type]
    reward = None if value is None else Reward(value=value)
    end = "error" if value is None else "user_stop"
    return Trajectory(id=identity, task=TASK, turns=(turn,), end=end, reward=reward)


TASK = Task(id="t", domain="d", instructions="")


def test_rows_of_a_step() -> None:
    groups = [
        Group(task=TASK, trajectories=(talk("a", 1.0), talk("b", 0.0)), failed=(talk("x", None),)),
        Group(task=TASK, trajectories=(talk("c", 1.0), talk("d", 1.0)), failed=(talk("y", None),)),
        Group(task=TASK, trajectories=(talk("e", 1.0), talk("f", 0.5), talk("g", 0.0))),
        Group(task=TASK, trajectories=(talk("h", 1.0),)),
        Group(task=TASK, trajectories=(), failed=(talk("z", None),)),
    ]
    rows = build_rows(groups, dr_grpo)
    # A sibling at the mean has no pull of its own, but counts among the rows and tokens of the step.
    assert [(row.id, row.advantages[-1]) for row in rows] == [
        ("a", 0.5),
        ("b", -0.5),
        ("e", 0.5),
        ("f", 0.0),
        ("g", -0.5),
    ]
    assert [has_signal(group) for group in groups] == [True, False, True, False, False]


def test_tasks_of_a_finite_domain_come_in_epochs(train_config: Configure) -> None:
    config = train_config(training__tasks_per_step=2)
    domain = find_domain(config.domain)
    chosen = [[task.id for task in choose_tasks(domain, config, step, 0, ())] for step in range(6)]
    for epoch in (chosen[:3], chosen[3:]):
        assert sorted(name for step in epoch for name in step) == [f"train-{number}" for number in range(6)]
    assert chosen[:3] != chosen[3:]
    only = choose_tasks(domain, config, 0, 0, (2,))
    assert {task.level for task in only} == {2}
    with pytest.raises(ConfigError, match="no tasks in split 'train'"):
        choose_tasks(domain, config, 0, 0, (7,))


def test_an_endless_domain_never_repeats_a_step(train_config: Configure) -> None:
    config = train_config(domain="shop")
    shop = find_domain("shop")
    steps = [choose_tasks(shop, config, step, draw, (1,)) for step in range(3) for draw in range(2)]
    ids = [task.id for step in steps for task in step]
    assert len(set(ids)) == len(ids) == 18
    assert steps[0] == choose_tasks(shop, config, 0, 0, (1,))


async def test_the_curriculum_admits_levels_one_by_one(train_config: Configure, trained: Path) -> None:
    run = await train(
        train_config(
            learner__model=str(trained),
            training__steps=3,
            training__curriculum=0.05,
            tasks__levels=[2, 1],
        )
    )
    lines = read_metrics(run)
    assert lines[0]["levels"] == [1]
    assert set(lines[0]["families"]) == {"inside"}
    assert lines[0]["reward"] >= 0.05
    assert lines[1]["levels"] == [1, 2]


async def test_the_shop_trains_through_the_same_loop(train_config: Configure) -> None:
    config = train_config(
        domain="shop",
        tasks__levels=[1],
        training__steps=1,
        training__tasks_per_step=2,
        training__group_size=2,
        limits__observations=4,
        limits__reply_tokens=8,
        limits__context_tokens=512,
    )
    run = await train(config)
    [line] = read_metrics(run)
    assert (line["conversations"], line["failed"], line["levels"]) == (4, 0, [1])


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1.0, 0.853553, 0.5, 0.146447]),
        ({"warmup": 2}, [1 / 3, 2 / 3, 1.0, 1.0]),
        ({"warmup": 2, "schedule": "linear"}, [1 / 3, 2 / 3, 1.0, 0.5]),
    ],
)
def test_schedules_by_hand(settings: dict[str, Any], rates: list[float]) -> None:
    optimizer = Optimizer(learning_rate=1.0, **settings)
    found = [to_optim(optimizer, step, 4).learning_rate for step in range(4)]
    assert found == pytest.approx(rates, abs=1e-6)


async def test_groups_come_in_the_order_of_their_tasks(train_config: Configure) -> None:
    config = train_config()
    domain = find_domain(config.domain)
    agent = find_model(Speaker(model="oracle"), "agent", domain, Limits())
    user = find_model(config.user, "user", domain, Limits())
    collector = Collector(config, domain, agent, Parties(user))
    groups = await collector.next_groups(0)
    assert [group.task.id for group in groups] == [task.id for task in choose_tasks(domain, config, 0, 0, ())]
    assert collector.replaced == []
