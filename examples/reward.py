"""A reward of your own: the usual outcome, less a tenth for each call that a tool refused.

    trialogue train shop --reward examples/reward.py:careful

A reward takes the task, the conversation and the environment at its end, and returns a `Reward`. It may be
async, to ask a judge. `success` says whether the task counts as solved, in pass^k and everywhere else. If it
is not set, a value of 1 or more counts.
"""

from trialogue import Environment, Reward, Task, Trajectory, outcome

PENALTY = 0.1


def careful(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    """What was solved with refused calls counts as a success, but is worth less."""
    usual = outcome(task, trajectory, environment)
    refused = sum(turn.failed for turn in trajectory.turns)
    value = max(0.0, usual.value - PENALTY * refused)
    why = (f"refused calls: {refused}",) if refused else ()
    return Reward(value=value, success=usual.is_success, parts=usual.parts, why=(*usual.why, *why))
