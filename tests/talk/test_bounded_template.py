"""Chat templates that loop, grow or fail: refused in one line, within the limit, by the real process."""

import asyncio
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trialogue.engine.tiny import train_tokenizer
from trialogue.errors import ConfigError
from trialogue.messages import Message
from trialogue.talk.render import bounded_template
from trialogue.talk.render.api import Renderer, find_renderer
from trialogue.talk.render.bounded_template import BoundedTemplate

KEEPS = Path(__file__).with_name("templates").joinpath("hermes.jinja").read_text(encoding="utf-8")
CONTROLS = ("<|pad|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")

NESTED = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
HOSTILE = {
    "nested loops": NESTED,
    "loops over a list": "{% set l = range(99999)|list %}" + "{% for a in l %}" * 2 + "{% endfor %}" * 2,
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "one long operation": "{{ (9 ** 9) ** (9 ** 9) }}",
}
GROWING = {
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "multiplying": "{{ 'ab' * 10 ** 12 }}",
    "padding": "{{ 'ab'|center(10 ** 12) }}",
    "a long text": "{{ 'ab' * 10 ** 8 }}",
}


@cache
def make_tokenizer() -> Any:
    return train_tokenizer(["Hello. And then? There."] * 3, CONTROLS)


def find(template: str) -> Renderer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return find_renderer(tokenizer, "template")


def one_of(cases: dict[str, str]) -> list[Any]:
    """The first case belongs to the core, the others to the tests with hostile input."""
    first, *others = cases
    return [first, *(pytest.param(name, marks=pytest.mark.fuzz) for name in others)]


@pytest.fixture
def less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "SECONDS", 0.5)


@pytest.mark.parametrize("name", one_of(HOSTILE))
@pytest.mark.usefixtures("less_time")
def test_a_template_that_takes_too_long_is_stopped(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError, match=r"took more than 0\.5 s of processor time") as caught:
        find(HOSTILE[name])
    assert "\n" not in str(caught.value)
    assert time.process_time() - begun < 20  # this process has not looped itself


@pytest.mark.parametrize("name", one_of(GROWING))
def test_a_template_that_grows_without_end_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the chat template refuses"):
        find(GROWING[name])


@pytest.mark.usefixtures("less_time")
def test_one_that_loops_only_later_is_stopped_once_and_holds_nobody_else() -> None:
    """Sound while it is tried, endless in a long conversation: every later reply is refused at once."""
    template = "{% if messages|length > 12 %}" + NESTED + "{% endif %}" + KEEPS
    renderer = find(template)
    turns = [Message(role="user", content="Hi"), Message(role="assistant", content="Ho")] * 10
    with pytest.raises(ConfigError, match=r"took more than 0\.5 s"):
        renderer.start([*turns, turns[0]], [])

    async def ask_again() -> float:
        begun = asyncio.get_running_loop().time()
        for _ in range(1000):
            with pytest.raises(ConfigError, match=r"took more than 0\.5 s"):
                renderer.start([turns[0]], [])
        return asyncio.get_running_loop().time() - begun

    assert asyncio.run(ask_again()) < 30


def test_the_process_sees_no_secret_and_ends_with_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x" * 20)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    template = BoundedTemplate(tokenizer)
    shapes = [{"role": "user", "content": "Grüße 😀"}]
    assert template.render(shapes, None, prompt=False) == "Grüße 😀"
    process = template._process
    assert process is not None
    with open(f"/proc/{process.pid}/environ", "rb") as file:
        assert b"OPENAI_API_KEY" not in file.read()
    del template
    assert process.poll() is not None


def test_several_templates_by_name_are_taken() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "x", "tool_use": KEEPS}
    assert find_renderer(tokenizer).name == "hermes"
