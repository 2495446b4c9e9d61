# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Make the tiny base model of the package: a tokenizer, random weights, and lessons in copying.

    python -m tools.tiny_base.pretrain OUT [--minutes 36] [--start BASE]

The tokenizer is trained on conversations of the shop's train split, so that it has the words. The weights are
trained on lessons only, so the base knows the format and how to copy, and nothing about tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from time import monotonic

from tools.tiny_base.school import PAIRS, WORDS, School
from trialogue.config import Limits, Speaker
from trialogue.engine.api import EngineSettings, OptimParams
from trialogue.learn.losses import cross_entropy
from trialogue.output import echo
from trialogue.talk.find import find_model
from trialogue.talk.render.load import save_renderer
from trialogue.talk.render.tiny import COMPACT_TOKENS, BriefRenderer, to_brief_call, to_brief_result
from trialogue.talk.render.vocabulary import Vocabulary
from trialogue.talk.rollout import rollout
from trialogue.trajectory import Trajectory
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain

MASTERED = 0.5
"""The lessons become harder while the loss is below this."""


async def make_base(
    out: Path, *, start: Path | None = None, minutes: float = 36.0, seed: int = 0, batch: int = 64
) -> None:
    """Make a base and write it to a folder. With `start`, train an existing base further."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trialogue.engine.tiny import make_model, train_tokenizer
    from trialogue.engine.torch_engine import TorchEngine

    domain = find_domain("shop")
    documents = [to_document(item) for item in await converse_often(domain, 3000, seed)]
    words = "".join(f" {word} {word.capitalize()}" for word in [*WORDS, *PAIRS]) + "-".join(("", *PAIRS))
    if start is None:
        tokenizer = train_tokenizer([*documents, *[words] * (len(documents) // 10)], COMPACT_TOKENS)
        model = make_model(len(tokenizer), seed=seed)
    else:
        tokenizer = AutoTokenizer.from_pretrained(start)
        model = AutoModelForCausalLM.from_pretrained(start)
    renderer = BriefRenderer(Vocabulary(tokenizer))
    engine = TorchEngine(model, EngineSettings(seed=seed))
    school = School(renderer, [*list_keys(documents), *WORDS[::6]], seed)
    started, step = monotonic(), 0
    difficulty, average, highest = (0.0, 9.0, 2e-3) if start is None else (1.0, 0.1, 1e-3)
    while (passed := (monotonic() - started) / (60 * minutes)) < 1:
        rows = [school.lesson(difficulty * school.random.random()) for _ in range(batch)]
        outputs = await engine.forward_backward(rows, cross_entropy)
        rate = highest * min(1.0, (step + 1) / 50) * max(0.05, 1 - passed)
        await engine.optim_step(OptimParams(learning_rate=rate))
        average = 0.95 * average + 0.05 * outputs.metrics["loss"]
        step += 1
        if average < MASTERED:
            difficulty = min(1.0, difficulty + 0.01)
        if step % 50 == 0:
            echo(f"step={step} loss={average:.4f} difficulty={difficulty:.2f} done={passed:.0%}")
    model.save_pretrained(out)
    save_renderer(out, tokenizer, renderer)
    engine.close()


async def converse_often(domain: Domain, count: int, seed: int) -> list[Trajectory]:
    """Conversations of the domain's oracle on train tasks."""
    tasks = domain.tasks("train", count, seed)
    limits = Limits()
    agent = find_model(Speaker(model="oracle"), "agent", domain, limits)
    user = find_model(Speaker(model="agenda"), "user", domain, limits)
    return [item async for group in rollout(domain, tasks, agent, user) for item in group.trajectories]


def to_document(trajectory: Trajectory) -> str:
    """A conversation as text in the brief format."""
    lines: list[str] = []
    for turn in trajectory.turns:
        message = turn.message
        if message.role == "tool":
            lines.append(f" {to_brief_result(message.content)}")
        else:
            lines += [f" {to_brief_call(call)}" for call in message.tool_calls] or [f" {message.content}"]
    return "\n".join(lines)


def list_keys(documents: Iterable[str]) -> list[str]:
    """The keys of values in calls and results."""
    return sorted({key for document in documents for key in re.findall(r" (\w+)[:=*] ", document)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, help="An existing base to train further")
    parser.add_argument("--minutes", type=float, default=36.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(make_base(given.out, start=given.start, minutes=given.minutes, seed=given.seed))
