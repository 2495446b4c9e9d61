"""Supervised fine-tuning of a tiny model on the wall that is to be painted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trialogue.config import SftConfig, load_config
from trialogue.engine.api import Row
from trialogue.engine.tiny import train_tokenizer
from trialogue.errors import ConfigError, TrialogueError
from trialogue.learn.checkpoint import Best, load_learner
from trialogue.learn.sft import choose_batch, collect, measure_loss, sft, split_rows, to_example_rows
from trialogue.run import list_checkpoints, read_about, read_config, read_lines
from trialogue.talk.model import Model, ModelSource
from trialogue.talk.render.tiny import COMPACT_TOKENS
from trialogue.task import Call, Expected, Task
from trialogue.trajectory import Reply, Tokens, Trajectory, Turn
from trialogue.world.domain import from_list
from trialogue.world.find import find_domain
from trialogue.world.scaffold import write_domain
from trialogue.world.tools import Tool

Configure = Callable[..., SftConfig]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(run / "metrics.jsonl")]


def test_the_best_is_kept_and_patience_ends() -> None:
    best = Best(patience=2)
    assert best.kept is None
    for step, value in ((1, 0.5), (2, 0.4), (3, 0.5), (4, 0.3)):
        best.see(step, value)
    assert (best.kept, best.worse, best.is_over) == (3, 1, False)  # an equal one counts as better
    again = Best.restore(2, best.to_data())
    again.see(5, 0.2)
    assert (again.kept, again.is_over) == (3, True)
    careless = Best.restore(0, again.to_data())
    assert (careless.kept, careless.is_over) == (None, False)


async def test_imitation_ends_when_the_held_out_loss_rises_and_keeps_the_lowest(
    sft_config: Configure,
) -> None:
    run = await sft(
        sft_config(
            sft__epochs=60.0,
            sft__validation=0.34,
            sft__checkpoint_every=1,
            sft__patience=2,
            optimizer__learning_rate=0.3,
        )
    )
    losses = [line["validation_loss"] for line in read_metrics(run)]
    best = min(range(len(losses)), key=lambda place: (losses[place], -place))
    assert len(losses) == best + 3 < 60
    kept = run / "checkpoints" / f"step-{best + 1:06d}" / "model.safetensors"
    model = load_file(run / "model" / "model.safetensors")
    assert all(bool((value == model[name]).all()) for name, value in load_file(kept).items())
    assert read_about(run)["state"] == "finished"


async def test_the_loss_falls_and_the_run_is_documented(sft_config: Configure) -> None:
    seen: list[int] = []
    run = await sft(
        sft_config(sft__epochs=24.0, sft__validation=0.34, sft__checkpoint_every=6),
        watch=lambda step, metrics: seen.append(step),
    )
    metrics = read_metrics(run)
    # six examples, two kept apart, four in a batch
    assert seen == [line["step"] for line in metrics] == list(range(1, 25))
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 3
    validated = [line["step"] for line in metrics if "validation_loss" in line]
    assert validated == [6, 12, 18, 24]
    assert metrics[-1]["validation_loss"] < metrics[5]["validation_loss"]
    assert metrics[0]["learning_rate"] == 1e-2
    assert metrics[-1]["learning_rate"] < 1e-3
    assert [line["step"] for _, line in read_lines(run / "timings.jsonl")] == seen
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert (about["kind"], about["state"]) == ("sft", "finished")
    assert [path.name for path in list_checkpoints(run)] == ["step-000024"]
    assert not (run / "model" / "optimizer.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(run / "model")


async def test_the_agents_words_are_learned_and_no_others(sft_config: Configure) -> None:
    config = sft_config()
    domain = find_domain(config.domain)
    learner = load_learner(config.learner, 0)
    renderer: Any = learner.renderer
    [example, *_] = await collect(domain, config)
    [row] = to_example_rows(example, domain, renderer, "agent")
    decode = renderer.vocabulary.decode
    assert decode(row.tokens) == (
        "<|system|> Painter<|user|> Paint it.<|assistant|><|call|> paint colour: blue<|end|>"
        "<|tool|> wet<|assistant|> Done.<|end|>"
    )
    trained = [token for token, mask in zip(row.tokens, row.mask, strict=True) if mask]
    assert decode(trained) == "<|call|> paint colour: blue<|end|> Done.<|end|>"
    [row] = to_example_rows(example, domain, renderer, "user")
    trained = [token for token, mask in zip(row.tokens, row.mask, strict=True) if mask]
    assert "###STOP###" in decode(trained)
    assert "paint colour" not in decode(row.tokens)


async def test_a_faulty_teacher_is_filtered_or_not(sft_config: Configure) -> None:
    domain = find_domain(sft_config().domain)
    everything = await collect(domain, sft_config(sft__faults=0.5, sft__only_successes=False))
    good = await collect(domain, sft_config(sft__faults=0.5))
    assert len(everything) == 6
    assert 0 < len(good) < 6
    assert all(item.value == 1 for item in good)
    with pytest.raises(ConfigError, match="none of 6 conversations"):
        await collect(domain, sft_config(sft__faults=1.0))


async def test_a_teachers_conversations_come_in_the_order_of_their_tasks(sft_config: Configure) -> None:
    config = sft_config()
    domain = find_domain(config.domain)
    assert domain.user is not None
    asked: list[str] = []

    def slower_the_sooner(task: Task, seed: int) -> Model:
        asked.append(task.id)
        model, wait = cast("ModelSource", domain.user)(task, seed), 0.05 / len(asked)

        class Slow:
            async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
                await asyncio.sleep(wait)
                return await model.reply(turns, tools)

        return Slow()

    found = await collect(domain, config, None, slower_the_sooner)
    assert [item.id for item in found] == [f"{task}/0" for task in asked]


async def test_recorded_conversations_are_learned_from(sft_config: Configure, tmp_path: Path) -> None:
    domain = find_domain(sft_config().domain)
    file = tmp_path / "talks.jsonl"
    held = await collect(domain, sft_config())
    file.write_text("".join(item.to_json() + "\n" for item in held), encoding="utf-8")
    run = await sft(sft_config(sft__examples=str(file), sft__epochs=1.0))
    assert len(read_metrics(run)) == 2


async def test_another_tokenizers_ids_are_not_learned(
    sft_config: Configure, tmp_path: Path, blank: Path
) -> None:
    config = sft_config()
    domain = find_domain(config.domain)
    renderer: Any = load_learner(config.learner, 0).renderer
    [example, *_] = await collect(domain, config)
    ids = Tokens(start=True, prompt=(7, 7), reply=(9, 9), logprobs=(-1.0, -1.0))
    recorded = example.model_copy(
        update={
            "turns": tuple(
                turn.model_copy(update={"tokens": ids}) if turn.message.role == "assistant" else turn
                for turn in example.turns
            )
        }
    )
    folder = tmp_path / "sampled"
    folder.mkdir()
    config = sft_config(sft__examples=str(folder), sft__validation=0.0)

    def learned() -> list[list[int]]:
        return [list(row.tokens) for row in split_rows([recorded], domain, renderer, config)[0]]

    [rendered] = [list(row.tokens) for row in to_example_rows(example, domain, renderer, "agent")]
    assert learned() == [rendered]  # nobody knows whose ids they are
    train_tokenizer([" of another", " mind"] * 8, COMPACT_TOKENS, size=300).save_pretrained(folder)
    assert learned() == [rendered]
    shutil.copy(blank / "tokenizer.json", folder)
    assert learned() == [[7, 7, 9, 9], [7, 7, 9, 9]]
    config = sft_config(sft__examples=str(folder), sft__validation=0.0, sft__side="user")
    assert 7 not in learned()[0][:2]  # the tokenizer on record is the agent's


async def test_what_the_loss_is_measured_on_has_no_sibling_it_learns_from(sft_config: Configure) -> None:
    config = sft_config(sft__validation=0.34)
    domain = find_domain(config.domain)
    renderer: Any = load_learner(config.learner, 0).renderer
    found = await collect(domain, config)
    siblings = [item.model_copy(update={"id": f"{item.id}{trial}"}) for item in found for trial in "abc"]
    rows, held_out = split_rows(siblings, domain, renderer, config)
    assert (len(rows), len(held_out)) == (12, 6)
    assert not {row.id[:-1] for row in rows} & {row.id[:-1] for row in held_out}


async def test_nothing_left_to_learn_from_is_said(sft_config: Configure, tmp_path: Path) -> None:
    config = sft_config(sft__count=1, sft__validation=0.9)
    with pytest.raises(ConfigError, match=r"lower sft\.validation"):
        await sft(config)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x89PNG\x00\xff", r"line 1: not UTF-8 text: byte 0x89 at position 0"),
        (b"some words", r"line 1: not JSON"),
        (b"", r"none of 0 conversations in '.*' can be learned from"),
    ],
)
async def test_a_file_of_something_else_is_refused_before_a_run_is_begun(
    sft_config: Configure, tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "examples.jsonl").write_bytes(content)
    config = sft_config(sft__examples=str(tmp_path / "examples.jsonl"), run__name="none")
    with pytest.raises(TrialogueError, match=expected):
        await sft(config)
    assert not (Path(config.run.directory) / "none").exists()


def test_batches_go_through_every_row_in_each_epoch() -> None:
    rows = [Row([number], [0], [0.0], [0.0]) for number in range(5)]
    epochs = [row.tokens[0] for step in range(5) for row in choose_batch(rows, 3, step, seed=1)]
    assert [sorted(epochs[start : start + 5]) for start in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert epochs[:5] != epochs[5:10]
    again = [row.tokens[0] for step in range(5) for row in choose_batch(rows, 3, step, seed=1)]
    assert epochs == again


async def test_validation_loss_is_the_mean_over_learned_tokens() -> None:
    class Fixed:
        async def forward(self, rows: list[Row]) -> list[list[float]]:
            return [[0.0, -1.0, -2.0], [0.0, -6.0]]

    rows = [Row([1, 2, 3], [0, 0, 1], [0.0] * 3, [0.0] * 3), Row([1, 2], [0, 1], [0.0] * 2, [0.0] * 2)]
    assert await measure_loss(Fixed(), rows) == 4.0


async def test_stopping_and_resuming_changes_nothing(sft_config: Configure) -> None:
    def interrupt(step: int, metrics: dict[str, Any]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    settings: dict[str, Any] = {"sft__epochs": 4.0, "sft__validation": 0.2}
    whole = await sft(sft_config(**settings, run__name="whole"))
    parts = await sft(sft_config(**settings, run__name="parts"), watch=interrupt)
    assert json.loads((parts / "run.json").read_text(encoding="utf-8"))["state"] == "stopped"
    assert [path.name for path in list_checkpoints(parts)] == ["step-000002"]
    await sft(read_config(SftConfig, parts), resume=parts)
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    first, second = (load_file(run / "model" / "model.safetensors") for run in (whole, parts))
    assert all(first[name].equal(second[name]) for name in first)


async def test_a_list_of_tasks_gives_as_many_conversations_as_are_wanted_each_with_its_own_values(
    tmp_path: Path,
) -> None:
    write_domain(tmp_path / "bakery")
    domain = find_domain(str(tmp_path / "bakery"))
    config = load_config(SftConfig, None, ["sft.count=20", "sft.examples=teacher"])
    examples = await collect(domain, config)
    assert len(examples) == 20
    turns = [item.turns for item in examples if isinstance(item, Trajectory)]
    phones = {
        call.arguments["phone"]
        for each in turns
        for turn in each
        for call in turn.message.tool_calls
        if call.name == "find_orders" and isinstance(call.arguments, dict)
    }
    assert len(phones) > 12
    fixed = await collect(domain, load_config(SftConfig, None, ["sft.count=20", "tasks.vary=false"]))
    assert len(fixed) == 3


async def test_what_the_teacher_cannot_teach_is_told(tmp_path: Path) -> None:
    write_domain(tmp_path / "bakery")
    domain = find_domain(str(tmp_path / "bakery"))
    call = Call(name="cancel_order", arguments={"order_id": "A101"})
    agenda = {"wishes": [{"says": ["Cancel it."], "done": "cancel"}]}
    task = Task(
        id="guess",
        domain="bakery",
        instructions="Cancel.",
        split="train",
        meta={"agenda": agenda},
        expected=Expected(calls=(call,)),
    )
    faulty = replace(domain, tasks=from_list("bakery", [task]))
    with pytest.raises(ConfigError, match=r"the teacher solved none of .* nobody could know order_id"):
        await collect(faulty, load_config(SftConfig, None, ["sft.count=2"]))
