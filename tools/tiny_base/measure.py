# pyright: reportUnknownMemberType=false
"""How much a base helps with a domain that it has not met: python -m tools.tiny_base.measure BASE [DOMAIN…]

At each held-out random desk, or in each DOMAIN named, the base imitates 0, 100 and 1,000 conversations of the
teacher, then serves test tasks, greedily. Prints a line of JSON for each, and the means. `--copy` counts
instead how many names of any letters the base repeats in a call, without having seen the desk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from statistics import fmean

from tools.tiny_base.generalist import HELD_OUT, hold
from tools.tiny_base.worlds import make_world
from trialogue import (
    Limits,
    OptimParams,
    RolloutSettings,
    find_domain,
    find_model,
    grade,
    load_learner,
    rollout,
)
from trialogue.learn.losses import cross_entropy
from trialogue.learn.sft import choose_batch, to_example_rows
from trialogue.output import echo
from trialogue.world.domain import Domain

SIZES = (0, 100, 1000)
LIMITS = Limits(reply_tokens=96, context_tokens=2048)
EPOCHS = {0: 0.0, 100: 6.0, 1000: 3.0}
BATCH = 16
RATE = 1e-3


async def measure(base: str, domain: Domain, size: int, tasks: int, seed: int = 0) -> float:
    """The share of test tasks solved after imitating so many conversations."""
    learner = load_learner(base, seed)
    if size:
        examples = await hold(domain, size, seed)
        rows = [row for item in examples for row in to_example_rows(item, domain, learner.renderer, "agent")]
        steps = max(1, round(EPOCHS[size] * len(rows) / BATCH))
        for step in range(steps):
            await learner.engine.forward_backward(choose_batch(rows, BATCH, step, seed), cross_entropy)
            rate = RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
            await learner.engine.optim_step(OptimParams(learning_rate=rate))
        await learner.engine.publish()
    settings = RolloutSettings(limits=LIMITS, grade=grade, seed=seed)
    chosen = domain.tasks("test", tasks, seed)
    user = find_model("agenda", "user", domain)
    agent = learner.agent(LIMITS, temperature=0.0)
    held = [
        item async for group in rollout(domain, chosen, agent, user, settings) for item in group.everything
    ]
    learner.engine.close()
    return fmean(item.is_success for item in held)


async def measure_copying(base: str, count: int) -> float:
    """The share of test tasks of held-out desks whose first look-up has exactly what the user told."""
    right: list[bool] = []
    for seed in range(HELD_OUT, HELD_OUT + count // 10):
        domain = make_world(seed)
        learner = load_learner(base)
        tasks = domain.tasks("test", 10, seed)
        agent, user = learner.agent(LIMITS, temperature=0.0), find_model("agenda", "user", domain)
        settings = RolloutSettings(limits=LIMITS, seed=seed)
        async for group in rollout(domain, tasks, agent, user, settings):
            for item in group.everything:
                facts = item.task.meta["agenda"]["facts"]
                calls = [call for turn in item.turns for call in turn.message.tool_calls]
                given = [call.arguments for call in calls[:1] if isinstance(call.arguments, dict)]
                right.append(
                    bool(given) and given[0] == {name: fact["value"] for name, fact in facts.items()}
                )
        learner.engine.close()
    return fmean(right)


async def main(base: str, domains: Sequence[Domain], sizes: Sequence[int], tasks: int) -> None:
    found: defaultdict[int, list[float]] = defaultdict(list)
    for domain in domains:
        for size in sizes:
            share = await measure(base, domain, size, tasks)
            found[size].append(share)
            echo(json.dumps({"base": base, "domain": domain.name, "conversations": size, "solved": share}))
    echo(
        json.dumps({"base": base, "mean": {size: round(fmean(shares), 3) for size, shares in found.items()}})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("domains", nargs="*", help="Default: held-out random desks")
    parser.add_argument("--worlds", type=int, default=6)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--copy", type=int, default=0, help="Number of tasks; nothing else is measured then")
    given = parser.parse_args()
    if given.copy:
        echo(json.dumps({"base": given.base, "copied": asyncio.run(measure_copying(given.base, given.copy))}))
    else:
        drawn = Random(0).sample(range(HELD_OUT, HELD_OUT + 1000), given.worlds)
        listed = [find_domain(name) for name in given.domains] or [make_world(seed) for seed in drawn]
        asyncio.run(main(given.base, listed, given.sizes, given.tasks))
