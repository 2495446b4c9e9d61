# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""TRL drives, we converse: a `rollout_func` for its GRPOTrainer, with PEFT, DeepSpeed and vLLM its own.

    trainer = GRPOTrainer(model, reward_funcs=conversation_reward, rollout_func=make_rollout(config),
                          train_dataset=Dataset.from_list(to_prompts(config)), args=GRPOConfig(...))

Conversations live on a thread of their own, where users and tools are awaited, with one event loop for all
rollouts: a user's connections belong to the loop that opened them. Replies are generated on the trainer's
thread, for all conversations that wait at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from trialogue.config import TrainConfig
from trialogue.engine.api import Completion, SamplingParams
from trialogue.errors import ConfigError
from trialogue.hosts.conversations import Conversations, is_left_out, to_figures
from trialogue.hosts.export import find_tasks
from trialogue.learn.advantages import to_rows
from trialogue.score.parties import Parties
from trialogue.talk.local import LocalModel, Sampling
from trialogue.talk.render.load import make_renderer
from trialogue.task import Task
from trialogue.trajectory import Trajectory
from trialogue.world.find import find_domain

log = logging.getLogger(__name__)
PATIENCE = 0.05
"""Seconds a round of replies waits for conversations whose users are still thinking."""


def to_prompts(config: TrainConfig) -> list[dict[str, str]]:
    """The rows of TRL's dataset: each prompt is a task, which `make_rollout` reads."""
    found, _, marks = find_tasks(find_domain(config.domain, config.data), config)
    for mark in marks:
        log.warning("marked: whatever is trained on these prompts has %s", mark)
    tasks = {task.id: task for task in found}
    return [{"prompt": task.model_dump_json()} for task in tasks.values()]


def conversation_reward(*, reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The reward function to give to TRL. None, for a failed conversation, keeps it out of its group."""
    return list(reward)


def make_rollout(config: TrainConfig) -> Rollout:
    """TRL's `rollout_func`: one conversation for each entry of `prompts`, which TRL has repeated already."""
    return Rollout(config)


class Rollout:
    """Conversations with the users and the event loop that all rollouts of a training share."""

    def __init__(self, config: TrainConfig) -> None:
        self.conversations = Conversations.open(config, "")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(
            target=live, args=(self.loop, self.conversations.parties), name="conversations", daemon=True
        )
        self.thread.start()
        self._end = weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)
        self._end.atexit = False  # connections end with the process

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any] | None]:
        tasks = [Task.model_validate_json(prompt) for prompt in prompts]
        rounds = Rounds(trainer, len(tasks))
        trajectories = rounds.run(hold_conversations(self.conversations, tasks, trainer, rounds), self.loop)
        return to_columns(trajectories, trainer.processing_class.eos_token_id, rounds.scored)

    def close(self) -> None:
        """Let go of the users' connections now; it happens too when nobody holds the rollout any more."""
        self._end()
        self.thread.join()


