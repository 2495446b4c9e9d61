"""A renderer of your own: the format of the tiny base, with the names of the tools.

    trialogue train shop learner.renderer=examples/renderer.py:ToolNames

A renderer is made from a `Vocabulary`, the tokenizer with text and control tokens kept apart. It writes
prompts as token ids and reads replies; `Renderer` has its four functions. Prompts only grow: what the model
sampled is never written again.
"""

from collections.abc import Sequence

from trialogue import BriefRenderer, Tool


class ToolNames(BriefRenderer):
    """The tiny base's format shows no tools; this one names them after the policy's title."""

    def open(self, system: str | None, tools: Sequence[Tool]) -> list[str | int]:
        names = ", ".join(tool.name for tool in tools)
        return [*super().open(system, tools), f" tools: {names}"]
