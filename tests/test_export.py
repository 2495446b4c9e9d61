"""What `trialogue export verl` writes, read without verl: its own loader reads it in test_verl.py."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner

from trialogue.cli.main import main
from trialogue.config import EvalConfig, LossSettings, TrainConfig, load_config
from trialogue.engine.models import find_model_folder
from trialogue.errors import ConfigError
from trialogue.hosts.export import export_verl, flatten, to_algorithm, to_hydra
from trialogue.hosts.trl import to_prompts
from trialogue.learn.collect import choose_tasks
from trialogue.learn.train import to_optim
from trialogue.run import Run, read_config, read_marks
from trialogue.settings import Optimizer
from trialogue.talk.render.load import RENDERER, load_renderer
from trialogue.task import Task
from trialogue.world.find import find_domain
from trialogue.world.scaffold import write_domain

ROOT = Path(__file__).parents[1]


def read_settings(folder: Path) -> dict[str, str]:
    text = (folder / "launch.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    words = shlex.split(text, comments=True)
    assert words[-1] == "$@"
    return dict(word.split("=", 1) for word in words[words.index("verl.trainer.main_ppo") + 1 : -1])


def test_what_is_trained_from_test_tasks_elsewhere_is_marked(tmp_path: Path) -> None:
    settings = ["domain=shop", "training.steps=1", "training.tasks_per_step=4", "training.eval_every=0"]
    settings += ["optimizer.schedule=constant", "tasks.split=test"]
    with pytest.raises(ConfigError, match="4 of 4 tasks to learn from are test tasks"):
        export_verl(load_config(TrainConfig, None, settings), tmp_path / "out")
    settings += ["tasks.allow_test_split=true"]
    told = export_verl(load_config(TrainConfig, None, settings), tmp_path / "out")
    weights = tmp_path / "out" / "checkpoints" / "global_step_1" / "actor" / "huggingface"
    weights.mkdir(parents=True)
    assert read_marks(f"local:{weights}") == told["marks"] == ["learned from 4 test tasks of shop"]


def test_prompts_for_trl_need_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the key nor the connections of one who is paid."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    settings = ["domain=shop", "user.model=openai:owner", "training.steps=1", "training.tasks_per_step=3"]
    prompts = to_prompts(load_config(TrainConfig, None, settings))
    assert [Task.model_validate_json(row["prompt"]).domain for row in prompts] == ["shop"] * 3


def test_the_command_writes_a_folder_verl_can_start_from(tmp_path: Path) -> None:
    out = tmp_path / "an export"
    arguments = [
        "export",
        "verl",
        "shop",  # over the domain of the file
        "--config",
        str(ROOT / "configs" / "paper-32b.toml"),
        "training.steps=2",
    ]
    arguments += ["training.eval_tasks=3", "engine.verl.trainer.nnodes=2", "--out", str(out), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"out": str(out), "train": 64, "dev": 3, "steps": 2}
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "agent-loop.yaml",
        "config.json",
        "dev.parquet",
        "launch.sh",
        "requirements.txt",
        "run.json",
        "train.parquet",
    ]
    assert f"All machines must see the folder as `{out}`." in (out / "README.md").read_text(encoding="utf-8")
    settings = read_settings(out)
    assert settings["trainer.nnodes"] == "2"  # the command line wins over the file
    assert settings["trainer.n_gpus_per_node"] == "8"
    assert settings["data.max_response_length"] == "27768"
    assert settings["data.train_files"] == f"'{out}/train.parquet'"
    config = TrainConfig.model_validate_json((out / "config.json").read_text(encoding="utf-8"))
    assert config.user.concurrency == 8  # 64 requests at once, shared by 8 workers
    rows = parquet.read_table(out / "train.parquet").to_pylist()
    tasks = [Task.model_validate_json(row["extra_info"]["task"]) for row in rows]
    assert len({task.id for task in tasks}) == 64
    assert {task.split for task in tasks} == {"train"}
    assert {row["agent_name"] for row in rows} == {"trialogue"}
    assert not (out / "config.json").read_text(encoding="utf-8").count("sk-")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["training.mini_batches=3"], "must divide"),
        (["optimizer.schedule=linear"], "set optimizer.schedule=constant or cosine"),
        (["loss.reduction=constant", "loss.constant=10.5"], "whole number"),
        (["training.curriculum=0.7"], "verl knows nothing like training.curriculum"),
        (["training.curriculum=0.5", "checks.entropy=0.1"], "training.curriculum, checks.entropy"),
        (["stragglers.policy=cut"], "nothing like stragglers.policy"),
        (["engine.name=vllm"], "nothing like engine.name"),
        (["engine.verl.trainer.use_v1=false"], "older trainer"),
        (["optimizer.schedule=cosine", "optimizer.warmup=2"], "verl's cosine begins its warm-up"),
        (["learner.renderer=qwen3-exact", "loss.name=gspo"], "counts each of them as a conversation"),
        (["engine.verl.actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "layers that would mix"),
        (["user.concurrency=4"], "4 requests at once cannot be shared by verl's 8 workers"),
    ],
)
def test_what_verl_cannot_do_is_refused(overrides: list[str], problem: str, tmp_path: Path) -> None:
    usual = ["training.steps=1", "training.eval_every=0", "optimizer.schedule=constant"]
    config = load_config(TrainConfig, None, [*usual, *overrides])
    with pytest.raises(ConfigError, match=problem):
        export_verl(config, tmp_path)


def export(out: Path, *more: str) -> dict[str, str]:
    """The settings of an exported launch script."""
    settings = ["training.steps=3", "training.tasks_per_step=4", "training.eval_tasks=4"]
    config = load_config(TrainConfig, None, [*settings, "optimizer.schedule=constant", *more])
    export_verl(config, out)
    return read_settings(out)


@pytest.mark.parametrize("finite", [False, True])
def test_the_tasks_come_in_the_order_of_our_own_loop(tmp_path: Path, finite: bool) -> None:
    write_domain(tmp_path / "bakery")
    domain = [f"domain={tmp_path / 'bakery'}", "training.tasks_per_step=2"] if finite else []
    settings = export(tmp_path / "out", *domain)
    assert (settings["data.shuffle"], settings["trainer.total_epochs"]) == ("false", "1")
    rows = parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    found = [Task.model_validate_json(row["extra_info"]["task"]).id for row in rows]
    config = TrainConfig.model_validate_json((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    own = find_domain(config.domain)
    size = config.training.tasks_per_step
    for step in range(3):
        chosen = [task.id for task in choose_tasks(own, config, step, 0, ())]
        assert found[step * size :][: len(chosen)] == chosen  # one less where two epochs meet
    assert {row["extra_info"]["purpose"] for row in rows} == {"train"}
    watched = parquet.read_table(tmp_path / "out" / "dev.parquet").to_pylist()
    assert {row["extra_info"]["purpose"] for row in watched} == {"dev"}


def test_the_rate_of_each_step_is_ours(tmp_path: Path) -> None:
    """verl's formula for its cosine, with what the script says."""
    settings = export(tmp_path / "out", "optimizer.warmup=3", "optimizer.learning_rate=0.001")
    optim = {key.rsplit(".", 1)[1]: value for key, value in settings.items() if ".optim." in key}
    assert (optim["lr_scheduler_type"], optim["zero_indexed_step"]) == ("cosine", "false")
    warmup, floor = int(optim["lr_warmup_steps"]), float(optim["min_lr_ratio"])
    optimizer = Optimizer(learning_rate=1e-3, warmup=3)
    for step in range(6):
        place = step + 1  # steps count from 1
        curve = (1 - floor) * 0.5 * math.cos(math.pi * (place - warmup) / 3) + (1 + floor) * 0.5
        rate = 1e-3 * (place / warmup if place < warmup else max(floor, curve))
        assert rate == pytest.approx(to_optim(optimizer, step, 6).learning_rate)


