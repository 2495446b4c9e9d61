"""Guided users: rules decide what is said, a model how, and no fault of the model is said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parts.endpoint import Answer, Endpoint, completion
from tests.parts.mangling_model import ManglingModel
from trialogue import Trajectory, find_domain
from trialogue.config import SPEAKERS, EvalConfig, Speaker
from trialogue.errors import ConfigError
from trialogue.score.audit import audit
from trialogue.score.evaluate import evaluate
from trialogue.score.metrics import measure_wordings
from trialogue.score.reward import grade
from trialogue.talk.agenda import Act
from trialogue.talk.find import find_model
from trialogue.talk.guided import GuidedSource
from trialogue.talk.model import ModelSource
from trialogue.talk.own import Shared
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.wording import Line, find_faults, list_things

SHOP = find_domain("shop")
THINGS = list_things(SHOP.database)
WISH = Line((Act("wish", "Please cancel order W1234.", "Please cancel order W1234."),), ("blue lamp",))
FACT = Line((Act("fact", "", "My e-mail is ada@mail.net.", "ada@mail.net"),), ("Ada Stone",))
YES = Line((Act("yes", "", "Yes, please."),))
UNKNOWN = Line((Act("unknown", "", "I don't remember."),))


def hold(user: ModelSource, count: int = 20, seed: int = 0) -> list[Trajectory]:
    async def collect() -> list[Trajectory]:
        settings = RolloutSettings(redraws=0, grade=grade, audit=lambda item: audit(SHOP, item))
        tasks, agent = SHOP.tasks("test", count, seed), find_model("oracle", "agent", SHOP)
        groups = rollout(SHOP, tasks, agent, user, settings)
        return [item async for group in groups for item in group.everything]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("line", "text", "fault"),
    [
        (WISH, "Hi! I'd really like to have my order W1234 cancelled, please.", None),
        (WISH, "Could you cancel order W1234 for me?", None),
        (WISH, "Could you cancel my order?", "value"),
        (WISH, "I want to cancel order W1235.", "invention"),
        (WISH, "Cancel order W1234 and send me a refund.", "other thing"),
        (WISH, "Cancel order W1234 with the blue lamp.", "other fact"),
        (WISH, "Something is wrong with order W1234.", "meaning"),
        (WISH, "I have cancelled your order W1234.", "role"),
        (WISH, "Please cancel order W1234. Bye! ###STOP###", "stop"),
        (WISH, "Here is the line in my own words: cancel order W1234.", "role"),
        (WISH, "You can cancel order W1234 with any of the payment methods.", "role"),
        (WISH, "Only the line: Please cancel order W1234.", "role"),
        (YES, "Yes, I'll take care of that. No worries.", "role"),
        (FACT, "Sure, it's ada@mail.net.", None),
        (FACT, "It's ada@mail.com.", "value"),
        (FACT, "It's ada@mail.net, and I am called ada stone.", "other fact"),
        (FACT, "It's ada@mail.net. What is yours?", "role"),
        (FACT, "", "form"),
        (YES, "Yes, that would be great.", None),
        (YES, "No, please.", "stand"),
        (YES, "Hm, maybe.", "stand"),
        (UNKNOWN, "Sorry, I really can't remember that.", None),
        (UNKNOWN, "It was a nice day.", "stand"),
    ],
)
def test_each_fault_is_found(line: Line, text: str, fault: str | None) -> None:
    found = find_faults(text, line, "What can I do for you?", THINGS)
    assert (found == []) if fault is None else fault in found, found


def test_the_agents_own_sentence_is_not_the_users() -> None:
    heard = "I have looked at that and it is not so easy to do."
    assert "role" in find_faults(f"Yes. {heard}", YES, heard, THINGS)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_whatever_the_model_says_the_oracle_succeeds(share: float) -> None:
    model = ManglingModel(share)
    held = hold(GuidedSource(Shared(model), SHOP))
    assert [item.is_success for item in held] == [True] * 20
    assert not any(item.findings for item in held)
    figures = measure_wordings(held)
    assert figures["sentences"] > 80
    assert figures["sentences"] + figures["again"] + figures["replaced"] == model.asked
    assert (figures["replaced"] > 0.1 * figures["sentences"]) == (share > 0)
    assert model.longest < 1600  # characters: no long prompt even when asked again


def test_words_vary_and_are_counted() -> None:
    held = hold(GuidedSource(Shared(ManglingModel(0.0)), SHOP), 30)
    plain = hold(find_model("agenda", "user", SHOP), 30)
    texts = [turn.message.content for item in held for turn in item.turns if turn.side == "user"]
    assert not set(texts) & {turn.message.content for item in plain for turn in item.turns[1:]}.difference(
        turn.message.content
        for item in held
        for turn in item.turns
        if turn.rejected and len(turn.rejected) == 2
    ), "a sentence of the rules was said although the model's words were right"
    assert measure_wordings(plain) == {}


def test_code_behind_it_is_code() -> None:
    assert SPEAKERS.find_code("guided:evil:make") == "the module evil"
    assert SPEAKERS.find_code("guided:openai:model") is None


def test_it_plays_only_the_user() -> None:
    with pytest.raises(ConfigError, match="guided plays the user"):
        find_model("guided:openai:any", "agent", SHOP)
    with pytest.raises(ConfigError, match="no model 'nothing'"):
        find_model("guided:nothing", "user", SHOP)


async def test_an_endpoint_words_it_is_paid_for_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    spoken = iter(range(10_000))

    def answer(request: dict[str, Any], asked: int) -> Answer:
        line = request["messages"][-1]["content"].rpartition("ine: ")[2]
        return completion("As an AI I cannot." if next(spoken) % 3 == 0 else f"Well, {line}", usage=(150, 12))

    settings = {
        "agent": {"model": "oracle"},
        "tasks": {"count": 6, "levels": [1]},
        "run": {"directory": str(tmp_path), "name": "live"},
    }
    with Endpoint(answer) as endpoint:
        user = {"model": "guided:openai:words", "base_url": endpoint.url, "price": [1.0, 2.0]}
        live = await evaluate(EvalConfig.model_validate({**settings, "user": user}))
    assert live["pass^1"] == 1.0
    assert live["user"] == "guided:openai:words"
    assert live["guided"]["again"] > 0
    assert (
        live["ledger"][0]["calls"]
        == live["guided"]["sentences"] + live["guided"]["again"] + live["guided"]["replaced"]
    )
    assert live["sides"]["user"]["prompt"] == 150 * live["ledger"][0]["calls"]
    assert live["cost"] == pytest.approx(live["ledger"][0]["usd"])
    settings["run"] = {"directory": str(tmp_path), "name": "again"}
    again = Speaker(model=f"replay:{tmp_path}/live/recordings/user.jsonl")
    await evaluate(EvalConfig.model_validate({**settings, "user": again}))
    lines = [
        sorted(json.dumps({**json.loads(line), "digest": ""}) for line in file.read_text().splitlines())
        for name in ("live", "again")
        for file in [tmp_path / name / "trajectories" / "eval.jsonl"]
    ]
    assert lines[0] == lines[1]
