# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
"""Our configuration as verl reads it: a folder with the tasks, the agent loop's settings, a launch script.

README.md          how to install, start, resume and merge, and what differs from our own loop
requirements.txt   what launch.sh needs
run.json           what it is, and the marks of whatever is trained from it
config.json        our settings, for the trainer and for the agent loop in each of verl's workers
agent-loop.yaml    where verl finds the loop
train.parquet      the tasks of every step, in the order of our own loop
dev.parquet
launch.sh          verl's trainer with every setting; what is appended to it overrides
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, cast

from trialogue.config import Speaker, TrainConfig, difference_from_defaults
from trialogue.durable import write, write_json
from trialogue.engine.model_folder import read_object
from trialogue.errors import ConfigError
from trialogue.hosts.conversations import refuse_rows
from trialogue.learn.collect import choose_tasks, find_known
from trialogue.learn.held_out import find_marks
from trialogue.run import find_versions, find_weights, map_places
from trialogue.settings import MODELS, LearnerSettings, LossSettings, Optimizer
from trialogue.talk.render.load import RENDERER, read_renderer_name
from trialogue.task import Task
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain

LOOP = "trialogue"
"""The agent loop's name in verl."""
DOCTOR = (
    'test "${TRIALOGUE_DOCTOR:-1}" = 0 ||\n'
    '  python -m trialogue doctor --trust --exported "$(dirname "${BASH_SOURCE[0]}")" -- "$@"\n'
)
"""Look at what is missing before anything is spent; TRIALOGUE_DOCTOR=0 leaves it out."""
TRAINER = "trialogue.hosts.verl_trainer"
"""The module that registers our trainer with verl."""
NEVER = 1e6
"""A bound that is never reached, where verl knows no way to switch one off."""


