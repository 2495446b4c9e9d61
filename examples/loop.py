"""The method on one page: hold conversations, grade them, update the weights.

    python examples/loop.py                  take a cold start, then learn: 5 minutes on one core
    python examples/loop.py shop runs/cold   learn, from a model that `trialogue sft` made

A model of a million weights serves customers that are played by rules. In 20 steps its mean reward rises from
0.3 to 0.9 (docs/examples.md shows the run).
"""

import asyncio
import sys
from statistics import fmean

import torch
from torch import Tensor

from trialogue import (
    Group,
    Limits,
    OptimParams,
    RolloutSettings,
    SftConfig,
    TokenBatch,
    build_rows,
    find_domain,
    find_model,
    grade,
    load_config,
    load_learner,
    rollout,
    sft,
)

TASKS, CONVERSATIONS, TEMPERATURE = 16, 8, 0.8
LIMITS = Limits(reply_tokens=64, context_tokens=1024)


async def learn(name: str, model: str, steps: int = 20, rate: float = 2.5e-4) -> list[float]:
    """Learn from conversations. Returns the mean reward of each step."""
    domain, learner = find_domain(name), load_learner(model)
    agent = learner.agent(LIMITS, temperature=TEMPERATURE)
    user = find_model("agenda", "user", domain)
    rewards: list[float] = []
    for step in range(steps):
        tasks = domain.tasks("train", TASKS, seed=step, levels=[1])
        settings = RolloutSettings(group_size=CONVERSATIONS, limits=LIMITS, grade=grade, seed=step)
        groups = [group async for group in rollout(domain, tasks, agent, user, settings)]
        rows = build_rows(groups, advantage)
        if rows:  # none when all conversations of each task went equally well
            await learner.engine.forward_backward(rows, loss, temperature=TEMPERATURE)
            await learner.engine.optim_step(OptimParams(learning_rate=rate))
            await learner.engine.publish()
        rewards.append(fmean(item.value for group in groups for item in group.trajectories))
        print(f"step {step + 1:2}: reward {rewards[-1]:.2f} {'#' * round(40 * rewards[-1])}", flush=True)
    await learner.save("runs/loop")
    return rewards


def advantage(group: Group) -> list[float]:
    """How much better each conversation went than the others of the same task."""
    rewards = [item.value for item in group.trajectories]
    return [reward - fmean(rewards) for reward in rewards]


def loss(new_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The policy gradient: tokens of good conversations become likelier, those of bad ones less likely."""
    ratio = torch.exp(new_logprobs - batch.old_logprobs)
    return -(ratio * batch.advantages).sum() / batch.total_tokens, {}


async def imitate() -> str:
    """The cold start: imitate a teacher who makes mistakes. Without it no conversation succeeds."""
    settings = ["tasks.levels=[1]", "sft.count=4000", "sft.faults=0.22", "sft.only_successes=false"]
    return str(await sft(load_config(SftConfig, None, settings)))


if __name__ == "__main__":
    name, model = sys.argv[1:] or ("shop", asyncio.run(imitate()))
    asyncio.run(learn(name, model))