def live(loop: asyncio.AbstractEventLoop, parties: Parties) -> None:
    """Run the loop until it is stopped, then close on it what was opened on it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        loop.run_forever()
        runner.run(parties.close())


async def hold_conversations(
    conversations: Conversations, tasks: list[Task], trainer: Any, rounds: Rounds
) -> list[Trajectory]:
    limits, learner = conversations.config.limits, conversations.config.learner
    renderer = make_renderer(trainer.processing_class, learner.model, learner.renderer)
    sampling = Sampling(reply_tokens=limits.reply_tokens, context_tokens=limits.context_tokens)
    first = trainer.accelerator.process_index * len(tasks)
    seen: Counter[str] = Counter()

    def agent(task: Task, seed: int) -> LocalModel:
        return LocalModel(rounds, renderer, sampling, seed=seed)

    async def hold(task: Task, trial: int) -> Trajectory:
        try:
            step = trainer.state.global_step + 1
            return (await conversations.hold_until_graded(task, trial, step, agent))[-1]
        finally:
            rounds.leave()

    jobs: list[Any] = []
    for task in tasks:
        jobs.append(hold(task, first + seen[task.id]))
        seen[task.id] += 1
    return await asyncio.gather(*jobs)


@dataclass(frozen=True, slots=True)
class Wish:
    """A reply that a conversation waits for."""

    prompt: list[int]
    params: SamplingParams
    future: asyncio.Future[Completion]


class Rounds:
    """A sampler for conversations on one thread whose replies are generated on another, round by round."""

    def __init__(self, trainer: Any, conversations: int) -> None:
        self.trainer = trainer
        self.live = conversations
        self.scored = True
        """Whether the generation backend tells log-probabilities; TRL computes them itself where not."""
        self._waiting: list[Wish] = []
        self._ready = asyncio.Event()
        self._batches: queue.Queue[list[Wish] | None] = queue.Queue()

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        [prompt] = prompts
        wish = Wish(list(prompt), params, asyncio.get_running_loop().create_future())
        self._waiting.append(wish)
        self._look()
        return [await wish.future]

    async def end_session(self, session: str) -> None:
        """Nothing is kept between turns."""

    def leave(self) -> None:
        """One conversation less to wait for."""
        self.live -= 1
        self._look()

    def _look(self) -> None:
        if len(self._waiting) >= self.live:
            self._ready.set()

    def run(
        self, conversations: Awaitable[list[Trajectory]], loop: asyncio.AbstractEventLoop
    ) -> list[Trajectory]:
        """Hold the conversations on the loop, which runs on another thread, and generate for them until the
        last is over, here and elsewhere."""

        async def both() -> list[Trajectory]:
            rounds = asyncio.create_task(self._send())
            try:
                return await conversations
            finally:
                rounds.cancel()
                await asyncio.wait([rounds])

        held = asyncio.run_coroutine_threadsafe(both(), loop)
        held.add_done_callback(lambda _: self._batches.put(None))
        over = False
        try:
            while True:
                batch = None if over else self._batches.get()
                over = batch is None
                if over:
                    held.result()  # raises what went wrong
                if self._is_over_everywhere(over):
                    return held.result()
                replies = self._generate(batch or [])
                for wish, reply in zip(batch or [], replies, strict=False):
                    loop.call_soon_threadsafe(_answer, wish.future, reply)
        finally:
            held.cancel()  # nobody waits for replies that could not be generated

    async def _send(self) -> None:
        """A round begins when every conversation waits, or those that do have waited long enough."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self._ready.wait()
            self._ready.clear()
            if self._waiting:
                batch, self._waiting = self._waiting, []
                self._batches.put(batch)
                await asyncio.gather(*(wish.future for wish in batch), return_exceptions=True)

    def _is_over_everywhere(self, over: bool) -> bool:
        """Whether all processes are done. Generation is collective, so none may stop earlier."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return over
        import torch

        busy = torch.tensor([0.0 if over else 1.0], device=accelerator.device)
        return float(accelerator.reduce(busy, "sum")) == 0

    def _generate(self, batch: list[Wish]) -> list[Completion]:
        trainer = self.trainer
        prompts = [wish.prompt for wish in batch] or [[trainer.processing_class.eos_token_id]]
        longest = max((wish.params.max_tokens for wish in batch), default=1)
        with reply_tokens(trainer, longest):
            found, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
        self.scored = self.scored and logprobs is not None
        version = int(trainer.state.global_step)
        replies: list[Completion] = []
        for number, wish in enumerate(batch):
            stops = set(wish.params.stop_tokens)
            tokens = [int(token) for token in found[number]][: wish.params.max_tokens]
            stop = next((place for place, token in enumerate(tokens) if token in stops), None)
            tokens = tokens if stop is None else tokens[: stop + 1]
            scores = [0.0] * len(tokens) if logprobs is None else list(logprobs[number][: len(tokens)])
            replies.append(Completion(tokens, scores, "length" if stop is None else "stop", version))
        return replies


def _answer(future: asyncio.Future[Completion], reply: Completion) -> None:
    if not future.done():  # a conversation may have run out of time
        future.set_result(reply)


@contextmanager
def reply_tokens(trainer: Any, longest: int) -> Generator[None]:
    """TRL generates whole completions; one reply of a conversation has a limit of its own."""
    owner, name = trainer, "max_completion_length"
    if getattr(trainer, "use_vllm", False):
        owner = trainer.vllm_generation
    elif getattr(trainer, "generation_config", None) is not None:
        owner, name = trainer.generation_config, "max_new_tokens"
    before = getattr(owner, name)
    setattr(owner, name, longest)
    try:
        yield
    finally:
        setattr(owner, name, before)


def to_columns(trajectories: list[Trajectory], filler: int, scored: bool) -> dict[str, list[Any] | None]:
    """What TRL wants of each conversation; whatever it does not know goes to the reward functions."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward")
    }
    for trajectory in trajectories:
        failed = is_left_out(trajectory)
        rows = to_rows(trajectory, 0.0)
        if len(rows) > 1:
            raise ConfigError("the renderer rewrites earlier turns; TRL takes one row for a conversation")
        tokens, mask, logprobs = [filler], [0], [0.0]
        if rows:
            tokens, mask, logprobs = rows[0].tokens, rows[0].mask, rows[0].logprobs
        start = mask.index(1) if 1 in mask else len(tokens)
        columns["prompt_ids"].append(tokens[:start])
        columns["completion_ids"].append(tokens[start:] or [filler])
        columns["logprobs"].append(logprobs[start:] or [0.0])
        columns["env_mask"].append(([0] * (len(mask) - start) if failed else mask[start:]) or [0])
        columns["reward"].append(None if failed else trajectory.value)
    figures = [to_figures([trajectory]) for trajectory in trajectories]
    extra = {name: [line[name] for line in figures] for name in figures[0]}
    return {**columns, "logprobs": columns["logprobs"] if scored else None, **extra}
