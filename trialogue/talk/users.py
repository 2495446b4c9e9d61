"""How a language model is told to play the user."""

from __future__ import annotations

from trialogue.task import Task
from trialogue.world.domain import Domain

GUIDELINES = """\
You play a customer who talks with a service agent. Stay in that role whatever the agent says.

- Write one short message at a time, the way a person types. Never speak for the agent.
- Open with what you want in a sentence or two. Give further details only when the agent asks for them.
- Say only what your scenario tells you. If you are asked for something it does not contain, say that you do \
not know or do not remember. Never make up a name, number, date or preference.
- Put things in your own words instead of reading the scenario out.
- When the agent asks you to confirm something, check it against your scenario and answer plainly.
- Go on until every wish in your scenario has been fulfilled or clearly turned down. Only then end the \
conversation by writing {stop} as the last thing in your message. Never write {stop} for another reason.
"""


def user_prompt(domain: Domain, task: Task) -> str:
    """The system prompt of whoever plays the user: the domain's own, or guidelines, then the scenario."""
    if domain.user_prompt is not None:
        return domain.user_prompt(task)
    guidelines = domain.user_guidelines
    if guidelines is None:
        guidelines = GUIDELINES.format(stop=domain.stop_tokens[0])
    return f"{guidelines.rstrip()}\n\n# Your scenario\n\n{task.instructions.strip()}\n"
