# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
"""verl drives, we converse: an agent loop whose every trajectory is one of our conversations.

verl's token server samples for the agent (token ids in, token ids out), any of our users answers, our reward
grades. `trialogue export verl` writes the file that names this class; each worker of verl imports it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from trialogue.config import TrainConfig
from trialogue.engine.api import Completion, Row, SamplingParams
from trialogue.errors import ConfigError, EngineError
from trialogue.hosts.conversations import Conversations, is_left_out, refuse_rows, to_figures
from trialogue.learn.advantages import to_rows
from trialogue.run import to_timings
from trialogue.talk.local import LocalModel, Sampling
from trialogue.talk.model import ModelSource
from trialogue.talk.render.api import Renderer
from trialogue.talk.render.load import make_renderer
from trialogue.task import Task
from trialogue.trajectory import Trajectory

log = logging.getLogger(__name__)


class ConversationLoop(AgentLoopBase):
    """One conversation. verl makes an object for each; what they share is in `open_conversations`."""

    def __init__(self, *args: Any, settings: str, **options: Any) -> None:
        # verl's own templates are not used, so a tokenizer need not have the tokens they want.
        super().__init__(*args, **{**options, "hf_model_type": None})
        if not self.config.trainer.use_v1:
            raise ConfigError("verl's older trainer is not supported: leave trainer.use_v1=true")
        self.conversations = open_conversations(settings)
        self.renderer = open_renderer(settings, self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """The rows of a conversation: none where it failed, so that it enters neither the baseline of its
        group nor the loss. Without a trainer around it there is always one."""
        task = Task.model_validate_json(row["extra_info"]["task"])
        trial = int(row["session_id"] if "session_id" in row else row.get("priority", 0))
        step = int(row.get("global_steps", 0))
        watch = row["extra_info"].get("purpose") == "dev"
        sizes = Sizes(int(self.rollout_config.prompt_length), int(self.rollout_config.response_length))
        agent = self.make_agent(sampling_params, sizes)
        trajectories = await self.conversations.hold_until_graded(task, trial, step, agent, watch)
        await asyncio.to_thread(self.conversations.record, step, trajectories, watch)
        trajectory = trajectories[-1]
        if is_left_out(trajectory):
            log.warning("%s failed, %s to blame: %s", trajectory.id, trajectory.blame, trajectory.error)
        outputs = to_outputs(trajectories, sizes, self.renderer.stop_tokens[0])
        if len(outputs) > 1:
            refuse_rows(self.conversations.config.loss, self.renderer.name)
        if "session_id" in row:
            return [] if is_left_out(trajectory) else outputs
        [output] = outputs
        return output

    def make_agent(self, sampling_params: Mapping[str, Any], sizes: Sizes) -> ModelSource:
        limits = self.conversations.config.limits
        context = min(limits.context_tokens, sizes.prompt + sizes.response)
        sampling = Sampling(reply_tokens=limits.reply_tokens, context_tokens=context)
        # a seed for each reply makes vLLM slower
        given = {**sampling_params, "seed": None} if self.rollout_config.full_determinism else sampling_params

        def make(task: Task, seed: int) -> LocalModel:
            sampler = ServerSampler(self.server_manager, given, sizes)
            return LocalModel(sampler, self.renderer, sampling, seed=seed, session=f"{seed:x}")

        return make


@dataclass(frozen=True, slots=True)
class Sizes:
    """verl's two halves of a row, in tokens."""

    prompt: int
    response: int