@pytest.mark.parametrize(
    ("model", "packs"),
    [
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "true"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, "false"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "false"),
        ({"model_type": "granitemoehybrid", "mamba_d_conv": 4}, "false"),
    ],
)
def test_rows_are_packed_only_where_layers_do_not_mix_them(
    model: dict[str, Any], packs: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    settings = export(tmp_path / "out", f"learner.model={tmp_path}")
    assert settings["actor_rollout_ref.model.use_remove_padding"] == packs


def test_the_tiny_base_is_not_packed_and_keeps_its_renderer(tmp_path: Path) -> None:
    settings = export(tmp_path / "out")
    assert settings["actor_rollout_ref.model.use_remove_padding"] == "false"
    assert settings["+actor_rollout_ref.model.override_config.trialogue_renderer"] == "brief"
    settings = export(tmp_path / "other", "learner.renderer=compact")
    assert settings["+actor_rollout_ref.model.override_config.trialogue_renderer"] == "compact"


def test_a_folder_that_verl_copied_keeps_its_renderer(tmp_path: Path) -> None:
    """verl copies config.json and the tokenizer; where nothing says which renderer, none is guessed."""
    base = Path(find_model_folder("tiny"))
    for file in base.glob("*.json"):
        if file.name != "renderer.json":
            shutil.copy(file, tmp_path)
    with pytest.raises(ConfigError, match="suits the renderers brief and compact"):
        load_renderer(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {RENDERER: "brief"}), encoding="utf-8")
    assert load_renderer(str(tmp_path))[1].name == "brief"


