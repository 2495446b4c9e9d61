"""An engine of your own: the built-in one, which also counts the tokens that it samples.

    trialogue train shop engine.name=examples/engine.py:CountingEngine

`engine.name` takes an object with the methods of `Engine`, a class with `load(folder, settings)`, or a
function `(folder, settings)` that makes one.
"""

from collections.abc import Sequence

from trialogue import Completion, OptimParams, SamplingParams, TorchEngine


class CountingEngine(TorchEngine):
    """The metrics of each step get `sampled_tokens`."""

    sampled = 0

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, session: str | None = None
    ) -> list[Completion]:
        completions = await super().sample(prompts, params, session=session)
        self.sampled += sum(len(completion.tokens) for completion in completions)
        return completions

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        metrics = await super().optim_step(params)
        metrics["sampled_tokens"], self.sampled = self.sampled, 0
        return metrics
