"""Who plays the user and what it is told: prompts, personas, mixes of models."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trialogue import ConfigError, Reply, RolloutSettings, Task, Tool, Turn, find_domain, rollout
from trialogue.config import Limits, Speaker
from trialogue.score.reward import grade
from trialogue.talk.agenda import Agenda, make_agenda_user
from trialogue.talk.find import find_model
from trialogue.talk.personas import read_personas
from trialogue.talk.replay import Recorder, Replay
from trialogue.talk.users import GUIDELINES, set_user_prompt, to_card, user_prompt
from trialogue.world.domain import STOP

SHOP = find_domain("shop")
TASKS = SHOP.tasks("test", 20, 3)


class Hears:
    """The rule-based user, who keeps what it was told."""

    prompts: list[str]

    def __init__(self) -> None:
        self.prompts = []

    def __call__(self, task: Task, seed: int) -> Any:
        inner, prompts = make_agenda_user(task, seed), self.prompts

        class Listening:
            async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
                prompts.append(turns[0].message.content)
                return await inner.reply(turns, tools)

        return Listening()


def test_the_prompt_can_be_chosen(tmp_path: Path) -> None:
    task = TASKS[0]
    usual = user_prompt(SHOP, task)
    assert usual.startswith(GUIDELINES.format(stop=STOP)[:100])
    assert user_prompt(set_user_prompt(SHOP, Speaker(prompt="house")), task) == usual
    assert user_prompt(set_user_prompt(SHOP, Speaker(prompt="scenario")), task) == f"{task.instructions}\n"
    file = tmp_path / "prompt.txt"
    file.write_text("Play this: {scenario}\nEnd with {stop}, not with {braces}.")
    told = user_prompt(set_user_prompt(SHOP, Speaker(prompt=str(file))), task)
    assert told == f"Play this: {task.instructions}\nEnd with {STOP}, not with {{braces}}."
    with pytest.raises(ConfigError, match="neither domain, house, scenario or card, nor a file"):
        set_user_prompt(SHOP, Speaker(prompt="official"))
    file.write_text("Play.")
    with pytest.raises(ConfigError, match=r"has no \{scenario\} to fill in"):
        set_user_prompt(SHOP, Speaker(prompt=str(file)))


def test_a_card_holds_all_the_user_knows_in_one_line() -> None:
    for task in TASKS:
        card = to_card(task)
        assert "\n" not in card
        agenda = Agenda.model_validate(task.meta["agenda"])
        for wish in agenda.wishes:
            for fact in [*agenda.facts.values(), *wish.facts.values()]:
                assert (fact.value or "forgotten") in card
            assert wish.says[0] in card
    plain = Task(id="t", domain="d", instructions="You want\n  a lamp.")
    assert to_card(plain) == "You want a lamp."


def test_personas_are_drawn_by_seed_and_strength(tmp_path: Path) -> None:
    light, heavy = read_personas("light"), read_personas("heavy")
    drawn = {name: [kind.draw(seed) for seed in range(300)] for name, kind in (("l", light), ("h", heavy))}
    again = [light.draw(seed) for seed in range(300)]
    assert drawn["l"] == again
    traits = {
        name: sum(len(item.name.split()) for item in items if item) / 300 for name, items in drawn.items()
    }
    assert 1.5 < traits["l"] < 2.5
    assert 3.5 < traits["h"] < 5.0
    assert len({item.name for item in drawn["h"] if item}) > 100
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"name": "pirate", "text": "You are a pirate."}\n{"name": "poet", "text": "You rhyme."}\n'
    )
    names = Counter(item.name for seed in range(100) if (item := read_personas("light", str(own)).draw(seed)))
    assert set(names) == {"persona=pirate", "persona=poet"}
    assert min(names.values()) > 25
    own.write_text("{}")
    with pytest.raises(ConfigError, match="cannot read the personas"):
        read_personas("light", str(own))


async def test_a_persona_is_told_recorded_and_the_same_when_held_again() -> None:
    domain = set_user_prompt(SHOP, Speaker(dynamics="heavy"))
    runs: list[list[Any]] = []
    for _ in range(2):
        user = Hears()
        groups = rollout(domain, TASKS[:4], SHOP.oracle, user, RolloutSettings(grade=grade, group_size=2))
        runs.append([item async for group in groups for item in group.trajectories])
        prompts = set(user.prompts)
    assert [item.to_json() for item in runs[0]] == [item.to_json() for item in runs[1]]
    assert len({item.meta["persona"] for item in runs[0]}) > 4
    hashes = {hashlib.sha256(text.encode()).hexdigest()[:12] for text in prompts}
    assert {item.meta["prompt"] for item in runs[0]} == hashes
    assert all("# Your manner" in text for text in prompts)
    plain = rollout(SHOP, TASKS[:4], SHOP.oracle, make_agenda_user, RolloutSettings(grade=grade))
    assert ["persona" in item.meta for group in [g async for g in plain] for item in group.trajectories] == [
        False
    ] * 4


async def test_several_models_share_a_run_by_weight_and_are_replayed(tmp_path: Path) -> None:
    script = tmp_path / "gone.jsonl"
    script.write_text(json.dumps(f"Never mind. {STOP}") + "\n")
    mix = [{"model": "agenda", "weight": 3}, {"model": f"scripted:{script}"}]
    speaker = Speaker.model_validate({"mix": mix})
    source = Recorder(find_model(speaker, "user", SHOP, Limits()), tmp_path / "user.jsonl")

    async def hold(user: Any) -> list[Any]:
        groups = rollout(SHOP, TASKS, SHOP.oracle, user, RolloutSettings(grade=grade, group_size=4))
        return sorted(
            [item async for group in groups for item in group.trajectories], key=lambda item: item.id
        )

    held = await hold(source)
    spoke = {item.id: {turn.model for turn in item.turns if turn.side == "user"} for item in held}
    assert all(len(models) == 1 for models in spoke.values())
    counts = Counter(next(iter(models)) for models in spoke.values())
    assert 48 <= counts["agenda"] <= 72
    assert any(len({next(iter(spoke[f"{task.id}/{n}"])) for n in range(4)}) == 2 for task in TASKS)
    again = await hold(Replay(tmp_path / "user.jsonl"))
    assert [item.to_json() for item in again] == [item.to_json() for item in held]
    by_task = await hold(find_model(speaker.model_copy(update={"mix_by": "task"}), "user", SHOP, Limits()))
    models = {(item.task.id, item.turns[0].model) for item in by_task}
    assert len(models) == len(TASKS)
    assert len({model for _, model in models}) == 2
