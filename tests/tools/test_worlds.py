"""Random service desks, and the tokenizer and prompt of a base that meets them."""

from __future__ import annotations

import asyncio

import pytest

from tools.tiny_base.desk import World
from tools.tiny_base.generalist import HELD_OUT, hold, make_tokenizer
from tools.tiny_base.worlds import make_world
from trialogue.score.check import check
from trialogue.talk.render.tiny import BriefToolsRenderer
from trialogue.talk.render.vocabulary import Vocabulary


@pytest.mark.parametrize("seed", [0, 4, 12, HELD_OUT + 1])
def test_the_teacher_solves_every_task_of_a_random_desk(seed: int):
    held = asyncio.run(hold(make_world(seed), 14, seed))
    assert len(held) == 14
    assert len({item.task.family for item in held}) >= 5


def test_a_random_desk_is_a_sound_domain():
    assert check(make_world(3), count=12).ok


def test_the_same_seed_gives_the_same_desk_and_others_differ():
    sources = [World(seed).to_source() for seed in range(40)]
    assert sources == [World(seed).to_source() for seed in range(40)]
    assert len(set(sources)) == 40
    first, again = (make_world(7).tasks("train", 9, seed=2) for _ in range(2))
    assert first == again


def test_common_words_are_whole_also_inside_identifiers_and_names_are_pairs():
    tokenizer = make_tokenizer()

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([number]) for number in tokenizer.encode(text)]

    assert pieces(" | find_member email") == [" |", " find", "_member", " email"]
    assert pieces(" Zina Keta") == [" Zi", "na", " Ke", "ta"]
    assert len(tokenizer.encode(" \u0142\u00f3\u017a")) == 3
    for text in (" W0099 83.95 a_b=c*", " \u00dcn\u00efcode \u6f22\u5b57"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_prompt_names_the_tools():
    domain = make_world(3)
    environment = domain.open(domain.tasks("train", 1)[0])
    renderer = BriefToolsRenderer(Vocabulary(make_tokenizer()))
    text = renderer.vocabulary.to_text(renderer.open(domain.policy, list(environment.tools.values())))
    for tool in environment.tools.values():
        assert f" | {' '.join([tool.name, *tool.parameters['properties']])}" in text
