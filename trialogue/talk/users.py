"""How a language model is told to play the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from trialogue.config import Speaker
from trialogue.errors import ConfigError
from trialogue.talk.personas import read_personas
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


def user_prompt(domain: Domain, task: Task, manner: str = "") -> str:
    """The system prompt of whoever plays the user: the domain's own, or guidelines, then the scenario; with a
    manner besides, where the conversation has drawn one."""
    if domain.user_prompt is not None:
        told = domain.user_prompt(task)
        return f"{told.rstrip()}\n\n# Your manner\n\n{manner}\n" if manner else told
    guidelines = domain.user_guidelines
    if guidelines is None:
        guidelines = GUIDELINES.format(stop=domain.rules.stop_tokens[0])
    middle = f"# Your manner\n\n{manner}\n\n" if manner else ""
    return f"{guidelines.rstrip()}\n\n{middle}# Your scenario\n\n{task.instructions.strip()}\n"


def set_user_prompt(domain: Domain, speaker: Speaker) -> Domain:
    """The domain with the prompt and the personas of its user."""
    persona: Callable[[int], tuple[str, str]] | None = None
    if speaker.dynamics != "off":
        personas = read_personas(speaker.dynamics, speaker.personas)

        def draw(seed: int) -> tuple[str, str]:
            drawn = personas.draw(seed)
            return (drawn.name, drawn.text) if drawn is not None else ("", "")

        persona = draw
    prompt, guidelines = domain.user_prompt, domain.user_guidelines
    match speaker.prompt:
        case "domain":
            pass
        case "house":
            prompt = guidelines = None
        case "scenario":
            prompt = _scenario
        case "card":
            prompt = to_card
        case path:
            prompt = _from_file(path, domain.rules.stop_tokens[0])
    return replace(domain, user_prompt=prompt, user_guidelines=guidelines, persona=persona)


def _scenario(task: Task) -> str:
    return f"{task.instructions.strip()}\n"


def _from_file(path: str, stop: str) -> Callable[[Task], str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(
            f"user.prompt is '{path}': neither domain, house, scenario or card, nor a file that can be read"
        ) from None
    if "{scenario}" not in text:
        raise ConfigError(f"the prompt in {path} has no {{scenario}} to fill in")
    return lambda task: text.replace("{stop}", stop).replace("{scenario}", task.instructions.strip())


def to_card(task: Task) -> str:
    """A scenario in one line, for models too small to read prose: what is known, then what is wanted, as the
    agenda has it. A task without an agenda keeps its instructions, in one line."""
    agenda = task.meta.get("agenda")
    if not isinstance(agenda, dict):
        return " ".join(task.instructions.split())
    data = cast("dict[str, Any]", agenda)
    parts = [f"manner: {data.get('persona', 'plain')}", *_facts(data)]
    for wish in data["wishes"]:
        while wish:
            parts += [f"wish: {wish['says'][0]}", *_facts(wish)]
            wish = wish.get("instead")
            parts += ["or rather"] if wish else []
    return " | ".join(parts)


def _facts(data: dict[str, Any]) -> list[str]:
    known = cast("dict[str, dict[str, Any]]", data.get("facts") or {})
    return [f"{name}: {fact.get('value') or 'forgotten'}" for name, fact in known.items()]
