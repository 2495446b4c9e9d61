"""A wall whose owner asks several times, a tool that sometimes refuses, an owner who hangs up, and a tiny
Qwen3 that has learned to speak about it: enough for every way a conversation can go."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trialogue.config import SftConfig, TrainConfig, load_config
from trialogue.engine.models import find_model_folder
from trialogue.engine.tiny import train_tokenizer
from trialogue.learn.collect import choose_tasks
from trialogue.learn.sft import sft
from trialogue.score.reward import grade
from trialogue.talk.find import find_model
from trialogue.talk.render.api import Renderer
from trialogue.talk.render.load import load_renderer, save_renderer
from trialogue.talk.render.tiny import COMPACT_TOKENS, BriefRenderer
from trialogue.talk.render.vocabulary import Vocabulary
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.trajectory import Trajectory
from trialogue.world.domains.shop import domain as shop

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # the parts that other processes import, too

DOMAIN = '''
import random

from trialogue import Call, Database, Domain, Expected, ModelError, Reply, Task, ToolError, tool
from trialogue.talk.scripted import call
from trialogue.world.domain import from_list

ASKS = {"plain": 2, "long": 40, "gone": 1}


class Wall(Database):
    colour: str = "white"

    @tool(writes=True)
    def paint(self, colour: str) -> str:
        """Paint the wall."""
        if colour == "red":
            raise ToolError("no red left")
        self.colour = colour
        return "wet"


class Painter:
    def __init__(self, seed, faults):
        self.draw, self.faults = random.Random(seed), faults

    async def reply(self, turns, tools):
        if turns[-1].message.role == "tool":
            return Reply("Done.")
        faulty = self.draw.random() < self.faults
        return call("paint", colour=self.draw.choice(["red", "green"]) if faulty else "blue")


class Owner:
    def __init__(self, family):
        self.family, self.asked = family, 0

    async def reply(self, turns, tools):
        self.asked += 1
        if self.asked <= ASKS[self.family]:
            return Reply("Paint it.", has_patience=True)  # says when it has enough
        if self.family == "gone":
            raise ModelError("the line is dead")
        return Reply("###STOP###")


def oracle(task, seed, faults=0.0):
    return Painter(seed, faults)


def user(task, seed):
    return Owner(task.family)


TASKS = [
    Task(
        id=f"{split}-{number}",
        domain="wall",
        instructions="You want a blue wall.",
        split=split,
        expected=Expected(calls=(Call(name="paint", arguments={"colour": "blue"}),)),
        meta={"family": ("plain", "plain", "long", "gone")[number % 4]},
    )
    for split in ("train", "dev")
    for number in range(8)
]
domain = Domain("wall", "# Painter", Wall.load({}), from_list("wall", TASKS), oracle=oracle, user=user)
'''
WORDS = [
    " Painter",
    " Paint it.",
    " paint colour: blue",
    " paint colour: red",
    " paint colour: green",
    " wet",
]


@pytest.fixture(scope="session")
def wall(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("wall") / "wall.py"
    file.write_text(DOMAIN, encoding="utf-8")
    return str(file)


def make_blank(folder: Path, renderer: Renderer, tokenizer: Any) -> Path:
    """A tiny Qwen3 that knows nothing yet."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    save_renderer(folder, tokenizer, renderer)
    return folder


@pytest.fixture(scope="session")
def painter(wall: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an agent that knows the trade and paints blue about every second time."""
    tokenizer = train_tokenizer([*WORDS, " Done.", " no red left"] * 8, COMPACT_TOKENS, size=320)
    folder = make_blank(tmp_path_factory.mktemp("blank"), BriefRenderer(Vocabulary(tokenizer)), tokenizer)
    settings = {
        "domain": wall,
        "tasks.families": ["plain"],
        "sft.faults": 0.5,
        "sft.count": 8,
        "sft.epochs": 100.0,
    }
    return teach(folder, settings, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def questions() -> TrainConfig:
    """Three steps on the shop's easiest questions."""
    tasks = {"levels": (1,), "families": ("question",), "split": "train"}
    return TrainConfig.model_validate(
        {"tasks": tasks, "training": {"steps": 3, "tasks_per_step": 2, "group_size": 6, "eval_every": 0}}
    )


@pytest.fixture(scope="session")
def clerk(questions: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an agent that half remembers how the built-in shop's first questions were answered."""
    folder = tmp_path_factory.mktemp("clerk")
    levels, seed = questions.tasks.levels, questions.seed
    tasks = [task for step in range(3) for task in choose_tasks(shop, questions, step, 0, levels)]
    user = find_model(questions.user, "user", shop, questions.limits, seed)

    async def hold() -> list[Trajectory]:
        groups = rollout(
            shop,
            tasks,
            find_model("oracle", "agent", shop),
            user,
            RolloutSettings(group_size=6, seed=seed, grade=grade),
        )
        return [item async for group in groups for item in group.trajectories]

    lessons = folder / "lessons.jsonl"
    lessons.write_text("".join(item.to_json() + "\n" for item in asyncio.run(hold())), encoding="utf-8")
    tokenizer, renderer = load_renderer(find_model_folder("tiny"))
    blank = make_blank(folder / "blank", renderer, tokenizer)
    settings = {"domain": "shop", "sft.examples": str(lessons), "sft.epochs": 20.0}
    return teach(blank, settings, folder)


def teach(folder: Path, settings: dict[str, Any], runs: Path) -> Path:
    settings = {
        "learner.model": str(folder),
        "learner.device": "cpu",
        "learner.cache_gigabytes": 0.1,
        "sft.only_successes": False,
        "sft.batch": 4,
        "sft.validation": 0.0,
        "sft.checkpoint_every": 1000,
        "optimizer.learning_rate": 4e-3,
        "optimizer.warmup": 0,
        "optimizer.schedule": "cosine",
        "run.directory": str(runs),
        **settings,
    }
    config = load_config(SftConfig, None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    return asyncio.run(sft(config)) / "model"


@pytest.fixture(scope="session")
def config(wall: str, painter: Path) -> TrainConfig:
    settings = {
        "domain": wall,
        "learner.model": str(painter),
        "learner.device": "cpu",
        "learner.cache_gigabytes": 0.1,
        "limits.reply_tokens": 12,
        "limits.context_tokens": 160,
        "rollout.redraws": 0,
        "training.steps": 2,
        "training.temperature": 1.0,
        "training.tasks_per_step": 4,
        "training.group_size": 4,
        "training.eval_every": 0,
        "optimizer.learning_rate": 1e-3,
        "optimizer.warmup": 0,
        "optimizer.schedule": "constant",
    }
    return load_config(TrainConfig, None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


@pytest.fixture(scope="module")
def exported(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The settings exported to verl, where it is installed."""
    from verl_export import export_tiny

    return export_tiny(config, tmp_path_factory.mktemp("export"))
