"""Mask secrets: the values of environment variables whose names mark them as keys, tokens or passwords.

A server's error may quote a key, and a tool may print its environment. All text that is written to a run or
printed goes through `redact` first. A masked text keeps its length, so that positions in files stay valid.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, cast

_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$", re.IGNORECASE)
_SHORTEST = 8
"""A shorter value would be found in innocent text."""


def find_secrets() -> set[str]:
    """The secrets this process knows, as they are and as JSON writes them."""
    values = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _SHORTEST}
    return values | {
        json.dumps(value, ensure_ascii=plain)[1:-1] for value in values for plain in (True, False)
    }


def redact(text: str) -> str:
    """The text with every secret masked."""
    return _mask(text, find_secrets())


def redact_data(data: Any) -> Any:
    """Plain data with every secret in its texts masked."""
    return _mask_data(data, find_secrets())


def _mask_data(data: Any, secrets: set[str]) -> Any:
    if isinstance(data, str):
        return _mask(data, secrets)
    if isinstance(data, dict):
        return {key: _mask_data(value, secrets) for key, value in cast("dict[str, Any]", data).items()}
    if isinstance(data, list):
        return [_mask_data(value, secrets) for value in cast("list[Any]", data)]
    return data


def _mask(text: str, secrets: set[str]) -> str:
    for value in secrets:
        if value in text:
            text = text.replace(value, "*" * len(value.encode("utf-8", "surrogateescape")))
    return text
