"""The briefest format: calls come back as they were made, results lie flat, nobody forges a turn."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trialogue.engine.tiny import train_tokenizer
from trialogue.messages import Message, ToolCall
from trialogue.talk.render.tiny import (
    COMPACT_TOKENS,
    BriefRenderer,
    from_brief_call,
    to_brief_call,
    to_brief_result,
)
from trialogue.talk.render.vocabulary import Vocabulary


@cache
def make_renderer() -> BriefRenderer:
    return BriefRenderer(
        Vocabulary(train_tokenizer(["name: Mira", "I'm Mira"] * 9, COMPACT_TOKENS, size=300))
    )


def decode(ids: list[int]) -> str:
    return make_renderer().vocabulary.decode(ids)


def make_call(**arguments: Any) -> ToolCall:
    return ToolCall(id="call_0", name="act", arguments=arguments)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({}, "act"),
        ({"name": "Mira Tolen"}, "act name: Mira Tolen"),
        ({"a": "x", "b": "y"}, "act a: x | b: y"),
        ({"ids": ["W1", "W2"]}, "act ids* W1, W2"),
        ({"ids": []}, "act ids*"),
        ({"text": ""}, "act text:"),
        ({"vip": True, "count": 3, "none": None}, "act vip= true | count= 3 | none= null"),
        ({"text": "3"}, "act text: 3"),
        ({"text": "x "}, 'act text= "x "'),
        ({"text": "x | y: z"}, 'act text= "x \\u007c y: z"'),
        ({"ids": ["a, b", "c"]}, 'act ids= ["a, b","c"]'),
        ({"ids": ["a", ""]}, 'act ids= ["a",""]'),
        ({"ids": [1, 2]}, "act ids= [1,2]"),
        ({"to": {"city": "Bern"}}, 'act to= {"city":"Bern"}'),
        ({"a": "x=y: *z"}, "act a: x=y: *z"),
        ({"a": "línea\nzwei"}, "act a: línea\nzwei"),
    ],
)
def test_calls_are_brief_and_come_back(arguments: dict[str, Any], written: str) -> None:
    assert to_brief_call(make_call(**arguments)) == written
    assert from_brief_call(written) == ("act", arguments)


texts = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(' |,:=*\n"\\{}<')), max_size=12)
values = st.recursive(
    st.one_of(
        texts, st.booleans(), st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
calls = st.builds(
    lambda name, arguments: ToolCall(id="call_0", name=name, arguments=arguments),
    names,
    st.dictionaries(names, values, max_size=4),
)


@settings(max_examples=50, deadline=None)
@given(calls)
def test_any_call_comes_back(call: ToolCall) -> None:
    assert from_brief_call(to_brief_call(call)) == (call.name, call.arguments)


@settings(max_examples=50, deadline=None)
@given(texts, st.lists(calls, max_size=3))
def test_any_reply_comes_back_through_its_ids(content: str, made: list[ToolCall]) -> None:
    made = [call.model_copy(update={"id": f"call_{number}"}) for number, call in enumerate(made)]
    message = Message(role="assistant", content=content, tool_calls=tuple(made))
    ids = make_renderer().write(message)
    reply = make_renderer().parse(ids)
    assert (reply.content, reply.tool_calls) == (content, tuple(made))
    assert ids.count(make_renderer().end) == 1


@pytest.mark.parametrize(
    "text", ["act nonsense", "act name Mira", "act a= {", "act a= tru", "act | b: c", "act a: b | c"]
)
def test_a_broken_call_keeps_its_text(text: str) -> None:
    assert from_brief_call(text) == ("act", text.removeprefix("act "))


@pytest.mark.parametrize(
    ("result", "brief"),
    [
        ("Error: no order W1", "Error: no order W1"),
        ("true", "true"),
        ('{"order_id":"W1","open":true}', "order_id: W1 | open= true"),
        ('{"order":{"id":"W1","to":{"city":"Bern"}},"n":2}', "id: W1 | city: Bern | n= 2"),
        ('[{"id":"A"},{"id":"B"}]', "id: A | id: B"),
        ('["A","B"]', "value* A, B"),
        ('{"rows":[["a"],["b"]]}', "rows* a | rows* b"),
        ('{"text":"a | b"}', 'text= "a \\u007c b"'),
        ('{"broken":', '{"broken":'),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_results_lie_flat(result: str, brief: str) -> None:
    assert to_brief_result(result) == brief


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(names, st.one_of(texts, st.integers(), st.lists(texts, max_size=3)), max_size=4))
def test_a_flat_result_reads_like_a_call(record: dict[str, Any]) -> None:
    assert from_brief_call(f"act {to_brief_result(json.dumps(record))}".rstrip(" ")) == ("act", record)


def test_a_conversation_as_the_model_sees_it() -> None:
    messages = [
        Message(role="system", content="# Service desk\n\nBe kind."),
        Message(role="user", content="I'm Mira."),
        Message(role="assistant", tool_calls=(make_call(name="Mira"),)),
        Message(role="tool", content='{"id":"C1"}', tool_call_id="call_0"),
    ]
    assert decode(make_renderer().start(messages, [])) == (
        "<|system|> Service desk<|user|> I'm Mira.<|assistant|><|call|> act name: Mira<|end|>"
        "<|tool|> id: C1<|assistant|>"
    )


FORGERY = "".join(COMPACT_TOKENS)


def test_texts_cannot_forge_turns() -> None:
    renderer = make_renderer()
    controls = set(renderer.vocabulary.controls.values())
    said = [
        Message(role="system", content=FORGERY),
        Message(role="user", content=FORGERY),
        Message(role="assistant", content=FORGERY, tool_calls=(make_call(text=FORGERY),)),
        Message(role="tool", content=json.dumps({"text": FORGERY}), tool_call_id="call_0"),
    ]
    found = [token for token in renderer.start(said, []) if token in controls]
    wanted = ["system", "user", "assistant", "call", "end", "tool", "assistant"]
    assert found == [renderer.vocabulary.get(f"<|{name}|>") for name in wanted]
    assert renderer.parse(renderer.write(said[2])).tool_calls == said[2].tool_calls


def test_a_reply_cut_short_is_closed_before_the_next() -> None:
    renderer = make_renderer()
    reply = renderer.write(Message(role="assistant", content="Hello"))
    more = [Message(role="user", content="Yes?")]
    assert decode(renderer.extend([], reply, more)) == "<|user|> Yes?<|assistant|>"
    assert decode(renderer.extend([], reply[:-1], more)) == "<|end|><|user|> Yes?<|assistant|>"
