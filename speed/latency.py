# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportPrivateUsage=false
"""256 conversations with a user who takes 200 ms, sometimes seconds, for each of four answers.

Nothing can be faster than the conversation whose own user takes longest in total: the critical path. The peer
is TRL's own tool loop, in which asking the user is a tool: it waits for one conversation's answer before it
asks for the next one, with plain functions and with coroutines. On both sides the agents follow a script, so
that only waiting is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from speed.measure import Figure, Options, Part, compare, find_versions, join_versions

if TYPE_CHECKING:  # TRL's environment has none of these
    from trialogue.talk.scripted import ScriptedModel
    from trialogue.task import Task
    from trialogue.trajectory import Reply, Turn
    from trialogue.world.domain import Domain
    from trialogue.world.tools import Tool

TYPICAL, SPREAD = 0.2, 0.8  # seconds; log-normal, one in fifty takes more than a second
ANSWERS = 4
SIBLINGS = 4


def draw_seconds(chance: Random, pace: float) -> float:
    return TYPICAL * pace * chance.lognormvariate(0.0, SPREAD)


class SlowUser:
    """Says the lines of a scripted user after a delay."""

    def __init__(self, script: ScriptedModel, chance: Random, pace: float) -> None:
        self.script, self.chance, self.pace, self.waited = script, chance, pace, 0.0

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        seconds = draw_seconds(self.chance, self.pace)
        self.waited += seconds
        await asyncio.sleep(seconds)
        return await self.script.reply(turns, tools)


async def hold(
    world: tuple[Domain, list[Task]], conversations: int, seed: int, pace: float
) -> tuple[float, float, float]:
    """Seconds taken, seconds of the critical path, and the sum of all users' answers."""
    from trialogue.score.reward import grade
    from trialogue.talk.rollout import RolloutSettings, rollout
    from trialogue.talk.scripted import ScriptedModel, call

    domain, tasks = world
    users: list[SlowUser] = []

    def agent(task: Task, seed: int) -> ScriptedModel:
        order = "W" + task.id[1:]
        cancel = call("cancel_order", order_id=order, reason="late")
        return ScriptedModel(["Which?", call("get_order", order_id=order), cancel, "Cancelled.", "Bye."])

    def user(task: Task, number: int) -> SlowUser:
        script = ScriptedModel(["Cancel my order.", "W" + task.id[1:], "Thanks.", "###STOP###"])
        users.append(SlowUser(script, Random(f"{seed}/{len(users)}"), pace))
        return users[-1]

    chosen = tasks[: conversations // SIBLINGS]
    started = perf_counter()
    groups = rollout(
        domain,
        chosen,
        agent,
        user,
        RolloutSettings(group_size=SIBLINGS, concurrency=conversations, grade=grade, redraws=0),
    )
    held = [item async for group in groups for item in group.trajectories]
    seconds = perf_counter() - started
    assert len(held) == len(users) == conversations
    assert all(item.value == 1 for item in held)
    return seconds, max(user.waited for user in users), sum(user.waited for user in users)


def wait_in_trl(folder: str, conversations: int, pace: float) -> Callable[[], dict[str, Any]]:
    import tempfile

    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_chat_template
    asks, leaves = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (
            '<tool_call>\n{"name": "ask", "arguments": {"text": "Which order?"}}\n</tool_call><|im_end|>',
            "Bye.<|im_end|>",
        )
    )
    seeds = count()

    class Desk:
        """A TRL environment: its methods are the tools of one conversation."""

        def reset(self, number: int, seed: int, **_: Any) -> None:
            self._chance = Random(f"{seed}/{number}")

        def ask(self, text: str) -> str:
            """Ask the user.

            Args:
                text: What to ask.
            """
            sleep(draw_seconds(self._chance, pace))
            return "W1"

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(number % 2) for number in range(len(completions))]

    rows = [
        {"prompt": [{"role": "user", "content": "Cancel my order."}], "number": number}
        for number in range(conversations)
    ]
    scratch = tempfile.TemporaryDirectory()
    trainer = GRPOTrainer(
        folder,
        reward,
        GRPOConfig(
            output_dir=scratch.name,
            use_cpu=True,
            bf16=False,
            beta=0.0,
            per_device_train_batch_size=conversations,
            num_generations=2,
            max_completion_length=1024,
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=Desk,
    )
    trainer.model.train()

    def run() -> dict[str, Any]:
        seed, turn = next(seeds), count()

        def speak(prompts: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            """Stands in for the model."""
            return [
                list(asks if number < ANSWERS else leaves) for number in [next(turn)] for _ in prompts
            ], None

        trainer._generate_single_turn = speak
        started = perf_counter()
        held = trainer._generate_and_score_completions([{**row, "seed": seed} for row in rows])
        seconds = perf_counter() - started
        assert next(turn) == ANSWERS + 1, "not every answer was asked for"
        return {"seconds": seconds, "conversations": len(held["completion_ids"])}

    return run


PARTS = {"TRL": wait_in_trl}


def measure(options: Options) -> Iterator[Figure]:
    from speed.world import make_domain

    conversations, pace = (32, 0.2) if options.quick else (256, 1.0)
    name = f"{conversations} conversations, user latency {TYPICAL * pace * 1000:.0f} ms with a long tail"
    by = "critical path: the conversation whose user takes longest"
    world = make_domain()
    asyncio.run(hold(world, conversations, 0, 0.0))  # fills the caches of the domain
    found: list[tuple[float, float, float]] = []
    theirs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        peer = None
        if options.trl is None or options.model is None:
            print("latency: TRL left out, name the Python of an environment with it by --trl-python")
        else:
            settings = {"folder": options.model, "conversations": conversations, "pace": pace}
            peer = stack.enter_context(Part("latency", "TRL", options.trl, **settings))
        for seed in range(options.repetitions):
            found.append(asyncio.run(hold(world, conversations, seed, pace)))
            tell = partial(compare, name, "s", bound=median(path for _, path, _ in found), bounded_by=by)
            yield tell([(seconds, path) for seconds, path, _ in found], "critical path (1 is the bound)")
            if peer is None:
                pairs = [(seconds, every) for seconds, _, every in found]
                yield tell(pairs, "one user call after the other (sum of the waits, computed)")
                continue
            theirs.append(peer.run())
            assert theirs[-1]["conversations"] == conversations
            pairs = [(one[0], other["seconds"]) for one, other in zip(found, theirs, strict=True)]
            versions = join_versions({"versions": find_versions()}, theirs[0], "TRL")
            yield tell(pairs, "TRL's tool loop", versions=versions)
