"""An advantage of your own: the last replies of a conversation get more of it than the first ones.

    trialogue train shop advantage.name=examples/advantage.py:discounted

An advantage function takes a group, the conversations of one task. It returns one number for each
conversation, or one list for each conversation with one number for each reply of the agent.
"""

from trialogue import Group, Trajectory, advantages

DISCOUNT = 0.9


def discounted(group: Group) -> list[list[float]]:
    """GRPO's advantage, multiplied by 0.9 for each reply that follows."""
    values = advantages.grpo(group)
    return [spread(value, item) for value, item in zip(values, group.trajectories, strict=True)]


def spread(value: float, conversation: Trajectory) -> list[float]:
    replies = sum(turn.side == "agent" and turn.tokens is not None for turn in conversation.turns)
    return [value * DISCOUNT ** (replies - 1 - place) for place in range(replies)]