class ServerSampler:
    """The sampler of one conversation: verl's own server, temperature and all, with our stop tokens."""

    def __init__(self, server: Any, sampling_params: Mapping[str, Any], sizes: Sizes) -> None:
        self.server, self.sampling_params, self.sizes = server, sampling_params, sizes
        self.end: int | None = None
        """How long the row may grow: what verl counts as the prompt, and one response."""

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        [prompt] = prompts
        if self.end is None:
            self.end = min(len(prompt), self.sizes.prompt) + self.sizes.response
        room = min(params.max_tokens, self.end - len(prompt))
        if room <= 0:
            return [Completion([], [], "length", 0)]
        wanted = {
            **self.sampling_params,
            "max_tokens": room,
            "stop_token_ids": list(params.stop_tokens),
            "logprobs": True,
        }
        if "seed" in wanted and params.seed is not None:
            wanted["seed"] = params.seed % (1 << 63)
        output = await self.server.generate(
            request_id=session, prompt_ids=list(prompt), sampling_params=wanted
        )
        tokens, logprobs = list(output.token_ids), output.log_probs
        if output.stop_reason == "aborted" or not tokens:
            raise EngineError(f"verl's server gave up on a reply (stop reason {output.stop_reason})")
        if logprobs is None or len(logprobs) != len(tokens):
            raise EngineError("verl's server sent no log-probabilities; set rollout.calculate_log_probs=True")
        stopped = tokens[-1] in params.stop_tokens
        known = output.extra_fields  # an asynchronous trainer may renew the weights within a reply
        version = known.get("min_global_steps", known.get("global_steps")) or 0
        return [Completion(tokens, list(logprobs), "stop" if stopped else "length", int(version))]

    async def end_session(self, session: str) -> None:
        """The server's caches look after themselves."""


@cache
def open_conversations(settings: str) -> Conversations:
    """What the conversations of a worker share: configuration, domain and user."""
    config = TrainConfig.model_validate_json(Path(settings).read_text(encoding="utf-8"))
    return Conversations.open(config, str(Path(settings).parent))


_renderers: dict[str, Renderer] = {}


def open_renderer(settings: str, tokenizer: Any) -> Renderer:
    learner = open_conversations(settings).config.learner
    if settings not in _renderers:
        _renderers[settings] = make_renderer(tokenizer, learner.model, learner.renderer)
    return _renderers[settings]


def to_outputs(trajectories: Sequence[Trajectory], sizes: Sizes, filler: int) -> list[AgentLoopOutput]:
    """The rows of a conversation as verl wants them, the last of those that were held for it; the reward
    belongs to the last row. A failed one is a row of which nothing is trained."""
    trajectory = trajectories[-1]
    failed = is_left_out(trajectory)
    rows = to_rows(trajectory, 0.0) or [Row([filler], [0], [0.0], [0.0])]
    sampled = [turn.tokens for turn in trajectory.turns if turn.side == "agent" and turn.tokens is not None]
    versions = [tokens.version for tokens in sampled if tokens.reply] or [0]  # empty: cut for want of room
    extra_fields = {
        "turn_scores": [],
        "tool_rewards": [],
        "reward_extra_info": to_figures(trajectories),
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        "conversation": {
            "id": trajectory.id,
            "end": trajectory.end,
            "error": trajectory.error,
            "blame": trajectory.blame,
            "turns": [
                {
                    "side": turn.side,
                    "role": turn.message.role,
                    "tokens": len(turn.tokens.reply) if turn.tokens is not None else 0,
                    "tools": [call.name for call in turn.message.tool_calls],
                    "failed": turn.failed,
                }
                for turn in trajectory.turns
            ],
        },
    }
    seconds = to_timings(trajectory)["seconds"]
    metrics = AgentLoopMetrics(generate_sequences=seconds["agent"], tool_calls=seconds["tools"])
    outputs: list[AgentLoopOutput] = []
    for row in rows:
        trained = [place for place, mask in enumerate(row.mask) if mask]
        start = min([*trained[:1], len(row.tokens), sizes.prompt])
        stop = min(len(row.tokens), start + sizes.response)
        response = row.tokens[start:stop]
        mask = [0] * len(response) if failed else row.mask[start:stop]
        outputs.append(
            AgentLoopOutput(
                prompt_ids=row.tokens[:start],
                response_ids=response or [filler],  # verl puts the reward on the last token
                response_mask=mask or [0],
                response_logprobs=row.logprobs[start:stop] or [0.0],
                reward_score=0.0 if failed else trajectory.value,
                num_turns=len(trajectory.turns),
                metrics=metrics,
                extra_fields=extra_fields,
            )
        )
    return outputs