def test_what_is_limited_is_divided_among_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And paths hold wherever a worker starts."""
    monkeypatch.chdir(tmp_path)
    for name in ("user.txt", "manners.toml", "said.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    settings = ["training.steps=1", "training.eval_split=test", "training.eval_tasks=2", "budget.usd=10"]
    settings += ["optimizer.schedule=constant", "budget.tokens=1000", "user.requests_per_minute=60"]
    settings += ["user.tokens_per_minute=90000", "engine.verl.actor_rollout_ref.rollout.agent.num_workers=4"]
    settings += ["user.model=replay:said.jsonl", "user.otherwise=local:model", "user.prompt=user.txt"]
    settings += ["user.personas=manners.toml", 'run.track=["wandb"]']
    export_verl(load_config(TrainConfig, None, settings), tmp_path / "out")
    config = TrainConfig.model_validate_json((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert (config.budget.usd, config.budget.tokens, config.user.concurrency) == (2.5, 250, 16)
    assert (config.user.requests_per_minute, config.user.tokens_per_minute) == (15, 22500)
    assert config.simulator.concurrency == config.audit.judge.concurrency == 16
    assert config.user.model == f"replay:{tmp_path / 'said.jsonl'}"
    assert config.user.otherwise == f"local:{tmp_path / 'model'}"
    assert (config.user.prompt, config.user.personas) == (
        str(tmp_path / "user.txt"),
        str(tmp_path / "manners.toml"),
    )
    rows = parquet.read_table(tmp_path / "out" / "dev.parquet").to_pylist()
    assert {row["extra_info"]["split"] for row in rows} == {"test"}
    assert read_settings(tmp_path / "out")["trainer.logger"] == "[console,wandb]"


def test_a_run_finds_every_path_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "house").touch()  # a word is a word, whatever lies about
    (tmp_path / "user.txt").touch()
    share = {"model": "scripted:user.txt", "otherwise": "local:user.txt"}
    user = {"model": "replay:user.txt", "prompt": "user.txt", "personas": "user.txt", "mix": [share]}
    config = EvalConfig.model_validate({"user": user, "agent": {"prompt": "house"}, "run": {"name": "r"}})
    Run.create(config.run, "eval", "shop", config, 0).close("stopped")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = read_config(EvalConfig, tmp_path / "runs" / "r")
    place = str(tmp_path / "user.txt")
    assert (found.user.prompt, found.user.personas, found.agent.prompt) == (place, place, "house")
    assert found.user.mix[0].model == f"scripted:{place}"
    assert found.user.mix[0].otherwise == f"local:{place}"


def test_a_step_needs_enough_tasks(tmp_path: Path) -> None:
    write_domain(tmp_path / "bakery")
    with pytest.raises(ConfigError, match="fewer than the 16 of one step"):
        export_verl(load_config(TrainConfig, None, [f"domain={tmp_path / 'bakery'}"]), tmp_path)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"name": "dr_grpo"}, {"algorithm.norm_adv_by_std_in_grpo": False}),
        ({"name": "rloo"}, {"algorithm.adv_estimator": "rloo"}),
        ({"name": "dapo"}, {"actor_rollout_ref.actor.clip_ratio_high": 0.28}),
        ({"name": "gspo"}, {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}),
        ({"reduction": "row"}, {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}),
        ({"reduction": "constant", "constant": 64}, {"actor_rollout_ref.actor.loss_scale_factor": 64}),
        ({"dual_clip": 0}, {"actor_rollout_ref.actor.clip_ratio_c": 1e6}),
        ({"importance_cap": 2}, {"algorithm.rollout_correction.rollout_is_threshold": 2.0}),
    ],
)
def test_losses_by_verls_names(loss: dict[str, Any], expected: dict[str, Any]) -> None:
    found = to_algorithm(LossSettings.model_validate(loss))
    assert found | expected == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        ("a/b-c.d", "a/b-c.d"),
        ("it's", "'it\\'s'"),
        ("true", "'true'"),
        ([0.9, 0.95], "[0.9,0.95]"),
        ({"a": [1]}, "{a:[1]}"),
    ],
)
def test_values_in_hydras_grammar(value: Any, text: str) -> None:
    assert to_hydra(value) == text


def test_nested_tables_become_dotted_keys() -> None:
    assert flatten({"trainer": {"nnodes": 4}, "+a.b": 1, "c": {}}) == {
        "trainer.nnodes": 4,
        "+a.b": 1,
        "c": {},
    }
