# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Make a base that has met many service desks: copying exercises first, then more and more conversations of
the teacher at desks that are drawn at random (worlds.py).

    python -m tools.tiny_base.generalist OUT [--minutes 120] [--start BASE]

This is how `tiny-desk` is made. The tokenizer has common words of service
desks and pairs of letters; the prompt names the tools. A second process holds the conversations. Worlds from
`HELD_OUT` on measure a base (measure.py) and never train one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from string import ascii_lowercase
from time import monotonic
from typing import Any

from tools.tiny_base.desk import read_words
from tools.tiny_base.school import PAIRS, WORDS, School
from tools.tiny_base.worlds import FOREIGN, SCRIPTS, make_world
from trialogue import find_model
from trialogue.engine.api import EngineSettings, OptimParams, Row
from trialogue.learn.losses import cross_entropy
from trialogue.learn.sft import to_example_rows
from trialogue.output import echo
from trialogue.score.reward import grade
from trialogue.talk.render.api import Renderer
from trialogue.talk.render.load import load_renderer, save_renderer
from trialogue.talk.render.tiny import COMPACT_TOKENS, BriefToolsRenderer
from trialogue.talk.render.vocabulary import Vocabulary
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.teacher.teacher import make_teacher
from trialogue.trajectory import Trajectory
from trialogue.world.domain import Domain

MASTERED = 0.5
"""The lessons become harder while their loss is below this."""
HELD_OUT = 1_000_000
"""Worlds of this seed and above measure a base, and never train one."""
PER_WORLD = 14
BATCH = 32


async def hold(domain: Domain, count: int, seed: int, split: str = "train") -> list[Trajectory]:
    """Conversations of the teacher, in its plainest words, that earned the whole reward."""
    agent, user = make_teacher(domain, plain=True), find_model("agenda", "user", domain)
    settings = RolloutSettings(seed=seed, grade=grade)
    groups = rollout(domain, domain.tasks(split, count, seed), agent, user, settings)
    return [item async for group in groups for item in group.trajectories if item.is_success]


def list_words() -> list[str]:
    """The words that are one token each."""
    listed = (Path(__file__).parent / "vocabulary.txt").read_text(encoding="utf-8").split()
    texts = str(read_words())
    found = {*listed, *WORDS, *re.findall(r"[a-z]{2,}", texts), "ids", "id"}
    words = read_words()
    begins = " ".join((*_SPEECH, *WORDS, *words["people"], *words["things"], *words["actions"]))
    capital = {word.capitalize() for word in re.findall(r"[a-z]{2,}", begins)}
    return sorted(word for word in {*found, *capital} if len(word) > 1)


_SPEECH = (
    "shall should may could would please tell sorry hello hi thanks thank thing great one more wait all",
    "right done what which where when who how is it the i have am can cannot next first before good bye",
    "there",
)


def make_tokenizer() -> Any:
    """Words, pairs of letters with and without a space, digits, letters of other languages."""
    from trialogue.engine.tiny import train_tokenizer

    words = list_words()
    plain = "".join(f" {word}" for word in words) + "".join(f"_{word}" for word in words if word.islower())
    pairs = "".join(f" {pair} {pair.capitalize()}" for pair in PAIRS) + "-".join(("", *PAIRS))
    pairs += "".join(f"-{pair.capitalize()}" for pair in PAIRS)
    digits = "".join(f" {one}{two}-{one}{two} {one}-{one}" for one in "0123456789" for two in "0123456789")
    signs = (*FOREIGN, *SCRIPTS, *ascii_lowercase)
    letters = "".join(f" {sign}-{sign} {sign.upper()}-{sign.upper()}" for sign in signs) + " | |"
    return train_tokenizer([plain, pairs, digits, letters] * 4, COMPACT_TOKENS, size=12000, words=words)


def list_rows(seeds: Sequence[int], renderer: Renderer) -> Iterator[tuple[array[int], array[int]]]:
    """Conversations in worlds as tokens and mask."""
    for seed in seeds:
        domain = make_world(seed)
        for item in asyncio.run(hold(domain, PER_WORLD, seed)):
            for row in to_example_rows(item, domain, renderer, "agent"):
                yield array("H", row.tokens), array("b", row.mask)