def export_verl(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Write the folder and tell what is in it."""
    refuse_unknown(config)
    out = out.expanduser().resolve()
    domain = find_domain(config.domain, config.data)
    train, dev, marks = find_tasks(domain, config)
    config = to_portable(config)
    overrides = to_overrides(config, out)
    shared = to_share(config, int(overrides["actor_rollout_ref.rollout.agent.num_workers"]))
    out.mkdir(parents=True, exist_ok=True)
    about = {"kind": "verl", "domain": config.domain, "seed": config.seed, "versions": find_versions()}
    write_json(out / "run.json", about | ({"marks": marks} if marks else {}))
    write_rows(out / "train.parquet", domain, train, "train")
    write_rows(out / "dev.parquet", domain, dev, "dev")
    for name in ("README.md", "requirements.txt"):
        text = (Path(__file__).parent / "verl_folder" / name).read_text(encoding="utf-8")
        write(out / name, Template(text).substitute(out=out, steps=config.training.steps))
    write_json(out / "config.json", shared.model_dump(mode="json"))
    write(
        out / "agent-loop.yaml",
        f"- name: {LOOP}\n  _target_: trialogue.hosts.verl.ConversationLoop\n"
        f"  settings: {json.dumps(str(out / 'config.json'))}\n",
    )
    script = out / "launch.sh"
    write(script, to_script(overrides, out))
    script.chmod(0o755)
    distinct = len({task.id for task in train})
    told = {"out": str(out), "train": distinct, "dev": len(dev), "steps": config.training.steps}
    return told | ({"marks": marks} if marks else {})


def find_tasks(domain: Domain, config: TrainConfig) -> tuple[list[Task], list[Task], list[str]]:
    """The tasks of all steps as our own loop chooses them, those to watch, and what everybody who looks at
    the results has to know."""
    wanted, size = config.tasks, config.training.tasks_per_step
    levels, families = wanted.levels, wanted.families
    known = size if domain.endless else len(find_known(domain, config, levels))
    if known < size:
        raise ConfigError(
            f"split '{wanted.split}' of {domain.name} has {known} tasks, fewer than the {size} of one "
            "step; lower training.tasks_per_step"
        )
    train: list[Task] = []
    for step in range(config.training.steps):
        drawn = [task for draw in (0, 1) for task in choose_tasks(domain, config, step, draw, levels)]
        train += list({task.id: task for task in drawn}.values())[:size]  # two epochs may meet in a step
    marks = find_marks(train, config, domain.reference or domain.name, config.learner.model)
    if not config.training.eval_every:
        return train, train[:1], marks  # verl wants a file, and never looks at it
    split = config.training.eval_split or "dev"
    dev = domain.tasks(split, config.training.eval_tasks, config.seed, levels=levels, families=families)
    if not dev:
        raise ConfigError(f"{domain.name} has no {split} tasks to watch; set training.eval_every=0")
    return train, dev, marks


def to_portable(config: TrainConfig) -> TrainConfig:
    """The same settings with paths that hold in any folder, for workers start wherever they like."""

    def resolve(path: Path) -> Path | None:
        return path.resolve() if path.exists() else None

    model = config.learner.model
    if model in MODELS or model.endswith(".gguf"):
        from trialogue.engine.models import find_model_folder

        model = find_model_folder(model)
    elif Path(model).expanduser().is_dir():
        model = str(find_weights(Path(model).expanduser()).resolve())
    settled = TrainConfig.model_validate(map_places(config.model_dump(mode="json"), resolve))
    return settled.model_copy(update={"learner": settled.learner.model_copy(update={"model": model})})


UNKNOWN = (
    "training.curriculum",
    "training.patience",
    "advantage.",
    "checks.",
    "stragglers.",
    "engine.name",
)
"""Settings of our own loop that verl has nothing for, but for `checks.logprob_gap`."""


def refuse_unknown(config: TrainConfig) -> None:
    """What does not carry over is refused, not dropped."""
    changed = [key for key in difference_from_defaults(config) if key != "checks.logprob_gap"]
    if wrong := [key for key in changed if key.startswith(UNKNOWN)]:
        raise ConfigError(f"verl knows nothing like {', '.join(wrong)}; leave out what is not the default")
    if config.training.tasks_per_step % config.training.mini_batches:
        raise ConfigError("training.mini_batches must divide training.tasks_per_step for verl")
    renderer = find_renderer_name(config.learner)
    if renderer is not None and renderer.endswith("-exact"):
        refuse_rows(config.loss, renderer)


def to_share(config: TrainConfig, workers: int) -> TrainConfig:
    """The settings of one of verl's workers: each is a process with a user and an account of its own, so
    whatever is limited is divided among them."""

    def divide(speaker: Speaker) -> Speaker:
        if speaker.concurrency < workers:
            raise ConfigError(
                f"{speaker.concurrency} requests at once cannot be shared by verl's {workers} workers: raise "
                "the concurrency or lower engine.verl.actor_rollout_ref.rollout.agent.num_workers"
            )
        requests, tokens = speaker.requests_per_minute, speaker.tokens_per_minute
        own = {
            "concurrency": speaker.concurrency // workers,
            "requests_per_minute": None if requests is None else requests / workers,
            "tokens_per_minute": None if tokens is None else tokens / workers,
            "mix": tuple(divide(share) for share in speaker.mix),
        }
        return speaker.model_copy(update=own)

    usd, tokens = config.budget.usd, config.budget.tokens
    budget = {
        "usd": None if usd is None else usd / workers,
        "tokens": None if tokens is None else max(1, tokens // workers),
    }
    judge = divide(config.audit.judge)
    own = {
        "user": divide(config.user),
        "simulator": divide(config.simulator),
        "audit": config.audit.model_copy(update={"judge": judge}),
        "budget": config.budget.model_copy(update=budget),
    }
    return config.model_copy(update=own)


def write_rows(path: Path, domain: Domain, tasks: list[Task], purpose: str) -> None:
    """verl's columns. The task travels as JSON: columns of structs would fill what is absent with nulls."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("writing verl's data needs pyarrow: pip install pyarrow") from None
    rows = [
        {
            "data_source": domain.name,
            "agent_name": LOOP,
            "prompt": [
                {"role": "system", "content": domain.policy},
                {"role": "user", "content": f"Task {task.id}: the user opens the conversation."},
            ],
            "ability": task.family or domain.name,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {
                "index": number,
                "split": task.split,
                "purpose": purpose,
                "task": task.model_dump_json(),
            },
        }
        for number, task in enumerate(tasks)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def to_overrides(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Every setting of verl that ours decide, then `engine.verl` as it is."""
    given = flatten(config.engine.verl)
    training, learner, optimizer = config.training, config.learner, config.optimizer
    if given.get("trainer.use_v1", True) is not True:
        raise ConfigError("verl's older trainer records nothing right: leave out engine.verl.trainer.use_v1")
    renderer = find_renderer_name(learner)
    prompt = int(given.get("data.max_prompt_length", config.limits.context_tokens // 4))
    shared = int(given.get("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1))
    longest = math.ceil(config.limits.context_tokens / shared)  # a row is split over that many GPUs
    packs = can_pack(learner.model)
    if shared > 1 and not packs:
        raise ConfigError(
            f"sequence parallelism packs rows, and {learner.model} has layers that would mix them"
        )
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        **to_algorithm(config.loss),
        **to_schedule(optimizer),
        "data.train_files": str(out / "train.parquet"),
        "data.val_files": str(out / "dev.parquet"),
        "data.train_batch_size": training.tasks_per_step,
        "data.max_prompt_length": prompt,
        "data.max_response_length": config.limits.context_tokens - prompt,
        "data.seed": config.seed,
        "data.shuffle": False,  # the file has the order of our own loop
        "data.return_raw_chat": True,
        "actor_rollout_ref.model.path": learner.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": learner.gradient_checkpointing,
        "actor_rollout_ref.model.lora_rank": learner.lora_rank,
        "actor_rollout_ref.model.lora_alpha": learner.lora_alpha,
        "actor_rollout_ref.model.use_remove_padding": packs,
        # verl copies the model's config.json from checkpoint to checkpoint, and no other file of ours
        **({f"+actor_rollout_ref.model.override_config.{RENDERER}": renderer} if renderer else {}),
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        "actor_rollout_ref.ref.fsdp_config.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": training.tasks_per_step // training.mini_batches,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": max(learner.micro_batch_tokens, longest),
        f"{actor}.optim.betas": list(optimizer.betas),
        f"{actor}.optim.weight_decay": optimizer.weight_decay,
        f"{actor}.optim.clip_grad": optimizer.gradient_clip or NEVER,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": training.group_size,
        f"{rollout}.temperature": training.temperature,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.max_model_len": config.limits.context_tokens,
        f"{rollout}.agent.num_workers": 8,
        f"{rollout}.agent.default_agent_loop": LOOP,
        f"{rollout}.agent.agent_loop_config_path": str(out / "agent-loop.yaml"),
        "reward.num_workers": 0,  # our loop grades
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "trialogue",
        "+trainer.v1.trialogue.settings": str(out / "config.json"),
        "trainer.v1.sampler.sync_refill_failed_groups": True,  # lets single tasks be drawn
        "trainer.project_name": "trialogue",
        "trainer.experiment_name": config.run.name or out.name,
        "trainer.default_local_dir": str(out / "checkpoints"),
        "trainer.logger": ["console", *config.run.track],
        "trainer.total_training_steps": training.steps,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": bool(training.eval_every),
        "trainer.test_freq": training.eval_every or -1,
        "trainer.save_freq": training.checkpoint_every,
        "trainer.max_actor_ckpt_to_keep": training.keep_checkpoints,
        **given,
    }


def find_renderer_name(learner: LearnerSettings) -> str | None:
    """The renderer that is set, or that the model's folder names. None is the one its tokenizer calls for."""
    known = read_renderer_name(learner.model)
    return learner.renderer or (known[0] if known is not None else None)


MIXING = ("conv", "linear", "mamba", "recurrent", "ssm")
"""What layers are called that carry something from token to token other than by attention."""


def can_pack(model: str) -> bool:
    """Whether rows can be packed one behind the other. Attention is told where a row begins; convolutions and
    recurrent layers are not, and would carry one row into the next. A hub's model is taken to have none: the
    trainer compares log-probabilities in its first step."""
    file = Path(model) / "config.json"
    if not file.is_file():
        return True
    known = read_object(file, ConfigError)
    kinds = [known.get("model_type"), *(known.get("layer_types") or ()), *known]
    return not any(part in str(kind).lower().split("_") for kind in kinds for part in MIXING)


def to_schedule(optimizer: Optimizer) -> dict[str, Any]:
    """The learning rate by step. verl's constant schedule warms up from a first step without any rate; its
    cosine, with a floor of 1 and steps that count from 1, is ours."""
    if optimizer.schedule == "linear":
        raise ConfigError("verl knows no linear schedule: set optimizer.schedule=constant or cosine")
    if optimizer.schedule == "cosine" and optimizer.warmup:
        raise ConfigError(
            "verl's cosine begins its warm-up with a rate of 0: set optimizer.warmup=0 or "
            "optimizer.schedule=constant"
        )
    warms = optimizer.warmup > 0
    settings = {
        "lr": optimizer.learning_rate,
        "lr_scheduler_type": "cosine" if warms else optimizer.schedule,
        "lr_warmup_steps": optimizer.warmup + 1 if warms else 0,
        "lr_warmup_steps_ratio": 0.0,
        "min_lr_ratio": 1.0 if warms else 0.0,
        "zero_indexed_step": not warms,
    }
    return {f"actor_rollout_ref.actor.optim.{key}": value for key, value in settings.items()}


def to_algorithm(loss: LossSettings) -> dict[str, Any]:
    """Advantages and loss. What verl cannot do as named is refused rather than approximated."""
    low, high = loss.clips
    actor = "actor_rollout_ref.actor"
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": "rloo" if loss.name == "rloo" else "grpo",
        "algorithm.norm_adv_by_std_in_grpo": loss.name != "dr_grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.filter_groups.enable": False,  # our trainer draws again, and not without end
        f"{actor}.policy_loss.loss_mode": loss.name if loss.name in ("gspo", "cispo") else "vanilla",
        f"{actor}.clip_ratio": low,
        f"{actor}.clip_ratio_low": 1.0 if loss.name == "cispo" else low,  # cispo has no lower bound
        f"{actor}.clip_ratio_high": high,
        f"{actor}.clip_ratio_c": loss.dual_clip or NEVER,
        f"{actor}.use_kl_loss": loss.kl > 0,
        f"{actor}.kl_loss_coef": loss.kl,
        f"{actor}.kl_loss_type": "low_var_kl",
        f"{actor}.entropy_coeff": 0,
        f"{actor}.loss_agg_mode": {
            "token": "token-mean",
            "row": "seq-mean-token-mean",
            "constant": "seq-mean-token-sum-norm",
        }[loss.reduction],
    }
    if loss.reduction == "constant":
        if loss.constant != int(loss.constant):
            raise ConfigError(f"verl takes a whole number for loss.constant, not {loss.constant}")
        settings[f"{actor}.loss_scale_factor"] = int(loss.constant)
    if loss.importance_cap:
        settings |= {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": loss.importance_cap,
        }
    return settings


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def to_script(overrides: Mapping[str, Any], out: Path) -> str:
    lines = [shlex.quote(f"{key}={to_hydra(value)}") for key, value in overrides.items()]
    return (
        "#!/usr/bin/env bash\n"
        "# Run on the head of a Ray cluster whose nodes all see this folder; more key=value may follow.\n"
        "set -euo pipefail\n"
        + DOCTOR
        + f"cd {shlex.quote(str(out))}\n"  # verl leaves its settings where it is started
        f'modules="${{VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}}{TRAINER}"\n'
        'export VERL_USE_EXTERNAL_MODULES="$modules"\n'
        "exec python -m verl.trainer.main_ppo \\\n"
        f"  \"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='$modules'\" \\\n"
        + "".join(f"  {line} \\\n" for line in lines)
        + '  "$@"\n'
    )


def to_hydra(value: Any) -> str:
    """A value in the grammar of hydra's overrides."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(to_hydra(item) for item in cast("list[Any]", value)) + "]"
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ",".join(f"{key}:{to_hydra(item)}" for key, item in items) + "}"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_./-]*", text) and text.lower() not in ("null", "true", "false"):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
