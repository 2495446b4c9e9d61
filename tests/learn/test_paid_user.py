"""Learning with a user that is paid for: recorded, counted by step, stopped by a budget, told again free."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_users import run_users

from trialogue.config import Budget, C, SftConfig, TrainConfig
from trialogue.errors import BudgetError
from trialogue.learn.sft import sft
from trialogue.learn.train import train
from trialogue.run import list_checkpoints, read_about, read_config, read_lines, read_trajectories


def read_conversations(run: Path) -> dict[str, Any]:
    """What was said, by conversation. Log-probabilities may differ in the last bits: which conversations are
    sampled together depends on when an endpoint answers."""
    return {
        item.id: (
            item.end,
            item.reward,
            [(turn.message, turn.tokens and turn.tokens.reply) for turn in item.turns],
        )
        for item in read_trajectories(run)
    }


def with_budget(kind: type[C], run: Path, **budget: Any) -> C:
    """The run's own settings, which allow its endpoint, with another budget."""
    return read_config(kind, run).model_copy(update={"budget": Budget(**budget)})


SHORT: dict[str, Any] = {
    "training__steps": 2,
    "training__tasks_per_step": 2,
    "training__group_size": 2,
    "user__model": "openai:user",
}


@pytest.mark.timeout(600)
async def test_training_with_an_endpoint_is_counted_stopped_and_replayed(
    train_config: Callable[..., TrainConfig], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-9090")
    more: dict[str, Any] = {
        **SHORT,
        "learner__model": str(trained),
        "training__eval_every": 0,
        "user__price": (1.0, 1.0),
    }
    with run_users(lines=["Paint my wall, please.", "Thank you. ###STOP###"]) as server:
        more["user__base_url"] = server.url
        whole = await train(train_config(**more, run__name="whole"))
        lines = [line for _, line in read_lines(whole / "ledger.jsonl")]
        assert [(line["step"], line["role"], line["model"]) for line in lines] == [
            (1, "user", "user"),
            (2, "user", "user"),
        ]
        calls = server.look()["seen"]["none"]
        assert sum(line["calls"] for line in lines) == calls
        spent = sum(line["usd"] for line in lines)

        first = lines[0]["prompt"] + lines[0]["completion"]
        enough = first + server.look()["largest"] + 72  # for the first step and a call or two of the second
        short = train_config(**more, run__name="short", budget__tokens=enough)
        stopped = await train(short)
        assert read_about(stopped)["state"] == "stopped"
        assert [checkpoint.name for checkpoint in list_checkpoints(stopped)] == ["step-000001"]
        again = await train(with_budget(TrainConfig, stopped, usd=1.0), resume=stopped)
        assert read_about(again)["state"] == "finished"
        assert read_conversations(again) == read_conversations(whole)
        paid = sum(line["usd"] for _, line in read_lines(again / "ledger.jsonl"))
        assert paid == pytest.approx(spent)  # what was on record when the budget ended was not paid for twice

        asked = server.look()["seen"]["none"]
        more |= {"user__model": f"replay:{whole / 'recordings' / 'user.jsonl'}"}
        replayed = await train(train_config(**more, run__name="replayed"))
        assert server.look()["seen"]["none"] == asked
    assert read_conversations(replayed) == read_conversations(whole)
    assert not (replayed / "ledger.jsonl").exists()
    assert "sk-canary-9090" not in json.dumps([str(read_about(run)) for run in (whole, again, replayed)])


@pytest.mark.parametrize("policy", ["cut", "async"])
async def test_a_step_the_budget_ends_is_held_once_when_it_goes_on(
    train_config: Callable[..., TrainConfig], trained: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-9090")
    more: dict[str, Any] = {
        **SHORT,
        "learner__model": str(trained),
        "stragglers__policy": policy,
        "stragglers__quorum": 1.0,
    }
    with run_users(lines=["Paint my wall, please.", "Thank you. ###STOP###"]) as server:
        more["user__base_url"] = server.url
        whole = await train(train_config(**more, run__name="whole"))
        first = next(line for _, line in read_lines(whole / "ledger.jsonl"))
        enough = first["prompt"] + first["completion"] + server.look()["largest"] + 72
        stopped = await train(train_config(**more, run__name="short", budget__tokens=enough))
        assert read_about(stopped)["state"] == "stopped"
        assert [checkpoint.name for checkpoint in list_checkpoints(stopped)] == ["step-000001"]
        again = await train(with_budget(TrainConfig, stopped, tokens=1_000_000), resume=stopped)
    ids = [item.id for item in read_trajectories(again)]
    assert len(ids) == len(set(ids)) == 8
    assert read_conversations(again) == read_conversations(whole)


async def test_a_paid_user_of_fine_tuning_is_counted_and_paid_once(
    sft_config: Callable[..., SftConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-9090")
    more: dict[str, Any] = {
        "limits__reply_tokens": 12,
        "user__model": "openai:user",
        "sft__epochs": 1.0,
        "sft__eval_tasks": 1,
    }
    with run_users(lines=["Paint my wall, please.", "Thank you. ###STOP###"]) as server:
        more["user__base_url"] = server.url
        whole = await sft(sft_config(**more, run__name="whole"))
        lines = [line for _, line in read_lines(whole / "ledger.jsonl")]
        assert {line["role"] for line in lines} == {"user"}
        assert sum(line["calls"] for line in lines) == server.look()["seen"]["none"]
        enough = server.look()["largest"] + 12 + 3 * 60  # for a few of the teacher's twelve calls
        with pytest.raises(BudgetError):
            await sft(sft_config(**more, run__name="short", budget__tokens=enough))
        short = whole.with_name("short")
        assert read_about(short)["state"] == "stopped"
        assert len(list(read_lines(short / "ledger.jsonl"))) == 1
        await sft(with_budget(SftConfig, short, tokens=1_000_000), resume=short)
        assert (short / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        paid = [line["calls"] for _, line in read_lines(short / "ledger.jsonl")]
        assert sum(paid) == sum(line["calls"] for line in lines)