_RENDERER: list[Renderer] = []


def _begin(folder: str) -> None:
    import os

    os.nice(5)
    logging.disable(logging.WARNING)
    _RENDERER.append(load_renderer(folder)[1])


def _work(seeds: Sequence[int]) -> list[tuple[array[int], array[int]]]:
    return list(list_rows(seeds, _RENDERER[0]))


async def make_base(
    out: Path,
    start: Path | None,
    *,
    minutes: float,
    worlds: int,
    first: int,
    seed: int,
    width: int,
    pairs: int,
) -> None:
    """Make a base and write it to a folder. With `start`, train an existing base further."""
    from transformers import AutoModelForCausalLM

    from trialogue.engine.tiny import make_model
    from trialogue.engine.torch_engine import TorchEngine

    tokenizer = make_tokenizer()
    layers = ("conv", "full_attention") * pairs
    model = make_model(len(tokenizer), width=width, layers=layers, feed_forward=3 * width, seed=seed)
    if start is not None:
        model = AutoModelForCausalLM.from_pretrained(start)
    echo(f"{len(tokenizer)} tokens, {sum(weight.numel() for weight in model.parameters()):,} weights")
    renderer = BriefToolsRenderer(Vocabulary(tokenizer))
    model.save_pretrained(out)
    save_renderer(out, tokenizer, renderer)
    engine = TorchEngine(model, EngineSettings(seed=seed))
    school = School(renderer, list_keys(), seed)
    random = Random(seed)
    chunks = [range(begin, begin + 20) for begin in range(first, first + worlds, 20)]
    rows: list[tuple[array[int], array[int]]] = []
    started, step = monotonic(), 0
    difficulty, lessons, talks, highest = (0.0, 9.0, 9.0, 1.5e-3) if start is None else (1.0, 0.5, 0.3, 1e-3)
    with multiprocessing.get_context("spawn").Pool(1, _begin, (str(out),), maxtasksperchild=10) as pool:
        coming = pool.imap_unordered(_work, chunks)
        arrived = 0
        while (passed := (monotonic() - started) / (60 * minutes)) < 1:
            while arrived < len(chunks):
                try:
                    rows += coming.next(timeout=0.001)
                    arrived += 1
                except multiprocessing.TimeoutError:
                    break
            share = 0.0 if difficulty < 0.3 or not rows else min(0.8, 0.3 + passed)
            talked = random.sample(rows, min(len(rows), round(share * BATCH)))
            batch = [Row([*ids], [*mask], [0.0] * len(ids), [0.0] * len(ids)) for ids, mask in talked]
            taught = [school.lesson(difficulty * random.random()) for _ in range(BATCH - len(batch))]
            rate = highest * min(1.0, (step + 1) / 50) * max(0.03, 1 - passed)
            for part in (taught, batch):
                if not part:
                    continue
                outputs = await engine.forward_backward(part, cross_entropy)
                loss = outputs.metrics["loss"]
                if part is taught:
                    lessons = 0.95 * lessons + 0.05 * loss
                else:
                    talks = 0.95 * talks + 0.05 * loss
            await engine.optim_step(OptimParams(learning_rate=rate))
            step += 1
            if lessons < MASTERED:
                difficulty = min(1.0, difficulty + 0.01)
            if step % 100 == 0:
                echo(
                    f"step={step} lessons={lessons:.4f} talks={talks:.4f} difficulty={difficulty:.2f} "
                    f"rows={len(rows)} seconds={monotonic() - started:.0f} done={passed:.0%}"
                )
            if step % 500 == 0:
                model.save_pretrained(out)
        pool.terminate()
    model.save_pretrained(out)
    engine.close()


def list_keys() -> list[str]:
    """Names of fields for the lessons."""
    words = read_words()
    names = [name for kind in words["kinds"].values() for name in kind]
    return sorted(
        {*names, *words["identity"], *words["choices"], *(f"{thing}_id" for thing in words["things"])}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, help="An existing base to train further")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--worlds", type=int, default=6000)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first world")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=3, help="Pairs of a convolution and an attention layer")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(make_base(**vars(parser.parse_args())))
