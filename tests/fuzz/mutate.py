"""How good input is damaged: texts letter by letter, data place by place, all from a seed."""

from __future__ import annotations

import json
import random
from typing import Any

SEEDS = [
    '{"name": "cancel_order", "arguments": {"order_id": "W1", "items": [1, 2.5, null, true]}}',
    '<think>\nhm\n</think>\n\nText\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>',
    '<|python_tag|>{"name": "look", "parameters": {"q": "x"}}; {"name": "b", "parameters": {}}',
    'cancel_order{"order_id":"W1"}',
    json.dumps(
        {
            "id": "t/0",
            "task": {"id": "t", "domain": "d", "instructions": ""},
            "turns": [
                {
                    "side": "agent",
                    "message": {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "name": "n", "arguments": {}}],
                    },
                    "tokens": {"start": True, "prompt": [1], "reply": [2], "logprobs": [-0.5]},
                }
            ],
            "end": "user_stop",
            "reward": {"value": 1.0},
        }
    ),
    'domain = "shop"\nseed = 3\n[agent]\nmodel = "oracle"\n[tasks]\ncount = 4\nlevels = [1, 2]\n',
    json.dumps(
        {
            "choices": [
                {
                    "finish_reason": "stop",
                    "message": {
                        "role": "assistant",
                        "content": "hi",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
                    },
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        }
    ),
    '{"key": "abc", "task": "t", "content": "hello", "finish": "stop", "usage": {"prompt": 3}}',
    "training.steps=3 loss.name=grpo tasks.levels=[1,2] limits.seconds=1e3",
]
PIECES = [
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "\\",
        "\n",
        "\x00",
        " ",
        "null",
        "NaN",
        "Infinity",
        "-",
        "1e999",
        "9" * 400,
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|im_start|>system\n",
        "<|eot_id|>",
    ),
    *(
        "<|python_tag|>",
        "\ud800",
        "\udc00",
        "\u2028",
        "\ue000",
        "\ufeff",
        "é",
        "日本",
        "👍🏽",
        "__class__",
        "__init__",
    ),
    *(
        '"name"',
        '"arguments"',
        '"parameters"',
        "[" * 3000,
        '{"a":' * 3000,
        "(" * 500,
        "\\u",
        "\\ud83d",
        "'",
        "`",
        "$(",
    ),
    *(
        "=",
        ".",
        "[[",
        "]]",
        "true",
        "inf",
        "nan",
        "0x",
        "-1",
        "1" * 30,
        "../",
        "/etc/passwd",
        "%s",
        "{0}",
        "\r",
        "\t",
    ),
]


def mutate(draw: random.Random, text: str) -> str:
    """A text made from good ones by cutting, doubling, swapping and putting in."""
    for _ in range(draw.choice((0, 1, 1, 2, 3, 8))):
        place, end = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        match draw.randrange(7):
            case 0:
                text = text[:place] + text[end:]
            case 1:
                text = text[:place] + draw.choice(PIECES) + text[place:]
            case 2:
                text = text[:end] + text[place:end] * draw.randint(1, 3) + text[end:]
            case 3:
                text = text[:place]
            case 4:
                text = (
                    text[:place]
                    + chr(draw.choice((draw.randrange(128), draw.randrange(0x11000))))
                    + text[place:]
                )
            case 5:
                text = text[:place] + draw.choice(SEEDS) + text[end:]
            case _:
                text = text[:place] + text[place:end][::-1] + text[end:]
    return text[:20_000]


def to_bytes(text: str, draw: random.Random) -> bytes:
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw.choice((0, 0, 1, 3))):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**30, float("nan"), float("inf"), "", "x", "../..", "__class__", "\ud800"),
    *([], {}, [[]], {"": None}, {"a": 1}, ["x"], "é日本👍🏽", "0", "[" * 2000, [None, {}, "x"], {"id": {}}),
]


def twist(value: Any, draw: random.Random) -> Any:
    """Plain data with one place of it replaced, taken out, doubled or renamed."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.12:
        return draw.choice(ODD)
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    match draw.randrange(8):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[draw.choice(("", "id", "x", "\udc00"))] = copy.pop(key)
        case 1 | 2 if isinstance(copy, list):
            copy.insert(key, value[key])
        case _:
            copy[key] = twist(value[key], draw)
    return copy


def mutate_file(text: str, name: str, draw: random.Random) -> bytes:
    """One file, twisted as the data it is or as mere letters."""
    if draw.random() < 0.25 or not text.strip() or not name.endswith((".json", ".jsonl")):
        return to_bytes(mutate(draw, text), draw)
    if not name.endswith(".jsonl"):
        try:
            return json.dumps(twist(json.loads(text), draw)).encode()
        except ValueError:  # some benchmarks call JSON lines JSON
            pass
    lines = text.splitlines()
    number = draw.randrange(len(lines))
    lines[number] = json.dumps(twist(json.loads(lines[number]), draw))
    return ("\n".join(lines) + "\n").encode()
