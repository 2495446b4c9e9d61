"""A wall to be painted: the smallest domain with a user, a tool and a mistake to unlearn, and a tiny model
that speaks about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trialogue.config import SftConfig, TrainConfig, load_config
from trialogue.engine.tiny import make_model, train_tokenizer
from trialogue.talk.render.load import save_renderer
from trialogue.talk.render.tiny import COMPACT_TOKENS, BriefRenderer
from trialogue.talk.render.vocabulary import Vocabulary

torch.set_num_threads(1)  # models this small only lose by waiting for a second core

DOMAIN = '''
"""A user wants a wall painted and likes only blue, which the agent has to find out by trying."""

import random

from trialogue import Call, Database, Domain, Expected, ModelError, Reply, Task, tool
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.world.domain import from_list

FAILING = 0


class Wall(Database):
    colour: str = "white"

    @tool(writes=True)
    def paint(self, colour: str) -> str:
        """Paint the wall."""
        self.colour = colour
        return "wet"


class Painter:
    def __init__(self, seed, faults):
        draw = random.Random(seed)
        self.colour = draw.choice(["red", "green"]) if draw.random() < faults else "blue"

    async def reply(self, turns, tools):
        if turns[-1].message.role == "tool":
            return Reply("Done.")
        return call("paint", colour=self.colour)


class Gone:
    async def reply(self, turns, tools):
        raise ModelError("the line is dead")


def oracle(task, seed, faults=0.0):
    return Painter(seed, faults)


def user(task, seed):
    return Gone() if FAILING and seed % FAILING == 0 else ScriptedModel(["Paint it.", "###STOP###"])


TASKS = [
    Task(
        id=f"{split}-{number}",
        domain="wall",
        instructions="You want a blue wall.",
        split=split,
        expected=Expected(calls=(Call(name="paint", arguments={"colour": "blue"}),)),
        meta={"family": ("inside", "outside")[number % 2], "level": 1 + number % 2},
    )
    for split in ("train", "dev")
    for number in range(6)
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
    """Path of the domain."""
    file = tmp_path_factory.mktemp("wall") / "wall.py"
    file.write_text(DOMAIN, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="session")
def troubled_wall(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same domain with a user who is gone every third time."""
    file = tmp_path_factory.mktemp("troubled") / "wall.py"
    file.write_text(DOMAIN.replace("FAILING = 0", "FAILING = 3"), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="session")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, its tokenizer and its renderer."""
    folder = tmp_path_factory.mktemp("blank")
    tokenizer = train_tokenizer([*WORDS, " Done."] * 8, COMPACT_TOKENS, size=320)
    model = make_model(
        len(tokenizer), width=32, layers=("conv", "full_attention"), heads=2, feed_forward=64, positions=256
    )
    model.save_pretrained(folder)
    save_renderer(folder, tokenizer, BriefRenderer(Vocabulary(tokenizer)))
    return folder


Settings = Callable[..., Any]


@pytest.fixture
def sft_config(wall: str, blank: Path, tmp_path: Path) -> Callable[..., SftConfig]:
    """A configuration small enough for seconds; keywords override it, `__` standing for a dot."""

    def make(**overrides: object) -> SftConfig:
        usual = {
            "domain": wall,
            "learner__model": str(blank),
            "learner__device": "cpu",
            "learner__cache_gigabytes": 0.1,
            "sft__count": 6,
            "sft__batch": 4,
            "sft__epochs": 3.0,
            "sft__checkpoint_every": 100,
            "optimizer__learning_rate": 1e-2,
            "optimizer__warmup": 0,
            "optimizer__schedule": "cosine",
            "run__directory": str(tmp_path / "runs"),
            "run__name": "sft",
        }
        return load_config(SftConfig, None, to_settings(usual | overrides))

    return make


@pytest.fixture
def train_config(wall: str, blank: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """The same for reinforcement learning."""

    def make(**overrides: object) -> TrainConfig:
        usual = {
            "domain": wall,
            "learner__model": str(blank),
            "learner__device": "cpu",
            "learner__cache_gigabytes": 0.1,
            "limits__reply_tokens": 12,
            "limits__context_tokens": 128,
            "rollout__concurrency": 32,
            "training__steps": 3,
            "training__temperature": 1.0,
            "training__tasks_per_step": 3,
            "training__group_size": 4,
            "training__eval_every": 0,
            "training__eval_tasks": 2,
            "training__checkpoint_every": 100,
            "optimizer__learning_rate": 5e-3,
            "optimizer__warmup": 0,
            "optimizer__schedule": "constant",
            "loss__name": "grpo",
            "loss__kl": 0.0,
            "run__directory": str(tmp_path / "runs"),
            "run__name": "train",
        }
        return load_config(TrainConfig, None, to_settings(usual | overrides))

    return make


def to_settings(overrides: dict[str, object]) -> list[str]:
    return [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items()]


@pytest.fixture(scope="session")
def trained(wall: str, blank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of imitation: this agent knows the trade, and paints blue about one time in three."""
    import asyncio

    from trialogue.learn.sft import sft

    settings = {
        "domain": wall,
        "learner__model": str(blank),
        "learner__device": "cpu",
        "learner__cache_gigabytes": 0.1,
        "sft__examples": "oracle",
        "sft__faults": 0.65,
        "sft__only_successes": False,
        "sft__batch": 6,
        "sft__epochs": 60.0,
        "sft__validation": 0.0,
        "sft__checkpoint_every": 1000,
        "optimizer__learning_rate": 1e-2,
        "optimizer__warmup": 0,
        "optimizer__schedule": "cosine",
        "run__directory": str(tmp_path_factory.mktemp("trained")),
        "run__name": "sft",
    }
    return asyncio.run(sft(load_config(SftConfig, None, to_settings(settings))))
